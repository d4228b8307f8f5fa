"""Serve a cluster's dashboard until it ends: for a command that does nothing else, or beside a block of code."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from .find import Found, look_again
from .head import Head
from .proxy import Proxy

_FIRST_TIMEOUT = 90.0  # Seconds in which the first stream to the head must come.


async def serve(found: Found, say: Callable[[str], None], ready: Callable[[str], Any], port: int = 0) -> None:
    """Serve until the cluster ends, which raises ClusterEnded. `ready` is called with the URL once the cluster is reached."""
    access = found.access
    assert access.dashboard_port is not None  # `choose` refuses clusters without dashboard.
    head = Head(found.connection, access, look_again(found), say)
    proxy = Proxy(head, access.token, access.dashboard_port)
    await proxy.start(port)
    running = asyncio.ensure_future(head.run())
    try:
        first = asyncio.ensure_future(head.until_ready(_FIRST_TIMEOUT))
        await asyncio.wait([running, first], return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            await first
            ready(proxy.url)
        else:
            first.cancel()
        await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await proxy.close()


@contextlib.contextmanager
def served(found: Found, say: Callable[[str], None]) -> Iterator[str]:
    """The URL of a cluster's dashboard inside the block; raises ClusterEnded if it cannot be reached."""
    url: Future[str] = Future()
    loop = asyncio.new_event_loop()
    task = loop.create_task(serve(found, say, url.set_result))

    def run() -> None:
        try:
            loop.run_until_complete(task)
        except asyncio.CancelledError:
            pass
        except Exception as error:  # noqa: BLE001
            if not url.done():
                url.set_exception(error)
            else:
                say(str(error))
        finally:
            loop.close()

    thread = threading.Thread(target=run, name="rayslurm-proxy", daemon=True)
    thread.start()
    try:
        yield url.result()
    finally:
        with contextlib.suppress(RuntimeError):  # The loop has ended.
            loop.call_soon_threadsafe(task.cancel)
        thread.join(5.0)
