"""Partitions and their nodes, parsed from the output of `scontrol show partition` and `sinfo --Node`, without side effects."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ..config import time_limit_seconds
from .config import SlurmQueueConfig

PARTITIONS = ("scontrol", "--all", "--oneliner", "show", "partition")
# Partition, node, state, CPUs allocated/idle/other/total, memory in MiB, generic resources, features (sinfo(1), Slurm 22.05).
NODES = ("sinfo", "--all", "--noheader", "--Node", "--format=%R|%N|%t|%C|%m|%G|%f")
COLUMNS = ("partition", "state", "time limit", "nodes", "usable", "idle", "CPUs", "memory", "GPUs")

# Without a resource's type, `gpu:2`; with sockets, `gpu:a100:4(S:0-1)`. A type may begin with a digit: `gpu:3090:8`.
_GPU = re.compile(r"gpu(?::(?P<type>[^:,()]+))?:(?P<count>\d+)(?=[(,]|$)")
_PAIR = re.compile(r"(\w+)=(\S*)")
# Beginnings of compact states in which a node takes jobs, or will when others end; cloud nodes are started on demand.
_USABLE = ("idle", "mix", "alloc", "comp", "plnd", "resv")


@dataclass(frozen=True)
class Node:
    """A node of a partition, as sinfo shows it."""

    name: str
    state: str  # Slurm's compact word, with a flag such as "*" for a node that does not respond.
    cpus: int
    memory: int  # MiB.
    gpus: Counter[str]  # Number of GPUs by type; "" if the GPUs have no type.
    features: tuple[str, ...]
    idle_cpus: int = 0  # CPUs that no job uses; 0 also if sinfo does not say.

    @property
    def usable(self) -> bool:
        """Whether the node accepts jobs, at once or after other jobs have ended."""
        return self.state.startswith(_USABLE) and "*" not in self.state

    @property
    def idle(self) -> bool:
        """Whether the node accepts jobs and runs no jobs now; True also for a node that is started on demand.

        The result is False for a node that is about to reboot, under maintenance, or planned for another job (sinfo(1), Slurm
        22.05).
        """
        return self.usable and self.state in ("idle", "idle~", "idle#")


@dataclass(frozen=True)
class Partition:
    """A partition with its nodes; `settings` has the values that `scontrol show partition` prints, by name, such as "MaxTime"."""

    name: str
    settings: dict[str, str]
    nodes: list[Node] = field(default_factory=list)

    @property
    def is_default(self) -> bool:
        """Whether Slurm puts jobs that name no partition into this partition."""
        return self.settings.get("Default") == "YES"

    @property
    def state(self) -> str:
        """The partition's state: UP, DOWN, DRAIN or INACTIVE."""
        return self.settings.get("State", "UP")

    @property
    def usable(self) -> list[Node]:
        """The nodes that accept jobs, at once or after other jobs have ended."""
        return [node for node in self.nodes if node.usable]

    @property
    def gpus(self) -> Counter[str]:
        """The largest number of GPUs on one node, by type of GPU."""
        most: Counter[str] = Counter()
        for node in self.nodes:
            most |= node.gpus
        return most

    def limit(self, setting: str) -> float | None:
        """Returns the limit in a setting such as "MaxTime" or "MaxNodes"; None if there is no limit.

        The limit is in seconds if the setting's name ends in "Time", and otherwise a count.
        """
        text = self.settings.get(setting, "UNLIMITED")
        if setting.endswith("Time"):
            return limit_seconds(text)
        return float(text) if text.isdigit() else None

    def names(self, setting: str) -> list[str]:
        """Returns the names that a setting such as "AllowGroups" lists; an empty list if the setting restricts nothing."""
        text = self.settings.get(setting, "ALL")
        return [] if text in ("ALL", "(null)", "N/A", "") else text.split(",")

    def cells(self) -> list[str]:
        """Returns the cells of the partition's row in a table with the columns `COLUMNS`."""
        name = self.name + ("*" if self.is_default else "")  # As sinfo shows it.
        numbers = (len(self.nodes), len(self.usable), sum(node.idle for node in self.nodes))
        gpus = ", ".join(f"{count} {kind or 'gpu'}" for kind, count in sorted(self.gpus.items()))
        memory = _span(node.memory // 1024 for node in self.nodes)
        return [
            *(name, self.state, self.settings.get("MaxTime", "")),
            *map(str, numbers),
            *(_span(node.cpus for node in self.nodes), memory and f"{memory} GiB", gpus),
        ]


def objections(partition: Partition, queue: SlurmQueueConfig) -> Iterator[str]:
    """Yields, as a phrase, each reason why a partition's settings forbid a job that requests what `queue` says.

    Yields nothing if the settings allow the job. The time limit and the nodes of the partition are not checked.
    """
    accounts, qos = partition.names("AllowAccounts"), partition.names("AllowQos")
    if partition.state != "UP":
        yield f"its state is {partition.state}"
    if queue.account and accounts and queue.account not in accounts:
        yield f"it is for the accounts {', '.join(accounts)}"
    if queue.account and queue.account in partition.names("DenyAccounts"):
        yield f"it does not take the account {queue.account}"
    if queue.qos and qos and queue.qos not in qos:
        yield f"it is for the QOS {', '.join(qos)}"
    if queue.qos and queue.qos in partition.names("DenyQos"):
        yield f"it does not take the QOS {queue.qos}"
    if partition.settings.get("RootOnly") == "YES":
        yield "only root may use it"
    if partition.settings.get("ReqResv") == "YES" and not queue.reservation:
        yield "it takes jobs of reservations only"
    most = partition.limit("MaxNodes")
    if most is not None and queue.num_nodes > most:
        yield f"it gives a job {most:g} nodes at most, and num_nodes is {queue.num_nodes}"
    least = partition.limit("MinNodes")
    if least is not None and queue.num_nodes < least:
        yield f"it gives a job {least:g} nodes at least, and num_nodes is {queue.num_nodes}"
    cpus = partition.limit("MaxCPUsPerNode")
    if cpus is not None and (queue.cpus_per_node or 1) > cpus:
        yield f"it gives a job {cpus:g} CPUs of a node at most, and cpus_per_node is {queue.cpus_per_node}"


def limit_seconds(text: str) -> float | None:
    """Returns the seconds of a time limit that scontrol printed, such as "1-00:00:00"; None for no limit, such as "NONE"."""
    return None if text in ("", "(null)", "NONE", "N/A", "Partition_Limit") else time_limit_seconds(text)


def _span(values: Iterable[int]) -> str:
    found = sorted(set(values))
    return "" if not found else str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"


def parse_partitions(partitions: str, nodes: str) -> list[Partition]:
    """Returns the partitions of a cluster, each with its nodes.

    `partitions` is the output of the command `PARTITIONS` (`scontrol show partition`), and `nodes` is the output of the command
    `NODES` (`sinfo --Node`). Lines of other text are ignored.
    """
    found = {}
    for line in partitions.splitlines():
        settings = dict(_PAIR.findall(line))
        if "PartitionName" in settings:
            found[settings["PartitionName"]] = Partition(settings["PartitionName"], settings)
    for line in nodes.splitlines():
        cells = line.split("|")
        if len(cells) >= 7 and cells[0] in found:
            found[cells[0]].nodes.append(_node(cells[1:]))
    return list(found.values())


def _node(cells: Sequence[str]) -> Node:
    name, state, cpus, memory, gres, features = cells[:6]
    gpus: Counter[str] = Counter()
    for match in _GPU.finditer(gres):
        gpus[match["type"] or ""] += int(match["count"])
    given = () if features in ("", "(null)") else tuple(features.split(","))
    counts = [int(each) if each.isdigit() else 0 for each in cpus.split("/")]
    idle = counts[1] if len(counts) == 4 else 0
    return Node(name, state, counts[-1], int(re.sub(r"\D", "", memory) or 0), gpus, given, idle)
