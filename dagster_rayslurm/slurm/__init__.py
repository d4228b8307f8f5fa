"""Slurm: how a cluster is described."""
