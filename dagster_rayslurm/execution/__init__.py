"""Runs payloads from start to verdict, in the same way for every mode. Begin with `run.execute`."""
