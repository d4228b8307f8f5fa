"""Addresses by which the nodes of a Ray cluster reach each other, and ports for Ray's services.

A chosen port is free at the time of the choice. Without a `port_range`, the port is outside the kernel's ephemeral range, so that
no outgoing connection takes the port before Ray binds it. Users configure a `port_range` if a firewall blocks other ports between
the nodes. The range is divided into blocks of `BLOCK` ports. A Ray cluster's runtime on a node reserves a block by binding the
first port of the block.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import itertools
import random
import re
import socket
from dataclasses import dataclass
from typing import List, Optional, Tuple

# Number of ports that one Ray cluster gets on one node from a `port_range`: a dozen for services, the others for workers.
BLOCK = 100
# Options of `ray start` for ports that only the head of a Ray cluster has (Ray 2.60).
HEAD_SERVICES = ("port", "ray-client-server-port", "dashboard-port")
# Options of `ray start` for ports that every node has; without a `port_range` the kernel chooses these (Ray 2.60).
NODE_SERVICES = (
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
    "metrics-export-port",
    "node-manager-port",
    "object-manager-port",
)
# Environment variables for two ports of the head that have no option and by default the same number in all Ray clusters.
HEAD_VARIABLES = ("AUTOSCALER_METRIC_PORT", "DASHBOARD_METRIC_PORT")

_chance = random.SystemRandom()


# ---- Addresses


def is_loopback(address: str) -> bool:
    """Whether `address` is a loopback IP address, such as 127.0.0.1; False if `address` is a host name."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def route_address(host: str) -> Optional[str]:
    """This node's own address on the network by which this node reaches `host`, a host name or an IP address.

    The result is None if `host` cannot be resolved, or if there is no route to `host`.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # Nothing is sent: the kernel only looks for a route.
            return str(probe.getsockname()[0])
    except OSError:
        return None


def join_host_port(host: str, port: int) -> str:
    """`host` and `port` as "HOST:PORT", with brackets around an IPv6 address."""
    return "%s:%d" % ("[%s]" % host if ":" in host else host, port)


def split_host_port(address: str) -> Tuple[str, int]:
    """The host and the port of an address "HOST:PORT"; an IPv6 address is returned without brackets.

    Raises ValueError if the port is not a number.
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


# ---- Ports


@dataclass(frozen=True)
class Ports:
    """The ports that were chosen for Ray on a node, and the arguments and variables of `ray start` that set them.

    With a `port_range`, the object holds a block of ports until `release` is called.
    """

    gcs: int = 0  # Port of the head's GCS, the service that all nodes of a Ray cluster connect to; 0 on a worker node.
    dashboard: int = 0  # Port of the head's dashboard; 0 on a worker node.
    options: Tuple[str, ...] = ()  # Arguments of `ray start` that set its ports.
    environ: Tuple[Tuple[str, str], ...] = ()  # Environment variables for `ray start`.
    block: Optional[socket.socket] = None  # Holds the block of ports until it is closed; None without a `port_range`.

    def release(self) -> None:
        """Give the block of ports back, so that other Ray clusters can take it; without a `port_range`, do nothing."""
        if self.block is not None:
            self.block.close()


def parse_range(text: str) -> Tuple[int, int]:
    """Returns the first and the last port of a range "LOW-HIGH".

    Raises ValueError if the text is not a range of ports from 1024 to 65535, or if the range has fewer than `BLOCK` ports, which
    one Ray cluster needs.
    """
    match = re.match(r"^(\d+)-(\d+)$", text)
    low, high = (int(match.group(1)), int(match.group(2))) if match else (0, 0)
    if not 1024 <= low <= high <= 65535:
        raise ValueError('expected "LOW-HIGH" with 1024 <= LOW <= HIGH <= 65535, got %r' % text)
    if high - low + 1 < BLOCK:
        raise ValueError("a cluster needs %d ports on each node, %s has %d" % (BLOCK, text, high - low + 1))
    return low, high


