"""Work on the worker nodes of an allocation: an agent on each worker node carries out the head's commands.

The head's side is `runtime.node.worker_nodes`. Begin with `agent`; `worker` and `simulated` are the two ways to reach it.
"""
