"""Uploads user code and the runtime to the Slurm cluster, as immutable directories that are named by the hash of their content.

Nothing is fetched from the cluster here. `tree` says what is in a bundle, `bundle` names it, and `deliver` sends it.
"""
