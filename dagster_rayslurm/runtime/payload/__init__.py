"""Runs one payload (a user's command): starts its process, records its output in the run record, and measures its usage.

`runtime.supervisor` decides when a payload runs, and on which Ray cluster. Begin with `payload`.
"""
