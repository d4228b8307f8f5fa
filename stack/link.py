"""A TCP link with latency that can be cut: what stands between a laptop and a login node, on one machine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

_CHUNK = 65536


class Link:
    """Listens on 127.0.0.1 and passes bytes on, each `delay` seconds late in each direction.

    A cut link is silent, as one without a route: what is open hangs for ever and never comes back, even after `mend`;
    new connections are refused until then.

    Args:
        host: where it leads.
        port: the port there.
        delay: seconds one way; the round trip takes twice that.
    """

    def __init__(self, host: str, port: int, delay: float = 0.0) -> None:
        self._target = (host, port)
        self._delay = delay
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server: asyncio.Server | None = None
        self._open: set[_Pipe] = set()
        self.port = 0
        self._call(self._listen())

    def cut(self) -> None:
        """Let nothing through any more."""
        self._call(self._cut())

    def mend(self) -> None:
        """Take new connections again."""
        self._call(self._listen())

    def close(self) -> None:
        """End everything."""
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _call(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> None:
        self._server = await self._loop.create_server(lambda: _Pipe(self), "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _cut(self) -> None:
        await self._stop_listening()
        for pipe in self._open:
            pipe.silent = True

    async def _close(self) -> None:
        await self._stop_listening()
        for pipe in list(self._open):
            pipe.end()
        await asyncio.sleep(0)


class _Pipe(asyncio.Protocol):
    """One connection: this end of it, and the protocol of the other end."""

    def __init__(self, link: Link) -> None:
        self.silent = False
        self._link = link
        self._here: asyncio.Transport | None = None
        self._there: asyncio.Transport | None = None
        self._early: list[bytes] = []

    def connection_made(self, transport: Any) -> None:
        self._here = transport
        self._link._open.add(self)
        self._connecting = self._link._loop.create_task(self._connect())

    async def _connect(self) -> None:
        try:
            host, port = self._link._target
            self._there, _ = await self._link._loop.create_connection(lambda: _Far(self), host, port)
        except OSError:
            self.end()
            return
        for data in self._early:
            self._there.write(data)

    def data_received(self, data: bytes) -> None:
        self._later(self._up, data)

    def _up(self, data: bytes) -> None:
        if self._there is None:
            self._early.append(data)
        else:
            self._there.write(data)
            self._hold(self._there, self._here)

    def down(self, data: bytes) -> None:
        """Bytes from the other end."""

        def write() -> None:
            if self._here is not None:
                self._here.write(data)
                self._hold(self._here, self._there)

        self._later(write)

    def _hold(self, full: asyncio.Transport, source: asyncio.Transport | None) -> None:
        """Do not buffer without end: stop reading while the other side does not take what is there."""
        if source is not None and full.get_write_buffer_size() > 32 * _CHUNK:
            source.pause_reading()
            self._link._loop.call_later(0.01, self._resume, full, source)

    def _resume(self, full: asyncio.Transport, source: asyncio.Transport) -> None:
        if full.get_write_buffer_size() > 16 * _CHUNK and not full.is_closing():
            self._link._loop.call_later(0.01, self._resume, full, source)
        else:
            with contextlib.suppress(RuntimeError):
                source.resume_reading()

    def _later(self, action: Any, *arguments: Any) -> None:
        def act() -> None:
            if not self.silent:
                action(*arguments)

        if self._link._delay:
            self._link._loop.call_later(self._link._delay, act)
        else:
            act()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._later(self.end)

    def end(self) -> None:
        """Close both ends."""
        self._link._open.discard(self)
        for transport in (self._here, self._there):
            if transport is not None:
                transport.close()


class _Far(asyncio.Protocol):
    def __init__(self, pipe: _Pipe) -> None:
        self._pipe = pipe

    def data_received(self, data: bytes) -> None:
        self._pipe.down(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._pipe._later(self._pipe.end)
