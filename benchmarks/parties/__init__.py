"""Who takes part in the comparisons on the Slurm stack, and how each of them makes one measured run."""
