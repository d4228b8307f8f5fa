"""One Ray cluster: start it on the head node, let worker nodes join, watch it, and find what payloads leave in it.

`runtime.supervisor` decides which payload gets which cluster. Begin with `cluster`, `membership` for what it decides, and
`ray_node` for Ray on one node. Every private API of Ray is in `internals`.
"""
