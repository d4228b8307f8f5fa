"""Starts runtimes as local processes or Slurm jobs, and runs payloads in warm sessions. Read `base.py` and `batch.py` first."""
