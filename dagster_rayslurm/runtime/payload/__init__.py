"""Runs one payload: its process and environment, its output, its run record and the measurement of its usage.

`runtime.supervisor` decides when a payload runs, and on which Ray cluster. Begin with `payload`.
"""
