"""Bytes between a socket and a channel, both ways at once."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

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
