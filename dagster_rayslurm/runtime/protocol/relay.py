"""Carries many connections to ports of one node over one stream of bytes, such as standard input and output of an `srun`.

The client requests connections. For each connection, the relay, a process on the node, connects to a port of the node's loopback
address, and copies the data in both directions. The relay begins with `HELLO`; the client skips all bytes before it, such as
lines of a shell or srun. Then each side sends frames: number of the connection, kind, length, data. The receiver passes the data
on, and tells the sender how many bytes it has passed on. For each connection, the sender sends at most `WINDOW` bytes ahead of
this number, so a slow connection does not hold up other connections. The end of the stream ends the relay and all connections.
"""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import stat
import struct
from collections import deque
from enum import IntEnum
from typing import Any, Awaitable, Callable, Deque, Dict, Optional, Set, Union

HELLO = b'{"relay": 1}\n'  # Also the answer to `Operation.RELAY`, because the relay takes over the connection.
WINDOW = 256 * 1024  # Bytes.

# Through srun, the relay sends each write as a line of base64 after this mark: slurmstepd keeps an incomplete line back
# (22.05; `--unbuffered` would use a terminal, which changes bytes), and other lines may come between.
_LINE = b"relay:"
LONGEST_LINE = 512 * 1024  # Bytes.

_HEADER = struct.Struct(">IBI")
_PIECE = 64 * 1024  # Most bytes of data in one frame.
_LONGEST = 2 * _PIECE  # Most bytes that a frame may have; more is damage.


class Kind(IntEnum):
    """The kind of a frame. A frame is a unit of the data that the two ends of the stream exchange, for one connection."""

    OPEN = 0  # Connect to the port, which is the frame's data, as text.
    DATA = 1
    END = 2  # The sender sends no more data.
    CREDIT = 3  # The sender has passed on this many bytes: the number is the frame's data, as text.
    RESET = 4  # The connection is over, in both directions.


