"""The configuration of a Slurm cluster and of allocations on the cluster. Options mean what sbatch(1) of Slurm 22.05 says."""

from __future__ import annotations

import re
from typing import Annotated, Any, Optional, Union

from pydantic import Field

from ..config import StrictConfig, StrictResource, check_sbatch_options, check_signal, identifier, slurm_memory, slurm_time
from ..fields import BASE, at_least, check_at_least, checked, plain_text
from ..launchers import BashLauncher, RayLauncher
from ..ssh.config import SSHConnectionResource

AUTO = "auto"  # The partition is chosen when the job is submitted; see `partition_choice`.


def _check_gpus(value: object) -> Any:
    typed = re.fullmatch(r"(?:gpu:)?(?!gpu:)(\w[\w.-]*):(\d+)", value) if isinstance(value, str) else None
    if typed:
        raise ValueError(f"{value!r} is not a number; write gpus_per_node={typed[2]} and gpu_type={typed[1]!r}")
    return check_at_least(value, 0)


class SlurmQueueConfig(StrictConfig):
    """What a job requests from Slurm. If a field is None, the launcher or Slurm decides."""

    partition: Annotated[Optional[str], plain_text] = None
    """Partition (`--partition`); None for the cluster's default, "auto" for the first one that fits and has free nodes when the
    job is submitted. With "auto", an environment that is sent is made for the nodes of the default partition."""
    account: Annotated[Optional[str], plain_text] = None
    """Account that is charged (`--account`)."""
    qos: Annotated[Optional[str], plain_text] = None
    """Quality of service (`--qos`)."""
    reservation: Annotated[Optional[str], plain_text] = None
    """Reservation to run in (`--reservation`)."""
    constraint: Annotated[Optional[str], plain_text] = None
    """Required node features (`--constraint`), such as "a100&nvlink"."""
    num_nodes: Annotated[int, at_least(1)] = 1
    """Number of nodes (`--nodes`)."""
    cpus_per_node: Annotated[Optional[int], at_least(1)] = None
    """CPUs on each node (`--cpus-per-task` of the one task per node); None requests the number that the launcher names, or if
    the launcher names none, leaves the number to Slurm (usually 1)."""
    gpus_per_node: Annotated[Optional[int], checked(_check_gpus)] = None
    """GPUs on each node (`--gpus-per-node`); None requests the number that the launcher names."""
    gpu_type: Annotated[Optional[str], plain_text] = None
    """Type of GPU as the cluster names it, such as "a100"."""
    mem: Annotated[Optional[str], slurm_memory] = None
    """Memory of each node (`--mem`), such as "64G"; MiB without a unit."""
    mem_per_cpu: Annotated[Optional[str], slurm_memory] = None
    """Memory for each CPU (`--mem-per-cpu`), such as "4G"; MiB without a unit."""
    time_limit: Annotated[str, slurm_time] = "01:00:00"
    """Time limit (`--time`): minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS or UNLIMITED."""
    exclusive: bool = False
    """Share the nodes with no other job (`--exclusive`)."""
    nodelist: Annotated[Optional[str], plain_text] = None
    """Nodes that must be in the allocation (`--nodelist`)."""
    exclude: Annotated[Optional[str], plain_text] = None
    """Nodes that must not be in the allocation (`--exclude`)."""
    switches: Annotated[Optional[str], plain_text] = None
    """The largest number of leaf switches that the nodes may span, and how long Slurm may wait for such nodes (`--switches`),
    such as "1@00:30:00"."""
    requeue: bool = False
    """Let Slurm requeue the job after a node failure or preemption (`--requeue`); never done with a session."""
    signal_before_timeout: Annotated[Optional[str], checked(check_signal)] = None
    """Signal to the payload ahead of the time limit, as SECONDS or SIGNAL@SECONDS ("USR1@300"); the runtime sends the signal
    itself, so that Ray's processes do not get it."""
    extra_sbatch: Annotated[list[str], checked(check_sbatch_options)] = []
    """Long options of sbatch that have no field, as --NAME or --NAME=VALUE, such as ["--licenses=matlab:1"]; those on which the
    runtime depends (--job-name, --output, --chdir, --array, --ntasks and such) are refused."""

    def having(self, **values: Any) -> SlurmQueueConfig:
        """Returns a copy with new values of some fields."""
        return SlurmQueueConfig(**{**self.model_dump(), **values})


class SlurmResource(StrictResource):
    """A Slurm cluster: how to reach it, what jobs request by default, and where files go."""

    ssh: Optional[SSHConnectionResource] = None
    """SSH connection to the edge (login) node; None when Dagster itself runs where `sbatch` is."""
    queue: SlurmQueueConfig = Field(default=SlurmQueueConfig())
    """What jobs request from Slurm by default."""
    remote_base: Annotated[str, plain_text] = BASE
    """Directory for run directories and caches, on a file system that the edge and the compute nodes share."""
    site: dict[str, str] = {}
    """Environment variables that every job at this site gets, such as proxies or NCCL settings."""
    poll_interval: Annotated[int, at_least(1, "seconds")] = 30
    """Seconds between two queries of the queue, for pending reasons and lost jobs; results never wait for a query."""


def split_signal(text: str | None) -> tuple[str, float | None]:
    """Returns the signal and the seconds in `text`, a value of `signal_before_timeout`: ("USR1", 300.0) for "USR1@300".

    The seconds say how long before the job's time limit the signal is sent. A "SIG" at the beginning of the signal is left out. A
    value without a signal, such as "300", gives ("TERM", 300.0). The value None gives ("TERM", None): no signal is sent.
    """
    if text is None:
        return "TERM", None
    name, _, seconds = text.rpartition("@")
    return (name.removeprefix("SIG") or "TERM"), float(seconds)


class HetComponent(StrictConfig):
    """One component of a heterogeneous job: a group of equal nodes.

    All components share one Ray cluster; with topology "separate", each component has a Ray cluster of its own.
    """

    component_id: Annotated[str, identifier]
    """Name of the component; Ray nodes carry it as a label."""
    queue: SlurmQueueConfig
    """What the component asks Slurm for."""
    launcher: Union[RayLauncher, BashLauncher] = Field(default=RayLauncher(), discriminator="kind")
    """Settings of the component's nodes in the one Ray cluster (a RayLauncher); with topology "separate", the launcher of the
    component's own payload."""
    head: bool = False
    """Whether the Ray head runs in this component; by default it runs in the first component."""
