"""Slurm's refusals and missing answers, as sentences that name the field and the remedy. Pure.

Slurm's commands that give no answer, in one sentence.

What Slurm has against a request, in one sentence that names the field and the remedy. Pure.

What cannot be granted is refused by sbatch or stays pending for ever, which depends on the version and on
`EnforcePartLimits` (slurm.conf(5)); tried on 22.05 and 24.11:

================================  ==================================  =========================
asked for                         EnforcePartLimits=NO, the default   EnforcePartLimits=ALL
================================  ==================================  =========================
more nodes than the partition     22.05 pending, 24.11 refused        refused
more CPUs, GPUs, memory per node  refused; on 22.05 with so many      refused
                                  CPUs in all pending
longer than MaxTime               pending, PartitionTimeLimit         refused
over a limit of the QOS           pending, QOSMax…PerJob…             pending, unless DenyOnLimit
unknown names of any kind         refused; account and QOS only       refused
                                  with AccountingStorageEnforce
================================  ==================================  =========================
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..ssh.base import Completed
from .request import FIELDS, JobRequest


class SlurmUnanswered(OSError):
    """A command of Slurm did not answer; that says nothing of any job. The message is one sentence."""


def unanswered(place: str, program: str, done: Completed) -> SlurmUnanswered:
    """Say why a command gave no answer.

    Args:
        place: where it ran.
        program: its name.
        done: how it ended.
    """
    said = " ".join(done.stderr.decode("utf-8", "replace").split())[-500:]
    if done.returncode == 127:
        return SlurmUnanswered(f"{place}: {program} is not on the PATH that a non-interactive login has; add it there ({said})")
    return SlurmUnanswered(f"{place}: {program} did not answer (exit code {done.returncode}): {said or 'it said nothing'}")


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
_PREFIX = re.compile(r"^sbatch: (error: |fatal: )?(Batch job submission failed: )?")
_NOISE = re.compile(r"^(sbatch: (warning:|Slurm .*retrying|error: get_addr_info: )|Try \"sbatch --help)", re.IGNORECASE)
_OPTION = re.compile(r"(?:option '--|for --|Invalid --)([a-z][a-z-]*)")
_MAX_WORDS = 400

_TEMPORARY = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Zero Bytes were transmitted|Communication (connection|shutdown) failure"
    r"|Unable to (resolve \"|establish control(ler)? machine address)|getaddrinfo\(\) failed"
    r"|Message (send|receive) failure|Munge encode failed|Protocol authentication error|standby mode|Rate limit exceeded"
    r"|MaxJobCount limit|job queue full|MaxSubmitJob|GrpSubmitJob"
)

_NODES = '`sinfo -N -o "%N %P %c %m %G %f"` shows what each node has'
_YOURS = "`sacctmgr show associations user=$USER format=account,partition,qos` lists yours"
_TIMES = '`sinfo -o "%P %l"` shows how long each partition allows'
_RESERVATIONS = "`scontrol show reservation` lists them and who may use them"
_LIMITS = "`sacctmgr show qos` and `sacctmgr show associations user=$USER` show the limits"

_ADVICE = (
    (r"No partition specified", "the cluster has no default partition; {partition}"),
    (r"not available \(inactive or drain\)", "the partition takes no jobs now; {partition}, or try again later"),
    (r"group not permitted to use this partition", "you may not use this partition; {partition}"),
    (r"invalid partition", "{partition}"),
    (
        r"Access/permission denied",
        "you may not use SlurmQueueConfig.partition as asked; it may demand a reservation, or jobs from other hosts",
    ),
    (r"reservation", f"check SlurmQueueConfig.reservation; {_RESERVATIONS}"),
    (r"Invalid account", f"SlurmQueueConfig.account must be one that you may charge in this partition; {_YOURS}"),
    (r"Invalid qos", f"SlurmQueueConfig.qos must be one that your account and the partition allow; {_YOURS}"),
    (r"Invalid feature", f"SlurmQueueConfig.constraint names features that no node has; {_NODES}"),
    (
        r"invalid number of nodes",
        "SlurmQueueConfig.num_nodes is less than SlurmQueueConfig.nodelist demands; raise the one or shorten the other",
    ),
    (
        r"Invalid node (name|list)|Requested nodes not in this partition",
        f"SlurmQueueConfig.nodelist and exclude must name nodes of the partition; {_NODES}",
    ),
    (r"Node count specification", "SlurmQueueConfig.num_nodes is not what the partition allows; `sinfo -s` shows its nodes"),
    (
        r"mutually exclusive",
        "use one of SlurmQueueConfig.mem, mem_per_cpu and what SlurmQueueConfig.extra_sbatch says of memory",
    ),
    (
        r"CPU count|More processors requested",
        "lower SlurmQueueConfig.cpus_per_node, or the CPUs that the launcher wants where the queue does not say; " + _NODES,
    ),
    (
        r"Memory (specification|required)",
        f"lower SlurmQueueConfig.mem or mem_per_cpu to what a node of the partition has; {_NODES}",
    ),
    (
        r"Requested time limit is invalid|Invalid --time specification",
        f"SlurmQueueConfig.time_limit is not what the partition allows; {_TIMES}",
    ),
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
    (r"Invalid license", "check --licenses in SlurmQueueConfig.extra_sbatch; `scontrol show licenses` lists them"),
    (r"Invalid wckey", "check --wckey in SlurmQueueConfig.extra_sbatch"),
    (r"dependency", "check --dependency in SlurmQueueConfig.extra_sbatch"),
)
"""What to do, by what sbatch says; the first that fits counts."""

_QUANTITIES = {
    "Cpu": ("CPUs", "num_nodes or cpus_per_node"),
    "GRES": ("GPUs", "num_nodes or gpus_per_node"),
    "Mem": ("memory", "num_nodes, mem or mem_per_cpu"),
    "Memory": ("memory", "num_nodes, mem or mem_per_cpu"),
    "Node": ("nodes", "num_nodes"),
    "WallDuration": ("time", "time_limit"),
}
_ANY_QUANTITY = ("what it counts", "num_nodes, its fields for each node, or extra_sbatch")
_MOST = re.compile(r"(QOS|Assoc)Max([A-Za-z]+?)(Minutes)?Per(?:Job|Node)(?:Limit)?")
_LEAST = re.compile(r"QOSMin([A-Za-z]+?)(?:NotSatisfied)?")

_NEVER = (
    (r"PartitionTimeLimit", f"SlurmQueueConfig.time_limit is longer than the partition allows; {_TIMES}"),
    (
        r"PartitionConfig",
        "the partition allows nobody such a request; check SlurmQueueConfig.time_limit, cpus_per_node and num_nodes, which may "
        "be more than it has in all, and whether it takes your account; `scontrol show partition` tells",
    ),
    (
        r"MaxMemPerLimit",
        "SlurmQueueConfig.mem or mem_per_cpu is more than the partition allows; MaxMemPerNode and MaxMemPerCPU in "
        "`scontrol show partition` show how much that is",
    ),
    (
        r"BadConstraints",
        "Slurm has given up, as no nodes fit what SlurmQueueConfig.constraint, nodelist, exclude and the sizes ask for "
        f"together; {_NODES}",
    ),
    (r"InvalidAccount", f"SlurmQueueConfig.account is not one that you may charge; {_YOURS}"),
    (r"InvalidQOS", f"SlurmQueueConfig.qos is not one that you may use; {_YOURS}"),
    (
        r"AccountNotAllowed|Job's account not permitted.*",
        f"the partition does not take this account; choose another SlurmQueueConfig.account or partition; {_YOURS}",
    ),
    (
        r"QOSNotAllowed|Job's QOS not permitted.*",
        f"the partition does not take this QOS; choose another SlurmQueueConfig.qos or partition; {_YOURS}",
    ),
    (r"uid \d+ not in group permitted.*", "you may not use this partition; choose another SlurmQueueConfig.partition"),
    (r"Reservation(Deleted|Invalid)", f"the reservation in SlurmQueueConfig.reservation is gone; {_RESERVATIONS}"),
    (r"DependencyNeverSatisfied", "what --dependency in SlurmQueueConfig.extra_sbatch waits for can no longer come"),
)
"""Reasons that no node, no other job and no administrator can take away while request and limits stay as they are."""


def explain(stderr: str, partitions: Sequence[str] = ()) -> str:
    """Say why sbatch has failed.

    Args:
        stderr: what it wrote there.
        partitions: the partitions that there are, as `sinfo -h -o %P` or `%R` gives them; none if that is not known.
    """
    words = _words(stderr)
    if is_temporary(stderr):
        return f"Slurm takes no job now ({words}): the request may be all right; try again later"
    return f"Slurm refused the job ({words}): {_advice(stderr, partitions)}"


def is_temporary(stderr: str) -> bool:
    """Whether sbatch has failed without a word against the request.

    The same request may succeed a little later. slurmctld may even have taken the job and its answer was lost, so look
    for it by its name first.
    """
    return bool(_TEMPORARY.search(stderr))


def impossible(reason: str, partition: str | None = None) -> str | None:
    """Say why a pending job can never start as it was asked for.

    Args:
        reason: as `squeue -o %r` gives it, or `scontrol show job` with its underscores.
        partition: of the job. Where it names several, separated by commas, the reason is that of whichever Slurm looked
            at last, and the job may well start in another.

    Returns:
        None where time, other jobs, nodes that come back or an administrator may let it start. `PartitionNodeLimit` is
        among those: it also stands for nodes that are down.
    """
    if partition is not None and "," in partition:
        return None
    reason = reason.replace("_", " ").strip()
    for pattern, sentence in _NEVER:
        if re.fullmatch(pattern, reason):
            return f"{sentence} ({reason})"
    return _over_limit(reason)


def _over_limit(reason: str) -> str | None:
    """A limit on each single job."""
    most, least = _MOST.fullmatch(reason), _LEAST.fullmatch(reason)
    if most:
        whose = "QOS" if most[1] == "QOS" else "account"
        what, fields = _QUANTITIES.get(most[2], _ANY_QUANTITY)
        if most[3]:
            what, fields = f"{what} times minutes", f"{fields}, or time_limit"
        return (
            f"the job asks for more {what} than its {whose} allows a job; lower SlurmQueueConfig.{fields}; {_LIMITS} ({reason})"
        )
    if least:
        what, fields = _QUANTITIES.get(least[1], _ANY_QUANTITY)
        return f"the job asks for less {what} than its QOS demands; raise SlurmQueueConfig.{fields}; {_LIMITS} ({reason})"
    return None


def _words(stderr: str) -> str:
    """The essence of what sbatch wrote, in one line."""
    lines = [line for line in stderr.splitlines() if line.strip() and not _NOISE.match(line)]
    # What else stands there may come from a login shell.
    spoken = [_PREFIX.sub("", line) for line in lines if line.startswith("sbatch: ")] or lines[-3:]
    text = "; ".join(dict.fromkeys(_CONTROL.sub(" ", line).strip() for line in spoken))
    return text if len(text) <= _MAX_WORDS else "…" + text[-_MAX_WORDS:]


def _advice(stderr: str, partitions: Sequence[str]) -> str:
    for line in stderr.splitlines():
        limit = _over_limit(_PREFIX.sub("", line).strip())
        if limit:
            return limit
    for pattern, advice in _ADVICE:
        if re.search(pattern, stderr, re.IGNORECASE):
            return advice.format(partition=_choose(partitions)) if "{partition}" in advice else advice
    option = _OPTION.search(stderr)
    if option and option[1] in FIELDS:
        return f"check SlurmQueueConfig.{FIELDS[option[1]]}, which stands for --{option[1]}"
    if option or "unrecognized option" in stderr:
        return "check SlurmQueueConfig.extra_sbatch; `sbatch --help` lists the options of this version"
    return "check SlurmQueueConfig against what your site demands of jobs"


def _choose(partitions: Sequence[str]) -> str:
    names = ", ".join(name.rstrip("*") for name in partitions)
    return f"set SlurmQueueConfig.partition to {'one of ' + names if names else 'one that `sinfo -s` lists'}"


def with_values(sentence: str, request: JobRequest) -> str:
    """A sentence with what was asked for in the fields that it names, once for each of them, and each component."""
    asked = [(_values(sentence, part), f" of {part.component_id!r}" if request.others else "") for part in request.parts]
    said = "; ".join(values + whose for values, whose in asked if values)
    return f"{sentence} (asked for: {said})" if said else sentence


def _values(sentence: str, request: JobRequest) -> str:
    named = [field for field in dict.fromkeys(FIELDS.values()) if re.search(rf"\b{field}\b", sentence)]
    named += ["gpu_type"] if "gpus_per_node" in named else []
    values = [(field, getattr(request, field, None)) for field in named]
    return ", ".join(f"{field}={value!r}" for field, value in values if value not in (None, False))
