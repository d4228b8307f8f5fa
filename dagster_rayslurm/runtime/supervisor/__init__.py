"""The runtime on the head node: accepts payloads, queues them, gives each a Ray cluster, runs them and shuts down.

How one payload runs is in `runtime.payload`, how one Ray cluster starts in `runtime.ray`. Begin with `supervisor`.
"""
