"""The ways to start a runtime: as a local process, as a Slurm job, or inside a warm session. Begin with `base` and `batch`."""
