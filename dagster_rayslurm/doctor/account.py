"""Parses the associations and the QOS (quality of service) in Slurm's accounting, and compares the limits with a job. Pure.

An association says that a user may charge an account on a cluster, and with which limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..slurm.config import SlurmQueueConfig
from ..slurm.partitions import limit_seconds

_ASSOCIATION = (
    *("cluster", "account", "user", "partition", "qos", "defaultqos", "maxjobs", "maxsubmit", "maxwall", "maxtres"),
    *("grpjobs", "grpsubmit", "grptres"),
)
_QOS = ("name", "maxwall", "maxtres", "maxtrespu", "maxjobspu", "maxsubmitpu", "grpjobs", "grpsubmit", "grptres")
_LIST = "sacctmgr --noheader --parsable2 show"
# Command that lists the associations of this user. The columns are `_ASSOCIATION`, separated by "|".
ASSOCIATIONS = (
    "sh",
    "-c",
    f'exec {_LIST} associations user="$(id -un)" format={",".join(_ASSOCIATION)}',
)
# Command that lists all QOS. The columns are `_QOS`, separated by "|".
QOS = (*_LIST.split(), "qos", f"format={','.join(_QOS)}")
SHOW = "`sacctmgr show associations user=$USER` and `sacctmgr show qos` show the limits"


@dataclass(frozen=True)
class Row:
    """An association or a QOS that sacctmgr lists; `columns` has the values by the column names of sacctmgr(1)."""

    what: str  # For sentences, such as "account physics" or "QOS normal".
    columns: dict[str, str]

    def __getitem__(self, name: str) -> str:
        return self.columns.get(name, "")


def parse_associations(text: str, cluster: str) -> list[Row]:
    """Returns this user's associations on the cluster `cluster`; if `cluster` is "", on all clusters.

    `text` is the output of the command `ASSOCIATIONS`.
    """
    rows = [Row("", dict(zip(_ASSOCIATION, line.split("|"), strict=False))) for line in text.splitlines() if "|" in line]
    return [Row(f"account {row['account']}", row.columns) for row in rows if not cluster or row["cluster"] == cluster]


def parse_qos(text: str) -> list[Row]:
    """Returns all QOS in `text`, the output of the command `QOS`, which lists the QOS of all users."""
    rows = [dict(zip(_QOS, line.split("|"), strict=False)) for line in text.splitlines() if "|" in line]
    return [Row(f"QOS {row['name']}", row) for row in rows]


def qos_of(row: Row) -> list[str]:
    """Returns the names of the QOS that the association `row` allows."""
    return [name.lstrip("+-") for name in row["qos"].split(",") if name]


def forbids(row: Row, queue: SlurmQueueConfig, seconds: float | None) -> list[str]:
    """Returns a phrase for each limit of the association or QOS `row` that forbids every job with the request `queue`.

    `seconds` is the time limit of the job; None if the job has no time limit.
    """
    found = []
    for limit in ("maxjobs", "maxsubmit", "maxjobspu", "maxsubmitpu", "grpjobs", "grpsubmit"):
        if row[limit] == "0":
            found.append(f"{limit}=0, so no job may run")
    allowed = limit_seconds(row["maxwall"])
    if allowed is not None and (seconds is None or seconds > allowed):
        found.append(f"maxwall={row['maxwall']} is less than time_limit={queue.time_limit}")
    for limit in ("maxtres", "maxtrespu", "grptres"):
        for kind, most in _amounts(row[limit]):
            wanted = _wanted(queue, kind)
            if wanted is not None and wanted > most:
                found.append(f"{limit} allows {kind}={most}, and the job asks for {wanted}")
    return found


def _amounts(tres: str) -> Sequence[tuple[str, int]]:
    """Returns the resources and amounts in a limit of Slurm such as "cpu=64,gres/gpu=4"; leaves out amounts with a unit."""
    pairs = (each.partition("=") for each in tres.split(",") if each)
    return [(kind, int(count)) for kind, _, count in pairs if count.isdigit()]


def _wanted(queue: SlurmQueueConfig, kind: str) -> int | None:
    """Returns how much of the trackable resource (TRES) `kind` the job requests; None for anything but nodes, CPUs and GPUs."""
    if kind == "node":
        return queue.num_nodes
    if kind == "cpu":
        return queue.num_nodes * (queue.cpus_per_node or 1)
    if kind in ("gres/gpu", f"gres/gpu:{queue.gpu_type}"):
        return queue.num_nodes * (queue.gpus_per_node or 0)
    return None
