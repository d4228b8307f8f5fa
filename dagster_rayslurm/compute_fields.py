"""The configuration fields of `ComputeResource`, whose methods are in `compute`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Optional, Union

import dagster as dg
from pydantic import Field

from .config import ExecutionMode, SessionConfig, StrictResource, Topology
from .environments import Environment, InheritedEnvironment
from .fields import BASE, at_least, choice, plain_text
from .launchers import BashLauncher, RayLauncher
from .slurm.config import HetComponent, SlurmResource

# A payload: a script or a command line as text, or a command as a list of words.
Payload = Union[str, "os.PathLike[str]", Sequence[str]]
Payloads = Union[Payload, Mapping[str, Payload]]  # One payload, or a mapping with one payload for each component.
# The Dagster contexts with which `run()` may be called.
Context = Union[dg.AssetExecutionContext, dg.OpExecutionContext, dg.AssetCheckExecutionContext]


EXCLUDE_AND_RETRY = "exclude-and-retry"
DETACH = "detach"


class ComputeFields(StrictResource):
    """Base class of `ComputeResource`: the configuration fields that say where and how payloads run."""

    mode: Annotated[str, choice(*ExecutionMode)] = "local"
    """How payloads run: "local", "slurm", "slurm-session" or "slurm-hetjob"."""
    slurm: Optional[SlurmResource] = None
    """The Slurm cluster. Local mode ignores it, all other modes need it."""
    default_launcher: Union[RayLauncher, BashLauncher] = Field(default=RayLauncher(), discriminator="kind")
    """Launcher of payloads whose call passes no launcher."""
    session: SessionConfig = Field(default=SessionConfig())
    """The warm session, used with enable_cluster_reuse or mode slurm-session."""
    components: list[HetComponent] = []
    """Components of a heterogeneous job, or of a session's allocation; mode slurm-hetjob needs at least one. Local mode simulates
    each component by a Ray node of its own."""
    topology: Annotated[str, choice(*Topology)] = "spanning"
    """"spanning" for one Ray cluster across all components, or "separate" for a cluster and a payload per component
    (slurm-hetjob, and local, which simulates it)."""
    enable_cluster_reuse: bool = False
    """Keep the Ray cluster warm between payloads; a warm cluster ends itself after session.idle_timeout. In the modes slurm and
    slurm-hetjob each payload has a job of its own all the same."""
    environment: Environment = Field(default=InheritedEnvironment(), discriminator="kind")
    """The Python environment of payloads: one that is on the cluster, or one that is made there from what this machine sends.
    Local mode uses Dagster's environment in place of one that is sent."""
    pre_deployed_env_path: Annotated[Optional[str], plain_text] = None
    """Path of a pre-deployed environment, in place of `environment`: a conda prefix, a venv, or a directory with activate.sh.
    Local mode ignores a path that does not exist on this machine."""
    auto_detect_platform: bool = True
    """Make environments that are sent for the platform of the compute nodes: Slurm runs a command of a second on one of them, at
    most once a day. If False, they are made for the platform of the edge node."""
    data_dir: Annotated[Optional[str], plain_text] = None
    """Directory that payloads share, whose path they find in the variable RAYSLURM_DATA_DIR; None for `data` in the base
    directory of the cluster, in local mode of this machine."""
    local_resources: Annotated[str, choice("simulate", "strict")] = "simulate"
    """What local mode does when a launcher asks for more CPUs or GPUs than this machine has: "simulate" lets Ray
    schedule as if they were there, and says so in the log; "strict" refuses the run. Memory is never simulated."""
    local_base: Annotated[str, plain_text] = BASE
    """Base directory on this machine, for the run directories of local mode and for outputs."""
    require_messages: bool = True
    """Fail a Pipes payload that never opened or never closed Pipes."""
    keep_run_dirs: Annotated[str, choice("all", "failed", "none")] = "failed"
    """Which run directories are kept: "all", those of "failed" runs, or "none". One with outputs that were left out is kept."""
    retention_days: Annotated[int, at_least(1, "days")] = 14
    """Days after which kept run directories and outputs are removed, and unused files of sessions and uploads."""
    connection_loss_timeout: Annotated[int, at_least(0, "seconds")] = 86400
    """Seconds for which a run may be out of reach before it has failed."""
    runtime_start_timeout: Annotated[int, at_least(1, "seconds")] = 600
    """Seconds for a started runtime (on Slurm: after its job started) to write its first record."""
    queue_timeout: Annotated[Optional[int], at_least(1, "seconds")] = None
    """Seconds in Slurm's queue after which a run has failed and its job is cancelled; None for no limit."""
    on_unhealthy: Annotated[str, choice("fail", EXCLUDE_AND_RETRY)] = "fail"
    """What a failed health check of a node leads to: "fail", or "exclude-and-retry" to start the run once more without the node.
    With the latter, jobs also avoid nodes that failed a check in another run of this user within the last hour."""
    on_service_stop: Annotated[str, choice("cancel", DETACH)] = "cancel"
    """What happens to the Slurm job if a service manager such as systemd stops Dagster: "cancel" cancels the job, "detach" lets
    it run, and the next attempt of the step continues with it."""
    on_infeasible: Annotated[str, choice("warn", "fail")] = "warn"
    """What follows when a task, an actor or a placement group waits for what no node of the Ray cluster can ever hold: "warn"
    says so in the log, "fail" also ends the run, unless other payloads share the cluster at that time."""
    max_stdio_mb: Annotated[int, at_least(1, "MiB")] = 1024
    """MiB of payload output that are recorded; the rest is counted and dropped."""
    max_outputs_mb: Annotated[int, at_least(0, "MiB")] = 100
    """MiB of files that `outputs=` brings back; the largest ones are left out, and named."""
