"""The runtime on the head node: accepts and queues payloads, runs each with a Ray cluster if needed, and shuts down.

`runtime.payload` shows how one payload runs, and `runtime.ray` how one Ray cluster starts. Begin with `supervisor`.
"""
