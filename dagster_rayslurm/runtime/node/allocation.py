"""Reads the environment variables of a Slurm task (srun(1), Slurm 22.05): the job, the step's nodes, the head's addresses.

This module also expands Slurm's lists of nodes and parses Slurm's durations.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, field, replace
from typing import Any, Dict, List, Mapping, MutableMapping, NamedTuple, Optional, Sequence

from .network import is_loopback, route_address
from .resources import GPU_VARIABLES

_UNKNOWN_NETWORK = "192.0.2.1"  # An address on no network (RFC 5737), so the route to this address is the default route.
# Variables that Slurm sets for each component with the suffix `_HET_GROUP_N`.
_COMPONENT_VARIABLES = ("SLURM_JOB_PARTITION", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_NODE")


class Component(NamedTuple):
    """The nodes of one component of a heterogeneous Slurm job, or all nodes of an ordinary job.

    `name` is the component's name in the user's configuration; None until `select_component` has set it.
    """

    job_id: str
    partition: str
    nodes: List[str]
    name: Optional[str] = None


@dataclass(frozen=True)
class Allocation:
    """The Slurm job of this process: its id, the names of the nodes of this job step, and the index of this node among them.

    The step has one task on each node. The first node is the head.
    """

    job_id: str
    node_id: int  # Index of this node in `nodes`; 0 is the head, the node whose runtime commands the others.
    nodes: List[str]  # Names of all nodes, the head's first.
    # Where the head may be reached, the likeliest first; if there are other nodes, no loopback address.
    head_addresses: List[str]
    partition: str = ""
    account: str = ""  # Empty where Slurm has no accounts.
    restarts: int = 0  # How often Slurm has requeued the job.
    components: List[Component] = field(default_factory=list)  # Two or more if the job is heterogeneous, in the job's order.
    first: int = 0  # Index of `nodes[0]` among all nodes of the step; 0 unless `nodes` are those of a later component.

    def group_of(self, node_id: int) -> int:
        """Index in `components` of the component that contains the node `nodes[node_id]`; 0 if there are no components."""
        ends = itertools.accumulate(len(component.nodes) for component in self.components)
        return next((group for group, end in enumerate(ends) if node_id < end), 0)

    def component_of(self, node_id: int) -> Optional[str]:
        """Name of the component that contains the node `nodes[node_id]`; None if the job has no named components."""
        return self.components[self.group_of(node_id)].name if self.components else None

    def of_own_group(self) -> "Allocation":
        """Returns a copy of the allocation that has only the nodes of this task's component; its list `components` is empty.

        The index of this node, the head addresses, the job id and the partition are those of the component. In an ordinary job,
        the copy has all nodes.
        """
        if len(self.components) < 2:
            return replace(self, components=[])
        group = self.group_of(self.node_id)
        first = sum(len(component.nodes) for component in self.components[:group])
        job_id, partition, nodes, _ = self.components[group]
        # srun tells only the address of the node that it runs on, the first node of the first component.
        addresses = [*(address for address in self.head_addresses if group == 0 and address != nodes[0]), nodes[0]]
        own = replace(self, job_id=job_id, partition=partition, nodes=nodes, head_addresses=addresses, components=[])
        return replace(own, node_id=self.node_id - first, first=first)

    def facts(self) -> Dict[str, Any]:
        """The job id, partition, account, nodes and named components, as a dictionary for JSON."""
        facts = {"job_id": self.job_id, "partition": self.partition, "account": self.account, "nodes": self.nodes}
        rows = [
            # The components of job 17 have the ids 17+0, 17+1 and so on (squeue(1)).
            dict(each._asdict(), job_id="%s+%d" % (self.job_id, group) if len(self.components) > 1 else self.job_id)
            for group, each in enumerate(self.components)
        ]
        named = [{"component": row.pop("name"), **row} for row in rows if row["name"] is not None]
        return {**facts, "components": named} if named else facts


def from_environ(environ: Mapping[str, str]) -> Optional[Allocation]:
    """Returns the allocation that `environ`, the environment variables of a Slurm task, describes; None outside of a Slurm step.

    The components have no names yet; `select_component` adds the names.
    """
    if "SLURM_JOB_ID" not in environ or "SLURM_NODEID" not in environ:
        return None

    def value(name: str, group: int) -> str:
        return environ.get("%s_HET_GROUP_%d" % (name, group), "")

    components = [
        Component(value("SLURM_JOB_ID", n), value("SLURM_JOB_PARTITION", n), expand_nodelist(value("SLURM_JOB_NODELIST", n)))
        for n in range(int(environ.get("SLURM_HET_SIZE") or 0))
    ]
    # The step's own list of a heterogeneous job is sorted, and its node ids go by component (tried on 22.05 and 24.11).
    nodes = [node for component in components for node in component.nodes]
    nodes = nodes or expand_nodelist(environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"])
    # srun runs on the first node. Its address is what that node's name resolves to on that node, perhaps 127.0.1.1.
    launch = environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    addresses = ["" if len(nodes) > 1 and is_loopback(launch) else launch, nodes[0]]
    return Allocation(
        job_id=environ["SLURM_JOB_ID"],
        node_id=int(environ["SLURM_NODEID"]),
        nodes=nodes,
        head_addresses=[address for address in addresses if address],
        partition=components[0].partition if components else environ.get("SLURM_JOB_PARTITION", ""),
        account=environ.get("SLURM_JOB_ACCOUNT", ""),
        restarts=int(environ.get("SLURM_RESTART_COUNT") or 0),
        components=components,
    )


def head_address(allocation: Allocation) -> str:
    """Returns the address by which other nodes reach the head node. May only be called on the head node.

    The result is the first entry of `allocation.head_addresses` if this entry is not the head's name, or if the job has a single
    node. Otherwise the result is the head's own address on the route to another node, or else on the default route. Loopback
    addresses do not count. If no address is found, the result is the head's name.
    """
    known, *_ = allocation.head_addresses
    name, *others = allocation.nodes
    if not others or known != name:
        return known
    found = (route_address(host) for host in (others[0], _UNKNOWN_NETWORK))
    return next((address for address in found if address is not None and not is_loopback(address)), name)


def select_component(environ: MutableMapping[str, str], here: Allocation, component_ids: Sequence[str]) -> Allocation:
    """Returns a copy of the allocation `here` whose components have the names `component_ids`, in the order of the job.

    If `component_ids` is empty, returns `here` itself. An ordinary job counts as one component. Raises ValueError if the numbers
    of names and components differ.

    In a heterogeneous job, the function also changes `environ`, the environment of this task: in every task, Slurm sets some
    variables to the values of the first or the last component (srun(1); tried on Slurm 22.05 and 24.11). The variables for
    partition and memory get the values of this task's component. If this node has no GPUs, the function removes the variables
    for visible GPUs.
    """
    if here.components:
        group = here.group_of(here.node_id)
        own = {name: environ.get("%s_HET_GROUP_%d" % (name, group)) for name in _COMPONENT_VARIABLES}
        if environ.get("SLURM_GPUS_ON_NODE", "0") == "0" and not environ.get("SLURM_STEP_GPUS"):
            # This node has no GPUs, so the GPU variables come from the first node, where the job's script ran.
            own.update(dict.fromkeys(GPU_VARIABLES))
        change(environ, own)
    components = here.components or [Component(here.job_id, here.partition, here.nodes)]
    if not component_ids:
        return here
    if len(component_ids) != len(components):
        told = (len(component_ids), ", ".join(component_ids), len(components))
        raise ValueError("the start record has %d components (%s), and Slurm's step %d" % told)
    return replace(here, components=[each._replace(name=name) for each, name in zip(components, component_ids)])


def change(environ: MutableMapping[str, str], changes: Mapping[str, Optional[str]]) -> None:
    """Set the variables in `environ` that have a value in `changes`, and unset the variables whose value there is None."""
    for name, value in changes.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value


_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_PART = re.compile(r"\[([^][]*)\]")
_WORD = re.compile(r"(?:\[[^]]*\]|[^,])+")

MAX_NODES = 1 << 20  # Nodes that a list may name at most: a longer list is damaged, and expanding it would fill the memory.


def expand_nodelist(text: str) -> List[str]:
    """The names of the nodes in a list such as `c[1-2,05-07],x3,rack[1-2]n[01-03]` (SLURM_JOB_NODELIST), in order.

    The result equals the output of `scontrol show hostnames` (Slurm 22.05 and 24.11): numbers are padded with zeros to the width
    of the first number of their range, and the last bracket of a name varies fastest. "", `(null)`, `None assigned` and `None`
    stand for empty lists. Raises ValueError if the text is not a node list, or if the list has more than `MAX_NODES` nodes.
    """
    if text.strip() in ("", "(null)", "None assigned", "None"):
        return []
    nodes: List[str] = []
    for word in _WORD.findall(text.strip()):
        pieces = _PART.split(word)  # Literals have even indexes, the contents of brackets odd ones.
        if any(bracket in literal for literal in pieces[::2] for bracket in "[]"):
            raise ValueError("%r is not a list of nodes: a bracket is left over in %r" % (text, word))
        choices = [_numbers(piece, text) if place % 2 else [piece] for place, piece in enumerate(pieces)]
        if len(nodes) + math.prod(map(len, choices)) > MAX_NODES:
            raise ValueError("%r is not a list of nodes: it names more than %d" % (text[:200], MAX_NODES))
        nodes += [name for name in map("".join, itertools.product(*choices)) if name]
    return nodes


def _numbers(inside: str, text: str) -> List[str]:
    """The numbers in `inside`, the text between one pair of brackets in a node list, such as "1-2,05-07".

    The numbers of a range are padded with zeros to the width of the first one. Raises ValueError if `inside` is not a list of
    numbers and ranges. `text` is the whole node list, for the error message.
    """
    numbers: List[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        low, high = (match.group(1), match.group(2) or match.group(1)) if match else ("1", "0")
        if not 0 <= int(high) - int(low) < MAX_NODES:
            raise ValueError("%r is not a list of nodes: [%s] is no range" % (text[:200], inside[:200]))
        numbers += ["%0*d" % (len(low), number) for number in range(int(low), int(high) + 1)]
    return numbers


_DURATION = re.compile(r"(?:([0-9]+)-)?(?:([0-9]+):)?([0-9]+):([0-9]+(?:\.[0-9]+)?)")


def parse_duration(text: str) -> Optional[float]:
    """The seconds in a duration like "[D-]HH:MM:SS" or "MM:SS.mmm" (squeue(1), sacct(1), Slurm 22.05).

    The result is None if the text is not a duration.
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes = (int(part or 0) for part in match.groups()[:3])
    return 86400.0 * days + 3600 * hours + 60 * minutes + float(match.group(4))
