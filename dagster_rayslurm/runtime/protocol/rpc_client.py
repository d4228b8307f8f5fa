"""The client's side of the connections between runtimes: connects with retries, answers pings, and reconnects after a loss.

Nothing here blocks, except the lookup of a host name, which succeeds once.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ..process.loop import Loop, Timer
from .rpc import Channel, ChannelListener, Message, Role

Address = Tuple[str, int]
"""Host and port."""

_CONNECT_TIMEOUT = 1.0
"""Seconds for connecting to one address."""
_HANDSHAKE_TIMEOUT = 3.0
"""Seconds for the handshake, after which the next address is tried: another service may listen on the port."""
_RETRY_PAUSE = 0.1
"""Seconds after a failure until the next address is tried."""
_MAX_LOOKUP_PAUSE = 5.0
"""Longest pause in seconds after a host name could not be resolved. The pause is ten times as long as the lookup blocked."""


class ClientListener:
    """The callbacks of an `RpcClient`, for subclasses to override; the methods here do nothing."""

    def connected(self) -> None:
        """Called each time that the client has connected and both ends have authenticated themselves."""

    def received(self, message: Message) -> None:
        """Called when a message has arrived from the server."""

    def disconnected(self) -> None:
        """Called when an authenticated connection was lost; the client reconnects by itself."""

    def unreachable(self, address: Address, why: str) -> None:
        """Called when an attempt to connect has failed; the client tries the next address by itself."""


class RpcClient(ChannelListener):
    """Keeps one connection to a server, which listens on one of several addresses.

    Args:
        loop: the event loop.
        key: the shared secret, hex.
        addresses: where the server may listen, the likeliest first.
        listener: its methods are called with what happens.
    """

    def __init__(self, loop: Loop, key: str, addresses: Sequence[Address], listener: ClientListener) -> None:
        self._loop = loop
        self._key = key
        self._addresses = list(addresses)
        self._listener = listener
        self._resolved: Dict[Address, List[Any]] = {}
        self._channel: Optional[Channel] = None
        self._connecting: Optional[socket.socket] = None
        self._retry: Optional[Timer] = None
        self._closed = False
        self._last_received = loop.now()

    @property
    def is_connected(self) -> bool:
        return self._channel is not None and self._channel.is_authenticated

    @property
    def silent_for(self) -> float:
        """Seconds since anything arrived from the server; before the first connection, since this client was made."""
        return self._loop.now() - self._last_received

    def send(self, **message: Any) -> None:
        """Send a message to the server; without a connection the message is dropped."""
        if self._channel is not None and self._channel.is_authenticated:
            self._channel.send(**message)

    def connect(self) -> None:
        """Try to connect to the address whose turn it is, unless the client is connected or closed."""
        self._retry = None
        if self._closed or self._channel is not None or self._connecting is not None:
            return
        address = self._addresses.pop(0)
        self._addresses.append(address)
        began = self._loop.now()
        try:
            if address not in self._resolved:
                self._resolved[address] = socket.getaddrinfo(address[0], address[1], 0, socket.SOCK_STREAM)
        except OSError as error:
            took = self._loop.now() - began
            return self._failed(address, str(error), max(_RETRY_PAUSE, min(_MAX_LOOKUP_PAUSE, 10 * took)))
        self._try(address, self._resolved[address])

    def reconnect(self) -> None:
        """Drop the present connection, if there is one, and connect again."""
        if self._channel is not None:
            self._channel.fail("")

    def close(self) -> None:
        """Disconnect, and do not reconnect."""
        self._closed = True
        if self._retry is not None:
            self._retry.cancel()
        self._stop_connecting()
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def authenticated(self, channel: Channel) -> None:  # noqa: ARG002
        self._last_received = self._loop.now()
        self._addresses.insert(0, self._addresses.pop())  # A later reconnect begins with this address.
        self._listener.connected()

    def received(self, channel: Channel, message: Message) -> None:
        self._last_received = self._loop.now()
        if message.get("op") == "ping":
            return channel.send(event="pong")
        self._listener.received(message)

    def closed(self, channel: Channel, why: str) -> None:  # noqa: ARG002
        self._channel = None
        if channel.is_authenticated:
            self._listener.disconnected()
        self._retry_after(_RETRY_PAUSE)

    def _try(self, address: Address, resolved: List[Any]) -> None:
        """Connect to the first of an address's IP addresses; if that fails, to the next one."""
        family, kind, protocol, _, sockaddr = resolved[0]

        def failed(why: str) -> None:
            if resolved[1:]:
                return self._try(address, resolved[1:])
            self._failed(address, why, _RETRY_PAUSE)

        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:
            return failed(str(error))
        sock.setblocking(False)
        code = sock.connect_ex(sockaddr)
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            return failed(os.strerror(code))
        self._connecting = sock

        def finished() -> None:
            if self._connecting is not sock:
                return
            timeout.cancel()
            self._loop.forget(sock.fileno())
            self._connecting = None
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code == 0:
                return self._start_handshake(sock)
            sock.close()
            failed(os.strerror(code))

        def timed_out() -> None:
            if self._connecting is sock:
                self._stop_connecting()
                failed("timed out")

        timeout = self._loop.call_later(_CONNECT_TIMEOUT, timed_out)
        self._loop.on_writable(sock.fileno(), finished)

    def _stop_connecting(self) -> None:
        if self._connecting is not None:
            self._loop.forget(self._connecting.fileno())
            self._connecting.close()
            self._connecting = None

    def _failed(self, address: Address, why: str, pause: float) -> None:
        self._listener.unreachable(address, why)
        self._retry_after(pause)

    def _retry_after(self, seconds: float) -> None:
        if not self._closed and self._retry is None:
            self._retry = self._loop.call_later(seconds, self.connect)

    def _start_handshake(self, sock: socket.socket) -> None:
        self._channel = channel = Channel(self._loop, sock, self._key, Role.CLIENT, self)

        def check() -> None:
            if self._channel is channel and not channel.is_authenticated:
                channel.fail("its handshake took too long")

        self._loop.call_later(_HANDSHAKE_TIMEOUT, check)


def all_addresses(hosts: Sequence[str], ports: Sequence[int]) -> List[Address]:
    """The addresses at which to look for a server that listens on the first free one of its ports, the likeliest first."""
    return [(host, port) for port in ports for host in dict.fromkeys(hosts)]
