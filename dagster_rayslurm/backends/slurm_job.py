"""A Slurm job as this side sees it: what is known of it, why it waits, how it ended, and how it is ended for sure."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from ..errors import FailureKind, RunFailure
from ..follow import Evidence
from ..follow.follower import VISIBILITY_TIMEOUT
from ..interrupts import deferred_interrupts
from ..runtime.protocol.record import EXIT, node_log, tail_lines
from ..slurm.accounting import JobFacts, fetch_job_facts
from ..slurm.cancel import ASK_INTERVAL, wait_until_gone
from ..slurm.commands import without_option_variables
from ..slurm.errors import impossible, with_requested_values
from ..slurm.job_log import failed_tasks, node_number, relevant_lines
from ..slurm.pending_reasons import (
    most_informative_row,
    never_starts,
    partition_too_small,
    pending_reason,
    too_many_nodes,
    waiting_text,
)
from ..slurm.queue import SharedQueue, fetch_queue
from ..slurm.request import JobRequest
from ..slurm.script import LOG, parse_exit
from ..slurm.snapshot import QueueRow, QueueSnapshot, parse_count
from ..slurm.states import TERMINAL, Exited, JobPhase, JobStatus, JobWatch, Started, seen
from ..slurm.submit import SubmittedJob
from ..ssh.base import Connection
from .sessions.idle import IdleSessions

_FIRST_LOOK = 2.0
"""Seconds after the submission at which Slurm has said why a job waits; a look before that would delay the next one."""
_EXIT_INTERVAL = 1.0
"""Seconds between two looks at the exit code that the batch script leaves."""
_SETTLE = 3.0
"""Seconds that the record is read on after the job is known to be over: files may arrive later than that word."""
_UNSEEN = 15.0
"""As many of them for a record of which nothing was seen, though its job came to an end of its own, if a log says why there may
be none: the runtime could not start. Else a network file system has not shown any of it yet."""
_KILLED = 128
"""Exit codes from here on are those of a runtime that a signal ended; smaller ones are its payload's, or its own."""
_EXITED = frozenset({"COMPLETED", "FAILED"})
"""Slurm's states of a job that ended by itself."""
_NOT_BY_ITSELF = ("JobLaunchFailure", "RaisedSignal")
"""How Slurm's reason for a failed job begins whose script did not exit: it could not be started in its directory, say."""
STATE_DEADLINE = 15.0
"""Seconds in which a job that is on its way down comes to its final state."""
_LOG_BYTES = 65536
_SIGNALLED = ("Terminated", "Killed")
"""How srun says that a signal ended a task."""
_SHOWN = 3
"""Nodes whose logs are shown."""


