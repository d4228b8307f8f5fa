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
from dataclasses import dataclass, field, replace
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

_SWEEP_TIMEOUT = 600.0  # Seconds for one removal of old files on a cluster; without SSH, there is no limit.
_INTERVAL = 1.0  # Seconds between two attempts to deliver a cancel request.
# Seconds within which a further signal belongs to the same interrupt: Ctrl-C reaches a step process twice, from the terminal
# and from Dagster's multiprocess executor.
_REPEATED = 1.0


@dataclass(frozen=True)
class Step:
    """One attempt at a Dagster step that runs a payload. `rayslurm submit`, which runs without Dagster, also makes a `Step`."""

    run_id: str
    step_key: str
    partition_key: str | None
    log: Any  # The step's Dagster log.
    reattached: bool = False  # Whether an earlier attempt at the step started the payload, and this attempt continues it.
    owner: Ownership = UNCONTESTED  # Says whether this attempt still owns the payload.
    files: Mapping[str, bytes] = field(default_factory=dict)  # Further files of the run directory, by name.


class RunningPayload(Protocol):
    """A payload that a backend has started: its runtime runs, or its Slurm job waits or runs.

    The methods with a body are defaults, which suit a runtime that is a process of this machine.
    """

    cluster_id: str  # Name of the Ray cluster.
    job_id: str | None = None  # Slurm's job id; None without Slurm.
    requeue: bool = False  # Whether Slurm may requeue the job, and so run the payload again.

    @property
    def waiting(self) -> bool:
        """Whether the runtime still waits in Slurm's queue."""
        return False

    def poll(self, evidence: Evidence) -> str | None:
        """Check once whether the runtime has ended; returns a text that says how the runtime ended, or None while it lives.

        Raises RunFailure if the runtime can never start, or has waited for longer than the queue timeout. `evidence` has the
        known facts about the payload; an implementation may add facts.
        """

    def next_reads(self) -> Sequence[Read]:
        """Returns the reads of files that the next `poll` will do, as tuples of path, offset and number of bytes.

        The caller can then read the files of many payloads by one remote call.
        """
        return ()

    def cancel(self, now: bool = False) -> None:
        """Ask the runtime to end the payload, without waiting for the end.

        The payload has a grace period to end by itself; if `now` is True, it has none. If the request cannot be delivered, a
        warning is logged, and later calls of `poll` try again.
        """

    def kill(self) -> None:
        """End the payload by force, without a grace period: kill its runtime, or cancel its Slurm job."""

    def explain(self, evidence: Evidence) -> None:
        """Add the last lines of the logs, and Slurm's accounting, to `evidence`.

        Called after the payload's end, if the run record alone does not explain it.
        """

    def metadata(self, evidence: Evidence) -> Mapping[str, Any]:  # noqa: ARG002
        """Returns the Dagster metadata that the backend adds to a result or failure, such as the Slurm job id."""
        return {}

    def release(self, evidence: Evidence) -> None:
        """Clean up when the step no longer follows the payload; for instance, cancel a Slurm job that has not started.

        Does not end the session of the payload, or a job that a later attempt at the step owns. `evidence` has all known facts
        about the payload.
        """


# Callback that a backend calls with each payload as soon as the payload's runtime was started. `release` of such a payload is
# called later, even after an error.
Register = Callable[[RunningPayload], None]

Plans = Mapping[str, Plan]  # Plans by name of their component, in the order of the components in the job.


class Backend(Protocol):
    """Starts the runtime of a payload or, with topology "separate", the runtimes of the payloads of all components at once.

    The parameter `plan` is a `Plan` or, with topology "separate", `Plans`.
    """

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
        """Raise ValueError if this backend cannot run `plan`; the message names the configuration field. Starts nothing."""

    def start(self, plan: Any, run_dir: str, context: PipesContextData, step: Step, register: Register, /) -> object:
        """Create the run directory and start the plan's runtimes; if `step.reattached` is True, continue the runtimes that exist.

        Does not wait for the end of the payloads. Calls `register` with each payload as soon as its runtime has started. Returns
        the payload if `plan` is a single `Plan`; if it is `Plans`, one for each component, returns None. Raises StartError if a
        payload cannot be started, and OSError if the machine or cluster cannot be reached or written to.
        """

    def example(self, plan: Any, /) -> str:
        """Returns the command or batch script of a plan, for display; words in capitals stand for values not yet known."""

    def sweep(self, retention_days: float) -> None:
        """Remove files of earlier payloads that were not used for `retention_days` days.

        A backend for Slurm removes run directories and other files on the cluster, in a background thread, and ignores errors. A
        backend for this machine removes at most the directories of sessions that have ended; the caller removes all other old
        files here.
        """


