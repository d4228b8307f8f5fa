"""Runs one payload: starts its process, writes its output and its end to the run record, and measures its usage."""
