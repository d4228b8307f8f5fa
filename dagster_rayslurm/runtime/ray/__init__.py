"""One Ray cluster: start it on the head node, let worker nodes join, watch it, and find what payloads leave in it.

Which payload gets which cluster is decided in `runtime.supervisor`. Begin with `cluster`. Every private API of Ray is in
`internals`.
"""