@runtime_checkable
class CanReattach(Protocol):
    """Protocol of a backend whose payloads outlive the Dagster process, so that a later attempt at the step can continue them."""

    def can_reattach(self, plan: Plan, run_dir: str, step: Step) -> bool:
        """Returns whether `start` can continue the payload of the run directory `run_dir`, which an earlier attempt has started.

        This is so if that payload was started with the same plan, and either still waits or runs, or has succeeded. `step` is the
        present attempt at the step.
        """

    def end_abandoned(self, run_dir: str, grace_period: float, /) -> None:
        """End the payload of `run_dir`, which an earlier attempt started, and wait for the end.

        Called if this attempt could not take the payload over, because the earlier attempt had begun to end or judge the payload.
        The earlier attempt may have died before it ended the payload. The payload has `grace_period` seconds to end by itself;
        job arrays have none. Raises StartError if Slurm does not confirm the end or, for a payload in a session, if the run
        record does not show the end in time.
        """


@runtime_checkable
class CanExclude(Protocol):
    """Protocol of a backend whose Slurm jobs can avoid nodes that failed a health check."""

    def remember_unhealthy(self, nodes: Sequence[UnhealthyNode]) -> None:
        """Record in the base directory that `nodes` failed a health check, so that later jobs of this user can avoid these nodes.

        Raises OSError if the cluster does not answer, or the base directory cannot be written.
        """

    def exclusion_for_plan(self, plan: Any, /) -> Exclusion:
        """Returns the nodes that a new job would avoid after failed health checks; raises OSError if Slurm does not answer."""


# ---- Files


def run_files(plan: Plan, context: PipesContextData, step: Step) -> dict[str, bytes]:
    """Returns the files that a run directory has before the payload's runtime starts, as contents by file name.

    The file `PAYLOAD` has the run id and the key of `step`, by which the `rayslurm` commands find the run. The files of the run
    record are empty. They exist from the start because of NFS: a file that is looked up before it exists may seem to be missing
    for a minute.
    """
    payload = replace(plan.payload, run_id=step.run_id, step=step.step_key)
    files = {PAYLOAD: to_json(payload), CONTEXT: json.dumps(context), JOURNAL: "", STDIO: ""}
    if plan.secret_env:
        files[SECRETS] = secrets_json(plan)
    return {name: content.encode("utf-8") for name, content in files.items()}


def secrets_json(plan: Plan) -> str:
    """Returns the content of the file `SECRETS`: the secret variables of a plan."""
    return json.dumps(plan.secret_env)


def write_run_dir(connection: Connection, run_dir: str, files: Mapping[str, bytes]) -> None:
    """Create a run directory with `files`, contents by file name; raises OSError if a file cannot be written."""
    connection.make_dir(run_dir)
    for name, content in files.items():
        connection.write(os.path.join(run_dir, name), content)


def cancel_request_json(now: bool) -> str:
    """Returns the JSON text by which a runtime is asked to end its payload. If `now` is True, the payload has no grace period."""
    return json.dumps({"op": Operation.CANCEL, "now": now})


def write_cancel_request(connection: Connection, run_dir: str, now: bool) -> None:
    """Write a file into the run directory `run_dir` that asks its runtime to end the payload, and return at once.

    If `now` is True, the payload has no grace period. Raises OSError if the file cannot be written.
    """
    connection.write(os.path.join(run_dir, CANCEL), cancel_request_json(now).encode())


