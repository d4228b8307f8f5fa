"""The runtime: the program that starts Ray and runs payloads, on the nodes of a Slurm allocation or on this machine.

It writes the record of each run, from which Dagster's side learns everything, and kills what is left of a run at its end. It is
sent to the nodes as one zipapp and started with the environment's own Python, 3.8 or newer. It imports the standard library only,
and nothing of the rest of the package, because Dagster need not be installed there.

Begin with `__main__`, which lists the commands, and `supervisor.supervisor`, which runs payloads. `docs/architecture.md` has the
map of the packages in here, and the order of their imports.
"""
