"""This node: its resources, their use, its addresses and ports."""
