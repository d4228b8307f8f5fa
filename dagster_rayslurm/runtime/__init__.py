"""The runtime: the program that starts Ray and runs payloads (users' commands) in a Slurm allocation or on this machine.

The launcher sends it to the nodes as one zipapp, where the Python of the user's environment runs it, 3.8 or newer. It imports
only the standard library and its own modules, so Dagster need not be installed there. Begin with `__main__` and
`supervisor.supervisor`.
"""
