"""The request for a job: the queue configuration, completed by what the launcher wants on each node. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Optional

from ..config import check_text, mebibytes, time_limit_seconds
from ..runtime.node.resources import SHARE_FOR_RAY, Footprint
from .config import SlurmQueueConfig, split_signal
from .fields import FIELD_OF_OPTION, RESERVED_OPTIONS, SBATCH_FIELDS, requests_gpus

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
_INVISIBLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_LONG_OPTION = re.compile(r"--([A-Za-z][A-Za-z0-9-]*)(=.*)?")

_NAME_PREFIX = "rayslurm-"
_MAX_STEP = 40
"""Most characters of the step's key in a job name."""
_MAX_COMMENT = 500
"""Most bytes of a job's comment; slurmctld refuses strings of more than 1024 (tried on 22.05 and 24.11)."""


@dataclass(frozen=True)
class JobRequest:
    """All options of one job; None leaves a choice to Slurm.

    The fields are those of `SlurmQueueConfig`; CPUs and GPUs are those of the queue, else of the launcher. Of a heterogeneous
    job they are the first component's, and `further_components` has a request for each later component.
    """

    job_name: str
    comment: str
    partition: Optional[str] = None
    account: Optional[str] = None
    qos: Optional[str] = None
    reservation: Optional[str] = None
    constraint: Optional[str] = None
    num_nodes: int = 1
    cpus_per_node: Optional[int] = None
    gpus_per_node: Optional[int] = None
    gpu_type: Optional[str] = None
    mem: Optional[str] = None
    mem_per_cpu: Optional[str] = None
    time_limit: str = "01:00:00"
    exclusive: bool = False
    nodelist: Optional[str] = None
    exclude: Optional[str] = None
    switches: Optional[str] = None
    requeue: bool = False
    extra_sbatch: tuple[str, ...] = ()
    component_id: Optional[str] = None
    further_components: tuple[JobRequest, ...] = ()

    @property
    def components(self) -> tuple[JobRequest, ...]:
        """The request of each component, in the job's order; for a job without components, the request itself."""
        return (self, *self.further_components)

    @property
    def without_further_components(self) -> JobRequest:
        """The request of the first component alone."""
        return replace(self, further_components=())

    @property
    def partitions_text(self) -> str:
        """The requested partitions in words, each once."""
        named = (f"partition {each.partition}" if each.partition else "the default partition" for each in self.components)
        return " and ".join(dict.fromkeys(named))

    @property
    def login_variables(self) -> list[str]:
        """The `SBATCH_*` variables of the user's login that sbatch may see, as no component sets the field they stand for."""
        open_fields = [
            field
            for field in SBATCH_FIELDS
            if field.login_variable and all(getattr(each, field.name) is None for each in self.components)
        ]
        return [f"SBATCH_{field.name.upper()}" for field in open_fields]


def make_request(queue: SlurmQueueConfig, footprint: Footprint, *, job_name: str, comment: str) -> JobRequest:
    """The request for a job on the nodes that a queue configuration describes.

    Args:
        queue: the allocation, every `EnvVar` resolved.
        footprint: what the launcher wants on each node; used where the queue says nothing.
        job_name: name of the job.
        comment: comment of the job.

    Raises:
        ValueError: the queue contradicts itself, sets a reserved option, or grants less than the launcher wants; the
            sentence names the fields.
    """
    check_queue(queue)
    cpus = _amount(queue.cpus_per_node, "cpus_per_node", "CPUs", footprint)
    _check_memory(queue, cpus, footprint)
    gpus = queue.gpus_per_node
    if not any(map(requests_gpus, queue.extra_sbatch)):
        gpus = _amount(gpus, "gpus_per_node", "GPUs", footprint)
    if queue.gpu_type is not None and not gpus:
        raise ValueError(f"SlurmQueueConfig.gpu_type={queue.gpu_type!r} is given, but no GPU is asked for; set gpus_per_node")
    names = {field.name for field in fields(JobRequest)} & set(SlurmQueueConfig.model_fields)
    values = {
        **{name: getattr(queue, name) for name in names},
        "cpus_per_node": cpus,
        "gpus_per_node": gpus or None,
        "extra_sbatch": tuple(queue.extra_sbatch),
    }
    return JobRequest(job_name=check_text(job_name), comment=check_text(comment), **values)


def gibibytes_for_ray(mem: str | None, mem_per_cpu: str | None, cpus: int | None) -> float | None:
    """The part of a node's memory that Ray may use, in GiB; None if Slurm chooses the memory, as it does for 0."""
    memory = mebibytes(mem) if mem is not None else mebibytes(mem_per_cpu) * cpus if mem_per_cpu is not None and cpus else 0
    return memory * SHARE_FOR_RAY / 1024 or None


