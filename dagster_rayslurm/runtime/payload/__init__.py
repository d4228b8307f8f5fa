"""One payload: its process, output, record and measurement."""
