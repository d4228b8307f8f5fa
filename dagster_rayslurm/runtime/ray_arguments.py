"""What Ray is started with on a node: arguments, environment, addresses (Ray 2.60)."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
from typing import Dict, List, Optional

from . import ports
from .machine import Machine
from .spec import RaySpec

_SHARE_OF_LIMIT = 0.9
"""Part of a memory limit that Ray may schedule on; the runtime and Ray's daemons live on the rest."""


class ClusterError(Exception):
    """The cluster did not start or was lost.

    Attributes:
        reason: "environment", "cluster-start" or "cluster-lost", as in the `end` record.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def start_arguments(
    spec: RaySpec, machine: Machine, chosen: ports.Ports, temp_dir: str, address: Optional[str], gcs: Optional[str] = None
) -> List[str]:
    """The arguments of `ray start` (Ray 2.60).

    Args:
        spec: the cluster that is asked for.
        machine: what this node grants.
        chosen: the node's ports.
        temp_dir: Ray's own directory.
        address: the address of this node; None for the one that Ray finds.
        gcs: "HOST:PORT" of the head to join; None for the head itself.
    """
    arguments = ["--block", "--head"] if gcs is None else ["--block", "--address=" + gcs]
    if gcs is None:
        arguments.append("--include-dashboard=%s" % ("true" if spec.dashboard else "false"))
    if address:
        arguments.append("--node-ip-address=" + address)
    return arguments + _node_arguments(spec, machine, chosen, temp_dir)


def symmetric_arguments(
    spec: RaySpec, machine: Machine, chosen: ports.Ports, temp_dir: str, gcs: str, head: bool, nodes: int, entrypoint: List[str]
) -> List[str]:
    """The arguments of `ray symmetric-run` (Ray 2.60), which starts the head where `gcs` is and workers elsewhere."""
    arguments = ["--address=" + gcs, "--min-nodes=%d" % nodes]
    if head:
        arguments.append("--include-dashboard=%s" % ("true" if spec.dashboard else "false"))
    own = [option for option in _node_arguments(spec, machine, chosen, temp_dir) if not option.startswith("--port=")]
    return [*arguments, *own, "--", *entrypoint]


def _node_arguments(spec: RaySpec, machine: Machine, chosen: ports.Ports, temp_dir: str) -> List[str]:
    """What every node says of itself."""
    arguments = ["--disable-usage-stats", "--temp-dir=" + temp_dir, *chosen.options]
    arguments.append("--num-cpus=%d" % (machine.num_cpus if spec.num_cpus is None else spec.num_cpus))
    arguments.append("--num-gpus=%d" % (machine.num_gpus if spec.num_gpus is None else spec.num_gpus))
    store = spec.object_store_memory
    if store is not None:
        arguments.append("--object-store-memory=%d" % store)
    if machine.memory_limit is not None:
        # Ray 2.60 looks at the machine and the root cgroup, not at what Slurm granted to the job.
        usable = int(machine.memory_limit * _SHARE_OF_LIMIT)
        if store is None:
            store = int(usable * 0.3)
            arguments.append("--object-store-memory=%d" % store)
        arguments.append("--memory=%d" % max(usable - store, 2**20))
    if spec.resources:
        arguments.append("--resources=" + json.dumps(spec.resources))
    if spec.labels:
        arguments.append("--labels=" + ",".join("%s=%s" % item for item in sorted(spec.labels.items())))
    return arguments + spec.ray_args


def ray_environment(spec: RaySpec, token_path: str) -> Dict[str, str]:
    """What every process of a cluster needs in its environment, drivers included."""
    env = {"RAY_USAGE_STATS_ENABLED": "0"}
    if spec.auth == "token":
        env.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=token_path)
    else:
        env.update(RAY_AUTH_MODE="disabled")
    return env


def interface_address(interface: str) -> str:
    """The IPv4 address of a network interface.

    Raises:
        ClusterError: if this node has no such interface, or it has no address.
    """
    request = struct.pack("256s", os.fsencode(interface)[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR of netdevice(7).
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise ClusterError(
                "cluster-start",
                "network_interface=%r has no IPv4 address on node %s (%s); it has: %s"
                % (interface, socket.gethostname(), error.strerror, known),
            ) from None
    return socket.inet_ntoa(answer[20:24])


def route_address(host: str) -> Optional[str]:
    """The address from which this node reaches a host; None if it has no route there."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # Nothing is sent: the kernel only looks for a route.
            return str(probe.getsockname()[0])
    except OSError:
        return None


def node_address(spec: RaySpec, gcs: str) -> Optional[str]:
    """The address that a worker gives itself: of the interface it is told to use, else where the route to the head begins.

    Raises:
        ClusterError: the interface is not there.
    """
    if spec.network_interface:
        return interface_address(spec.network_interface)
    return route_address(gcs.rpartition(":")[0].strip("[]"))


def join_host_port(host: str, port: int) -> str:
    """ "HOST:PORT", with brackets around an IPv6 address."""
    return "%s:%d" % ("[%s]" % host if ":" in host else host, port)
