"""The ways to start a runtime: as a local process, as a Slurm job, or inside a warm session.

What follows the start is the same for all backends and is in `execution`. Begin with `base`, the interface, and `batch`.
"""
