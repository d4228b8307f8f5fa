"""Several nodes: the head's view of its workers, and the agent on each node."""
