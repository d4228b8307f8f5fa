"""Run Ray-backed Dagster assets on this machine or on a Slurm cluster. Begin with `compute.ComputeResource`."""

from dagster._core.libraries import DagsterLibraryRegistry

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

DagsterLibraryRegistry.register("dagster-rayslurm", __version__, is_dagster_package=False)

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
