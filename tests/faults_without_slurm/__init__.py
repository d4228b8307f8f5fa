"""Faults of Slurm on this machine alone: whole runs against the fake Slurm."""
