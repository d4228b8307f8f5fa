"""Processes of the runtime: the event loop, the keeper, tables of processes, and private directories on a node.

The modules here do not decide how Ray and payloads are started. Begin with `loop`, the event loop of the whole runtime, and with
`processes.guard`, which cleans up after the runtime.
"""
