"""A socket on which others connect to this runtime."""

from __future__ import annotations

import errno
import socket
from typing import Callable

from .loop import Loop

_OUT_OF_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_NO_FILES = 1.0
"""Seconds until this process, out of file descriptors, accepts connections again."""


class Listener:
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
