"""What sbatch is asked for: the queue configuration, completed by what the launcher needs. Pure.

Options mean what sbatch(1) of Slurm 22.05 says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Optional

from ..config import check_text, mebibytes, time_limit_seconds
from ..runtime.node.resources import SHARE_FOR_RAY, Footprint
from .config import SlurmQueueConfig, split_signal

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
_INVISIBLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_LONG_OPTION = re.compile(r"--([A-Za-z][A-Za-z0-9-]*)(=.*)?")
_GPUS = re.compile(r"--(gpus(-per-(socket|task))?=|(gres|tres-per-task)=(.*[,/])?gpu([:=,]|$))")

_OURS = "rayslurm-"
_MAX_STEP = 40
_MAX_COMMENT = 500
"""Bytes; slurmctld refuses strings of more than 1024 (tried on 22.05 and 24.11)."""

FIELDS = {
    "account": "account",
    "constraint": "constraint",
    "cpus-per-task": "cpus_per_node",
    "exclude": "exclude",
    "exclusive": "exclusive",
    "gpus-per-node": "gpus_per_node",
    "mem": "mem",
    "mem-per-cpu": "mem_per_cpu",
    "no-requeue": "requeue",
    "nodefile": "nodelist",
    "nodelist": "nodelist",
    "nodes": "num_nodes",
    "partition": "partition",
    "qos": "qos",
    "requeue": "requeue",
    "reservation": "reservation",
    "signal": "signal_before_timeout",
    "switches": "switches",
    "time": "time_limit",
}
"""Options of sbatch that a field of SlurmQueueConfig stands for."""

_ONE_TASK = "the runtime is the one task of each node; use cpus_per_node for its CPUs"
_ONE_CLUSTER = "a SlurmResource is one cluster; use another one for another cluster"
_NO_JOB = "with it sbatch submits nothing"
_RUN_DIRECTORY = "what the job writes stands in its run directory"
_ELSEWHERE = "the job's script and its srun would run elsewhere"
_MACHINERY = {
    "array": "each run is one job",
    "batch": _ELSEWHERE,
    "chdir": _RUN_DIRECTORY,
    "cluster": _ONE_CLUSTER,
    "clusters": _ONE_CLUSTER,
    "comment": "it names the Dagster run, step and partition",
    "container": _ELSEWHERE,
    "container-id": _ELSEWHERE,
    "error": _RUN_DIRECTORY,
    "help": _NO_JOB,
    "het-group": _ELSEWHERE,
    "input": "the job reads nothing",
    "job-name": "the job is found again by its name",
    "ntasks": _ONE_TASK,
    "ntasks-per-core": _ONE_TASK,
    "ntasks-per-gpu": _ONE_TASK,
    "ntasks-per-node": _ONE_TASK,
    "ntasks-per-socket": _ONE_TASK,
    "ntasks-per-tres": _ONE_TASK,
    "open-mode": _RUN_DIRECTORY,
    "output": _RUN_DIRECTORY,
    "pack-group": _ELSEWHERE,
    "parsable": "it is always on",
    "tasks-per-node": _ONE_TASK,
    "test-only": _NO_JOB,
    "usage": _NO_JOB,
    "version": _NO_JOB,
    "wait": "results are followed without it",
    "wrap": "the job starts the runtime",
}
"""Options of sbatch that are nobody's to choose, and why."""

_OWNED = (*FIELDS, *_MACHINERY)


@dataclass(frozen=True)
class JobRequest:
    """Everything that sbatch is asked for one job; None leaves a choice to Slurm.

    The fields are those of `SlurmQueueConfig`, with CPUs and GPUs as the queue or else the launcher asks for them. Those of a
    heterogeneous job are its first component's, and `others` are the components that follow; they have no others.
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
    others: tuple[JobRequest, ...] = ()

    @property
    def parts(self) -> tuple[JobRequest, ...]:
        """What each component is asked for, in the job's order; the request itself if it has none."""
        return (self, *self.others)

    @property
    def alone(self) -> JobRequest:
        """What its first component is asked for, without those that follow."""
        return replace(self, others=())

    @property
    def where(self) -> str:
        """Where it is asked for, in words: each partition once."""
        named = (f"partition {part.partition}" if part.partition else "the default partition" for part in self.parts)
        return " and ".join(dict.fromkeys(named))


def asks_for_gpus(option: str) -> bool:
    """Whether an option of sbatch asks for GPUs in words of Slurm's own."""
    return _GPUS.match(option) is not None


