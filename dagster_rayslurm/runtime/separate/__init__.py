"""The runtime's side of the separate topology (`topology="separate"`): each component has a payload and a Ray cluster of its own.

The runtimes of all components wait for each other at a barrier, and all payloads end when one fails. Runs with one Ray
cluster over all components do not use this. Begin with `participant`.
"""
