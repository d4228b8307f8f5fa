"""Processes of the runtime: event loop, keeper, subprocesses, scratch directories."""
