"""Environments: which Python a payload runs in."""

from .config import Environment, InheritedEnvironment, PreDeployedEnvironment
from .resolve import Interpreter, resolve_environment

__all__ = ["Environment", "InheritedEnvironment", "Interpreter", "PreDeployedEnvironment", "resolve_environment"]
