"""Connections: how files and commands reach the place where the runtime works."""
