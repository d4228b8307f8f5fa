"""Reaches for the runtime that others connect to, a head's or a meeting's host, until it is there; and anew when it is lost.

It waits for nothing: who dials may have payloads of its own to serve meanwhile.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from ..process.loop import Loop, Timer
from .rpc import Channel, Message

Place = Tuple[str, int]

_CONNECT_TIMEOUT = 1.0
_RETRY = 0.1
_INTRODUCTION = 3.0
"""Seconds in which the other end must prove itself; something else may listen on the port."""
_SLOW_NAMES = 5.0
"""Seconds until a name is looked up again at most, which nothing but a wait can do: most of the time is for other things."""


class RpcClient:
    """One connection to one of several places, the same for as long as it can be had.

    Args:
        loop: where everything happens.
        key: the secret that both ends must know, hex.
        places: hosts and ports where the other end may listen, the likeliest first.
        on_joined: called each time that it has been reached and both ends know each other.
        take: called with each message.
        on_lost: called each time that a connection is lost on which both ends knew each other.
        on_problem: called with a place that cannot be reached, and why.
    """

    def __init__(
        self,
        loop: Loop,
        key: str,
        places: Sequence[Place],
        on_joined: Callable[[], None],
        take: Callable[[Message], None],
        on_lost: Callable[[], None],
        on_problem: Callable[[Place, str], None] = lambda _, __: None,
    ) -> None:
        self._loop = loop
        self._key = key
        self._places = list(places)
        self._on_joined = on_joined
        self._take = take
        self._on_lost = on_lost
        self._on_problem = on_problem
        self._addresses: Dict[Place, List[Any]] = {}
        self._channel: Optional[Channel] = None
        self._again: Optional[Timer] = None
        self._tried: Optional[socket.socket] = None
        self._closed = False

    @property
    def joined(self) -> bool:
        """Whether the other end is there, and both know each other."""
        return self._channel is not None and self._channel.proved

    def send(self, **message: Any) -> None:
        """Send a message, if the other end is there."""
        if self._channel is not None and self._channel.proved:
            self._channel.send(**message)

    def dial(self) -> None:
        """Try the next place where the other end may listen."""
        self._again = None
        if self._closed or self._channel is not None or self._tried is not None:
            return
        place = self._places.pop(0)
        self._places.append(place)
        began = self._loop.now()
        try:
            addresses = self._addresses_of(place)
        except OSError as error:
            took = self._loop.now() - began
            return self._failed(place, str(error), max(_RETRY, min(_SLOW_NAMES, 10 * took)))
        self._try(place, addresses)

    def redial(self) -> None:
        """Give a connection up that is of no use any more, and look for the other end anew."""
        if self._channel is not None:
            self._channel.close()
            self._disconnected(self._channel)

    def close(self) -> None:
        """Let go of the other end, and look for it no more."""
        self._closed = True
        if self._again is not None:
            self._again.cancel()
        self._hang_up()
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _addresses_of(self, place: Place) -> List[Any]:
        """What a place's name means; it is asked for once.

        Raises:
            OSError: it means nothing.
        """
        if place not in self._addresses:
            self._addresses[place] = socket.getaddrinfo(place[0], place[1], 0, socket.SOCK_STREAM)
        return self._addresses[place]

    def _try(self, place: Place, addresses: List[Any]) -> None:
        """Connect to the first of a place's addresses, else to the next."""
        family, kind, protocol, _, address = addresses[0]

        def failed(why: str) -> None:
            if addresses[1:]:
                return self._try(place, addresses[1:])
            self._failed(place, why, _RETRY)

        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:
            return failed(str(error))
        sock.setblocking(False)
        code = sock.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            return failed(os.strerror(code))
        self._tried = sock

        def settled() -> None:
            if self._tried is not sock:
                return
            slow.cancel()
            self._loop.forget(sock.fileno())
            self._tried = None
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code == 0:
                return self._introduce(place, sock)
            sock.close()
            failed(os.strerror(code))

        def too_slow() -> None:
            if self._tried is sock:
                self._hang_up()
                failed("timed out")

        slow = self._loop.call_later(_CONNECT_TIMEOUT, too_slow)
        self._loop.on_writable(sock.fileno(), settled)

    def _hang_up(self) -> None:
        """Stop the try to connect that goes on."""
        if self._tried is not None:
            self._loop.forget(self._tried.fileno())
            self._tried.close()
            self._tried = None

    def _failed(self, place: Place, why: str, pause: float) -> None:
        self._on_problem(place, why)
        self._later(pause)

    def _later(self, seconds: float) -> None:
        if not self._closed and self._again is None:
            self._again = self._loop.call_later(seconds, self.dial)

    def _introduce(self, place: Place, sock: socket.socket) -> None:
        held: List[Channel] = []
        channel = Channel(
            self._loop,
            sock,
            self._key,
            "worker",
            lambda: self._proved(place),
            self._take,
            lambda: self._disconnected(held[0]),
        )
        held.append(channel)
        self._channel = channel

        def another_service() -> None:
            if self._channel is channel and not channel.proved:
                self.redial()

        self._loop.call_later(_INTRODUCTION, another_service)

    def _proved(self, place: Place) -> None:
        self._places.remove(place)
        self._places.insert(0, place)  # Where it was reached, it is reached again.
        self._on_joined()

    def _disconnected(self, channel: Channel) -> None:
        if self._channel is not channel:
            return
        self._channel = None
        if channel.proved:
            self._on_lost()
        self._later(_RETRY)


def places(hosts: Sequence[str], ports: Sequence[int]) -> List[Place]:
    """All places where one may listen that takes the first free one of its ports, the likeliest first."""
    return [(host, port) for port in ports for host in dict.fromkeys(hosts)]
