"""The runtime: the program that starts Ray and runs payloads, on the nodes of a Slurm allocation or on this machine.

It is sent to the nodes as one zipapp and started with the environment's own Python, 3.8 or newer, where Dagster need not be
installed: it imports the standard library and itself. Begin with `__main__` and `supervisor.supervisor`.
"""
