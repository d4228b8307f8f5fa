"""Chooses the nodes that a job must avoid because these nodes failed a health check, as long as enough other nodes are left.

A run checks the health of its nodes before it starts Ray (`RayLauncher.health_check`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..edge.unhealthy import known, note
from ..errors import UnhealthyNode
from ..runtime.node.allocation import expand_nodelist
from ..ssh.base import Connection
from .config import AUTO
from .request import JobRequest
from .shared_queue import run_slurm, unanswered

MEMORY = 3600.0  # Seconds for which a node that failed a health check is avoided.
_TIMEOUT = 60.0
# Beginnings of the states in which a node takes no jobs until somebody has repaired it (sinfo(1), Slurm 22.05).
_UNUSABLE = ("down", "drain", "fail", "inval", "future", "unknown")

Partitions = Mapping[str, Sequence[str]]  # The usable nodes of each partition; the default one also has the name "".


@dataclass(frozen=True)
class Exclusion:
    """The nodes that failed a health check: `nodes` are the ones that a job excludes, `kept` the ones that it may still get."""

    nodes: tuple[UnhealthyNode, ...] = ()
    kept: tuple[tuple[UnhealthyNode, str], ...] = ()  # Pairs of a node, and the reason why the job does not exclude the node.

    def problem(self, unhealthy: Sequence[UnhealthyNode]) -> str | None:
        """Returns a sentence about the first node in `unhealthy` that the job does not exclude, with the reason.

        The result is None if the job excludes all nodes in `unhealthy`, which failed a health check.
        """
        excluded = {each.node for each in self.nodes}
        reasons = {each.node: why for each, why in self.kept}
        left = [each.node for each in unhealthy if each.node not in excluded]
        return f"{left[0]} is not excluded, because {reasons.get(left[0], 'it is in no partition of the job')}" if left else None


# ---- Pure


def choose(request: JobRequest, unhealthy: Sequence[UnhealthyNode], partitions: Partitions) -> Exclusion:
    """Decides for each node in `unhealthy` whether a job excludes the node, or may still get it (`kept` in the result).

    `unhealthy` are nodes that failed a health check, and `partitions` has the usable nodes of each partition. The function goes
    through `unhealthy` in order. It excludes a node if the job's partitions, without this node and the nodes excluded before,
    still have as many usable nodes as the job requests. A node in the job's `nodelist` is kept. A node outside the job's
    partitions is left out of the result.
    """
    exclusion = Exclusion()
    for each in unhealthy:
        if not any(
            each.node in partitions.get(name, ()) for part in request.components for name in _partitions(part, partitions)
        ):
            continue
        out = {each.node, *(other.node for other in exclusion.nodes)}
        problem = next((why for part in request.components if (why := _too_few(request, part, out, partitions))), None)
        if problem is None and any(each.node in listed(part.queue.nodelist) for part in request.components):
            problem = "SlurmQueueConfig.nodelist asks for it"
        if problem is None:
            exclusion = replace(exclusion, nodes=(*exclusion.nodes, each))
        else:
            exclusion = replace(exclusion, kept=(*exclusion.kept, (each, problem)))
    return exclusion


def excluding(request: JobRequest, nodes: Sequence[str]) -> JobRequest:
    """Returns a copy of the request in which each component also excludes `nodes`, besides the nodes that the user excludes."""

    def one(part: JobRequest) -> JobRequest:
        own = listed(part.queue.exclude)
        words = [*([part.queue.exclude] if part.queue.exclude else []), *(node for node in nodes if node not in own)]
        return replace(part, queue=part.queue.having(exclude=",".join(words) or None))

    return replace(one(request), further_components=tuple(map(one, request.further_components)))


def parse_partitions(text: str) -> Partitions:
    """Returns the names of the nodes of each partition, without nodes that are down or drained.

    `text` is output of `sinfo --Node` in the format "%N|%P|%T" (node, partition, state). The default partition is in the result
    twice, also by the name "".
    """
    partitions: dict[str, list[str]] = {}
    for line in text.splitlines():
        node, _, rest = line.strip().partition("|")
        name, _, state = rest.partition("|")
        for key in (name.rstrip("*"), *([""] if name.endswith("*") else [])):
            usable = partitions.setdefault(key, [])
            if not state.lower().startswith(_UNUSABLE):
                usable.append(node)
    return partitions


def _too_few(request: JobRequest, part: JobRequest, out: set[str], partitions: Partitions) -> str | None:
    """Returns a sentence if the job would have too few usable nodes for `part` without the nodes `out`; None if it has enough.

    `part` is a component of the job `request`; for a job without components, `request` itself. Enough nodes are left if one of
    the partitions of `part` has enough usable nodes. Slurm gives each component nodes of its own, so components with the same
    partition need the sum of their nodes. `partitions` has the usable nodes of each partition. The result is also None if
    `partitions` has none of the partitions of `part`.
    """
    wanted = sum(each.queue.num_nodes for each in request.components if each.queue.partition == part.queue.partition)
    out = out | set(listed(part.queue.exclude))
    left = {
        name: [node for node in partitions[name] if node not in out]
        for name in _partitions(part, partitions)
        if name in partitions
    }
    if not left or any(len(nodes) >= wanted for nodes in left.values()):
        return None
    name, nodes = max(left.items(), key=lambda item: len(item[1]))
    what = f"partition {name}" if name else "the default partition"
    return f"{what} would have {len(nodes)} usable node{'' if len(nodes) == 1 else 's'} left, and the job needs {wanted}"


def _partitions(part: JobRequest, partitions: Partitions) -> Sequence[str]:
    """Returns the names of the partitions in which the component `part` may run; "" stands for the default partition.

    A component with the partition "auto" may run in every partition in `partitions`.
    """
    return list(partitions) if part.queue.partition == AUTO else (part.queue.partition or "").split(",")


def listed(nodes: str | None) -> list[str]:
    """Returns the names of the nodes in a text such as "node[1-3,7]"; an empty list for None, or for an invalid text."""
    try:
        return expand_nodelist(nodes or "")
    except ValueError:  # Slurm reports what is wrong with the text when the job is submitted.
        return []


# ---- On the cluster


def remember(connection: Connection, base: str, nodes: Sequence[UnhealthyNode]) -> None:
    """Records `nodes`, which failed a health check, in a file below the directory `base`, so that later jobs exclude them.

    `base` is on the cluster, and all runs of this user share `base`. Raises OSError if the cluster does not answer.
    """
    connection.call(note, base, [each._asdict() for each in nodes], repeat=True, timeout=_TIMEOUT)


def exclusion_for(connection: Connection, base: str, request: JobRequest) -> Exclusion:
    """Returns which nodes a job excludes because they failed a health check of a run in the last hour (`MEMORY` seconds).

    `base` is the base directory on the cluster, where `remember` records such nodes. `request` stays unchanged; `excluding`
    returns a copy of a request that excludes the nodes in the result.

    Raises OSError if the cluster or Slurm does not answer.
    """
    found = connection.call(known, base, MEMORY, repeat=True, timeout=_TIMEOUT)
    if not found:
        return Exclusion()
    unhealthy = [UnhealthyNode(each["node"], each["check"], f"{each['found']}; {each['age'] / 60:.0f} min ago") for each in found]
    done = run_slurm(connection, ["sinfo", "--noheader", "--Node", "--all", "--format=%N|%P|%T"], timeout=_TIMEOUT)
    if done.returncode:
        raise unanswered(connection.place, "sinfo", done)
    return choose(request, unhealthy, parse_partitions(done.stdout.decode("utf-8", "replace")))
