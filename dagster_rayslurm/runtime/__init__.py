"""The part that runs where the payload runs: standard library only, Python 3.8 or newer.

It is sent to the allocated nodes as one zipapp and started with the environment's own Python. It starts Ray,
runs the payload, writes the record of the run and tears everything down. Nothing in here imports the rest of
the project, so that the same files work on a laptop and on a compute node where Dagster is not installed.

`docs/architecture.md` has the map of its rooms, and the order of their imports.
"""
