"""Uploads user code and the runtime to the Slurm cluster, as immutable directories that are named by the hash of their content.

Nothing is fetched from the cluster here. `bundle` collects the files of a bundle and names it; `deliver` sends it.
"""