class Stream:
    """One of the connections that a `Multiplexer` carries over a single stream of bytes.

    `Multiplexer.open` returns a connection that this side opens. If the other side opens a connection, the multiplexer passes it
    to its function `accept`. `read`, `write`, `end`, `until_reset` and `close` are coroutines.
    """

    def __init__(self, multiplexer: Multiplexer, number: int) -> None:
        self._multiplexer, self._number = multiplexer, number
        self._chunks: Deque[bytes] = deque()
        self._window = WINDOW
        self._ended = self._broken = False
        self._changed = asyncio.Event()

    async def read(self) -> bytes:
        """Coroutine: wait until the other side has sent bytes, and return them.

        Returns b"" once the other side sends no more data, or once the connection is closed.
        """
        while not (self._chunks or self._ended):
            await self._wait()
        data = b"".join(self._chunks)
        self._chunks.clear()
        if data and not self._broken:
            await self._multiplexer.send(self._number, Kind.CREDIT, b"%d" % len(data))
        return data

    async def write(self, data: bytes) -> None:
        """Coroutine: send all bytes of `data`; wait while the other side still has to pass on `WINDOW` bytes sent earlier.

        Raises ConnectionResetError if the connection is closed in both directions, before or meanwhile.
        """
        while data:
            while self._window <= 0 and not self._broken:
                await self._wait()
            if self._broken:
                raise ConnectionResetError("the connection was reset")
            size = min(_PIECE, self._window)
            piece, data = data[:size], data[size:]
            self._window -= len(piece)
            await self._multiplexer.send(self._number, Kind.DATA, piece)

    async def until_reset(self) -> None:
        """Coroutine: wait until the other side closes the connection in both directions, or until the stream of bytes ends."""
        while not self._broken:
            await self._wait()

    async def end(self) -> None:
        """Coroutine: tell the other side that this side sends no more data; this side can still read."""
        if not self._broken:
            await self._multiplexer.send(self._number, Kind.END)

    async def close(self) -> None:
        """Coroutine: close the connection in both directions, and make the multiplexer forget it.

        Must be called for each connection, also for one that the other side has closed.
        """
        if not self._broken:
            self._broken = self._ended = True
            self._changed.set()  # Other tasks may wait for this connection.
            await self._multiplexer.send(self._number, Kind.RESET)
        self._multiplexer.streams.pop(self._number, None)

    def received(self, kind: Kind, data: bytes) -> None:
        """Process a frame of the other side on this connection, and wake the waiting coroutines; called by the multiplexer."""
        if kind == Kind.DATA:
            self._chunks.append(data)
        elif kind == Kind.CREDIT:
            self._window += int(data)
        else:
            self._ended = True
            self._broken = self._broken or kind == Kind.RESET
        self._changed.set()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class Lines:
    """Replaces an `asyncio.StreamWriter` where bytes must travel as text, as through srun: sends each write as a line of base64.

    `read_lines` decodes the lines at the other end.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.drain, self.close = writer.drain, writer.close

    def write(self, data: bytes) -> None:
        """Send `data` as one line of base64, without waiting; the caller awaits `drain` afterwards, as with a `StreamWriter`."""
        self._writer.write(_LINE + base64.b64encode(data) + b"\n")


async def read_lines(lines: asyncio.StreamReader, reader: asyncio.StreamReader) -> None:
    """Coroutine: read the stream `lines`, decode the lines from the class `Lines`, and feed the decoded bytes to `reader`.

    Runs until `lines` ends; then `reader` ends too. All other lines, such as messages of srun, are ignored. An error of the
    connection, or a damaged line, counts as the end.
    """
    try:
        while True:
            line = await lines.readline()
            if not line:
                break
            if line.startswith(_LINE):
                reader.feed_data(base64.b64decode(line[len(_LINE) :]))
    except (OSError, ValueError):
        pass
    finally:
        reader.feed_eof()


class Multiplexer:
    """One side of a stream of bytes (`reader`, `writer`) that carries many connections.

    Connections work only while the coroutine `run` is running. When the other side opens a connection, the coroutine function
    `accept` is started as a task, with the connection and the requested port as its arguments. Without `accept`, the multiplexer
    ignores such requests.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: Union[asyncio.StreamWriter, Lines],
        accept: Optional[Callable[[Stream, int], Awaitable[None]]] = None,
    ) -> None:
        self._reader, self._writer, self._accept = reader, writer, accept
        self._lock = asyncio.Lock()  # Before Python 3.10, only one task at a time may wait for a writer to drain.
        self._tasks: Set[Any] = set()
        self._last = 0
        self.streams: Dict[int, Stream] = {}
        self.over = False

    async def open(self, port: int) -> Stream:
        """Coroutine: request a connection to `port` on the node of the other side, and return it without waiting for an answer.

        If nothing listens on the port, the other side closes the connection, so that `read` returns b"".
        """
        self._last += 1
        stream = self.streams[self._last] = Stream(self, self._last)
        if self.over:
            stream.received(Kind.RESET, b"")
        await self.send(self._last, Kind.OPEN, b"%d" % port)
        return stream

    async def send(self, number: int, kind: Kind, data: bytes = b"") -> None:
        """Coroutine: send one frame, which belongs to the connection `number`; does nothing if the common stream has ended.

        If sending fails, the stream counts as ended, and all its connections are closed.
        """
        async with self._lock:
            if not self.over:
                try:
                    self._writer.write(_HEADER.pack(number, kind, len(data)) + data)
                    await self._writer.drain()
                except OSError:
                    self._end()

    async def run(self) -> None:
        """Coroutine: process the frames of the other side until the stream of bytes ends, or until a frame is invalid.

        Then close all connections and the writer, and cancel the tasks of `accept`. Neither of the two ends raises an exception.
        """
        try:
            while True:
                number, kind, length = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
                if length > _LONGEST:
                    break
                self._received(number, Kind(kind), await self._reader.readexactly(length))
        except (OSError, EOFError, ValueError):
            pass
        finally:
            self._end()
            self._writer.close()
            for task in self._tasks:
                task.cancel()

    def _received(self, number: int, kind: Kind, data: bytes) -> None:
        if kind == Kind.OPEN and self._accept is not None:
            stream = self.streams[number] = Stream(self, number)
            task = asyncio.ensure_future(self._accept(stream, int(data)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif number in self.streams:  # Else the connection was closed meanwhile.
            self.streams[number].received(kind, data)

    def _end(self) -> None:
        self.over = True
        for stream in self.streams.values():
            stream.received(Kind.RESET, b"")


class _Over(Exception):
    """Raised by one of the tasks inside `copy` to end the other tasks, when the connection is over."""


async def copy(stream: Stream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, serves: bool = False) -> bool:
    """Coroutine: copy data both ways between a TCP connection (`reader`, `writer`) and the multiplexed connection `stream`.

    One far end is the server, and the other is the client. If `serves` is True, the server is at the far end of the TCP
    connection; otherwise it is at the far end of `stream`. The coroutine ends when the server has sent its last data, or when
    either connection fails. If only the client has sent its last data, copying goes on. At the end, the coroutine closes
    `stream`; the caller must close the TCP connection. The result is whether data was written to the TCP connection.
    """
    written = False

    async def away() -> None:
        while True:
            data = await reader.read(_PIECE)
            if not data:
                await stream.end()
                break
            await stream.write(data)
        if serves:
            raise _Over

    async def back() -> None:
        nonlocal written
        while True:
            data = await stream.read()
            if not data:
                break
            written = True
            writer.write(data)
            await writer.drain()
        if not serves:
            raise _Over
        writer.write_eof()

    async def reset() -> None:
        await stream.until_reset()
        if serves:
            raise _Over

    tasks = [asyncio.ensure_future(each) for each in (away(), back(), reset())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await stream.close()
    return written


async def _connect(stream: Stream, port: int) -> None:
    """Coroutine: connect to `port` of this node, and copy data between that connection and `stream` until the connection is over.

    If nothing listens on the port, only close `stream`.
    """
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return await stream.close()
    try:
        await copy(stream, reader, writer, serves=True)
    finally:
        writer.close()


async def _relay() -> None:
    loop = asyncio.get_running_loop()
    if os.path.samestat(os.fstat(0), os.fstat(1)) and stat.S_ISSOCK(os.fstat(0).st_mode):
        return await serve(*await asyncio.open_connection(sock=socket.socket(fileno=os.dup(0))))
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), open(0, "rb", 0))
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, open(1, "wb", 0))
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    await serve(reader, writer, lines=True)


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lines: bool = False) -> None:
    """Coroutine: serve one client of the relay, over `reader` and `writer`, until the client's stream ends.

    If `lines` is True, the relay sends its data as text (class `Lines`), which the client must decode with `read_lines`.
    """
    writer.write(HELLO)
    await Multiplexer(reader, Lines(writer) if lines else writer, _connect).run()


def main() -> int:
    """Run the relay: carry the connections of one client to ports of this node until the client's stream ends; returns 0.

    The client's stream arrives on standard input, and answers go to standard output. For each connection that the client
    requests, the relay connects to a port of 127.0.0.1 on this node. The client always sends raw frames. If standard input and
    output are the same socket, the answers are raw frames too; otherwise they are lines of base64 (`Lines`). The result is the
    exit code of the process.
    """
    asyncio.run(_relay())
    return 0
