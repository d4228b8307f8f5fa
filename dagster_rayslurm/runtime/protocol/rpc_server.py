"""Server side of the authenticated connections between runtimes.

A socket on which others connect to this runtime.

Where others connect to the head's runtime: its workers, and those who ask a session for something.

Who connects is a stranger until it has proved that it knows the key; strangers are few at a time and soon sent away, so
that nobody who reaches the port can keep the others out.
"""

from __future__ import annotations

import errno
import socket
from typing import Callable, Dict, List

from ..process.loop import Loop
from .rpc import Channel, Message

_OUT_OF_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_NO_FILES = 1.0
"""Seconds until this process, out of file descriptors, accepts connections again."""


class Acceptor:
    """Accepts connections; whoever is not accepted yet waits in the kernel's queue.

    Args:
        loop: where everything happens.
        sock: a listening socket, which is closed in the end.
        take: called with each connection.
        rest: asked before one is accepted; seconds for which nobody is to be, or 0.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        take: Callable[[socket.socket], None],
        rest: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._loop = loop
        self._socket = sock
        self._take = take
        self._rest = rest
        sock.setblocking(False)
        loop.on_readable(sock.fileno(), self._accept)

    def close(self) -> None:
        """Accept nobody any more."""
        self._loop.forget(self._socket.fileno())
        self._socket.close()

    def _accept(self) -> None:
        seconds = self._rest()
        if seconds > 0:
            return self._pause(seconds)
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            if error.errno in _OUT_OF_ROOM:
                self._pause(_NO_FILES)
            return  # Or else it went away before it was accepted.
        self._take(connection)

    def _pause(self, seconds: float) -> None:
        """Accept nobody for a while: a listener that is not asked stays readable, and the loop would spin."""
        self._loop.forget(self._socket.fileno())

        def resume() -> None:
            if self._socket.fileno() >= 0:  # Else everybody has been sent home.
                self._loop.on_readable(self._socket.fileno(), self._accept)

        self._loop.call_later(seconds, resume)


_STRANGER_TIMEOUT = 10.0
"""Seconds in which who connects must prove that it belongs here."""
_MAX_STRANGERS = 64
"""Connections that have not proved it yet; while there are more, they wait in the kernel's queue."""
_PATIENCE = 1.0
"""Seconds after which a stranger gives way to others, where there are too many; a proof takes milliseconds."""

_EVERYWHERE = ((socket.AF_INET6, "::"), (socket.AF_INET, ""))
_LOOPBACK = ((socket.AF_INET, "127.0.0.1"),)


class RpcServerError(OSError):
    """The head cannot listen."""


def listen(ports: List[int], loopback: bool = False) -> socket.socket:
    """Listen on the first free port.

    Args:
        ports: to be tried in this order.
        loopback: whether only this machine may connect, else on every address of this node.

    Raises:
        RpcServerError: none of them is free.
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
    raise RpcServerError("the head cannot listen on any of the ports %s: %s" % (", ".join(map(str, ports)), problem))


class RpcServer:
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
        self._listener = Acceptor(loop, sock, self._accepted, self._crowded)

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
