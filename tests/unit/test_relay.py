"""Tests: many connections to ports of a node over one stream."""

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from dagster_rayslurm.archive import install_runtime
from dagster_rayslurm.runtime.protocol import relay
from dagster_rayslurm.ssh.local import LocalConnection

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def in_process() -> Streams:
    ours, theirs = socket.socketpair()
    serving = asyncio.ensure_future(relay.serve(*await asyncio.open_connection(sock=theirs)))
    reader, writer = await asyncio.open_connection(sock=ours)
    await reader.readuntil(relay.HELLO)
    reader.serving = serving  # type: ignore[attr-defined]
    return reader, writer


def with_relay(
    work: Callable[[relay.Multiplexer, int], Awaitable[None]], connect: Callable[[], Awaitable[Streams]] = in_process
) -> None:
    """Run `work` with a multiplexer, and the port of a server that sends back what it gets."""

    async def run() -> None:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        reader, writer = await connect()
        multiplexer = relay.Multiplexer(reader, writer)
        running = asyncio.ensure_future(multiplexer.run())
        try:
            await asyncio.wait_for(work(multiplexer, server.sockets[0].getsockname()[1]), 30)
        finally:
            writer.close()
            await asyncio.wait_for(running, 10)
            server.close()

    asyncio.run(run())


async def sent_back(multiplexer: relay.Multiplexer, port: int, data: bytes) -> bytes:
    stream = await multiplexer.open(port)

    async def send() -> None:
        await stream.write(data)
        await stream.end()

    sending, got = asyncio.ensure_future(send()), b""
    while piece := await stream.read():
        got += piece
    await sending
    await stream.close()
    return got


def test_a_connection_that_nobody_reads_holds_up_no_other() -> None:
    async def work(multiplexer: relay.Multiplexer, port: int) -> None:
        slow = await multiplexer.open(port)
        feeding = asyncio.ensure_future(slow.write(bytes(20 * relay.WINDOW)))
        texts = [bytes([number]) * 3 * relay.WINDOW for number in range(8)]
        assert await asyncio.gather(*(sent_back(multiplexer, port, text) for text in texts)) == texts
        assert not feeding.done(), "it is not limited"
        feeding.cancel()
        await slow.close()
        assert not multiplexer.streams

    with_relay(work)


def test_a_port_where_nothing_listens_ends_its_connection_only() -> None:
    async def work(multiplexer: relay.Multiplexer, port: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            free = closed.getsockname()[1]
        assert await sent_back(multiplexer, free, b"") == b""
        assert await sent_back(multiplexer, port, b"x") == b"x"

    with_relay(work)


def test_the_task_that_closes_a_connection_ends_the_waits_of_others() -> None:
    async def work(multiplexer: relay.Multiplexer, port: int) -> None:
        stream = await multiplexer.open(port)
        waiting = [asyncio.ensure_future(stream.read()), asyncio.ensure_future(stream.until_reset())]
        await asyncio.sleep(0)  # Both wait now.
        await stream.close()
        assert await asyncio.wait_for(asyncio.gather(*waiting), 10) == [b"", None]

    with_relay(work)


def test_the_end_of_the_stream_ends_all_connections() -> None:
    async def work(multiplexer: relay.Multiplexer, port: int) -> None:
        stream = await multiplexer.open(port)
        multiplexer._writer.close()
        assert await stream.read() == b""
        with pytest.raises(ConnectionResetError):
            await stream.write(b"x")

    with_relay(work)


def test_damage_ends_the_stream() -> None:
    async def run() -> None:
        reader, writer = await in_process()
        writer.write(b"x" * 100)
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()

    asyncio.run(run())


def test_the_runtime_serves_as_a_relay_on_pipes(tmp_path: Path) -> None:
    """As through srun: other lines come between, and an incomplete line would be kept back."""
    runtime = install_runtime(tmp_path)
    noisy = 'while IFS= read -r line; do echo noise; echo "$line"; done'
    # The relay sets its input to non-blocking; without `cat` that would be the shell's output, too, which would lose data.
    script = f"echo noise; cat | {sys.executable} -I {runtime} relay | {noisy}"

    async def connect() -> Streams:
        stream = LocalConnection().stream(["sh", "-c", script])
        lines, writer = await asyncio.open_connection(sock=stream, limit=relay.LONGEST_LINE)
        await asyncio.wait_for(lines.readuntil(relay.HELLO), 60)
        reader = asyncio.StreamReader()
        reader.reading = asyncio.ensure_future(relay.read_lines(lines, reader))  # type: ignore[attr-defined]
        return reader, writer

    async def work(multiplexer: relay.Multiplexer, port: int) -> None:
        text = bytes(range(256)) * 1000
        assert all(each == text for each in await asyncio.gather(*(sent_back(multiplexer, port, text) for _ in range(3))))

    with_relay(work, connect)
