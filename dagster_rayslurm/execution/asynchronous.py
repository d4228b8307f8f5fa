"""Runs the steps of a run for a caller in an event loop. No thread blocks while the run's payloads wait and run.

The steps of a run are a generator of type `Steps`: it yields payloads, and its caller follows these payloads until they have
ended, and then continues the generator. For all callers in this process, the hub (see `follow.hub`) follows the payloads of one
Slurm cluster in a single thread.
"""

from __future__ import annotations

import asyncio
import sys
import time
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Generic, TypeVar

from ..follow import Following
from ..follow.hub import Followed, Hub
from .run import Steps

T = TypeVar("T")


class _Done(Generic[T]):
    """Holds the return value of a generator of type `Steps`, because a future cannot pass on the exception `StopIteration`."""

    def __init__(self, result: T) -> None:
        self.result = result


async def drive_async(steps: Steps[T], hub: Hub) -> T:
    """Coroutine that runs the generator `steps` to its end without blocking the event loop; returns the generator's result.

    The generator runs in threads of `hub`, and `hub` also follows the payloads that the generator yields. Exceptions of the
    generator are raised.

    The first cancellation of the calling task ends the payloads as an interrupt does, with a grace period. A second cancellation
    ends the payloads at once. After a cancellation, `CancelledError` is raised, but only when the payloads have ended.
    """
    cancelled: asyncio.CancelledError | None = None
    thrown = False  # Whether `cancelled` was raised inside the steps.
    hurried = False  # Whether the task was cancelled a second time.
    followed: Followed | None = None
    began = time.monotonic()
    work = hub.starting.submit(partial(_advance, steps, None, None))

    async def end_of(future: Future[Any], following: Following | None = None) -> None:
        """Wait until `future` is done; the first cancellation of the task may end the wait earlier.

        If `following` is None, a thread does the work of `future`. If the thread has not begun when the task is first cancelled,
        the work is cancelled, and the function returns. Work that has begun is awaited in spite of all cancellations.

        If `following` is not None, `future` is done when the payloads in `following` have ended. The function returns when the
        task is first cancelled. If the task was cancelled before, each further cancellation ends the payloads at once, by a call
        of `following.hurry`, and the function goes on waiting.
        """
        nonlocal cancelled, hurried
        done, loop = asyncio.Event(), asyncio.get_running_loop()

        def wake(_: object) -> None:
            with suppress(RuntimeError):  # The loop is closed.
                loop.call_soon_threadsafe(done.set)

        future.add_done_callback(wake)
        while not future.done():
            try:
                await done.wait()
            except asyncio.CancelledError as request:
                if cancelled is None:
                    cancelled = request
                    stack.enter_context(_shield())
                    if future.cancel() or following is not None:
                        return
                else:
                    hurried = True
                    if following is not None:
                        following.hurry()

    with ExitStack() as stack:
        try:
            while True:
                await end_of(work)
                if work.cancelled():
                    steps.close()
                    break
                step = work.result()
                if isinstance(step, _Done):
                    if cancelled is None:
                        return step.result
                    break
                error: BaseException | None = cancelled
                if cancelled is None or thrown:
                    if hurried:
                        step.hurry()
                    followed = hub.follow(step, began)
                    await end_of(followed.ended, step)
                    error = followed.ended.exception() if followed.ended.done() else cancelled
                thrown = thrown or (error is not None and error is cancelled)
                work = hub.ending.submit(partial(_advance, steps, followed, error), cancellable=False)
        except GeneratorExit:  # The loop is gone.
            if followed is not None:
                followed.leave()
            raise
        except BaseException as raised:
            if cancelled is None or raised is cancelled:
                raise
            raise cancelled from raised
    assert cancelled is not None
    raise cancelled


def _advance(steps: Steps[T], followed: Followed | None, error: BaseException | None) -> Following | _Done[T]:
    """Continue the generator `steps` to its next `yield`; returns the payloads that the generator yields.

    If the generator ends, the function returns the generator's result in a `_Done`. An exception that the generator does not
    catch is raised.

    Args:
        steps: The generator.
        followed: The payloads that the hub follows since the last `yield`; the hub now stops following them. None if the hub has
            not followed any.
        error: The exception to raise inside the generator, at its last `yield`; None to continue the generator normally.
    """
    if followed is not None:
        followed.leave()
    try:
        return next(steps) if error is None else steps.throw(error)
    except StopIteration as stop:
        return _Done(stop.value)


def _shield() -> Any:
    """Returns a context manager that protects the `await`s inside it from anyio, which repeats a cancellation at each `await`.

    A further request to cancel the task still has an effect. If anyio is not imported, the context manager does nothing.
    """
    anyio = sys.modules.get("anyio")
    return anyio.CancelScope(shield=True) if anyio is not None else ExitStack()
