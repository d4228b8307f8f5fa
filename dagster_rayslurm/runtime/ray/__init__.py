"""Runs one Ray cluster: starts the cluster, has worker nodes join, watches the cluster, and finds what payloads leave alive.

`runtime.supervisor` decides which payload gets which Ray cluster. Begin with `cluster`. See also `membership`, the state machine
that decides when the cluster is ready or has failed, and `ray_node` for Ray on one node. All calls of Ray's private APIs are in
`internals`.
"""
