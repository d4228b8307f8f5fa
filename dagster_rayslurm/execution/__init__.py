"""Runs payloads from their start to a verdict (success, or a kind of failure), in the same way for every execution mode.

Begin with `run.executing`.
"""
