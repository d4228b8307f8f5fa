"""Runs one payload, which is a user's command: process and environment, output, run record, and measurement of usage.

`runtime.supervisor` decides when a payload runs, and on which Ray cluster. Begin with `payload`.
"""
