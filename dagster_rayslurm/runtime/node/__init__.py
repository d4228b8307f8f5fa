"""The node that this process runs on: its CPUs, GPUs and memory and their use, health checks, addresses and ports.

The modules here start neither Ray nor a payload (the user's program of a Dagster step). `worker_nodes` holds the connections of
the head's runtime to the worker nodes. Begin with `resources` and `usage`.
"""
