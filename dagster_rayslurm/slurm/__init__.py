"""Slurm: its configuration, requests for jobs, their submission, the queue, and how jobs end."""
