"""Sentences for users whose job Slurm refuses, lets wait, or can never start. Pure.

A request that cannot be granted is refused by sbatch or stays pending for ever, depending on the version and on
`EnforcePartLimits` (slurm.conf(5)). By default 22.05 lets a job wait that asks for more nodes than its partition has, or for more
time; 24.11 refuses too many nodes. Limits of a QOS let it wait unless the QOS has DenyOnLimit. Tried on 22.05 and 24.11.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from .config import SlurmQueueConfig
from .request import FIELD_OF_OPTION, SBATCH_FIELDS, JobRequest
from .shared_queue import QueueRow

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
# In the output of sbatch: what stands before an error, lines that are no errors, and an option that an error names.
_PREFIX = re.compile(r"^sbatch: (error: |fatal: )?(Batch job submission failed: )?")
_NOISE = re.compile(r"^(sbatch: (warning:|Slurm .*retrying|error: get_addr_info: )|Try \"sbatch --help)", re.IGNORECASE)
_OPTION = re.compile(r"(?:option '--|for --|Invalid --)([a-z][a-z-]*)")
_MAX_WORDS = 400  # Most characters of sbatch's own errors that a sentence quotes.

# Errors of sbatch that are no objection to the request, see `is_temporary`.
_TEMPORARY = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Zero Bytes were transmitted|Communication (connection|shutdown) failure"
    r"|Unable to (resolve \"|establish control(ler)? machine address)|getaddrinfo\(\) failed"
    r"|Message (send|receive) failure|Munge encode failed|Protocol authentication error|standby mode|Rate limit exceeded"
    r"|MaxJobCount limit|job queue full|MaxSubmitJob|GrpSubmitJob"
)

# How a user finds out what the cluster has and allows; parts of the advice below.
_NODES = '`sinfo -N -o "%N %P %c %m %G %f"` shows what each node has'
_ASSOCIATIONS = "`sacctmgr show associations user=$USER format=account,partition,qos` lists yours"
_TIMES = '`sinfo -o "%P %l"` shows how long each partition allows'
_RESERVATIONS = "`scontrol show reservation` lists them and who may use them"
_LIMITS = "`sacctmgr show qos` and `sacctmgr show associations user=$USER` show the limits"
_PARTITION = "`scontrol show partition` shows what it allows"
_PARTITIONS = "set SlurmQueueConfig.partition to one that `sinfo -s` lists"

# Advice for each error of sbatch, by a pattern of the error; the first match counts.
_ADVICE = (
    (r"partition specified|\(inactive or drain\)|not permitted to use this partition|Access/permission denied", _PARTITIONS),
    (r"reservation", f"check SlurmQueueConfig.reservation; {_RESERVATIONS}"),
    (r"Invalid account", f"SlurmQueueConfig.account must be one that you may charge in this partition; {_ASSOCIATIONS}"),
    (r"Invalid qos", f"SlurmQueueConfig.qos must be one that your account and the partition allow; {_ASSOCIATIONS}"),
    (r"Invalid feature", f"SlurmQueueConfig.constraint names features that no node has; {_NODES}"),
    (
        r"Invalid node (name|list)|Requested nodes not in this partition",
        f"SlurmQueueConfig.nodelist and exclude must name nodes of the partition; {_NODES}",
    ),
    (
        r"number of nodes|Node count specification",
        "SlurmQueueConfig.num_nodes is not what nodelist and the partition allow; `sinfo -s` shows its nodes",
    ),
    (r"CPU count|More processors", f"lower SlurmQueueConfig.cpus_per_node, or the CPUs that the launcher wants; {_NODES}"),
    (
        r"Memory (specification|required)",
        f"lower SlurmQueueConfig.mem or mem_per_cpu to what a node of the partition has; {_NODES}",
    ),
    (r"time limit is invalid|--time spec", f"SlurmQueueConfig.time_limit is not what the partition allows; {_TIMES}"),
    (
        r"generic resource|Trackable RESource|--gpus-per-node",
        f"check SlurmQueueConfig.gpus_per_node and gpu_type, and GPUs in extra_sbatch; {_NODES}",
    ),
    (
        r"Requested (node|partition) configuration",
        "no node of the partition has what SlurmQueueConfig.cpus_per_node, gpus_per_node, gpu_type, mem, constraint, nodelist "
        f"and exclude ask for together, or it has fewer than num_nodes of them; {_NODES}",
    ),
    (r"violates accounting/QOS policy", f"ask for less, or set SlurmQueueConfig.qos or account to others; {_LIMITS}"),
    (r"license|wckey|dependency|mutually exclusive|unrecognized option", "check SlurmQueueConfig.extra_sbatch"),
)

# By the word in Slurm's reason: what a limit counts, and the fields of `SlurmQueueConfig` that ask for it.
_QUANTITIES = {
    "Cpu": ("CPUs", "num_nodes or cpus_per_node"),
    "GRES": ("GPUs", "num_nodes or gpus_per_node"),
    "Mem": ("memory", "num_nodes, mem or mem_per_cpu"),
    "Memory": ("memory", "num_nodes, mem or mem_per_cpu"),
    "Node": ("nodes", "num_nodes"),
    "WallDuration": ("time", "time_limit"),
}
# Pending reasons, and errors of sbatch, that name a limit on single jobs.
_LIMIT = re.compile(r"(QOS|Assoc)(?:Max([A-Za-z]+?)(?:Minutes)?Per(?:Job|Node)(?:Limit)?|Min([A-Za-z]+?)(?:NotSatisfied)?)")

# Sentences for pending reasons that stay true while the request and the limits stay as they are, by a pattern of the reason.
_NEVER = (
    (r"PartitionTimeLimit", f"SlurmQueueConfig.time_limit is longer than the partition allows; {_TIMES}"),
    (
        r"PartitionConfig",
        f"SlurmQueueConfig.time_limit, cpus_per_node, num_nodes or account is not what the partition takes; {_PARTITION}",
    ),
    (r"MaxMemPerLimit", f"SlurmQueueConfig.mem or mem_per_cpu is more than the partition allows; {_PARTITION}"),
    (
        r"BadConstraints",
        f"no nodes fit what SlurmQueueConfig.constraint, nodelist, exclude and the sizes ask for together; {_NODES}",
    ),
    (
        r"InvalidAccount|AccountNotAllowed|Job's account not permitted.*",
        f"the partition does not take this SlurmQueueConfig.account; choose another one, or another partition; {_ASSOCIATIONS}",
    ),
    (
        r"InvalidQOS|QOSNotAllowed|Job's QOS not permitted.*",
        f"the partition does not take this SlurmQueueConfig.qos; choose another one, or another partition; {_ASSOCIATIONS}",
    ),
    (r"uid \d+ not in group permitted.*", "you may not use this partition; choose another SlurmQueueConfig.partition"),
    (r"Reservation(Deleted|Invalid)", f"the reservation in SlurmQueueConfig.reservation is gone; {_RESERVATIONS}"),
    (r"DependencyNeverSatisfied", "what --dependency in SlurmQueueConfig.extra_sbatch waits for can no longer come"),
)

_UNINFORMATIVE = ("", "None", "Priority", "Resources")  # Reasons that say only that the job waits for its turn.
# Beginnings of reasons that name what a job waits for; other reasons name what is wrong with it.
_AWAITED = ("BeginTime", "Dependency", "Licenses", "Priority", "Reservation", "Resources")
_TODAY = 18 * 3600.0  # Seconds up to which an expected start is shown as a time of day, without the date.


def explain(stderr: str) -> str:
    """Returns a sentence on why sbatch failed, and what to do; `stderr` is the error output of sbatch."""
    lines = [line for line in stderr.splitlines() if line.strip() and not _NOISE.match(line)]
    # Lines that do not begin with "sbatch: " may come from the start-up files of a login shell.
    errors = [_PREFIX.sub("", line) for line in lines if line.startswith("sbatch: ")] or lines[-3:]
    text = "; ".join(dict.fromkeys(_CONTROL.sub(" ", line).strip() for line in errors))
    words = text if len(text) <= _MAX_WORDS else "…" + text[-_MAX_WORDS:]
    if is_temporary(stderr):
        return f"Slurm takes no job now ({words}): the request may be all right; try again later"
    return f"Slurm refused the job ({words}): {_advice(stderr, errors)}"


def _advice(stderr: str, errors: Sequence[str]) -> str:
    if limit := next(filter(None, map(_over_limit, errors)), None):
        return limit
    if advice := next((advice for pattern, advice in _ADVICE if re.search(pattern, stderr, re.IGNORECASE)), None):
        return advice
    option = _OPTION.search(stderr)
    if option and option[1] in FIELD_OF_OPTION:
        return f"check SlurmQueueConfig.{FIELD_OF_OPTION[option[1]]}, which stands for --{option[1]}"
    if option:
        return "check SlurmQueueConfig.extra_sbatch; `sbatch --help` lists the options of this version"
    return "check SlurmQueueConfig against what your site demands of jobs"


def is_temporary(stderr: str) -> bool:
    """Whether sbatch failed for a passing reason, so that the same request may succeed later; `stderr` is its error output.

    slurmctld may have taken the job although its answer was lost, so search for the job by its name first.
    """
    return bool(_TEMPORARY.search(stderr))


def impossible(reason: str, partition: str | None = None) -> str | None:
    """Returns a sentence if a pending job can never start for this `reason` of Slurm; None if the job may start later.

    The reason is that of squeue, or of scontrol with its underscores. If `partition` names several, separated by commas, the
    reason is that of the last one tried, and the job may start in another one.
    """
    if partition is not None and "," in partition:
        return None
    reason = reason.replace("_", " ").strip()
    sentence = next((sentence for pattern, sentence in _NEVER if re.fullmatch(pattern, reason)), None)
    return f"{sentence} ({reason})" if sentence else _over_limit(reason)


def _over_limit(reason: str) -> str | None:
    """Returns a sentence if Slurm's `reason` names a limit of the account or QOS on each job; None for any other reason."""
    reason = reason.strip()
    limit = _LIMIT.fullmatch(reason)
    if not limit:
        return None
    owner = "QOS" if limit[1] == "QOS" else "account"
    what, fields = _QUANTITIES.get(limit[2] or limit[3], ("of something", "num_nodes, its fields for each node, or extra_sbatch"))
    if limit[3]:
        return f"the job asks for less {what} than its {owner} demands; raise SlurmQueueConfig.{fields}; {_LIMITS} ({reason})"
    fields += ", or time_limit" if "Minutes" in reason else ""
    return f"the job asks for more {what} than its {owner} allows a job; lower SlurmQueueConfig.{fields}; {_LIMITS} ({reason})"


