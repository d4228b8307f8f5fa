"""Server side of the authenticated connections between runtimes.

A connection is a stranger until the handshake is done. The server keeps few strangers at a time, and none for long, so that they
cannot keep clients out.
"""

from __future__ import annotations

import errno
import socket
from typing import Any, Callable, Dict, List, Optional, Set

from ..process.loop import Loop, Timer
from .rpc import HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT, Channel, ChannelListener, Role

_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_OUT_OF_RESOURCES_PAUSE = 1.0
"""Seconds until a process without file descriptors accepts connections again."""
_HANDSHAKE_TIMEOUT = 10.0
_MAX_STRANGERS = 64
"""Connections whose handshake may be open at a time; more wait in the kernel's queue."""
_MIN_HANDSHAKE_TIME = 1.0
"""Seconds after which the oldest stranger is closed if there are too many; a handshake takes milliseconds."""

_ALL_ADDRESSES = ((socket.AF_INET6, "::"), (socket.AF_INET, ""))
_LOOPBACK = ((socket.AF_INET, "127.0.0.1"),)


class RpcServerError(OSError):
    """No port is free to listen on."""


def listen(ports: List[int], loopback: bool = False) -> socket.socket:
    """Listen on the first free port.

    Args:
        ports: tried in this order.
        loopback: whether only this machine may connect, else any host.

    Raises:
        RpcServerError: none of them is free.
    """
    problem = ""
    for port in ports:
        for family, address in _LOOPBACK if loopback else _ALL_ADDRESSES:
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


class Acceptor:
    """Accepts connections on a listening socket.

    Args:
        loop: the event loop.
        sock: the listening socket; the acceptor owns it.
        on_connection: called with each connection.
        pause: returns the seconds for which no connection may be accepted; asked before each one.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        on_connection: Callable[[socket.socket], None],
        pause: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._loop = loop
        self._socket = sock
        self._on_connection = on_connection
        self._pause = pause
        sock.setblocking(False)
        loop.on_readable(sock.fileno(), self._accept)

    def close(self) -> None:
        self._loop.forget(self._socket.fileno())
        self._socket.close()

    def _accept(self) -> None:
        seconds = self._pause()
        if seconds > 0:
            return self._stop_for(seconds)
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            if error.errno in _OUT_OF_RESOURCES:
                self._stop_for(_OUT_OF_RESOURCES_PAUSE)
            return  # Otherwise the client went away before it was accepted.
        self._on_connection(connection)

    def _stop_for(self, seconds: float) -> None:
        """Stop watching the socket for a while: it stays readable, so the loop would spin."""
        self._loop.forget(self._socket.fileno())

        def resume() -> None:
            if self._socket.fileno() >= 0:  # Closed otherwise.
                self._loop.on_readable(self._socket.fileno(), self._accept)

        self._loop.call_later(seconds, resume)


class RpcServer(ChannelListener):
    """Accepts connections and passes the authenticated ones to a listener.

    Args:
        loop: the event loop.
        key: the shared secret, hex.
        ports: the server listens on the first free one.
        listener: receives the events of authenticated channels.
        loopback: whether only this machine may connect.
        heartbeat: whether to send `{"op": "ping"}` to all clients, and to close channels that are silent for too long.

    Attributes:
        port: the port it listens on.
    """

    def __init__(
        self,
        loop: Loop,
        key: str,
        ports: List[int],
        listener: ChannelListener,
        loopback: bool = False,
        heartbeat: bool = False,
    ) -> None:
        self._loop = loop
        self._key = key
        self._listener = listener
        self._strangers: Dict[Channel, float] = {}
        self._clients: Set[Channel] = set()
        sock = listen(ports, loopback)
        self.port = int(sock.getsockname()[1])
        self._acceptor = Acceptor(loop, sock, self._connected, self._pause)
        self._heartbeat: Optional[Timer] = loop.call_later(HEARTBEAT_INTERVAL, self._beat) if heartbeat else None

    def stop_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()

    def close(self) -> None:
        """Accept no more connections, and close those that are not authenticated."""
        self.stop_heartbeat()
        for channel in self._strangers:
            channel.close()
        self._strangers.clear()
        self._acceptor.close()

    def authenticated(self, channel: Channel) -> None:
        del self._strangers[channel]
        self._clients.add(channel)
        self._listener.authenticated(channel)

    def received(self, channel: Channel, message: Dict[str, Any]) -> None:
        if message.get("event") != "pong":
            self._listener.received(channel, message)

    def closed(self, channel: Channel, why: str) -> None:
        self._strangers.pop(channel, None)
        if channel in self._clients:
            self._clients.remove(channel)
            self._listener.closed(channel, why)

    def _connected(self, sock: socket.socket) -> None:
        channel = Channel(self._loop, sock, self._key, Role.SERVER, self)
        self._strangers[channel] = self._loop.now()

        def check() -> None:
            if channel in self._strangers:
                channel.fail("its handshake took too long")

        self._loop.call_later(_HANDSHAKE_TIMEOUT, check)

    def _pause(self) -> float:
        """Seconds until there is room for another stranger; the oldest one is closed if it had enough time."""
        if len(self._strangers) < _MAX_STRANGERS:
            return 0.0
        oldest, since = next(iter(self._strangers.items()))
        left = since + _MIN_HANDSHAKE_TIME - self._loop.now()
        if left <= 0:
            oldest.fail("too many connections")
        return left

    def _beat(self) -> None:
        self._clients = {channel for channel in self._clients if channel.is_open}
        for channel in list(self._clients):
            if self._loop.now() - channel.last_received > HEARTBEAT_TIMEOUT:
                channel.fail("it has been silent for %g s" % HEARTBEAT_TIMEOUT)
            else:
                channel.send(op="ping")
        self._heartbeat = self._loop.call_later(HEARTBEAT_INTERVAL, self._beat)


class Peer:
    """A client that may reconnect, as the server sees it: its newest channel, if there is one."""

    def __init__(self) -> None:
        self.channel: Optional[Channel] = None

    @property
    def here(self) -> bool:
        """Whether it is connected."""
        return self.channel is not None

    def attach(self, channel: Channel) -> None:
        """Use a new channel instead of the one before."""
        if self.channel is not None:
            self.channel.close()  # It reconnected before the loss was noticed here.
        self.channel = channel

    def detach(self, channel: Channel) -> bool:
        """Drop a channel that has ended; False if the client has another one by now."""
        if self.channel is not channel:
            return False
        self.channel = None
        return True

    def send(self, **message: Any) -> None:
        """Send a message if the client is connected."""
        if self.channel is not None:
            self.channel.send(**message)
