"""Connections to the machine where the runtime is started: this machine, or an edge node of a Slurm cluster by SSH.

A connection calls functions of `edge` (the package whose functions run on the edge node), runs commands, copies files and
connects to ports. A connection knows nothing of Slurm, payloads or Ray. Begin with `base.Connection`, the interface, and
`pool.connection_to`, which returns the connection for a configuration.
"""
