"""Runs one payload: its process and environment, its output, its run record and the measurement of its usage.

When a payload's turn comes, and on which Ray cluster, is decided in `runtime.supervisor`. Begin with `payload`.
"""
