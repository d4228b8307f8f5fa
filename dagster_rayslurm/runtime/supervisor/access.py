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
from ..process import processes
from ..process.loop import Loop
from ..protocol.messages import Operation, Refusal, refuse
from ..protocol.record import CLUSTER, write_atomically
from ..protocol.rpc import Channel, Listener, Message, RpcServer, derive_key
from ..protocol.spec import ClusterAccess, RuntimeSpec
from ..ray.cluster import RayCluster


@dataclass(eq=False)
class Relays(Listener):
    """Lets clients reach the dashboard of a Ray cluster: each client that knows the key gets a relay.

    A relay is a process that carries the client's connections to ports of this node. The first call of `access` in a Slurm
    allocation opens the port on which clients are accepted.
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
        """Returns how clients reach the dashboard of a cluster: directly, or in a Slurm allocation through the relay server.

        Raises OSError if no port is free for the relay server.
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
        """Write the file in the directory `run_dir` that tells clients how to reach `cluster`, the Ray cluster of the payload.

        An OSError is ignored, because the payload can run without the file.
        """
        with contextlib.suppress(OSError):
            write_atomically(os.path.join(run_dir, CLUSTER), json.dumps(asdict(self.access(cluster))).encode("utf-8"))

    def received(self, channel: Channel, message: Message) -> None:
        """Start a relay on the connection of a client that requests a relay; answer any other request with a refusal."""
        if message.get("op") != Operation.RELAY:
            return channel.send(**refuse(Refusal.UNKNOWN, "only relays are to be had here"))
        streams = {"stdin": channel.sock, "stdout": channel.sock, "stderr": subprocess.DEVNULL}
        pid = self.loop.spawn(
            self._command, lambda *_: self.pids.discard(pid), cwd="/", preexec_fn=processes.die_with_parent(), **streams
        )
        self.pids.add(pid)
        channel.close()


def remove_access(run_dir: str) -> None:
    """Remove the file that `Relays.write` wrote into a run directory; does nothing if there is no such file."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(run_dir, CLUSTER))
