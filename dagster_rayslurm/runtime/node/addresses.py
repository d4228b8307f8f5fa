"""Network addresses by which the nodes of a Ray cluster reach each other."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from typing import Optional

from ..protocol.end import ClusterError, EndReason
from ..protocol.spec import RaySpec

_IPV6 = "/proc/net/if_inet6"
"""The file with the IPv6 addresses of this node (proc(5))."""


def is_loopback(address: str) -> bool:
    """Whether an address leads back to its own machine, as 127.0.0.1 does; False for a host name."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def interface_address(interface: str) -> str:
    """The IPv4 address of a network interface, or its IPv6 address if it has no IPv4 address.

    Raises:
        ClusterError: this node has no such interface, or the interface has no address.
    """
    request = struct.pack("256s", os.fsencode(interface)[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR of netdevice(7).
        except OSError as error:
            address = _ipv6_address(interface)
            if address is not None:
                return address
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise ClusterError(
                EndReason.CLUSTER_START,
                "network_interface=%r has no address on node %s (%s); it has: %s"
                % (interface, socket.gethostname(), error.strerror, known),
            ) from None
    return socket.inet_ntoa(answer[20:24])


def _ipv6_address(interface: str) -> Optional[str]:
    """The global IPv6 address of a network interface; None if it has none."""
    try:
        with open(_IPV6) as file:
            rows = [line.split() for line in file]
    except OSError:
        return None
    found = (row[0] for row in rows if row[5] == interface and row[3] == "00")  # Scope 00 is global.
    return next((str(ipaddress.IPv6Address(int(digits, 16))) for digits in found), None)


def route_address(host: str) -> Optional[str]:
    """This node's own address on the network by which it reaches a host; None if there is no route to the host."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # Nothing is sent: the kernel only looks for a route.
            return str(probe.getsockname()[0])
    except OSError:
        return None


def node_address(spec: RaySpec, gcs: str) -> Optional[str]:
    """The address that this worker node has in its Ray cluster; None if there is no route to the head.

    That is the address of the configured network interface, or else the one from which this node reaches the head.

    Args:
        gcs: "HOST:PORT" of the GCS, the service of the head that all nodes of a Ray cluster connect to.

    Raises:
        ClusterError: the configured interface has no address.
    """
    if spec.network_interface:
        return interface_address(spec.network_interface)
    return route_address(gcs.rpartition(":")[0].strip("[]"))


def join_host_port(host: str, port: int) -> str:
    """ "HOST:PORT", with brackets around an IPv6 address."""
    return "%s:%d" % ("[%s]" % host if ":" in host else host, port)
