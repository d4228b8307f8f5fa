"""What is measured on this machine alone, without Slurm."""
