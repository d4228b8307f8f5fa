"""Uploads user code and the runtime (the program that starts Ray and payloads) to the Slurm cluster.

A bundle is an immutable directory with user code; the runtime is one file. The name of each contains a hash of its content. The
module `bundle` collects the files of a bundle and computes the bundle's name. The module `deliver` sends bundles and the runtime.
Nothing is fetched from the cluster here.
"""
