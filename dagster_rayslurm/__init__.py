"""Run Ray-backed Dagster assets on this machine or on a Slurm cluster. Begin with `compute.ComputeResource`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .completion_sensor import build_completion_sensor
    from .compute import ComputeResource
    from .config import ExecutionMode, SessionConfig
    from .dg_components import ComputeResourceComponent, RaySlurmScriptComponent
    from .environments import (
        CommandEnvironment,
        ContainerEnvironment,
        InheritedEnvironment,
        PackedEnvironment,
        PixiEnvironment,
        PreDeployedEnvironment,
        UvEnvironment,
    )
    from .errors import FailureKind, UnhealthyNode
    from .failures import CompletedRun, RunFailure, retry_policy_for
    from .handle import RunHandle
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
    "ComputeResourceComponent",
    "ContainerEnvironment",
    "ExecutionMode",
    "FailureKind",
    "HetComponent",
    "InheritedEnvironment",
    "Launcher",
    "PackedEnvironment",
    "PixiEnvironment",
    "PreDeployedEnvironment",
    "RayLauncher",
    "RaySlurmScriptComponent",
    "RunFailure",
    "RunHandle",
    "SSHConnectionResource",
    "SessionConfig",
    "SlurmQueueConfig",
    "SlurmResource",
    "UnhealthyNode",
    "UvEnvironment",
    "__version__",
    "build_completion_sensor",
    "feasible",
    "retry_policy_for",
]

_MODULES = (
    "compute",
    "completion_sensor",
    "config",
    "environments",
    "errors",
    "failures",
    "handle",
    "launchers",
    "runtime.ray.feasibility",
    "slurm.config",
    "ssh.config",
)


_COMPONENTS = "ComputeResourceComponent", "RaySlurmScriptComponent"  # In `dg_components`, for `dg` alone.


def __getattr__(name: str) -> Any:
    """Returns the public class or function `name`; the first call imports the modules of the package (PEP 562).

    Raises AttributeError if there is no public class or function with this name.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module in ("dg_components",) if name in _COMPONENTS else _MODULES:
        each = vars(import_module(f"{__name__}.{module}"))
        globals().update({public: each[public] for public in __all__ if public in each})
    return globals()[name]


def __dir__() -> list[str]:
    """Returns the public names, among which `dg list components` looks for components."""
    return sorted(__all__)
