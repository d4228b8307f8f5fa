"""Runs one Ray cluster: starts it, has worker nodes join, watches it, and finds what payloads leave alive in it.

`runtime.supervisor` decides which payload gets which cluster. Begin with `cluster`; then see `membership`, the state machine that
decides for it, and `ray_node` for Ray on one node. Every private API of Ray is in `internals`.
"""
