"""Code that all backends share: protocols, files of a run directory, requests to end a payload, and removal of old files."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

from dagster_pipes import PipesContextData

from ..edge.base_directory import SWEPT, sweep
from ..errors import UnhealthyNode
from ..follow import Cadence, Evidence
from ..plan import Plan
from ..runtime.protocol.messages import Operation
from ..runtime.protocol.record import CANCEL, CONTEXT, JOURNAL, PAYLOAD, SECRETS, STDIO
from ..runtime.protocol.spec import to_json
from ..slurm.exclusion import Exclusion
from ..slurm.shared_queue import fetch_queue
from ..ssh.base import Connection, Read
from .layout import Layout
from .ownership import UNCONTESTED, Ownership

_INTERVAL = 1.0  # Seconds between two attempts to deliver a cancel request.
# Seconds within which a further signal belongs to the same interrupt: Ctrl-C reaches a step process twice, from the terminal
# and from Dagster's multiprocess executor.
_REPEATED = 1.0


@dataclass(frozen=True)
class Step:
    """One attempt at a Dagster step that runs a payload."""

    run_id: str
    step_key: str
    partition_key: str | None
    log: Any  # The step's Dagster log.
    reattached: bool = False  # Whether an earlier attempt at the step started the payload, and this attempt continues it.
    owner: Ownership = UNCONTESTED  # Says whether this attempt still owns the payload.
    files: Mapping[str, bytes] = field(default_factory=dict)  # Further files of the run directory, by name.


class RunningPayload(Protocol):
    """A payload whose runtime was started or waits in Slurm's queue. The defaults of the methods suit a local process."""

    cluster_id: str  # Name of the Ray cluster.
    job_id: str | None = None  # Slurm's job id; None without Slurm.
    requeue: bool = False  # Whether Slurm may requeue the job, and so run the payload again.

    @property
    def waiting(self) -> bool:
        """Whether the runtime still waits in Slurm's queue."""
        return False

    def poll(self, evidence: Evidence) -> str | None:
        """Returns how the runtime ended, in words; None while the runtime lives.

        Raises RunFailure if the runtime can never start, or has waited for longer than the queue timeout. An implementation may
        add findings to `evidence`.
        """

    def next_reads(self) -> Sequence[Read]:
        """Returns the reads of files that the next `poll` will do."""
        return ()

    def cancel(self, now: bool = False) -> None:
        """Ask the runtime to end the payload: at once if `now` is True, otherwise after a grace period."""

    def kill(self) -> None:
        """End the runtime and all its processes at once."""

    def explain(self, evidence: Evidence) -> None:
        """Add logs and Slurm's accounting to the evidence. Called if the record alone does not explain the payload's end."""

    def metadata(self, evidence: Evidence) -> Mapping[str, Any]:  # noqa: ARG002
        """Returns the Dagster metadata that the backend adds to a result or failure, such as the Slurm job id."""
        return {}

    def release(self, evidence: Evidence) -> None:
        """End what must not go on after the step, such as a Slurm job that has not started.

        Called when the step is done with the payload. A session goes on, and so does a job that a later attempt owns. `evidence`
        is all that the step knows about the payload.
        """


# Callback that a backend calls with each payload as soon as the payload's runtime was started. `release` of such a payload is
# called later, even after an error.
Register = Callable[[RunningPayload], None]

Plans = Mapping[str, Plan]  # Plans by name of their component, in the order of the components in the job.


class Backend(Protocol):
    """Starts the runtime for a payload (`Plan`), or the runtimes for the payloads of all components at once (`Plans`)."""

    @property
    def connection(self) -> Connection:
        """The connection to the machine or cluster where runtimes run."""

    @property
    def layout(self) -> Layout:
        """The directories on the machine or cluster where runtimes run; the first access may connect to the cluster."""

    @property
    def cadence(self) -> Cadence:
        """The pauses between two reads of a payload's run record."""

    def check(self, plan: Any, /) -> None:
        """Raise ValueError if this backend cannot run a plan. The message names the configuration field. Nothing is started."""

    def start(self, plan: Any, run_dir: str, context: PipesContextData, step: Step, register: Register, /) -> object:
        """Create a run directory and start the plan's runtimes, or continue the runtimes of a reattached step.

        Calls `register` with each payload as soon as the payload's runtime was started. Returns the payload; a backend for
        `Plans` returns None. Raises StartError if a payload cannot be started, and OSError if the machine or cluster cannot be
        reached or written to.
        """

    def example(self, plan: Any, /) -> str:
        """Returns the command or batch script of a plan, for display; words in capitals stand for values not yet known."""

    def sweep(self, retention_days: float) -> None:
        """Remove what was not used for `retention_days`, and what the caller cannot remove itself.

        A backend for Slurm removes run directories and other files on the cluster, in a thread of its own. A backend for this
        machine removes at most the directories of sessions that have ended.
        """


