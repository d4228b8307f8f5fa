"""Runs the `rayslurm` command for `python -m dagster_rayslurm.cli`."""

from . import main

main(prog_name="rayslurm")
