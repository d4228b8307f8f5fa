"""Work on the worker nodes of an allocation: the head node sends commands, and an agent on each worker node carries them out.

What concerns only the own node is in `runtime.node`. Begin with `head` for the head's side and `node_agent` for the worker's.
"""
