"""Dagster's side of the separate topology (`topology="separate"`): one payload for each component, run and judged together.

How the components wait for each other on the nodes is in `runtime.separate`. Begin with `execute`.
"""
