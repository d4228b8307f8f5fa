"""Sentences for users whose job Slurm refuses, lets wait, or can never start; the functions have no side effects.

Depending on Slurm's version and on `EnforcePartLimits` (slurm.conf(5)), sbatch refuses a request that cannot be granted, or the
job stays pending for ever. By default, Slurm 22.05 lets a job wait that requests more nodes than its partition has, or more time
than its partition allows. Slurm 24.11 refuses a job with too many nodes. A job beyond a limit of its QOS waits, unless the QOS
has DenyOnLimit. Tried on Slurm 22.05 and 24.11.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from .config import SlurmQueueConfig
from .pending import ASSOCIATIONS, LIMITS, NODES, RESERVATIONS, TIMES, impossible, most_informative_row, over_limit
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

# Errors of sbatch for a job array that may be all right with fewer elements, or once others have ended.
_NO_ROOM = re.compile(r"MaxSubmitJob|GrpSubmitJob|MaxJobCount limit|job queue full|Invalid job array specification")

_PARTITIONS = "set SlurmQueueConfig.partition to one that `sinfo -s` lists"

# Advice for each error of sbatch, by a pattern of the error; the first match counts.
_ADVICE = (
    (r"partition specified|\(inactive or drain\)|not permitted to use this partition|Access/permission denied", _PARTITIONS),
    (r"reservation", f"check SlurmQueueConfig.reservation; {RESERVATIONS}"),
    (r"Invalid account", f"SlurmQueueConfig.account must be one that you may charge in this partition; {ASSOCIATIONS}"),
    (r"Invalid qos", f"SlurmQueueConfig.qos must be one that your account and the partition allow; {ASSOCIATIONS}"),
    (r"Invalid feature", f"SlurmQueueConfig.constraint names features that no node has; {NODES}"),
    (
        r"Invalid node (name|list)|Requested nodes not in this partition",
        f"SlurmQueueConfig.nodelist and exclude must name nodes of the partition; {NODES}",
    ),
    (
        r"number of nodes|Node count specification",
        "SlurmQueueConfig.num_nodes is not what nodelist and the partition allow; `sinfo -s` shows its nodes",
    ),
    (r"CPU count|More processors", f"lower SlurmQueueConfig.cpus_per_node, or the CPUs that the launcher wants; {NODES}"),
    (
        r"Memory (specification|required)",
        f"lower SlurmQueueConfig.mem or mem_per_cpu to what a node of the partition has; {NODES}",
    ),
    (r"time limit is invalid|--time spec", f"SlurmQueueConfig.time_limit is not what the partition allows; {TIMES}"),
    (
        r"generic resource|Trackable RESource|--gpus-per-node",
        f"check SlurmQueueConfig.gpus_per_node and gpu_type, and GPUs in extra_sbatch; {NODES}",
    ),
    (
        r"Requested (node|partition) configuration",
        "no node of the partition has what SlurmQueueConfig.cpus_per_node, gpus_per_node, gpu_type, mem, constraint, nodelist "
        f"and exclude ask for together, or it has fewer than num_nodes of them; {NODES}",
    ),
    (r"violates accounting/QOS policy", f"ask for less, or set SlurmQueueConfig.qos or account to others; {LIMITS}"),
    (r"Invalid job array specification", 'the cluster takes no job arrays (MaxArraySize in slurm.conf); use allocation="shared"'),
    (r"license|wckey|dependency|mutually exclusive|unrecognized option", "check SlurmQueueConfig.extra_sbatch"),
)


def explain(stderr: str) -> str:
    """Returns a sentence for the user on why sbatch failed and what to do; `stderr` is the error output of sbatch."""
    lines = [line for line in stderr.splitlines() if line.strip() and not _NOISE.match(line)]
    # Lines that do not begin with "sbatch: " may come from the start-up files of a login shell.
    errors = [_PREFIX.sub("", line) for line in lines if line.startswith("sbatch: ")] or lines[-3:]
    text = "; ".join(dict.fromkeys(_CONTROL.sub(" ", line).strip() for line in errors))
    words = text if len(text) <= _MAX_WORDS else "…" + text[-_MAX_WORDS:]
    if is_temporary(stderr):
        return f"Slurm takes no job now ({words}): the request may be all right; try again later"
    return f"Slurm refused the job ({words}): {_advice(stderr, errors)}"


def _advice(stderr: str, errors: Sequence[str]) -> str:
    if limit := next(filter(None, map(over_limit, errors)), None):
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
    """Whether sbatch failed for a passing reason, so that the same request may succeed later; `stderr` is sbatch's error output.

    The job may exist nevertheless, if slurmctld has accepted the job and only the answer was lost.
    """
    return bool(_TEMPORARY.search(stderr))


def lacks_room(stderr: str) -> bool:
    """Whether sbatch refused a job array only because the array has too many elements, or because the user has too many jobs.

    `stderr` is the error output of sbatch.
    """
    return bool(_NO_ROOM.search(stderr))


def with_requested_values(sentence: str, request: JobRequest) -> str:
    """Returns `sentence` with an addition such as " (asked for: mem='64G')": the values of the fields that `sentence` names.

    The fields are those of `SlurmQueueConfig`, and the values are those of the job `request`; for a heterogeneous job, those of
    each component. Returns `sentence` unchanged if it names no field that has a value.
    """
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
    """Returns the request of one component of a job.

    `request` is the request for the job. `row` is the component's row in the queue. For a job without components, the result is
    `request` itself. If `request` lacks the component, the result is a new request with only two values: the label of the row as
    the component's id, and the partition of the row.
    """
    number = row.label.partition("+")[2]
    if number.isdigit() and int(number) < len(request.components) > 1:
        return replace(request.components[int(number)], further_components=())
    if number:
        return JobRequest("", "", SlurmQueueConfig(partition=row.partition), row.label)
    return request


def pending_reason(reason: str, rows: Sequence[QueueRow], request: JobRequest) -> str:
    """Returns Slurm's reason why a job waits, for a message to the user.

    The result is `reason`, the reason in the row of the job's first component, if all components wait for the same reason.
    Otherwise, the result is the reason of the component that delays the job most, with the name of this component. `rows` are the
    job's rows in the queue, and `request` is the request for the job.
    """
    row = most_informative_row(rows)
    return reason if row is None else f"{row.reason or row.state} (component {component_request(row, request).component_id})"


def never_starts(rows: Sequence[QueueRow], request: JobRequest) -> str | None:
    """Returns a sentence for the user if a pending job, or one of its components, can never start; None if it may start later.

    The sentence says what is wrong and what to change. `rows` are the job's rows in the queue, and `request` is the request for
    the job.
    """
    for row in rows:
        part = component_request(row, request)
        # The row has the partitions that the job waits for, also if a plugin of the site or an earlier attempt chose them.
        reason = impossible(row.reason, row.partition)
        if reason:
            sentence = with_requested_values(reason, part)
            return sentence if part is request else f"component {part.component_id!r}: {sentence}"
    return None


def partition_too_small(rows: Sequence[QueueRow], request: JobRequest, sizes: Mapping[str, int]) -> str | None:
    """Returns a sentence for the user if a pending job requests more nodes of a partition than the partition has; None otherwise.

    The requests of all components for the same partition are added up. The function compares numbers of nodes, because Slurm
    shows the reason `PartitionNodeLimit` also if some of the partition's nodes are down.

    Args:
        rows: the job's rows in the queue.
        request: the request for the job.
        sizes: the number of nodes of each partition. A partition that is not in `sizes` counts as large enough.
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
