"""A small study of handwritten digits: Ray-backed Dagster assets that run here and on a Slurm cluster alike."""
