"""Makes a port of a head node reachable at a URL of this machine, until the cluster ends (`serve`) or a block ends (`served`)."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

from ..runtime.protocol.spec import ClusterAccess
from .find import Found, look_again
from .head import ClusterEnded, Head
from .proxy import Proxy

_FIRST_TIMEOUT = 90.0  # Seconds in which the first stream to the head must come.


@dataclass(frozen=True)
class Service:
    """An HTTP server on the loopback address of the head node: the port, and the token that requests need ("" for none).

    `secret` is the first part of all paths of the server, as in /SECRET/lab; None if the paths have no such part.
    """

    port: int
    token: str
    secret: str | None = None


def dashboard_of(access: ClusterAccess) -> Service:
    """Returns the Ray dashboard of a cluster as a service; the cluster must have a dashboard."""
    assert access.dashboard_port is not None  # `choose` refuses clusters without dashboard.
    return Service(access.dashboard_port, access.token)


async def serve(
    found: Found, say: Callable[[str], None], ready: Callable[[Proxy], Any], port: int = 0, service: Service | None = None
) -> None:
    """Makes a service of a cluster reachable at a URL of this machine until the cluster ends; then raises ClusterEnded.

    If `service` is None, the service is the Ray dashboard. The proxy listens on `port` of this machine, or on any free port if
    `port` is 0. `ready` is called with the proxy once the cluster is reached. `say` is called with a sentence when the connection
    is lost or restored. Raises ClusterEnded also if the cluster cannot be reached in time, and OSError if the port is taken.
    """
    service = service or dashboard_of(found.access)
    head = Head(found.connection, found.access, look_again(found), say, service.port)
    proxy = Proxy(head, service.token, service.port, service.secret)
    await proxy.start(port)
    running = asyncio.ensure_future(head.run())
    try:
        first = asyncio.ensure_future(head.until_ready(_FIRST_TIMEOUT))
        await asyncio.wait([running, first], return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            try:
                await first
            except asyncio.TimeoutError:
                where = f"the Ray cluster on {found.access.hostname}"
                raise ClusterEnded(f"{where} could not be reached within {_FIRST_TIMEOUT:.0f} s; try again") from None
            ready(proxy)
        else:
            first.cancel()
        await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await proxy.close()


@contextlib.contextmanager
def served(
    found: Found, say: Callable[[str], None], service: Service | None = None, ended: Callable[[str], None] | None = None
) -> Iterator[str]:
    """Context manager that makes a service of a cluster reachable at a URL of this machine, and yields the URL.

    If `service` is None, the service is the Ray dashboard. Raises ClusterEnded if the cluster cannot be reached. `say` is called
    with a sentence when the connection is lost or restored. `ended` is called with a sentence when the URL stops working, because
    the cluster has ended or stays out of reach; if `ended` is None, `say` is called.
    """
    url: Future[str] = Future()
    began: Future[tuple[asyncio.AbstractEventLoop, Any]] = Future()

    async def work() -> None:
        began.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        await serve(found, say, lambda proxy: url.set_result(proxy.url), service=service)

    def run() -> None:
        try:
            asyncio.run(work())  # `asyncio.run` also ends the open connections of clients.
        except asyncio.CancelledError:
            pass
        except Exception as error:  # noqa: BLE001
            if not url.done():
                url.set_exception(error)
            else:
                (ended or say)(str(error))
        finally:
            began.cancel()  # Has an effect only if no event loop could be made, so that `work` has never run.

    thread = threading.Thread(target=run, name="rayslurm-proxy", daemon=True)
    thread.start()
    try:
        yield url.result()
    finally:
        with contextlib.suppress(CancelledError, RuntimeError):  # The loop has never begun, or has ended.
            loop, task = began.result()
            loop.call_soon_threadsafe(task.cancel)
        thread.join(5.0)
