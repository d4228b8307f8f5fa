"""Explains to users why a job waits, from the reason that Slurm shows for a pending job; the functions have no side effects.

Such a reason is one word or phrase in squeue, such as "Resources" or "PartitionTimeLimit". A job beyond a limit of its QOS waits,
unless the QOS has DenyOnLimit. Tried on Slurm 22.05 and 24.11.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from .shared_queue import QueueRow

# How a user finds out what the cluster has and allows; parts of the advice below.
NODES = '`sinfo -N -o "%N %P %c %m %G %f"` shows what each node has'
ASSOCIATIONS = "`sacctmgr show associations user=$USER format=account,partition,qos` lists yours"
TIMES = '`sinfo -o "%P %l"` shows how long each partition allows'
RESERVATIONS = "`scontrol show reservation` lists them and who may use them"
LIMITS = "`sacctmgr show qos` and `sacctmgr show associations user=$USER` show the limits"
_PARTITION = "`scontrol show partition` shows what it allows"

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
    (r"PartitionTimeLimit", f"SlurmQueueConfig.time_limit is longer than the partition allows; {TIMES}"),
    (
        r"PartitionConfig",
        f"SlurmQueueConfig.time_limit, cpus_per_node, num_nodes or account is not what the partition takes; {_PARTITION}",
    ),
    (r"MaxMemPerLimit", f"SlurmQueueConfig.mem or mem_per_cpu is more than the partition allows; {_PARTITION}"),
    (
        r"BadConstraints",
        f"no nodes fit what SlurmQueueConfig.constraint, nodelist, exclude and the sizes ask for together; {NODES}",
    ),
    (
        r"InvalidAccount|AccountNotAllowed|Job's account not permitted.*",
        f"the partition does not take this SlurmQueueConfig.account; choose another one, or another partition; {ASSOCIATIONS}",
    ),
    (
        r"InvalidQOS|QOSNotAllowed|Job's QOS not permitted.*",
        f"the partition does not take this SlurmQueueConfig.qos; choose another one, or another partition; {ASSOCIATIONS}",
    ),
    (r"uid \d+ not in group permitted.*", "you may not use this partition; choose another SlurmQueueConfig.partition"),
    (r"Reservation(Deleted|Invalid)", f"the reservation in SlurmQueueConfig.reservation is gone; {RESERVATIONS}"),
    (r"DependencyNeverSatisfied", "what --dependency in SlurmQueueConfig.extra_sbatch waits for can no longer come"),
)

_UNINFORMATIVE = ("", "None", "Priority", "Resources")  # Reasons that say only that the job waits for its turn.
# Beginnings of reasons that name what a job waits for; other reasons name what is wrong with it.
_AWAITED = ("BeginTime", "Dependency", "Licenses", "Priority", "Reservation", "Resources")
_TODAY = 18 * 3600.0  # Seconds up to which an expected start is shown as a time of day, without the date.


def impossible(reason: str, partition: str | None = None) -> str | None:
    """Returns a sentence for the user if a waiting job can never start; None if the job may start later.

    The sentence says what is wrong with the job and what to change. `reason` is Slurm's reason why the job waits, as squeue or
    scontrol prints it. `partition` is the partition of the job; None if it is not known. If `partition` has several names,
    separated by commas, the result is None, because the reason then concerns only the last partition that Slurm tried.
    """
    if partition is not None and "," in partition:
        return None
    reason = reason.replace("_", " ").strip()
    sentence = next((sentence for pattern, sentence in _NEVER if re.fullmatch(pattern, reason)), None)
    return f"{sentence} ({reason})" if sentence else over_limit(reason)


def over_limit(reason: str) -> str | None:
    """Returns a sentence for the user if a job breaks a limit that its account or QOS sets for each single job.

    The sentence names the limit and the field to change. `reason` is Slurm's reason why the job waits, or an error message of
    sbatch. The result is None if `reason` names no such limit.
    """
    reason = reason.strip()
    limit = _LIMIT.fullmatch(reason)
    if not limit:
        return None
    owner = "QOS" if limit[1] == "QOS" else "account"
    what, fields = _QUANTITIES.get(limit[2] or limit[3], ("of something", "num_nodes, its fields for each node, or extra_sbatch"))
    if limit[3]:
        return f"the job asks for less {what} than its {owner} demands; raise SlurmQueueConfig.{fields}; {LIMITS} ({reason})"
    fields += ", or time_limit" if "Minutes" in reason else ""
    return f"the job asks for more {what} than its {owner} allows a job; lower SlurmQueueConfig.{fields}; {LIMITS} ({reason})"


def most_informative_row(rows: Sequence[QueueRow]) -> QueueRow | None:
    """Returns the row of the component that seems to delay its heterogeneous job most.

    `rows` are the rows of the job's components in the queue. The result is None if all rows have the same reason and the same
    expected start, or if there are fewer than two rows.
    """
    if len({(row.reason, row.start) for row in rows}) < 2:
        return None

    def rank(row: QueueRow) -> tuple[int, float]:
        never = impossible(row.reason, row.partition) is not None
        return (2 if never else int(row.reason not in _UNINFORMATIVE)), row.start or 0.0

    return max(rows, key=rank)


def waiting_text(reason: str, start: float | None, now: float) -> str:
    """Returns a phrase such as "waiting for Resources; Slurm expects a start at 14:30 UTC at the latest".

    `reason` is Slurm's reason why a job waits; "" for none. `start` is the time at which Slurm expects the job to start; None if
    Slurm names no time. `now` is the present time. Both times are in seconds since the epoch. Without a reason and a start, the
    result is "".
    """
    if not reason and not start:
        return ""
    waiting = f"waiting for {reason}" if reason.startswith(_AWAITED) else f"waiting: {reason}" if reason else "waiting"
    if not start:
        return waiting
    day = "%H:%M UTC" if start - now < _TODAY else "%Y-%m-%d %H:%M UTC"
    # Jobs before it may end ahead of their time limits.
    return f"{waiting}; Slurm expects a start at {time.strftime(day, time.gmtime(start))} at the latest"