@runtime_checkable
class CanReattach(Protocol):
    """A backend whose payloads outlive the Dagster process, so that a later attempt at the step can continue the payloads."""

    def can_reattach(self, plan: Plan, run_dir: str, step: Step) -> bool:
        """Returns whether `start` can continue the payload of a run directory: the payload runs this plan and has not failed."""

    def end_abandoned(self, run_dir: str, grace_period: float, /) -> None:
        """End the payload of a run directory after the payload's owner, a Dagster process, died while ending the payload.

        The payload has `grace_period` seconds to end by itself. Raises StartError if Slurm does not confirm the end.
        """


@runtime_checkable
class CanExclude(Protocol):
    """A backend whose Slurm jobs can avoid nodes that failed a health check."""

    def remember_unhealthy(self, nodes: Sequence[UnhealthyNode]) -> None:
        """Record nodes that failed a health check, so that later jobs of this user can avoid them; raises OSError."""

    def exclusion_for_plan(self, plan: Any, /) -> Exclusion:
        """Returns the nodes that a new job would avoid after failed health checks; raises OSError if Slurm does not answer."""


# ---- Files


def run_files(plan: Plan, context: PipesContextData) -> dict[str, bytes]:
    """Returns the files that a run directory has before the payload's runtime starts, as contents by file name.

    The files of the run record are empty. On NFS, a file that was looked up before it existed would stay missing for a minute.
    """
    files = {PAYLOAD: to_json(plan.payload), CONTEXT: json.dumps(context), JOURNAL: "", STDIO: ""}
    if plan.secret_env:
        files[SECRETS] = json.dumps(plan.secret_env)
    return {name: content.encode("utf-8") for name, content in files.items()}


def write_run_dir(connection: Connection, run_dir: str, files: Mapping[str, bytes]) -> None:
    """Create a run directory with the given files; raises OSError if a file cannot be written."""
    connection.make_dir(run_dir)
    for name, content in files.items():
        connection.write(os.path.join(run_dir, name), content)


def cancel_request_json(now: bool) -> str:
    """Returns a cancel request as the JSON text that the runtime reads. If `now` is True, the payload has no grace period."""
    return json.dumps({"op": Operation.CANCEL, "now": now})


def write_cancel_request(connection: Connection, run_dir: str, now: bool) -> None:
    """Ask the runtime of a run directory to end the payload: at once if `now` is True, otherwise after a grace period."""
    connection.write(os.path.join(run_dir, CANCEL), cancel_request_json(now).encode())


@dataclass
class CancelRequest:
    """The request to end one payload. `send` tries to deliver the request for the first time, and `resend` tries again."""

    deliver: Callable[[bool], Any]  # Called with `now` to deliver the request; raises OSError on failure.
    log: Any
    now: bool | None = None  # Whether the request leaves the payload no grace period; None before `send`.
    delivered: bool = False
    error: OSError | None = None  # Why the last delivery failed; None if it worked.
    sent_at: float = 0.0  # Time of the last try to deliver the request, by this machine's monotonic clock.

    def send(self, now: bool) -> None:
        """Send the request, unless an equal request was sent before. If `now` is True, the payload has no grace period.

        A request with `now` True is sent even after a request with `now` False, but not the other way round. If the delivery
        fails, the function logs a warning and returns; `resend` tries again.
        """
        if self.now is None or now > self.now:
            self.now, self.delivered, self.sent_at = now, False, -math.inf
            self.resend()

    def resend(self) -> None:
        """Send the request again if the request was not delivered, at most once a second. Logs the first failure as a warning."""
        if self.now is None or self.delivered or time.monotonic() - self.sent_at < _INTERVAL:
            return
        try:
            self.deliver(self.now)
            self.delivered, self.error = True, None
        except OSError as error:
            if self.error is None:
                self.log.warning(f"[rayslurm] the payload cannot be told to end, which is tried again: {error}")
            self.error = error
        self.sent_at = time.monotonic()

    def resend_for(self, evidence: Evidence) -> None:
        """Call `resend`; if a request without grace period cannot be delivered, mark the payload unreachable in the evidence."""
        self.resend()
        if self.now and self.error is not None:
            evidence.unreachable = str(self.error)


