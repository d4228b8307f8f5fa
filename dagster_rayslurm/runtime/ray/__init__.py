"""Runs one Ray cluster: starts it, has worker nodes join, watches it, and finds what payloads leave alive in it.

`runtime.supervisor` decides which payload gets which cluster. Begin with `cluster`; then see `membership`, the state machine that
decides when the cluster is ready or has failed, and `ray_node` for Ray on one node. All calls of Ray's private APIs are in
`internals`.
"""
