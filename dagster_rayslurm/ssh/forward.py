"""Port forwarding over an SSH connection.

Bytes between a socket and a channel, both ways at once.

A listening port of this machine whose clients are carried over an SSH connection.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

from .transport import Refused

_SIZE = 65536


def pump(client: socket.socket, channel: Any) -> None:
    """Copy until both directions have ended; each end of one direction is passed on as such."""
    with contextlib.closing(channel):
        up = threading.Thread(target=_copy, args=(client.recv, channel.sendall, channel.shutdown_write), daemon=True)
        up.start()
        _copy(channel.recv, client.sendall, lambda: client.shutdown(socket.SHUT_WR))
        up.join()


def _copy(receive: Callable[[int], bytes], send: Callable[[bytes], Any], end: Callable[[], Any]) -> None:
    with contextlib.suppress(OSError, EOFError):
        while data := receive(_SIZE):
            send(data)
    with contextlib.suppress(OSError, EOFError):
        end()


class ListeningForward:
    """A port on 127.0.0.1; other users of this machine can connect to it as well, so what it leads to asks who is there.

    Args:
        carry: carries one client's bytes until both sides are done, and closes it.
    """

    def __init__(self, carry: Callable[[socket.socket], None]) -> None:
        self._carry = carry
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._clients: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="rayslurm-forward", daemon=True).start()

    @property
    def host(self) -> str:
        return "127.0.0.1"

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Stop listening and cut the clients off."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # Wakes the thread in accept, which a close alone does not.
        self._listener.close()
        with self._lock:
            clients = list(self._clients)
        for client in clients:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> ListeningForward:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                self._closed.wait(0.1)  # Closed; or out of descriptors, which may pass.
                continue
            with self._lock:
                self._clients.add(client)
            threading.Thread(target=self._serve, args=(client,), name="rayslurm-forward", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            # A client that cannot be carried sees its connection end, as it would without a forward in between.
            with contextlib.suppress(OSError, EOFError, Refused):
                self._carry(client)
        finally:
            client.close()
            with self._lock:
                self._clients.discard(client)
