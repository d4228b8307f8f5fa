"""Where others connect to the head's runtime: its workers, and those who ask a session for something.

Who connects is a stranger until it has proved that it knows the key; strangers are few at a time and soon sent away, so
that nobody who reaches the port can keep the others out.
"""

from __future__ import annotations

import socket
from typing import Callable, Dict, List

from .channel import Channel, Message
from .listener import Listener
from .loop import Loop

_STRANGER_TIMEOUT = 10.0
"""Seconds in which who connects must prove that it belongs here."""
_MAX_STRANGERS = 64
"""Connections that have not proved it yet; while there are more, they wait in the kernel's queue."""
_PATIENCE = 1.0
"""Seconds after which a stranger gives way to others, where there are too many; a proof takes milliseconds."""

_EVERYWHERE = ((socket.AF_INET6, "::"), (socket.AF_INET, ""))
_LOOPBACK = ((socket.AF_INET, "127.0.0.1"),)


class DoorError(OSError):
    """The head cannot listen."""


def listen(ports: List[int], loopback: bool = False) -> socket.socket:
    """Listen on the first free port.

    Args:
        ports: to be tried in this order.
        loopback: whether only this machine may connect, else on every address of this node.

    Raises:
        DoorError: none of them is free.
    """
    problem = ""
    for port in ports:
        for family, address in _LOOPBACK if loopback else _EVERYWHERE:
            try:
                listener = socket.socket(family, socket.SOCK_STREAM)
            except OSError:
                continue  # A host without IPv6.
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                listener.bind((address, port))
                listener.listen(256)
                listener.setblocking(False)
                return listener
            except OSError as error:
                listener.close()
                problem = str(error)
    raise DoorError("the head cannot listen on any of the ports %s: %s" % (", ".join(map(str, ports)), problem))


class Door:
    """Accepts connections, and hands over those that have proved themselves, with the first message they send.

    Args:
        loop: where everything happens.
        key: the secret that they must know, hex.
        ports: where to listen, the first free one.
        welcome: takes a channel and its first message; it sets what is called for the next ones, or closes it.
        loopback: whether only this machine may connect.
    """

    def __init__(
        self,
        loop: Loop,
        key: str,
        ports: List[int],
        welcome: Callable[[Channel, Message], None],
        loopback: bool = False,
    ) -> None:
        self._loop = loop
        self._key = key
        self._welcome = welcome
        self._strangers: Dict[Channel, float] = {}
        sock = listen(ports, loopback)
        self.port = int(sock.getsockname()[1])
        """Where it listens."""
        self._listener = Listener(loop, sock, self._accepted, self._crowded)

    def close(self) -> None:
        """Accept nobody any more, and send the strangers away."""
        for channel in self._strangers:
            channel.close()
        self._strangers.clear()
        self._listener.close()

    def _crowded(self) -> float:
        """Seconds for which there is no room for one more stranger; who has been one for long gives way."""
        if len(self._strangers) < _MAX_STRANGERS:
            return 0.0
        oldest, since = next(iter(self._strangers.items()))
        left = since + _PATIENCE - self._loop.now()
        if left <= 0:
            self._strangers.pop(oldest)
            oldest.close()
        return left

    def _accepted(self, sock: socket.socket) -> None:
        held: List[Channel] = []

        def take(message: Message) -> None:
            self._strangers.pop(held[0], None)
            self._welcome(held[0], message)

        def forget() -> None:
            self._strangers.pop(held[0], None)

        channel = Channel(self._loop, sock, self._key, "head", lambda: None, take, forget)
        held.append(channel)
        self._strangers[channel] = self._loop.now()

        def too_slow() -> None:
            if self._strangers.pop(channel, None) is not None:
                channel.close()

        self._loop.call_later(_STRANGER_TIMEOUT, too_slow)
