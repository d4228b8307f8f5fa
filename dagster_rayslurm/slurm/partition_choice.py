"""Chooses the partition of a job whose queue has `partition="auto"`: the first partition that fits and has free nodes.

The queue of a job or component is its `SlurmQueueConfig`, which says what to request from Slurm.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from ..config import time_limit_seconds
from ..ssh.base import Connection
from .config import AUTO, SlurmQueueConfig
from .exclusion import listed
from .partitions import NODES, Node, Partition, objections, parse_partitions
from .request import JobRequest, granted_gpus, least_memory
from .shared_queue import run_slurm, unanswered

# Without `--all`, scontrol leaves out partitions that are hidden or closed to the user's groups (scontrol(1), Slurm 22.05).
_QUESTION = ("sh", "-c", 'scontrol --oneliner show partition && exec "$@"', "sh", *NODES)
_TIMEOUT = 60.0
_SIMPLE = re.compile(r"[\w.-]+(&[\w.-]+)*")  # A constraint that is a list of features, all of which a node must have.


@dataclass(frozen=True)
class Placement:
    """A job request with a chosen partition in place of each partition "auto", and a sentence for the log about each choice."""

    request: JobRequest
    reasons: tuple[str, ...]


def is_auto(request: JobRequest) -> bool:
    """Returns whether the partition of a job, or of a component of the job, is "auto", which `choose` replaces."""
    return any(each.queue.partition == AUTO for each in request.components)


def choose(request: JobRequest, partitions: Sequence[Partition]) -> Placement:
    """Replaces each partition "auto" in a job request by the first partition that fits and has enough free nodes.

    A partition fits if its settings and its nodes allow the job. The cluster's default partition is tried first. Partitions with
    GPUs are tried last if the job requests no GPUs. If no partition has enough free nodes, a job waits in all partitions that
    fit, and a component of a heterogeneous job waits in the first partition that fits. Raises `ValueError` if no partition fits.
    A pure function.
    """
    taken: set[str] = set()  # Each component gets nodes of its own, and partitions may share nodes.
    reasons, parts = [], []
    for part in request.components:
        if part.queue.partition == AUTO:
            which = f"component {part.component_id}: " if part.component_id else ""
            try:
                name, reason = _choose_one(part.queue, partitions, taken, alone=not request.further_components)
            except ValueError as error:
                raise ValueError(f"{which}{error}") from None
            part = replace(part, queue=part.queue.having(partition=name))
            reasons.append(f"{which}{reason}")
        taken |= _likely_nodes(part.queue, partitions, taken)
        parts.append(part)
    return Placement(replace(parts[0], further_components=tuple(parts[1:])), tuple(reasons))


def _likely_nodes(queue: SlurmQueueConfig, partitions: Sequence[Partition], taken: Set[str]) -> set[str]:
    """Returns the names of the nodes that Slurm likely gives to a component: free nodes first, and small nodes first.

    `queue` says what the component requests, and `taken` has the names of nodes that earlier components of the same job likely
    get. If not enough nodes fit, the result has fewer nodes than `queue` requests.
    """
    names = queue.partition.split(",") if queue.partition else [each.name for each in partitions if each.is_default]
    nodes = [node for each in partitions if each.name in names for node in each.usable]
    fitting = [node for node in nodes if node.name not in taken and _fits(node, queue)]
    fitting.sort(key=lambda node: (not _is_free(node, queue), node.gpus.total(), node.memory, node.cpus))
    return {node.name for node in fitting[: queue.num_nodes]}


def _choose_one(queue: SlurmQueueConfig, partitions: Sequence[Partition], taken: Set[str], alone: bool) -> tuple[str, str]:
    """Returns the partition for a job or for one component, and a sentence with the reason for the choice.

    The partition is the first partition that fits and has enough free nodes. If no partition has enough free nodes, the function
    returns all partitions that fit, separated by commas, or only the first of these if `alone` is False. Raises `ValueError` if
    no partition fits.

    Args:
        queue: what the job or component requests.
        partitions: the partitions of the cluster.
        taken: the names of the nodes that earlier components of the same job likely take.
        alone: True for a job without components, which Slurm may place in any of several partitions; False for a component.
    """
    busy: dict[str, str] = {}
    passed_over: list[str] = []
    for each in sorted(partitions, key=lambda one: (bool(one.gpus) and not _gpus(queue), not one.is_default)):
        nodes = [node for node in each.usable if node.name not in taken and _fits(node, queue)]
        if problem := _problem(each, nodes, queue):
            passed_over.append(f"{each.name}: {problem}")
            continue
        free = sum(_is_free(node, queue) for node in nodes)
        if free >= queue.num_nodes:
            before = f"; passed over {', '.join(passed_over)}" if passed_over else ""
            return each.name, f'partition="auto" is {each.name}, the first that fits and is free: {_count(free)} free{before}'
        busy[each.name] = f"{each.name}: {free} of {_count(len(nodes))} free"
        passed_over.append(busy[each.name])
    if not busy:
        why = "; ".join(passed_over[:5]) or "sinfo shows none"
        more = f"; and {len(passed_over) - 5} more" if len(passed_over) > 5 else ""
        raise ValueError(f'partition="auto": no partition fits ({why}{more})')
    names = list(busy)[: None if alone else 1]
    waits = ", ".join(busy[name] for name in names)
    return ",".join(names), f'partition="auto" is {" or ".join(names)}, where the job waits ({waits})'


def _problem(partition: Partition, nodes: Sequence[Node], queue: SlurmQueueConfig) -> str | None:
    """Returns why a partition cannot run a job or component with this queue; None if the partition can.

    `nodes` are the partition's usable nodes that are large enough, and that no earlier component of the same job takes.
    """
    objection = next(objections(partition, queue), None)
    if objection is not None:
        return objection
    most, seconds = partition.limit("MaxTime"), time_limit_seconds(queue.time_limit)
    if most is not None and (seconds is None or seconds > most):
        return f"its limit of {partition.settings['MaxTime']} is less than time_limit={queue.time_limit}"
    wanted = set(listed(queue.nodelist))
    if wanted and not wanted <= {node.name for node in nodes}:
        return f"it lacks nodes of nodelist={queue.nodelist}, or they do not fit"
    if len(nodes) < queue.num_nodes:
        return f"{len(nodes)} of {_count(len(partition.nodes))} work and are large enough"
    return None


def _fits(node: Node, queue: SlurmQueueConfig) -> bool:
    """Returns whether a node has the CPUs, memory, GPUs and features that a queue asks for, and is not in `queue.exclude`.

    A constraint with other operators than "&" is ignored.
    """
    cpus = queue.cpus_per_node or 1
    gpus = node.gpus[queue.gpu_type] if queue.gpu_type else node.gpus.total()
    features = queue.constraint.split("&") if queue.constraint and _SIMPLE.fullmatch(queue.constraint) else ()
    large = cpus <= node.cpus and least_memory(queue) <= node.memory and _gpus(queue) <= gpus
    return large and set(features) <= set(node.features) and node.name not in listed(queue.exclude)


def _gpus(queue: SlurmQueueConfig) -> int:
    """Returns the number of GPUs that a queue asks for on each node; 0 for none.

    If only an option in `extra_sbatch` asks for GPUs, the number is not known, and the result is 1.
    """
    granted = granted_gpus(queue.model_dump())
    return 1 if granted is None else granted


def _is_free(node: Node, queue: SlurmQueueConfig) -> bool:
    """Returns whether `node` could start a job with the configuration `queue` now; the caller has checked that the job fits.

    A node that runs other jobs never counts as free for a job with GPUs, because sinfo shows its idle CPUs but not its idle GPUs.
    """
    shared = node.state == "mix" and not queue.exclusive and not _gpus(queue)
    return node.idle or (shared and node.idle_cpus >= (queue.cpus_per_node or 1))


def _count(nodes: int) -> str:
    return f"{nodes} node{'' if nodes == 1 else 's'}"


def placement_for(connection: Connection, request: JobRequest) -> Placement:
    """Queries Slurm for its partitions and nodes, and returns the placement that `choose` selects for a job.

    Raises `ValueError` if no partition fits, and OSError if the cluster does not answer.
    """
    done = run_slurm(connection, ["env", "LC_ALL=C", *_QUESTION], timeout=_TIMEOUT)
    if done.returncode:
        raise unanswered(connection.place, "scontrol or sinfo", done)
    text = done.stdout.decode("utf-8", "replace")
    return choose(request, parse_partitions(text, text))