def with_requested_values(sentence: str, request: JobRequest) -> str:
    """Returns the sentence, followed by the job's values of all fields that the sentence names, for each component."""
    heterogeneous = bool(request.further_components)
    values = [(_values(sentence, each), f" of {each.component_id!r}" if heterogeneous else "") for each in request.components]
    text = "; ".join(named + component for named, component in values if named)
    return f"{sentence} (asked for: {text})" if text else sentence


def _values(sentence: str, request: JobRequest) -> str:
    shown = []
    for field in SBATCH_FIELDS:
        word = "gpus_per_node" if field.name == "gpu_type" else field.name
        value = getattr(request.queue, field.name)
        if value not in (None, False, []) and re.search(rf"\b{word}\b", sentence):
            shown.append(f"{field.name}={value!r}")
    return ", ".join(shown)


# ---- Jobs that wait. Slurm 22.05 and 24.11 show the first component of a heterogeneous job as waiting for resources even if
# another one can never start, and never place two components of a job on the same node.


def component_request(row: QueueRow, request: JobRequest) -> JobRequest:
    """Returns the request for the component that a row of the queue shows; if unknown, one with label and partition only."""
    number = row.label.partition("+")[2]
    if number.isdigit() and int(number) < len(request.components) > 1:
        return replace(request.components[int(number)], further_components=())
    if number:
        return JobRequest("", "", SlurmQueueConfig(partition=row.partition), row.label)
    return request


