"""Work on the worker nodes of an allocation: the head node sends commands, and an agent on each worker node carries them out.

Facts about a single node are in `runtime.node`. Begin with `head` for the head's side and `node_agent` for the worker's.
"""
