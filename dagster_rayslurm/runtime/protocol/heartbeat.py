"""Other runtimes that connect to this one: whether each of them is here, and was heard of lately.

A connection may end, and its runtime live: it is back soon. One that is silent is as good as gone.
"""

from __future__ import annotations

from typing import Any, Callable, Generic, Iterable, Optional, TypeVar

from ..process.loop import Loop
from .rpc import Channel

PING_INTERVAL = 5.0
SILENCE = 30.0
"""Seconds without a word after which the other end of a channel counts as lost."""
COMES_BACK = 10.0
"""Seconds in which a runtime that lives is back after its connection was lost; it tries ten times a second."""


class Peer:
    """Another runtime, as the one that it has connected to sees it."""

    def __init__(self) -> None:
        self.channel: Optional[Channel] = None
        self.heard = 0.0

    @property
    def here(self) -> bool:
        """Whether it can be reached."""
        return self.channel is not None

    def came(self, channel: Channel, now: float) -> None:
        """Take a new connection for its own."""
        if self.channel is not None:
            self.channel.close()  # It came back before its loss was noticed here.
        self.channel, self.heard = channel, now

    def went(self, channel: Channel) -> bool:
        """Give up a connection that is of no use any more; False if there is another one by now."""
        if self.channel is not channel:
            return False
        channel.close()
        self.channel = None
        return True

    def send(self, **message: Any) -> None:
        """Send a message, if it is here."""
        if self.channel is not None:
            self.channel.send(**message)


P = TypeVar("P", bound=Peer)


class Heartbeat(Generic[P]):
    """Has every peer give a sign of life now and then, and tells of those that do not.

    Args:
        loop: where everything happens.
        peers: all of them, whether here or not.
        on_silent: called with a peer, the connection on which it is silent, and why that is of no use any more.
    """

    def __init__(self, loop: Loop, peers: Callable[[], Iterable[P]], on_silent: Callable[[P, Channel, str], None]) -> None:
        self._loop = loop
        self._peers = peers
        self._on_silent = on_silent
        self._beat()

    def stop(self) -> None:
        """Ask nobody any more."""
        self._timer.cancel()

    def _beat(self) -> None:
        now = self._loop.now()
        for peer in self._peers():
            if peer.channel is None:
                continue
            if now - peer.heard > SILENCE:
                self._on_silent(peer, peer.channel, "it has been silent for %g s" % SILENCE)
            else:
                peer.send(op="ping")
        self._timer = self._loop.call_later(PING_INTERVAL, self._beat)
