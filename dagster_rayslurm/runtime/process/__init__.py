"""Processes of the runtime: event loop, keeper, process tree, scratch directories."""
