"""A small Slurm cluster in containers for development and tests: `python -m stack up`."""