@dataclass
class CancelRequest:
    """The request to end one payload. `send` tries to deliver the request; `resend` tries again if that failed."""

    deliver: Callable[[bool], Any]  # Called with `now` to deliver the request; raises OSError on failure.
    log: Any
    now: bool | None = None  # Whether the request leaves the payload no grace period; None before `send`.
    delivered: bool = False
    error: OSError | None = None  # Why the last delivery failed; None if it worked.
    sent_at: float = 0.0  # Time of the last try to deliver the request, by this machine's monotonic clock.

    def send(self, now: bool) -> None:
        """Try to deliver the request to end the payload. If `now` is True, the payload has no grace period.

        Does nothing if a request was sent before, except when the earlier request had a grace period and this one has none. If
        the delivery fails, the function logs a warning and returns; the caller then calls `resend` until it works.
        """
        if self.now is None or now > self.now:
            self.now, self.delivered, self.sent_at = now, False, -math.inf
            self.resend()

    def resend(self) -> None:
        """Try again to deliver the request, at most once a second. Does nothing if no request was sent, or if it was delivered.

        The first of several failures is logged as a warning; none is raised.
        """
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
        """Call `resend`. If a request without grace period is still not delivered, set `evidence.unreachable` to the reason."""
        self.resend()
        if self.now and self.error is not None:
            evidence.unreachable = str(self.error)


@contextmanager
def _handled_by(take: Callable[[int], None]) -> Iterator[None]:
    """Context manager: inside the block, call `take` with the number of each SIGINT or SIGTERM, instead of the earlier handlers.

    After the block, the earlier handlers are installed again. Outside the main thread, the context manager does nothing.
    """
    with ExitStack() as stack:
        for signum in (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ():
            # getsignal returns None for a handler that Python did not install; such a handler cannot be restored.
            stack.callback(signal.signal, signum, signal.getsignal(signum) or signal.SIG_DFL)
            signal.signal(signum, lambda received, _: take(received))
        yield


@contextmanager
def delayed_interrupts() -> Iterator[None]:
    """Context manager: delay SIGINT and SIGTERM until the end of the block.

    Then the first delayed signal is raised, and the others are dropped. Outside the main thread, no signal is delayed.
    """
    came: list[int] = []
    try:
        with _handled_by(came.append):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


@contextmanager
def noticed_interrupts() -> Iterator[Callable[[], None]]:
    """Context manager: record each SIGINT and SIGTERM inside the block, and also call the handler that was installed before.

    Yields a function without arguments. If a signal was recorded, the function calls the handler of the first signal again;
    otherwise it does nothing. A long block must call the function now and then, because the exception of the first call may get
    lost: Python drops an exception that a handler raises while the garbage collector runs a callback. Outside the main thread, no
    signal is recorded.
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
    """Context manager: ignore SIGINT and SIGTERM inside a block that cleans up after an interrupt.

    Yields a function that returns whether a further signal has come. Signals in the first `_REPEATED` seconds of the block do not
    count, because they belong to the first interrupt. Outside the main thread, no signal is ignored, and the function returns
    False.
    """
    ignored_until = time.monotonic() + _REPEATED
    later: list[int] = []
    with _handled_by(lambda signum: later.append(signum) if time.monotonic() > ignored_until else None):
        yield lambda: bool(later)


def sweep_remote(connection: Connection, base: str, retention_days: float, *, every_minutes: int = 60) -> list[str]:
    """Remove run directories, sessions, bundles, environments and runtimes on the cluster, if not used for `retention_days` days.

    The directory of a session's allocation stays while the allocation's job may live. The newest of these directories is removed
    only together with the whole session, because the number of the newest directory determines the next number. A bundle,
    environment or runtime stays while the files of a run or session name it.

    Args:
        connection: The connection to the cluster.
        base: The base directory on the cluster.
        retention_days: The number of days; less than a minute counts as a minute.
        every_minutes: All processes on all machines together sweep at most once in this number of minutes. If the number is 0,
            each call sweeps.

    Returns the removed paths, relative to the base directory; [] if no sweep is due. Raises OSError if the cluster cannot be
    reached, the base directory cannot be written, or the call takes longer than `_SWEEP_TIMEOUT`. A later sweep removes the rest.
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
    return connection.call(sweep, base, age, 60.0 * every_minutes, jobs, timeout=_SWEEP_TIMEOUT)
