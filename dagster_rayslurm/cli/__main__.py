"""`python -m dagster_rayslurm.cli`, the `rayslurm` command."""

from . import main

main(prog_name="rayslurm")