def control_ports(port_range: Optional[str], count: int = 8) -> List[int]:
    """Returns up to `count` ports, in random order; the runtime of the head node listens on the first of them that is free there.

    The ports are chosen before the head node is known. Without a `port_range`, they are from 10000 to 32767. With a `port_range`
    ("LOW-HIGH"), each is the last port of a block of `BLOCK` ports, because Ray uses this port only for workers, and can do
    without it. Raises ValueError if `port_range` is not valid.
    """
    if port_range:
        low, high = parse_range(port_range)
        ends = list(range(low + BLOCK - 1, high + 1, BLOCK))
        return _chance.sample(ends, min(count, len(ends)))
    return _chance.sample(range(10000, 32768), count)  # Below the usual ephemeral range (ip(7)).


def is_free(port: int) -> bool:
    """Whether the TCP port `port` can be bound on all IPv4 and IPv6 addresses of this node."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
        except OSError as error:
            if family == socket.AF_INET or error.errno == errno.EADDRINUSE:  # Without IPv6, the error is another one.
                return False
    return True


def choose_ports(port_range: Optional[str] = None, head: bool = True) -> Ports:
    """Choose free ports for a Ray cluster on this node, from a block of `port_range` ("LOW-HIGH") if this is given.

    `head` is False for a worker node, which has fewer services. The result holds the block until its `release` is called. Raises
    OSError if too few ports are free.
    """
    services: Tuple[str, ...] = HEAD_SERVICES if head else ()
    variables: Tuple[str, ...] = ()
    block = None
    if port_range:
        block, free = _claim_block(port_range)
        services, variables = services + NODE_SERVICES, HEAD_VARIABLES if head else ()
        others = ["--worker-port-list=" + ",".join(map(str, free[len(services + variables) :]))]
    else:
        free = _free_ports(len(services))
        others = ["--%s=0" % service for service in NODE_SERVICES] + ["--min-worker-port=0", "--max-worker-port=0"]
    named = dict(zip(services + variables, free))
    options = ["--%s=%d" % (service, named[service]) for service in services]
    environ = tuple((variable, str(named[variable])) for variable in variables)
    return Ports(named.get("port", 0), named.get("dashboard-port", 0), (*options, *others), environ, block)


def _free_ports(count: int) -> List[int]:
    """Returns `count` TCP ports that are free now, outside the range that the kernel uses for outgoing connections (ip(7)).

    Raises OSError if fewer free ports are found.
    """
    low, high = ephemeral_range()
    candidates = [*range(10000, min(low, 65536)), *range(high + 1, 65536)] or list(range(10000, 65536))
    chosen = list(itertools.islice(filter(is_free, _chance.sample(candidates, min(200, len(candidates)))), count))
    if len(chosen) < count:
        raise OSError("no free ports outside the ephemeral range %d-%d" % (low, high))
    return chosen


def ephemeral_range() -> Tuple[int, int]:
    """The first and the last port that the kernel uses for outgoing connections (ip(7), ip_local_port_range).

    If the kernel's setting cannot be read, the result is 32768 and 65535.
    """
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            low, high = map(int, file.read().split())
            return low, high
    except (OSError, ValueError):
        return 32768, 65535


def _claim_block(port_range: str) -> Tuple[socket.socket, List[int]]:
    """Reserve a free block of ports of the range "LOW-HIGH".

    Returns the socket that reserves it, and the free ports of the block. The socket is bound to the first port of the block;
    closing it gives the block back. Raises OSError if every block is taken.
    """
    low, high = parse_range(port_range)
    starts = list(range(low, high - BLOCK + 2, BLOCK))
    for start in _chance.sample(starts, len(starts)):
        holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        with contextlib.suppress(OSError):
            holder.bind(("0.0.0.0", start))
            free = [port for port in range(start + 1, start + BLOCK) if is_free(port)]
            if len(free) > len(HEAD_SERVICES + NODE_SERVICES + HEAD_VARIABLES):
                return holder, free
        holder.close()
    raise OSError("every block of %d ports in %s is taken on this node" % (BLOCK, port_range))
