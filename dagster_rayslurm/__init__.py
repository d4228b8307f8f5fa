"""Run Ray-backed Dagster assets on this machine or on a Slurm cluster. Begin with `compute.ComputeResource`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compute import ComputeResource
    from .config import ExecutionMode, SessionConfig
    from .environments import (
        CommandEnvironment,
        ContainerEnvironment,
        InheritedEnvironment,
        PackedEnvironment,
        PixiEnvironment,
        PreDeployedEnvironment,
        UvEnvironment,
    )
    from .errors import CompletedRun, RunFailure, retry_policy_for
    from .launchers import BashLauncher, Launcher, RayLauncher
    from .runtime.ray.feasibility import feasible
    from .slurm.config import HetComponent, SlurmQueueConfig, SlurmResource
    from .ssh.config import SSHConnectionResource

__version__ = "0.1.0"

__all__ = [
    "BashLauncher",
    "CommandEnvironment",
    "CompletedRun",
    "ComputeResource",
    "ContainerEnvironment",
    "ExecutionMode",
    "HetComponent",
    "InheritedEnvironment",
    "Launcher",
    "PackedEnvironment",
    "PixiEnvironment",
    "PreDeployedEnvironment",
    "RayLauncher",
    "RunFailure",
    "SSHConnectionResource",
    "SessionConfig",
    "SlurmQueueConfig",
    "SlurmResource",
    "UvEnvironment",
    "__version__",
    "feasible",
    "retry_policy_for",
]

_MODULES = "compute", "config", "environments", "errors", "launchers", "runtime.ray.feasibility", "slurm.config", "ssh.config"


def __getattr__(name: str) -> Any:
    """Returns a public class or function; the package imports its modules at the first such access, not before (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for each in map(import_module, (f"{__name__}.{module}" for module in _MODULES)):
        globals().update({public: vars(each)[public] for public in __all__ if public in vars(each)})
    return globals()[name]
