"""Tools of the runtime to handle processes: the event loop, the keeper, lists of processes, private directories of a node.

How Ray and payloads are started is not decided here. Begin with `loop`, in which the whole runtime runs, and
`processes.guard`, which cleans up after it.
"""
