"""Warm sessions on Slurm and on this machine: match, acquire, request, list and end them."""
