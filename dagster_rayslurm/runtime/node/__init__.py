"""The node that this process runs on: its CPUs, GPUs and memory, how much of them is used, its addresses and ports.

Nothing here starts Ray or a payload. `worker_nodes` is how the head's runtime reaches the worker nodes. Begin with `resources`
and `usage`.
"""
