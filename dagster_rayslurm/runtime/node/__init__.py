"""The node that this process runs on: its CPUs, GPUs and memory, how much of them is used, its addresses and ports.

Nothing here starts Ray or a payload. `worker_node` only defines how the head node sees the worker nodes; `runtime.nodes` connects
them. Begin with `resources` and `usage`.
"""
