"""The fields of `ComputeResource`; `compute` has its methods."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Optional, Union

import dagster as dg
from pydantic import Field

from .config import ExecutionMode, SessionConfig, StrictResource, Topology, at_least, choice, plain_text
from .environments import Environment, InheritedEnvironment
from .launchers import BashLauncher, RayLauncher
from .slurm.config import HetComponent, SlurmResource

Payload = Union[str, "os.PathLike[str]", Sequence[str]]
"""A payload: a script or a command line as text, or a command as a list of words."""
Payloads = Union[Payload, Mapping[str, Payload]]
"""One payload, or a mapping with one payload for each component."""
Context = Union[dg.AssetExecutionContext, dg.OpExecutionContext, dg.AssetCheckExecutionContext]
"""The Dagster contexts with which `run()` may be called."""


class ComputeFields(StrictResource):
    """Where and how payloads run, as users configure it."""

    mode: Annotated[str, choice(*ExecutionMode)] = Field(
        default="local", description='How payloads run: "local", "slurm", "slurm-session" or "slurm-hetjob".'
    )
    slurm: Optional[SlurmResource] = Field(
        default=None, description="The Slurm cluster. Local mode ignores it, all other modes need it."
    )
    default_launcher: Union[RayLauncher, BashLauncher] = Field(
        default=RayLauncher(), discriminator="kind", description="Launcher of payloads without one of their own."
    )
    session: SessionConfig = Field(
        default=SessionConfig(), description="The warm session, used with enable_cluster_reuse or mode slurm-session."
    )
    components: list[HetComponent] = Field(
        default=[],
        description="Components of the heterogeneous job, which needs them, or of the session; local mode simulates them, a Ray "
        "node for each.",
    )
    topology: Annotated[str, choice(*Topology)] = Field(
        default=Topology.SPANNING.value,
        description='"spanning" for one Ray cluster across all components, or "separate" for a cluster and a payload per '
        "component (slurm-hetjob, and local, which simulates it).",
    )
    enable_cluster_reuse: bool = Field(
        default=False,
        description="Keep the Ray cluster warm between payloads; it ends itself after session.idle_timeout. In the modes slurm "
        "and slurm-hetjob each payload has a job of its own all the same.",
    )
    environment: Environment = Field(
        default=InheritedEnvironment(),
        discriminator="kind",
        description="The Python environment of payloads: one that is on the cluster, or one that is made there from what this "
        "machine sends. Local mode uses Dagster's in place of the latter.",
    )
    pre_deployed_env_path: Annotated[Optional[str], plain_text] = Field(
        default=None,
        description="Short for a pre-deployed environment: a conda prefix, a venv, or a directory with activate.sh. Local mode "
        "ignores a path that does not exist on this machine.",
    )
    auto_detect_platform: bool = Field(
        default=True, description="Accepted and ignored: environments are always made for the platform of the cluster."
    )
    data_dir: Annotated[Optional[str], plain_text] = Field(
        default=None,
        description="Shared directory of payloads, in RAYSLURM_DATA_DIR; None for `data` below the base directory there.",
    )
    local_resources: Annotated[str, choice("simulate", "strict")] = Field(
        default="simulate",
        description='What local mode does when a launcher asks for more CPUs or GPUs than this machine has: "simulate" has Ray '
        'count them and says so in the log, "strict" refuses. Memory is never simulated.',
    )
    local_base: Annotated[str, plain_text] = Field(
        default="~/.dagster_rayslurm", description="Base directory on this machine: run directories of the local mode, outputs."
    )
    require_messages: bool = Field(default=True, description="Fail a Pipes payload that never opened or never closed Pipes.")
    keep_run_dirs: Annotated[str, choice("all", "failed", "none")] = Field(
        default="failed", description='Which run directories are kept: "all", those of "failed" runs, or "none".'
    )
    retention_days: Annotated[int, at_least(1, "days")] = Field(
        default=14,
        description="Days after which kept run directories and outputs are removed, and unused files of sessions and uploads.",
    )
    connection_loss_timeout: Annotated[int, at_least(0, "seconds")] = Field(
        default=86400, description="Seconds for which a run may be out of reach before it has failed."
    )
    runtime_start_timeout: Annotated[int, at_least(1, "seconds")] = Field(
        default=600,
        description="Seconds for a started runtime (on Slurm: after its job started) to write its first record.",
    )
    queue_timeout: Annotated[Optional[int], at_least(1, "seconds")] = Field(
        default=None,
        description="Seconds in Slurm's queue after which a run has failed and its job is cancelled; None for no limit.",
    )
    max_stdio_mb: Annotated[int, at_least(1, "MiB")] = Field(
        default=1024, description="MiB of payload output that are recorded; the rest is counted and dropped."
    )
    max_outputs_mb: Annotated[int, at_least(0, "MiB")] = Field(
        default=100, description="MiB of files that `outputs=` brings back; the largest ones are left out, and named."
    )