def _check_memory(queue: SlurmQueueConfig, cpus: int | None, footprint: Footprint) -> None:
    usable = gibibytes_for_ray(queue.mem, queue.mem_per_cpu, None if queue.exclusive else cpus)
    for want in footprint:
        if want.unit == "GiB" and want.amount is not None and usable is not None and want.amount > usable:
            field = f"mem={queue.mem!r}" if queue.mem is not None else f"mem_per_cpu={queue.mem_per_cpu!r} for {cpus} CPUs"
            raise ValueError(
                f"{want.field}={want.amount:g} is more than SlurmQueueConfig.{field} leaves for Ray: {usable:.3g} GiB of each "
                f"node; raise {field.partition('=')[0]}, or lower {want.field.partition('.')[2]}"
            )


def _amount(granted: int | None, field: str, unit: str, footprint: Footprint) -> int | None:
    """The amount to request on each node: what the queue says, else the most that the launcher wants; 0 counts as no want."""
    wants = [want for want in footprint if want.unit == unit and want.amount]
    if granted is None:
        return max((int(want.amount) for want in wants if want.amount), default=None)
    for want in wants:
        if want.amount is not None and want.amount > granted:
            raise ValueError(
                f"{want.field}={want.amount:g} is more than SlurmQueueConfig.{field}={granted} grants; raise {field}, or leave "
                "it out to ask for what the launcher wants"
            )
    return granted


def check_queue(queue: SlurmQueueConfig) -> None:
    """Refuse a queue that contradicts itself or sets a reserved option.

    Raises:
        ValueError: naming the fields.
    """
    if queue.mem is not None and queue.mem_per_cpu is not None:
        raise ValueError(
            f"SlurmQueueConfig.mem={queue.mem!r} and mem_per_cpu={queue.mem_per_cpu!r} exclude each other; set one of them"
        )
    _, before = split_signal(queue.signal_before_timeout)
    limit = time_limit_seconds(queue.time_limit)
    if before is not None and limit is not None and before >= limit:
        raise ValueError(
            f"SlurmQueueConfig.signal_before_timeout={queue.signal_before_timeout!r} is not within "
            f"time_limit={queue.time_limit!r}, which is {limit:.0f} seconds; lower the one or raise the other"
        )
    for option in queue.extra_sbatch:
        _check_extra_option(queue, option)


def _check_extra_option(queue: SlurmQueueConfig, option: str) -> None:
    """Refuse an option of `extra_sbatch` that has a field, or on which runs depend."""
    match = _LONG_OPTION.fullmatch(option)
    if not match:
        raise ValueError(f"SlurmQueueConfig.extra_sbatch: {option!r} is not written as --NAME or --NAME=VALUE")
    name, value = match.groups()
    if name == "exclusive" and value and not queue.exclusive:
        return  # --exclusive=user and such, which the field cannot express.
    if name in FIELD_OF_OPTION:
        raise ValueError(f"SlurmQueueConfig.extra_sbatch: --{name} has a field of its own; use {FIELD_OF_OPTION[name]}")
    if name in RESERVED_OPTIONS:
        raise ValueError(f"SlurmQueueConfig.extra_sbatch: --{name} cannot be chosen; {RESERVED_OPTIONS[name]}")
    # sbatch accepts a prefix of an option for the option, unless the prefix is an option itself, as --gpus is.
    known = [*sorted(FIELD_OF_OPTION), *sorted(RESERVED_OPTIONS)]
    longer = [each for each in known if each.startswith(name) and name != "gpus"]
    if longer:
        raise ValueError(
            f"SlurmQueueConfig.extra_sbatch: sbatch would take --{name} for --{longer[0]}; write options in full, and what "
            "has a field of its own there"
        )
    if queue.gpus_per_node is not None and requests_gpus(option):
        raise ValueError(
            f"SlurmQueueConfig.extra_sbatch: {option!r} asks for GPUs, and so does gpus_per_node={queue.gpus_per_node}; "
            "use one of the two"
        )


def job_name(step_key: str, nonce: str) -> str:
    """A job name that shows the step and ends in the nonce, a random word by which the job is found again."""
    return f"{_NAME_PREFIX}{_UNSAFE.sub('_', step_key)[:_MAX_STEP]}-{nonce}"


def is_job_of(name: str, nonce: str) -> bool:
    """Whether a job's name is one that `job_name` made with this nonce."""
    return name.startswith(_NAME_PREFIX) and name.endswith(f"-{nonce}")


def job_comment(run_id: str, step_key: str, partition_key: str | None) -> str:
    """A comment that names the Dagster run, step and partition of a job, in one line of at most 500 bytes."""
    words = ["dagster run", run_id, "step", step_key]
    if partition_key is not None:
        words += ["partition", partition_key]
    line = _INVISIBLE.sub("\N{REPLACEMENT CHARACTER}", " ".join(words)).encode()
    if len(line) <= _MAX_COMMENT:
        return line.decode()
    return line[: _MAX_COMMENT - len("…".encode())].decode(errors="ignore") + "…"
