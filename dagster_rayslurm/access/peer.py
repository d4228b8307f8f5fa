"""Finds which user of this machine opened a connection on the loopback address, by /proc/net/tcp (see proc(5))."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_ESTABLISHED = "01"  # In other states the table may name root, because no process has the connection any more.
_MAPPED = "0000000000000000FFFF0000"  # An IPv4 address on an IPv6 socket, such as a socket of Java (RFC 4291, 2.5.5.2).

Address = tuple[str, int]


def is_own(peer: Address, here: Address) -> bool:
    """Returns True if a process of this user opened the connection from the address `peer` to the address `here`.

    Returns True also if /proc/net/tcp does not exist, as on macOS.
    """
    if not os.path.exists(_TABLES[0]):  # As on macOS.
        return True
    return owner(peer, here, _rows()) == os.geteuid()


def owner(peer: Address, here: Address, rows: Iterable[str]) -> int | None:
    """Returns the id of the user whose process opened the connection from `peer` to `here`; None if no row shows the connection.

    `rows` are the lines of /proc/net/tcp and /proc/net/tcp6. Pure.
    """
    ends = [_hex(peer), _hex(here)]
    for row in rows:
        words = row.split()
        if len(words) > 7 and words[3] == _ESTABLISHED and [word.removeprefix(_MAPPED) for word in words[1:3]] == ends:
            return int(words[7])
    return None


def _hex(address: Address) -> str:
    """Returns an IPv4 address and port as in /proc/net/tcp, such as "0100007F:1F90" for 127.0.0.1 and port 8080."""
    packed = int.from_bytes(socket.inet_aton(address[0]), "little" if _LITTLE else "big")
    return f"{packed:08X}:{address[1]:04X}"


_LITTLE = int.from_bytes(b"\1\0", "little") == memoryview(b"\1\0").cast("H")[0]


def _rows() -> Iterable[str]:
    """Yields the lines of /proc/net/tcp and /proc/net/tcp6; leaves out a file that cannot be read."""
    for table in _TABLES:
        try:
            with open(table, encoding="ascii") as file:
                yield from file
        except OSError:
            continue
