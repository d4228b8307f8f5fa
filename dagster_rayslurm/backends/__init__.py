"""Backends: the ways to get the runtime started. What follows is the same for all of them."""
