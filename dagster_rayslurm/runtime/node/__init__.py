"""The node that this process runs on: its CPUs, GPUs and memory, how much of them is used, its addresses and ports.

Nothing here starts Ray or a payload, or talks to other nodes. Begin with `resources` and `usage`.
"""
