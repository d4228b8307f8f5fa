"""What a payload writes to its standard output and error, chunk by chunk, as text."""

from __future__ import annotations

import codecs
import os
from typing import Callable, Dict

from ..process.loop import Loop

_CHUNK = 256 * 1024


class OutputStreams:
    """Reads pipes until all of them have ended.

    Args:
        loop: where they are watched.
        take: called with the name of a stream and some text.
        ended: called each time that one has ended.
        safely: makes the calls above.
    """

    def __init__(
        self,
        loop: Loop,
        take: Callable[[str, str], None],
        ended: Callable[[], None],
        safely: Callable[[Callable[[], None]], None],
    ) -> None:
        self._loop = loop
        self._take = take
        self._ended = ended
        self._safely = safely
        self._open: Dict[int, _Stream] = {}

    def __bool__(self) -> bool:
        """Whether there may be more to read."""
        return bool(self._open)

    def add(self, name: str, fd: int) -> None:
        """Read a pipe to its end; it is closed then."""
        self._open[fd] = _Stream(name)
        self._loop.on_readable(fd, lambda: self._safely(lambda: self._read(fd)))

    def close(self) -> None:
        """Read no more, wherever the pipes are."""
        for fd in list(self._open):
            self._close(fd)

    def _close(self, fd: int) -> None:
        self._loop.forget(fd)
        os.close(fd)
        del self._open[fd]

    def _read(self, fd: int) -> None:
        data = os.read(fd, _CHUNK)
        stream = self._open[fd]
        text = stream.decoder.decode(data, final=not data)
        if text:
            self._take(stream.name, text)
        if not data:
            self._close(fd)
            self._ended()


class _Stream:
    """One output stream; bytes that are not UTF-8 become U+FFFD, characters cut by a chunk are put together."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
