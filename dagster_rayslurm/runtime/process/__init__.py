"""Processes of the runtime: the event loop, the keeper, tables of processes, and private directories on a node.

The modules here do not decide how Ray and payloads are started. Begin with `loop`, in which the whole runtime runs, and
`processes.guard`, which cleans up after it.
"""