class SlurmJob:
    """One Slurm job and the directory that its script and its runtimes write to.

    Args:
        commands: runs Slurm's programs, and reaches the files.
        queue: the shared view of the queue.
        request: what was asked for.
        submitted: the job.
        directory: where its exit code and logs are.
        queue_timeout: seconds after which a job that still waits is given up; None waits for ever.
        over_ssh: whether the cluster is behind SSH.
        log: the step's log.
        idle_sessions: sessions that may be in its way while it waits; None to let them be.
        waiting_since: when that time began, by the cluster's clock; None for when the job was submitted.
    """

    def __init__(
        self,
        *,
        commands: Connection,
        queue: SharedQueue,
        request: JobRequest,
        submitted: SubmittedJob,
        directory: str,
        queue_timeout: float | None,
        over_ssh: bool,
        log: Any,
        idle_sessions: IdleSessions | None = None,
        waiting_since: float | None = None,
    ) -> None:
        self.job_id = submitted.job_id
        self.number = int(submitted.job_id)
        self.directory = directory
        self.log = log
        self.cancelled = False
        """Whether Slurm was asked to end it, so that somebody waits for its word."""
        self._commands = commands
        self._queue = queue
        self._request = request
        self._submitted = submitted
        self._queue_timeout = queue_timeout
        self._over_ssh = over_ssh
        self._waiting_since = submitted.at if waiting_since is None else waiting_since
        self._watch = JobWatch(submitted.at, request.requeue)
        self._exit_looked = time.monotonic()
        self._told = ""
        self._trouble: str | None = None
        self._over_since: float | None = None
        self._confirmed = False
        self._asked_at = 0.0
        self._idle_sessions = idle_sessions
        self._snapshot: QueueSnapshot | None = None
        self._rows: tuple[QueueRow, ...] = ()
        """Of its components; none for a job that is none of several."""
        self._counted = False
        self._too_large: str | None = None
        """Why it can never start, if it asks for more nodes than there are."""

    @property
    def submitted_at(self) -> float:
        """When it was submitted, by the cluster's clock, in seconds of the epoch."""
        return self._submitted.at

    def now(self) -> float:
        """The cluster's clock, by which it was submitted, in seconds of the epoch.

        Raises:
            OSError: it cannot be asked.
        """
        return self._queue.clock.now()

    @property
    def view(self) -> JobStatus:
        """What the job is, as far as was seen."""
        return self._watch.view

    @property
    def place(self) -> str:
        """Where its files are, in words; "" for this machine."""
        return self._commands.place if self._over_ssh else ""

    @property
    def requeue(self) -> bool:
        """Whether Slurm may run it again."""
        return self._request.requeue

    def observe(self, started_at: float | None = None, ask: bool = True) -> bool:
        """Take in what there is to see, without waiting for Slurm.

        Args:
            started_at: when its record started, if it has.
            ask: whether to look at the queue; else only the exit code is looked for.

        Returns:
            Whether anything could be seen; trouble is told to the log.
        """
        try:
            if started_at is not None and started_at != self._watch.started_at:
                self._watch = self._watch.after(Started(started_at))
            if ask:
                self._look()
            self._look_for_exit()
        except OSError as error:
            self._complain(str(error))
            return False
        return True

    def _look(self) -> None:
        local = time.monotonic()
        if not self.cancelled:
            now = self._queue.clock.now()
            too_early = 0 <= now - self._submitted.at < _FIRST_LOOK
            snapshot = None if too_early else self._queue.latest(now)
        elif local - self._asked_at >= ASK_INTERVAL:
            self._asked_at = local
            snapshot = fetch_queue(self._commands)  # Somebody waits for this one, so it may cost a question of its own.
        else:
            snapshot = None
        if snapshot is not None:
            self._see(snapshot)
        if self._queue.error:
            self._complain(self._queue.error)

    def _see(self, snapshot: QueueSnapshot) -> None:
        self._watch = self._watch.after(seen(snapshot, self.number))
        self._snapshot = snapshot
        rows = snapshot.components(self.number)
        self._rows = rows if len(rows) > 1 else ()

    def _look_for_exit(self) -> None:
        local = time.monotonic()
        if local - self._exit_looked >= _EXIT_INTERVAL:
            self._exit_looked = local
            code = parse_exit(self._commands.read(os.path.join(self.directory, EXIT), 0, _LOG_BYTES), self.number)
            if code is not None:
                self._watch = self._watch.after(Exited(self._queue.clock.now(), code))

    def tell(self) -> None:
        """Say why the job waits, whenever that changes, and have idle sessions make way for it."""
        view = self.view
        if view.phase != JobPhase.PENDING:
            return
        row = most_informative_row(self._rows)
        at = view.expected_start if row is None else row.start
        text = waiting_text(pending_reason(view.reason, self._rows, self._request), at, self._queue.clock.now())
        if text and text != self._told:
            self._told = text
            self.log.info(f"[rayslurm] Slurm job {self.job_id} is {text}")
        if self._idle_sessions is not None and self._snapshot is not None:
            with contextlib.suppress(OSError):  # Who cannot be reached now is asked at the next look.
                self._idle_sessions.make_way(self._snapshot, self._snapshot.components(self.number))
        if not self._counted and (self._rows or view.reason == "PartitionNodeLimit"):
            self._counted = True
            self._count()

    def _count(self) -> None:
        """Find out whether a job wants more nodes than there are.

        Raises:
            OSError: Slurm cannot be asked.
        """
        done = self._commands.run(without_option_variables(["sinfo", "--noheader", "--all", "--format=%R|%D"]), timeout=60)
        lines = [line.partition("|") for line in done.stdout.decode("utf-8", "replace").splitlines()]
        sizes = {name: parse_count(nodes.strip()) for name, _, nodes in lines}
        if self._rows:
            found = partition_too_small(self._rows, self._request, sizes)
            if found:
                self.log.warning(f"[rayslurm] {found}")
        elif self._snapshot is not None:
            for row in self._snapshot.components(self.number):
                self._too_large = too_many_nodes(row, self._request, sizes)

    def check_waiting(self) -> None:
        """End a job that cannot start as it was asked for, or has waited as long as its user allows.

        Raises:
            RunFailure: it is one of these.
            OSError: Slurm cannot be asked.
        """
        view, now = self.view, self._queue.clock.now()
        never = self._never() if view.phase == JobPhase.PENDING else None
        if never:
            raise RunFailure(
                FailureKind.SUBMISSION, f"Slurm job {self.job_id} can never start: {never}", self.metadata(Evidence())
            )
        if self._queue_timeout is None or now - self._waiting_since <= self._queue_timeout or view.phase == JobPhase.RUNNING:
            return
        # The shared view is of some seconds ago; a job that has just started must not be taken for one that waits.
        self._see(fetch_queue(self._commands))
        view = self.view
        if view.phase == JobPhase.PENDING:
            raise RunFailure(
                FailureKind.ALLOCATION,
                f"Slurm job {self.job_id} was still waiting after queue_timeout={self._queue_timeout:g} s: "
                + (pending_reason(view.reason, self._rows, self._request) or "no reason is known"),
                self.metadata(Evidence()),
                retry=False,
            )

    def _never(self) -> str | None:
        """Why it can never start; None if that is not so, or not known."""
        if self._rows:
            return never_starts(self._rows, self._request)
        if self._too_large:
            return self._too_large
        never = impossible(self.view.reason, self._request.partition)
        return with_requested_values(never, self._request) if never else None

    def end_description(self, started: bool, recorded: bool = True) -> str | None:
        """How the job ended, in words; None while it lives, and for a moment after: what it wrote may arrive later.

        Args:
            started: whether its record was seen to start.
            recorded: whether somebody reads a record of it.
        """
        view = self.view
        if not view.over:
            return None
        if self._over_since is None:
            self._over_since = time.monotonic()
        waited = time.monotonic() - self._over_since
        may_have_none = not (started or succeeded(view) or waited < _UNSEEN)
        if waited < settling(view, started, recorded and not self.cancelled) and not (may_have_none and self._says_why()):
            return None
        if view.exit_code is not None and view.state not in TERMINAL:
            return f"srun ended with exit code {view.exit_code}"
        return f"Slurm calls the job {view.state}" if view.phase == JobPhase.ENDED else "Slurm no longer knows the job"

    def _says_why(self) -> bool:
        """Whether Slurm or a log tells of more than how tasks ended: the log of a runtime which keeps a record is empty."""
        if self.view.reason.startswith(_NOT_BY_ITSELF):
            return True
        said = relevant_lines(f"{self._tail(LOG)}\n{self._tail(node_log(0))}")
        return not all(map(failed_tasks, said))

    def explain(self, evidence: Evidence, patience: float = STATE_DEADLINE) -> None:
        """Add what logs and Slurm tell.

        Args:
            evidence: takes it.
            patience: seconds in which the job shall come to its final state.
        """
        facts = self._facts(patience)
        evidence.job = facts and facts.with_component_ids([part.component_id for part in self._request.components])
        said = self._tail(LOG)
        evidence.runtime_log = "\n".join(text for text in (said, self._tail(node_log(0))) if text.strip())
        # Most of them srun ended itself, after the one that failed.
        failed = [each for each in failed_tasks(said) if not each[2].startswith(_SIGNALLED)]
        known = facts.nodes if facts is not None and facts.components else ()
        for node, task, how in failed[:_SHOWN]:
            number = node_number(node, task, known if self._request.further_components else None)
            tail = "" if number is None else self._tail(node_log(number))
            if number and tail.strip():
                evidence.tails[f"runtime on {node}"] = tail
            if evidence.culprit is None:
                last = (relevant_lines(tail) or [""])[-1]
                evidence.culprit = f"the runtime on node {node} ended ({how})" + (f": {last}" if last else "")

    def _tail(self, name: str) -> str:
        """The end of a log in the job's directory; "" if it cannot be read."""
        try:
            done = self._commands.run(["tail", "-c", str(_LOG_BYTES), "--", os.path.join(self.directory, name)], timeout=60)
        except OSError:
            return ""
        return tail_lines(done.stdout.decode("utf-8", "replace"))

    def _facts(self, patience: float) -> JobFacts | None:
        """What Slurm says of the job, once it has come to its end; None if it does not say."""
        deadline = time.monotonic() + patience
        facts, pause = None, 0.5
        while True:
            with contextlib.suppress(OSError):  # Slurm that does not answer leaves the verdict to the record.
                facts = fetch_job_facts(self._commands, self.number) or facts
            if (facts is not None and facts.is_final) or time.monotonic() > deadline:
                return facts
            time.sleep(pause)
            pause = min(2 * pause, 4.0)

    def metadata(self, evidence: Evidence) -> dict[str, Any]:
        """What is known of the job."""
        request = self._request
        metadata: dict[str, Any] = {"Slurm job ID": self.job_id, "Slurm job name": request.job_name}
        context = (evidence.end_or_partial or {}).get("context") or {}
        allocation = context.get("allocation") or {}
        used = [each["partition"] for each in allocation.get("components") or [allocation] if each.get("partition")]
        partitions = used or [part.partition for part in request.components if part.partition]
        if partitions:
            metadata["Slurm partition"] = ", ".join(dict.fromkeys(partitions))
        if allocation.get("account"):
            metadata["Slurm account"] = allocation["account"]
        if allocation.get("nodes"):
            metadata["Slurm nodes"] = ", ".join(allocation["nodes"])
        return metadata

    def _complain(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            self.log.warning(f"[rayslurm] the job goes on, but its state cannot be asked for: {trouble}")

    def cancel_until_gone(self, patience: float = 0.0) -> None:
        """Repeat the cancellation until Slurm agrees that the job is over; a job that does not go is waited for once."""
        if self._confirmed:
            return
        self._confirmed = True
        with deferred_interrupts():
            gone = wait_until_gone(self._commands, self.number, patience)
        if gone and self.cancelled:
            self.log.info(f"[rayslurm] Slurm job {self.job_id} is cancelled")
        if not gone:
            self.log.error(
                f"[rayslurm] Slurm job {self.job_id} may still be there: it was cancelled, and Slurm has not confirmed its end; "
                f"run `scancel {self.job_id}` on {self._commands.place}"
            )


def settling(view: JobStatus, started: bool, recorded: bool) -> float:
    """Seconds for which what a job wrote may arrive after it is known to be over. Pure.

    Args:
        view: the job, which is over.
        started: whether its record was seen to start.
        recorded: whether somebody reads a record of it.
    """
    if _exited(view) and (started or recorded):
        return VISIBILITY_TIMEOUT
    return _SETTLE if started or view.exit_code is not None else 0.0


def succeeded(view: JobStatus) -> bool:
    """Whether the job's runtime came to the end of a payload that succeeded, and so wrote it, as far as Slurm says. Pure."""
    return view.state == "COMPLETED" if view.exit_code is None else view.exit_code == 0


def _exited(view: JobStatus) -> bool:
    """Whether the job's runtime came to its own end, and so wrote one, as far as Slurm has not said otherwise by now."""
    if view.exit_code is None:
        return view.state in _EXITED
    return view.exit_code < _KILLED and (view.state not in TERMINAL or view.state in _EXITED)
