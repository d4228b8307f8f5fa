"""The runtime on the head node: accepts and queues payloads, runs each with its Ray cluster if it needs one, and shuts down.

`runtime.payload` shows how one payload runs, and `runtime.ray` how one Ray cluster starts. Begin with `supervisor`.
"""
