"""What is measured on the Slurm stack."""
