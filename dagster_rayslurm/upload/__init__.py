"""Uploads user code and the runtime to the Slurm cluster, as immutable directories that are named by the hash of their content.

`bundle` collects the files of a bundle and computes the bundle's name. `deliver` sends bundles and the runtime. Nothing is
fetched from the cluster here.
"""
