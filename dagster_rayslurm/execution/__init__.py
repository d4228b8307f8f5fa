"""Runs payloads from their start to a verdict (success, or a kind of failure), in the same way for every execution mode.

To read the code, begin with the function `executing` in `run.py`.
"""
