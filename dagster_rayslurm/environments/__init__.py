"""The Python environments that payloads run in: how a configuration names one, and the check of it before submission.

No environment is built or changed here. Begin with `config`.
"""

from .config import Environment, InheritedEnvironment, Interpreter, PreDeployedEnvironment, path_on_cluster, resolve_environment

__all__ = [
    "Environment",
    "InheritedEnvironment",
    "Interpreter",
    "PreDeployedEnvironment",
    "path_on_cluster",
    "resolve_environment",
]
