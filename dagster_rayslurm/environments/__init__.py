"""Environments: which Python a payload runs in."""

from .config import Environment, InheritedEnvironment, Interpreter, PreDeployedEnvironment, path_on_cluster, resolve_environment

__all__ = [
    "Environment",
    "InheritedEnvironment",
    "Interpreter",
    "PreDeployedEnvironment",
    "path_on_cluster",
    "resolve_environment",
]