@contextmanager
def _handled_by(take: Callable[[int], None]) -> Iterator[None]:
    """Inside the block, call `take` with the number of each SIGINT or SIGTERM that arrives. No effect outside the main thread."""
    with ExitStack() as stack:
        for signum in (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ():
            # getsignal returns None for a handler that Python did not install; such a handler cannot be restored.
            stack.callback(signal.signal, signum, signal.getsignal(signum) or signal.SIG_DFL)
            signal.signal(signum, lambda received, _: take(received))
        yield


@contextmanager
def delayed_interrupts() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until the end of the block. Then the first of the delayed signals takes effect."""
    came: list[int] = []
    try:
        with _handled_by(came.append):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


@contextmanager
def noticed_interrupts() -> Iterator[Callable[[], None]]:
    """Record each SIGINT and SIGTERM inside a block, and pass the signal on to the handler that was installed before the block.

    Yields a function without arguments. If no signal was recorded, the function does nothing. Otherwise the function calls the
    handler of the first recorded signal again. A long block must call the function now and then, because the first call of a
    handler may have no effect: Python ignores an exception that a handler raises while the main thread runs a callback of the
    garbage collector. Outside the main thread, no signal is recorded.
    """
    came: list[Callable[[], None]] = []

    def noticing(handler: Callable[[int, Any], Any]) -> Callable[[int, Any], None]:
        def handle(signum: int, frame: Any) -> None:
            came.append(partial(handler, signum, None))
            handler(signum, frame)

        return handle

    with ExitStack() as stack:
        for signum in (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ():
            handler = signal.getsignal(signum)
            if callable(handler):
                stack.callback(signal.signal, signum, handler)
                signal.signal(signum, noticing(handler))
        yield lambda: came[0]() if came else None


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], bool]]:
    """Ignore SIGINT and SIGTERM while a block cleans up after an interrupt.

    Yields a function that returns whether a further signal has come. Signals in the first `_REPEATED` seconds of the block do
    not count, because such signals belong to the first interrupt. Outside the main thread, no signal is ignored, and the
    function returns False.
    """
    ignored_until = time.monotonic() + _REPEATED
    later: list[int] = []
    with _handled_by(lambda signum: later.append(signum) if time.monotonic() > ignored_until else None):
        yield lambda: bool(later)


def sweep_remote(
    connection: Connection, base: str, retention_days: float, *, every_minutes: int = 60, timeout: float = 600.0
) -> list[str]:
    """Remove the run directories, sessions, bundles and runtimes on the cluster that were not used for `retention_days`.

    The directory of a session's allocation stays while the allocation's job may live. The newest directory of each session
    stays while any process looks for the session, because the number of the newest directory determines the next number. A
    bundle or runtime stays while a run or session names the bundle or runtime.

    Args:
        connection: The connection to the cluster.
        base: The base directory on the cluster.
        retention_days: The number of days; less than a minute counts as a minute.
        every_minutes: All processes on all machines together sweep at most once in this number of minutes. If the number is 0,
            each call sweeps.
        timeout: The number of seconds after which the call gives up. A later sweep removes the rest.

    Returns the removed paths, relative to the base directory; [] if no sweep is due. Raises OSError if the cluster cannot be
    reached, the base directory cannot be written, or the call has given up.
    """
    swept = connection.modified(os.path.join(base, SWEPT))
    # If the clocks differ, a sweep starts in vain, or later.
    if every_minutes and swept is not None and abs(time.time() - swept) < 60.0 * every_minutes:
        return []
    jobs = None
    if connection.modified(os.path.join(base, "sessions")) is not None:
        with contextlib.suppress(OSError):
            jobs = [row.job_id for row in fetch_queue(connection).rows]
    age = max(60.0, retention_days * 86400.0)
    return connection.call(sweep, base, age, 60.0 * every_minutes, jobs, timeout=timeout)
