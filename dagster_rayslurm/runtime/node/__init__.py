"""Facts about the node that this runtime runs on: its resources, their use, its addresses and ports."""
