"""The address of a network interface of this node.

The probe of `rayslurm doctor` runs this file without the rest of the package, so the file needs only Python 3.6 and the standard
library.
"""

import contextlib
import fcntl
import ipaddress
import socket
import struct

_IPV6 = "/proc/net/if_inet6"  # The file with the IPv6 addresses of this node (proc(5)).


def address_of(interface: str) -> str:
    """Returns the IPv4 address of a network interface such as "ib0", or else its global IPv6 address.

    Raises OSError if the interface does not exist or has no such address. The text of the error names this node and its
    interfaces.
    """
    request = struct.pack("256s", interface.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24])  # SIOCGIFADDR of netdevice(7).
    except OSError as error:
        with contextlib.suppress(OSError), open(_IPV6) as file:
            for digits, _, _, scope, _, name in map(str.split, file):
                if name == interface and scope == "00":  # Global.
                    return str(ipaddress.IPv6Address(int(digits, 16)))
        known = ", ".join(name for _, name in socket.if_nameindex())
        told = (interface, socket.gethostname(), error.strerror, known)
        message = "network_interface=%r has no address on node %s (%s); it has: %s" % told
    raise OSError(message)
