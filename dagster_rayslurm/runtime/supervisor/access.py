"""Gives users access to a payload's Ray cluster: relay processes on the head node, and a file with the relay server's address.

A relay carries a user's connections to ports of the head node, such as the port of the Ray dashboard.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from typing import List, Optional, Set

from ..node.allocation import Allocation
from ..payload.payload import Payload
from ..process import processes
from ..process.loop import Loop
from ..protocol.messages import Operation, Refusal, refuse
from ..protocol.record import CLUSTER, write_atomically
from ..protocol.rpc import Channel, Listener, Message, RpcServer, derive_key
from ..protocol.spec import ClusterAccess, RuntimeSpec
from ..ray.cluster import RayCluster


@dataclass(eq=False)
class Relays(Listener):
    """Lets clients reach the dashboard of a Ray cluster: each client that knows the secret key gets a relay.

    A relay is a process on this node, the head node, that carries the client's connections to ports of this node. In a Slurm
    allocation, the first call of `access` opens the TCP port on which clients request relays. Without Slurm, clients need no
    relay.
    """

    loop: Loop
    spec: RuntimeSpec
    hostname: str
    allocation: Optional[Allocation]  # None without Slurm; then no relays are needed.
    pids: Set[int] = field(default_factory=set)  # Process ids of the relays.
    _server: Optional[RpcServer] = None

    def __post_init__(self) -> None:
        self._command = [sys.executable, "-I", os.path.abspath(sys.argv[0]), "relay"]

    def access(self, cluster: RayCluster) -> ClusterAccess:
        """Returns the record that tells clients how to reach the dashboard of `cluster`.

        Without Slurm, clients connect to the dashboard directly; in a Slurm allocation, through a relay. Raises OSError if no
        port is free on which clients could request relays.
        """
        own = ClusterAccess(self.spec.cluster_id, self.hostname, cluster.dashboard_port, cluster.token, os.getpid())
        here = self.allocation
        if here is None:
            return own
        assert self.spec.control_key is not None
        key = derive_key(self.spec.control_key, "relays")
        if self._server is None:
            self._server = RpcServer(self.loop, key, [*self.spec.control_ports, 0], self)
        hosts: List[str] = list(dict.fromkeys([here.nodes[0], *here.head_addresses]))
        more = dict(job_id=here.job_id, heterogeneous=len(here.components) > 1, hosts=hosts, port=self._server.port)
        return ClusterAccess(**dict(asdict(own), key=key, relay=self._command, **more))

    def write(self, run_dir: str, cluster: RayCluster) -> None:
        """Write the file `cluster.json` in `run_dir`, which tells clients how to reach `cluster`, the Ray cluster of the payload.

        An OSError is ignored, because the payload can run without the file.
        """
        with contextlib.suppress(OSError):
            write_atomically(os.path.join(run_dir, CLUSTER), json.dumps(asdict(self.access(cluster))).encode("utf-8"))

    def received(self, channel: Channel, message: Message) -> None:
        """Handle a client's request for a relay: start a relay, which takes over the connection.

        Any other request is answered with a refusal.
        """
        if message.get("op") != Operation.RELAY:
            return channel.send(**refuse(Refusal.UNKNOWN, "only relays are to be had here"))
        streams = {"stdin": channel.sock, "stdout": channel.sock, "stderr": subprocess.DEVNULL}
        pid = self.loop.spawn(
            self._command, lambda *_: self.pids.discard(pid), cwd="/", preexec_fn=processes.die_with_parent(), **streams
        )
        self.pids.add(pid)
        channel.close()


def dashboard_hint(payload: Payload, cluster: RayCluster) -> str:
    """Returns text to append to a log line: "; dashboard: " and the command by which the user opens the dashboard of `cluster`.

    Returns "" if the Ray cluster has no dashboard.
    """
    if cluster.dashboard_port is None:
        return ""
    return "; dashboard: `rayslurm dashboard %s`" % os.path.basename(payload.run_dir)


def remove_access(run_dir: str) -> None:
    """Remove the file `cluster.json`, which `Relays.write` wrote, from a run directory; does nothing if there is no such file."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(run_dir, CLUSTER))