def most_informative_row(rows: Sequence[QueueRow]) -> QueueRow | None:
    """Returns the row of the component for which its job seems to wait longest; None if the rows are all alike."""
    if len({(row.reason, row.start) for row in rows}) < 2:
        return None

    def rank(row: QueueRow) -> tuple[int, float]:
        never = impossible(row.reason, row.partition) is not None
        return (2 if never else int(row.reason not in _UNINFORMATIVE)), row.start or 0.0

    return max(rows, key=rank)


def pending_reason(reason: str, rows: Sequence[QueueRow], request: JobRequest) -> str:
    """Returns Slurm's reason why a job waits; of several components, the reason and name of the one that delays the job most."""
    row = most_informative_row(rows)
    return reason if row is None else f"{row.reason or row.state} (component {component_request(row, request).component_id})"


def waiting_text(reason: str, start: float | None, now: float) -> str:
    """Returns a phrase with Slurm's reason why a job waits, and the start that Slurm expects; "" if Slurm shows neither.

    `start` and `now` are in seconds of the epoch.
    """
    if not reason and not start:
        return ""
    waiting = f"waiting for {reason}" if reason.startswith(_AWAITED) else f"waiting: {reason}" if reason else "waiting"
    if not start:
        return waiting
    day = "%H:%M UTC" if start - now < _TODAY else "%Y-%m-%d %H:%M UTC"
    # Jobs before it may end ahead of their time limits.
    return f"{waiting}; Slurm expects a start at {time.strftime(day, time.gmtime(start))} at the latest"


def never_starts(rows: Sequence[QueueRow], request: JobRequest) -> str | None:
    """Returns a sentence if the job, or one of its components, can never start; None if all components may start."""
    for row in rows:
        part = component_request(row, request)
        reason = impossible(row.reason, part.queue.partition)
        if reason:
            sentence = with_requested_values(reason, part)
            return sentence if part is request else f"component {part.component_id!r}: {sentence}"
    return None


def partition_too_small(rows: Sequence[QueueRow], request: JobRequest, sizes: Mapping[str, int]) -> str | None:
    """Returns a sentence if a job requests more nodes of a partition than the partition has, by `sizes`; None if it does not.

    Slurm's reason for a job without components is `PartitionNodeLimit`, which also stands for nodes that are down.
    """
    for partition in dict.fromkeys(row.partition for row in rows):
        here = [row for row in rows if row.partition == partition]
        nodes = sum(row.num_nodes for row in here)
        size = sizes.get(partition, nodes)
        if nodes > size and component_request(here[0], request) is request:
            advice = "lower SlurmQueueConfig.num_nodes, or choose another partition"
            return with_requested_values(f"partition {partition} has {size} nodes; {advice} ({here[0].reason})", request)
        if nodes > size:
            names = " and ".join(repr(component_request(row, request).component_id) for row in here)
            return (
                f"components {names} ask for {nodes} nodes of partition {partition} in all, and it has {size}: Slurm gives each "
                "component nodes of its own, so this job does not start unless nodes are added; ask for fewer"
            )
    return None
