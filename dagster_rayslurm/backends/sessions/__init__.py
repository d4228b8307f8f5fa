"""Warm sessions on Slurm and on this machine: an allocation, or a Ray cluster, that stays up and runs payloads of many steps."""
