"""The runtime: the program that starts Ray and runs payloads (users' commands) in a Slurm allocation or on this machine.

The launcher sends the runtime to the nodes as one zipapp. There, the Python of the user's environment, 3.8 or newer, runs the
zipapp. The runtime imports only the standard library and its own modules, so Dagster need not be installed in the environment.

Start records (`protocol.spec`) are JSON files by which Dagster's side tells the runtime what to do. The runtime tells the results
by the run record (`protocol.record`), files in the run directory. Begin with `__main__` and `supervisor.supervisor`.
"""
