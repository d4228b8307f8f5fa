"""What Slurm says of this task: its job, the nodes of the step, and where the head is (srun(1), Slurm 22.05)."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional

from .nodelist import expand_nodelist


@dataclass(frozen=True)
class Allocation:
    """One task's view of a step that has one task on each node.

    Attributes:
        job_id: Slurm's job id.
        node_id: this node's place in `nodes`; the head is 0.
        nodes: names of all nodes, the head's first.
        head_addresses: where the head may be reached, the likeliest first; no loopback address if there are other nodes.
        partition: partition of the job.
        account: account of the job; empty where Slurm has no accounts.
        restarts: how often Slurm has requeued the job.
    """

    job_id: str
    node_id: int
    nodes: List[str]
    head_addresses: List[str]
    partition: str = ""
    account: str = ""
    restarts: int = 0

    def facts(self) -> Dict[str, Any]:
        """What metadata tells of the allocation."""
        return {"job_id": self.job_id, "partition": self.partition, "account": self.account, "nodes": self.nodes}


def is_loopback(address: str) -> bool:
    """Whether an address means another machine to each machine; False for a name."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def from_environ(environ: Mapping[str, str]) -> Optional[Allocation]:
    """The allocation of this task, or None outside of a Slurm step."""
    if "SLURM_JOB_ID" not in environ or "SLURM_NODEID" not in environ:
        return None
    nodes = expand_nodelist(environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"])
    # srun runs on the first node; the address is what that node's name means there, by its own /etc/hosts perhaps 127.0.1.1.
    launch = environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    addresses = ["" if len(nodes) > 1 and is_loopback(launch) else launch, nodes[0]]
    return Allocation(
        job_id=environ["SLURM_JOB_ID"],
        node_id=int(environ["SLURM_NODEID"]),
        nodes=nodes,
        head_addresses=[address for address in addresses if address],
        partition=environ.get("SLURM_JOB_PARTITION", ""),
        account=environ.get("SLURM_JOB_ACCOUNT", ""),
        restarts=int(environ.get("SLURM_RESTART_COUNT") or 0),
    )
