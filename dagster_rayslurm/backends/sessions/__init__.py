"""Warm sessions: allocations with a running Ray cluster that many payloads share, on a Slurm cluster or on this machine.

This package finds or creates a session and asks it to run a payload; the session itself is a runtime (`runtime.supervisor`).
Begin with `backend`, then `acquire`.
"""
