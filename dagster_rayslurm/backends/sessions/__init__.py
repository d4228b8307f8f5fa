"""Warm sessions: which one a payload goes to, how it is found, made, asked and ended, on Slurm and on this machine."""
