"""One Ray cluster: start it on the head node, let worker nodes join, watch it, and find what payloads leave in it.

`runtime.supervisor` decides which payload gets which cluster. Begin with `cluster`. Every private API of Ray is in
`internals`.
"""
