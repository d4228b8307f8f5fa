"""Keeps a stream open to a relay, a process on a Ray cluster's head node, by TCP from the edge node or by `srun --overlap`."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import re
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from ..edge import slurm
from ..runtime.protocol import relay
from ..runtime.protocol.messages import Operation
from ..runtime.protocol.rpc import call
from ..runtime.protocol.spec import ClusterAccess
from ..slurm.steps import step_on_head
from ..ssh.base import Backoff, Connection, ConnectionFailed

T = TypeVar("T")

# Seconds in which a TCP connection must open, and the runtime prove its identity.
_TCP_TIMEOUT = 3.0
_HEAD_START = 0.7  # Seconds that TCP has before srun begins too: a firewall may drop packets without a word.
_SRUN_TIMEOUT = 60.0
_UNREACHABLE = 60.0  # Seconds after which a head is given up although the edge node is in reach.
_CHECK = 3.0  # Seconds between two looks whether the cluster is still there.
_CLIENT_CHECK = 1.0  # Seconds between two looks whether the client that waits for an answer is still there.
_REPEATABLE = (b"GET ", b"HEAD ")  # Beginnings of requests without an effect.
# A header of a request with a body. The client sends the body after the head, so the proxy cannot send the body twice.
_BODY = re.compile(rb"\r\n(?:transfer-encoding:|content-length:(?![ \t]*0+[ \t]*\r\n))", re.IGNORECASE)
_MOST_NOISE = 65536  # Bytes that a shell and srun may print before the relay's first line.


class ClusterEnded(Exception):
    """Raised when a cluster has ended, or can no longer be reached; the text is one sentence."""


class Unanswered(Exception):
    """Raised when a request that must not be sent twice gets no answer, although it may have reached the server."""


def open_relay(connection: Connection, access: ClusterAccess) -> tuple[socket.socket, bool]:
    """Starts a relay on the head node of a cluster, and opens a stream to the relay.

    The relay is a process that connects the stream to ports of the head node. `access` says how to reach the head node. The
    function tries TCP and `srun` in parallel, and takes the first stream. Returns the stream, and True if the relay runs under
    srun, False for TCP. Under srun, the data on the stream are encoded as lines (see `relay.read_lines`).

    Raises ConnectionFailed if the edge node cannot be reached. Raises OSError if only the head node cannot be reached.
    """
    connection.home()  # A login that fails says why.
    answers: queue.Queue[tuple[socket.socket, bool] | OSError] = queue.Queue()
    done = threading.Event()

    def attempt(way: Callable[[], socket.socket], lines: bool) -> None:
        try:
            stream = way()
        except (OSError, ValueError) as error:
            return answers.put(error if isinstance(error, OSError) else OSError(str(error)))
        if done.is_set():
            return stream.close()
        answers.put((stream, lines))

    def begin(way: Callable[[], socket.socket], lines: bool = False) -> None:
        threading.Thread(target=attempt, args=(way, lines), name="rayslurm-relay", daemon=True).start()

    ways = [partial(_by_tcp, connection, access, host) for host in access.hosts]
    for way in ways:
        begin(way)
    waiting, by_srun, problem = len(ways), False, OSError("it says no address")
    deadline = time.monotonic() + _SRUN_TIMEOUT + _TCP_TIMEOUT
    while waiting or not by_srun:
        try:
            answer = answers.get(timeout=max(0.1, deadline - time.monotonic()) if by_srun else _HEAD_START if waiting else 0.01)
        except queue.Empty:
            if by_srun:
                break
            begin(partial(_by_srun, connection, access), lines=True)
            waiting, by_srun = waiting + 1, True
            continue
        waiting -= 1
        if not isinstance(answer, OSError):
            done.set()
            return answer
        problem = answer
    done.set()
    raise problem


def _by_tcp(connection: Connection, access: ClusterAccess, host: str) -> socket.socket:
    """Asks the runtime on the head node for a relay, by TCP to the name or address `host`; returns the stream to the relay.

    Raises OSError if the runtime cannot be reached, or refuses.
    """
    stream = connection.connect(host, access.port, _TCP_TIMEOUT)
    try:
        answer = call(stream, access.key, {"op": Operation.RELAY}, _TCP_TIMEOUT)
        if "relay" not in answer:
            raise OSError(str(answer.get("message")))
        stream.settimeout(None)
    except BaseException:
        stream.close()
        raise
    return stream


def _by_srun(connection: Connection, access: ClusterAccess) -> socket.socket:
    """Starts a relay on the head node by `srun --overlap`; returns the stream to the relay, and raises OSError if srun fails."""
    command = [*step_on_head(str(access.job_id), access.heterogeneous, access.hosts[0]), "--chdir=/", *access.relay]
    stream = connection.stream(connection.call(slurm.command_line, command, repeat=True, timeout=_SRUN_TIMEOUT))
    stream.settimeout(_SRUN_TIMEOUT)
    noise = b""
    try:
        while not noise.endswith(relay.HELLO):
            data = stream.recv(1)
            if not data or len(noise) > _MOST_NOISE:
                said = " ".join(noise.decode("utf-8", "replace").split())[-300:]
                raise OSError(f"srun did not start a relay: {said or 'it said nothing'}")
            noise += data
        stream.settimeout(None)
    except BaseException:
        stream.close()
        raise
    return stream


class Head:
    """A stream to the head node of one Ray cluster; the stream carries many connections to the port `port` of the head node.

    A lost stream is opened again. `access` says how to reach the cluster at first; `find` returns the same information later, and
    raises ClusterEnded when the cluster has ended. The argument of `find` is True if the head node cannot be reached (see
    `find.look_again`). `say` is called with a sentence when the stream cannot be opened, and when the stream is open again.
    """

    def __init__(
        self,
        connection: Connection,
        access: ClusterAccess,
        find: Callable[[bool], ClusterAccess],
        say: Callable[[str], None],
        port: int,
    ) -> None:
        self.access, self._port = access, port
        self._connection, self._find, self._say = connection, find, say
        self._multiplexer: relay.Multiplexer | None = None
        self._ready = asyncio.Event()

    async def run(self) -> None:
        """Keeps the stream open until the cluster has ended; then raises ClusterEnded."""
        tasks = [asyncio.ensure_future(each) for each in (self._stay_connected(), self._check())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            await next(task for task in tasks if task.done())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _check(self) -> None:
        """Updates `access` every few seconds, for ever; raises ClusterEnded when the cluster has ended.

        Errors of the connection to the edge node are ignored.
        """
        while True:
            await asyncio.sleep(_CHECK)
            with contextlib.suppress(OSError):
                self.access = await _in_thread(self._find, False)

    async def _stay_connected(self) -> None:
        """Opens the stream, and opens a lost stream again; raises ClusterEnded if the cluster has ended or stays out of reach."""
        outage, short, said = Backoff(), Backoff(), False
        while True:
            try:
                stream = await self._open()
            except OSError as error:
                unreachable = not isinstance(error, ConnectionFailed)
                if unreachable and outage.seconds > _UNREACHABLE:
                    raise ClusterEnded(f"the head node {self.access.hostname} cannot be reached: {error}") from None
                if not said:
                    said = True
                    self._say(f"no way to the Ray cluster on {self.access.hostname}, trying again: {error}")
                await asyncio.sleep(outage.pause())
                with contextlib.suppress(OSError):
                    await _in_thread(self._find, unreachable)
                continue
            if said:
                self._say(f"the Ray cluster on {self.access.hostname} can be reached again")
            said = False
            opened = time.monotonic()
            await self._use(*stream)
            outage = Backoff()
            if time.monotonic() - opened > _CHECK:
                short = Backoff()
            else:  # Each stream costs a process on the head node, and by srun a step of Slurm.
                await asyncio.sleep(short.pause())

    async def until_ready(self, timeout: float) -> None:
        """Waits until the stream is open; raises asyncio.TimeoutError after `timeout` seconds."""
        await asyncio.wait_for(self._ready.wait(), timeout)

    async def forward(self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Sends the request `first` to the port of the head node, then copies data both ways between the port and a client.

        `first` is the head of an HTTP request. `reader` and `writer` are the streams of the client. Returns True at the end of
        the copying: when the server has closed the connection, or when a connection is reset. Returns True also if the client
        leaves while a GET or HEAD request waits for the answer.

        Returns False, with nothing sent to the client, in two cases: `first` could not be sent; or `first` is a GET or HEAD
        request without a body, and the server gave no answer. The caller may then call `forward` with `first` again. Any other
        request is sent only once: if the server gives no answer to it, the function raises Unanswered.
        """
        assert self._multiplexer is not None
        stream = await self._multiplexer.open(self._port)
        try:
            await stream.write(first)
            repeatable = first.startswith(_REPEATABLE) and not _BODY.search(first)
            if repeatable:
                reading = asyncio.ensure_future(stream.read())
                while not (reading.done() or reader.at_eof()):
                    await asyncio.wait([reading], timeout=_CLIENT_CHECK)
                if not reading.done():
                    reading.cancel()
                    await stream.close()
                    return True
                answer = reading.result()
                if not answer:
                    await stream.close()
                    return False
                writer.write(answer)
        except OSError:
            await stream.close()
            return False
        if not await relay.copy(stream, reader, writer) and not repeatable:
            raise Unanswered
        writer.close()
        return True

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Opens the stream to a new relay on the head node; returns the two directions of the stream.

        For a cluster on this machine, the relay is a task of this event loop. Raises OSError if the stream cannot be opened.
        """
        if self.access.job_id is not None:
            stream, lines = await _in_thread(open_relay, self._connection, self.access)
            received, writer = await asyncio.open_connection(sock=stream, limit=relay.LONGEST_LINE)
            reader = asyncio.StreamReader() if lines else received
            if lines:
                self._reading = asyncio.ensure_future(relay.read_lines(received, reader))
            return reader, writer
        ours, theirs = socket.socketpair()  # The cluster is on this machine, and so is its relay.
        self._own = asyncio.ensure_future(relay.serve(*await asyncio.open_connection(sock=theirs)))
        reader, writer = await asyncio.open_connection(sock=ours)
        await reader.readuntil(relay.HELLO)
        return reader, writer

    async def _use(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards the connections of all clients over the stream to the head node, until the stream ends.

        `reader` and `writer` are the two directions of the stream to the head node.
        """
        self._multiplexer = relay.Multiplexer(reader, writer)
        self._ready.set()
        try:
            await self._multiplexer.run()
        finally:
            self._ready.clear()


async def _in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Runs a function in a thread, and returns the result or raises the exception of the function.

    Unlike with `asyncio.to_thread`, the event loop may end before the function returns.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(call: Callable[[], None]) -> None:
        if not future.done():
            call()

    def run() -> None:
        try:
            call = partial(future.set_result, function(*arguments))
        except BaseException as error:  # noqa: BLE001 - who waits gets it
            call = partial(future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # The loop has ended.
            loop.call_soon_threadsafe(settle, call)

    threading.Thread(target=run, name="rayslurm-access", daemon=True).start()
    return await future
