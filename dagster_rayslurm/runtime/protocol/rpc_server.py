"""The server's side of the authenticated connections between runtimes.

A connection whose handshake is not done is called a stranger here. The server keeps few strangers at a time, and none for long,
so that they cannot keep clients out.
"""

from __future__ import annotations

import errno
import socket
from typing import Any, Callable, Dict, List, Optional, Set

from ..process.loop import Loop, Timer
from .rpc import HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT, Channel, ChannelListener, Role

_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_OUT_OF_RESOURCES_PAUSE = 1.0
"""Seconds after one of the errors `_OUT_OF_RESOURCES` until the server accepts connections again."""
_HANDSHAKE_TIMEOUT = 10.0
"""Seconds after which a stranger is closed."""
_MAX_STRANGERS = 64
"""Strangers that the server keeps at a time; more connections wait in the kernel's queue."""
_MIN_HANDSHAKE_TIME = 1.0
"""Seconds after which the oldest stranger is closed if there are `_MAX_STRANGERS`; a handshake takes milliseconds."""

_ALL_ADDRESSES = ((socket.AF_INET6, "::"), (socket.AF_INET, ""))
_LOOPBACK = ((socket.AF_INET, "127.0.0.1"),)


class RpcServerError(OSError):
    """Raised when none of the ports is free to listen on."""


def listen(ports: List[int], loopback: bool = False) -> socket.socket:
    """Returns a socket that listens on the first free port.

    Args:
        ports: the ports to try, in this order.
        loopback: whether only this machine may connect; otherwise any host may.

    Raises:
        RpcServerError: no port is free.
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
    """Accepts the connections that come in on a listening socket, of this server or of another one.

    Args:
        loop: the event loop.
        sock: the listening socket; the acceptor closes it.
        on_connection: called with each new connection.
        pause: called before each connection is accepted; returns the seconds to wait before it, 0 for none.
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
        """Stop accepting connections, and close the listening socket."""
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
            return  # For other errors: the client went away before its connection was accepted.
        self._on_connection(connection)

    def _stop_for(self, seconds: float) -> None:
        """Stop watching the socket for a while: it stays readable, so the loop would call again and again."""
        self._loop.forget(self._socket.fileno())

        def resume() -> None:
            if self._socket.fileno() >= 0:  # The acceptor was closed otherwise.
                self._loop.on_readable(self._socket.fileno(), self._accept)

        self._loop.call_later(seconds, resume)


class RpcServer(ChannelListener):
    """Listens for connections, authenticates the clients, and passes their messages to a listener.

    Args:
        loop: the event loop.
        key: the shared secret, hex.
        ports: the ports to try; the server listens on the first free one.
        listener: its methods are called with what happens on authenticated connections.
        loopback: whether only this machine may connect; otherwise any host may.
        heartbeat: whether to send `{"op": "ping"}` to all clients, and to close connections that are silent for too long.

    Attributes:
        port: the port that the server listens on.
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
        """Send no more pings, and no longer close silent connections."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()

    def close(self) -> None:
        """Accept no more connections, and close the strangers; authenticated connections stay open."""
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
        """Seconds until there is room for another stranger; closes the oldest one if it had enough time for its handshake."""
        if len(self._strangers) < _MAX_STRANGERS:
            return 0.0
        oldest, since = next(iter(self._strangers.items()))
        left = since + _MIN_HANDSHAKE_TIME - self._loop.now()
        if left <= 0:
            oldest.fail("too many connections")
        return left

    def _beat(self) -> None:
        """Close the connections that are silent for too long, and send a ping over the others."""
        self._clients = {channel for channel in self._clients if channel.is_open}
        for channel in list(self._clients):
            if self._loop.now() - channel.last_received > HEARTBEAT_TIMEOUT:
                channel.fail("it has been silent for %g s" % HEARTBEAT_TIMEOUT)
            else:
                channel.send(op="ping")
        self._heartbeat = self._loop.call_later(HEARTBEAT_INTERVAL, self._beat)


class Peer:
    """One client as the server sees it, over all its reconnections; holds the newest connection.

    Attributes:
        channel: that connection; None while the client is not connected.
    """

    def __init__(self) -> None:
        self.channel: Optional[Channel] = None

    @property
    def here(self) -> bool:
        """Whether the client is connected."""
        return self.channel is not None

    def attach(self, channel: Channel) -> None:
        """Take a new connection of the client in place of the one before."""
        if self.channel is not None:
            self.channel.close()  # The client reconnected before its loss was noticed here.
        self.channel = channel

    def detach(self, channel: Channel) -> bool:
        """Drop a connection that has ended. Returns whether the client is not connected now, that is, has no newer connection."""
        if self.channel is not channel:
            return False
        self.channel = None
        return True

    def send(self, **message: Any) -> None:
        """Send a message to the client; without a connection the message is dropped."""
        if self.channel is not None:
            self.channel.send(**message)