def make_request(queue: SlurmQueueConfig, footprint: Footprint, *, job_name: str, comment: str) -> JobRequest:
    """What to ask Slurm for.

    Args:
        queue: the footprint of the allocation, every `EnvVar` resolved.
        footprint: what the launcher wants of each node; asked for where the queue does not say.
        job_name: name of the job.
        comment: comment of the job.

    Raises:
        ValueError: the queue contradicts itself, takes an option that is not its own, or grants less than the launcher
            wants; the sentence names the fields.
    """
    check_queue(queue)
    cpus = _amount(queue.cpus_per_node, "cpus_per_node", "CPUs", footprint)
    _check_memory(queue, cpus, footprint)
    gpus = queue.gpus_per_node
    if not any(map(asks_for_gpus, queue.extra_sbatch)):
        gpus = _amount(gpus, "gpus_per_node", "GPUs", footprint)
    if queue.gpu_type is not None and not gpus:
        raise ValueError(f"SlurmQueueConfig.gpu_type={queue.gpu_type!r} is given, but no GPU is asked for; set gpus_per_node")
    return JobRequest(
        job_name=check_text(job_name),
        comment=check_text(comment),
        partition=queue.partition,
        account=queue.account,
        qos=queue.qos,
        reservation=queue.reservation,
        constraint=queue.constraint,
        num_nodes=queue.num_nodes,
        cpus_per_node=cpus,
        gpus_per_node=gpus or None,
        gpu_type=queue.gpu_type,
        mem=queue.mem,
        mem_per_cpu=queue.mem_per_cpu,
        time_limit=queue.time_limit,
        exclusive=queue.exclusive,
        nodelist=queue.nodelist,
        exclude=queue.exclude,
        switches=queue.switches,
        requeue=queue.requeue,
        extra_sbatch=tuple(queue.extra_sbatch),
    )


def gibibytes_for_ray(mem: str | None, mem_per_cpu: str | None, cpus: int | None) -> float | None:
    """The part of a node's memory that Ray may use, in GiB; None if Slurm decides on the memory, as it does for 0, too."""
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
    """What the queue grants, or else the most that the launcher wants; a want of 0 asks for nothing."""
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
    """Whether a queue contradicts itself, whatever the launcher wants.

    Raises:
        ValueError: it does, or takes an option that is not its own; the sentence names the fields.
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
    check_extra_sbatch(queue)


def check_extra_sbatch(queue: SlurmQueueConfig) -> None:
    """Whether `extra_sbatch` leaves alone what has a field of its own and what runs depend on.

    Raises:
        ValueError: it does not; the sentence names the option and what to use instead.
    """
    for option in queue.extra_sbatch:
        parts = _LONG_OPTION.fullmatch(option)
        if not parts:
            raise ValueError(f"SlurmQueueConfig.extra_sbatch: {option!r} is not written as --NAME or --NAME=VALUE")
        name, value = parts.groups()
        if name == "exclusive" and value and not queue.exclusive:
            continue  # --exclusive=user and the like, for which the field has no words.
        if name in FIELDS:
            raise ValueError(f"SlurmQueueConfig.extra_sbatch: --{name} has a field of its own; use {FIELDS[name]}")
        if name in _MACHINERY:
            raise ValueError(f"SlurmQueueConfig.extra_sbatch: --{name} cannot be chosen; {_MACHINERY[name]}")
        # sbatch takes an option by any beginning of its name that is no option itself.
        longer = [owned for owned in _OWNED if owned.startswith(name) and name != "gpus"]
        if longer:
            raise ValueError(
                f"SlurmQueueConfig.extra_sbatch: sbatch would take --{name} for --{longer[0]}; write options in full, and what "
                "has a field of its own there"
            )
        if queue.gpus_per_node is not None and asks_for_gpus(option):
            raise ValueError(
                f"SlurmQueueConfig.extra_sbatch: {option!r} asks for GPUs, and so does gpus_per_node={queue.gpus_per_node}; "
                "use one of the two"
            )


def job_name(step_key: str, nonce: str) -> str:
    """A name that tells an administrator what runs, and by which the job is found again: it ends in the nonce."""
    return f"{_OURS}{_UNSAFE.sub('_', step_key)[:_MAX_STEP]}-{nonce}"


def is_job_of(name: str, nonce: str) -> bool:
    """Whether a job's name is one that `job_name` makes with this nonce."""
    return name.startswith(_OURS) and name.endswith(f"-{nonce}")


def job_comment(run_id: str, step_key: str, partition_key: str | None) -> str:
    """A comment that says which Dagster run, step and partition a job is for, in one line of at most 500 bytes."""
    words = ["dagster run", run_id, "step", step_key]
    if partition_key is not None:
        words += ["partition", partition_key]
    line = _INVISIBLE.sub("\N{REPLACEMENT CHARACTER}", " ".join(words)).encode()
    if len(line) <= _MAX_COMMENT:
        return line.decode()
    return line[: _MAX_COMMENT - len("…".encode())].decode(errors="ignore") + "…"
