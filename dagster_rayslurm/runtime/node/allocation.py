"""What Slurm's environment variables tell a task: its job, the nodes of its step, the head's addresses (srun(1), Slurm 22.05)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Dict, List, Mapping, MutableMapping, Optional, Sequence

from ..protocol.slurm_text import expand_nodelist
from .network import is_loopback, route_address
from .resources import GPU_VARIABLES

_UNKNOWN_NETWORK = "192.0.2.1"
"""An address on no network (RFC 5737), so the route to this address is the default route."""
_COMPONENT_VARIABLES = ("SLURM_JOB_PARTITION", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_NODE")
"""Variables that Slurm sets for each component with the suffix `_HET_GROUP_N`."""


@dataclass(frozen=True)
class Allocation:
    """The Slurm job that this task runs in, its nodes, and this task's place among them; the step has one task on each node.

    The lists about components are empty for a job that is not heterogeneous.
    """

    job_id: str
    node_id: int  # Index of this node in `nodes`; 0 is the head, the node whose runtime commands the others.
    nodes: List[str]  # Names of all nodes, the head's first.
    # Where the head may be reached, the likeliest first; if there are other nodes, no loopback address.
    head_addresses: List[str]
    partition: str = ""
    account: str = ""  # Empty where Slurm has no accounts.
    restarts: int = 0  # How often Slurm has requeued the job.
    groups: List[List[str]] = field(default_factory=list)  # The nodes of each component, in the job's order.
    job_ids: List[str] = field(default_factory=list)  # Slurm's job id of each component.
    partitions: List[str] = field(default_factory=list)  # The partition of each component.
    component_ids: List[str] = field(default_factory=list)  # The components' names in the configuration, if they have names.
    first: int = 0  # Index in the step of the first of `nodes`; not 0 only if `nodes` are those of a later component.

    def group_of(self, node_id: int) -> int:
        """Index of the component that a node belongs to."""
        for group, nodes in enumerate(self.groups):
            if node_id < len(nodes):
                return group
            node_id -= len(nodes)
        return 0

    def component_of(self, node_id: int) -> Optional[str]:
        """Name of the component that a node belongs to; None if the components have no names."""
        return self.component_ids[self.group_of(node_id)] if self.component_ids else None

    def of_own_group(self) -> "Allocation":
        """The allocation with the nodes of this task's own component only; with all nodes if there are no components."""
        if not self.groups:
            return replace(self, component_ids=[])
        group = self.group_of(self.node_id)
        first = sum(map(len, self.groups[:group]))
        nodes = self.groups[group]
        # srun tells only the address of the node that it runs on, the first node of the first component.
        addresses = [address for address in self.head_addresses if address != nodes[0]] if group == 0 else []
        return replace(
            self,
            job_id=self.job_ids[group],
            node_id=self.node_id - first,
            nodes=nodes,
            head_addresses=[*addresses, nodes[0]],
            partition=self.partitions[group],
            groups=[],
            job_ids=[],
            partitions=[],
            component_ids=[],
            first=first,
        )

    def facts(self) -> Dict[str, Any]:
        """What the run's metadata in Dagster shows of the allocation, as a dictionary for JSON."""
        facts = {"job_id": self.job_id, "partition": self.partition, "account": self.account, "nodes": self.nodes}
        if not self.component_ids:
            return facts
        # The components of job 17 have the ids 17+0, 17+1 and so on (squeue(1)). A single component makes no heterogeneous job.
        numbers = ["%s+%d" % (self.job_id, group) for group in range(len(self.groups))] or [self.job_id]
        rows = zip(self.component_ids, numbers, self.partitions or [self.partition], self.groups or [self.nodes])
        return {**facts, "components": [dict(zip(("component", "job_id", "partition", "nodes"), row)) for row in rows]}


def from_environ(environ: Mapping[str, str]) -> Optional[Allocation]:
    """The allocation that this task's environment variables describe; None outside of a Slurm step."""
    if "SLURM_JOB_ID" not in environ or "SLURM_NODEID" not in environ:
        return None
    groups = [expand_nodelist(text) for text in _of_components(environ, "SLURM_JOB_NODELIST")]
    # The step's own list of a heterogeneous job is sorted, and its node ids go by component (tried on 22.05 and 24.11).
    nodes = [node for group in groups for node in group]
    nodes = nodes or expand_nodelist(environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"])
    # srun runs on the first node. Its address is what that node's name resolves to on that node, perhaps 127.0.1.1.
    launch = environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    addresses = ["" if len(nodes) > 1 and is_loopback(launch) else launch, nodes[0]]
    partitions = _of_components(environ, "SLURM_JOB_PARTITION")
    return Allocation(
        job_id=environ["SLURM_JOB_ID"],
        node_id=int(environ["SLURM_NODEID"]),
        nodes=nodes,
        head_addresses=[address for address in addresses if address],
        partition=partitions[0] if partitions else environ.get("SLURM_JOB_PARTITION", ""),
        account=environ.get("SLURM_JOB_ACCOUNT", ""),
        restarts=int(environ.get("SLURM_RESTART_COUNT") or 0),
        groups=groups,
        job_ids=_of_components(environ, "SLURM_JOB_ID"),
        partitions=partitions,
    )


def head_address(allocation: Allocation) -> str:
    """The address by which the other nodes reach the head; called on the head. Of a single node, any address will do.

    If Slurm tells none, this is the head's own address on the network by which it reaches another node.
    """
    known, *_ = allocation.head_addresses
    name, *others = allocation.nodes
    if not others or known != name:
        return known
    found = (route_address(host) for host in (others[0], _UNKNOWN_NETWORK))
    return next((address for address in found if address is not None and not is_loopback(address)), name)


def component_variables(environ: Mapping[str, str], group: int) -> Dict[str, Optional[str]]:
    """The Slurm variables that a task of one component of a heterogeneous job should have; None for one that must be unset.

    Slurm gives every task the variables of the first or the last component (srun(1); tried on Slurm 22.05 and 24.11).
    """
    own = {name: environ.get("%s_HET_GROUP_%d" % (name, group)) for name in _COMPONENT_VARIABLES}
    if environ.get("SLURM_GPUS_ON_NODE", "0") == "0" and not environ.get("SLURM_STEP_GPUS"):
        # This node has no GPUs, so the GPU variables come from the first node, where the job's script ran.
        own.update(dict.fromkeys(GPU_VARIABLES))
    return own


def select_component(environ: MutableMapping[str, str], here: Allocation, component_ids: Sequence[str]) -> Allocation:
    """The allocation of a task with component names, if any were requested.

    Also gives `environ`, the task's environment, the variables of the task's own component. Raises ValueError if Slurm's step
    has another number of components.
    """
    if here.groups:
        change(environ, component_variables(environ, here.group_of(here.node_id)))
    if component_ids and len(component_ids) != max(1, len(here.groups)):
        raise ValueError(
            "the start record has %d components (%s), and Slurm's step %d"
            % (len(component_ids), ", ".join(component_ids), max(1, len(here.groups)))
        )
    return replace(here, component_ids=list(component_ids))


def change(environ: MutableMapping[str, str], changes: Mapping[str, Optional[str]]) -> None:
    """Change environment variables: set those with a value, and unset those whose value is None."""
    for name, value in changes.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value


def _of_components(environ: Mapping[str, str], name: str) -> List[str]:
    """The values of a variable for each component of a heterogeneous job; empty for any other job."""
    size = int(environ.get("SLURM_HET_SIZE") or 0)
    return [environ.get("%s_HET_GROUP_%d" % (name, group), "") for group in range(size)]
