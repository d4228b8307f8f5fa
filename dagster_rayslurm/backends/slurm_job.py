"""One Slurm job: watch its state, say why the job waits and how it ended, and cancel the job until Slurm confirms the end."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import FailureKind
from ..failures import RunFailure
from ..follow import Evidence
from ..follow.follower import VISIBILITY_TIMEOUT
from ..runtime.protocol.messages import EndReason
from ..runtime.protocol.record import EXIT, node_log, tail_lines
from ..slurm.accounting import JobFacts, failed_tasks, fetch_job_facts, relevant_lines
from ..slurm.pending import most_informative_row, waiting_text
from ..slurm.refusals import never_starts, partition_too_small, pending_reason
from ..slurm.request import LOG, JobRequest
from ..slurm.shared_queue import QueueRow, QueueSnapshot, SharedQueue, fetch_queue, parse_count, run_slurm
from ..slurm.states import TERMINAL, JobPhase, JobStatus, JobWatch
from ..slurm.steps import parse_exit
from ..slurm.submit import ASK_INTERVAL, SubmittedJob, wait_until_gone
from ..ssh.base import Connection, ConnectionFailed, Read
from .base import CancelRequest, Step, deferred_interrupts, write_cancel_request

# Function that ends idle sessions whose nodes a waiting job could use; its arguments are the queue, and the job's rows in it.
MakeWay = Callable[[QueueSnapshot, Sequence[QueueRow]], None]

_FIRST_QUERY = 2.0  # Seconds after submission until Slurm says why a job waits; an earlier query would only delay the next query.
_EXIT_INTERVAL = 1.0  # Seconds between two reads of the exit code that the batch script leaves.
# Seconds for which an ended job's files are still read, because they may become visible later than the job's state.
_SETTLING_TIME = 3.0
# As `_SETTLING_TIME`, for a failed job without a visible record, whose log may say why its runtime did not start.
_UNSEEN_TIMEOUT = 15.0
_SIGNAL_EXIT = 128  # Exit codes from here on mean that a signal ended the runtime.
_EXITED = frozenset({"COMPLETED", "FAILED"})  # Slurm's states of a job whose batch script ended by itself.
# Beginnings of Slurm's reason for a failed job whose script did not exit, for instance because its directory was missing.
_SCRIPT_NOT_RUN = ("JobLaunchFailure", "RaisedSignal")
STATE_TIMEOUT = 15.0  # Seconds to wait until Slurm's accounting has the final state of a job that has ended.
_LOG_BYTES = 65536  # Bytes of the end of a log file that are read.
_SIGNALLED = ("Terminated", "Killed")  # Beginnings of srun's words for a task that a signal ended.
_MOST_LOGS = 3  # Most failed nodes whose logs become evidence.
_END_TIMEOUT = 5.0  # Seconds in which a job may end by itself after its runtime wrote the `end` record; then it is cancelled.
# Reasons of an `end` record after which `srun` may wait for ever: `srun` does not notice the end of tasks on a node that was
# reset, or whose slurmstepd was killed (22.05).
_SRUN_MAY_HANG = (EndReason.CLUSTER_LOST, EndReason.CLUSTER_START, EndReason.TERMINATED)
# Seconds between two touches of a waiting job's run directory, which keep the directory from being swept.
_TOUCH_INTERVAL = 3600.0


@dataclass(eq=False, kw_only=True)
class SlurmJob:
    """One Slurm job, from its submission until Slurm confirms its end."""

    commands: Connection  # The edge node, which runs Slurm's programs and reaches the job's files.
    queue: SharedQueue  # The user's jobs in Slurm's queue, through a file that all processes of the user share.
    request: JobRequest  # What the job asked Slurm for.
    submitted: SubmittedJob  # The job's id, and the time of submission.
    directory: str  # The directory to which the job's script and runtimes write the exit code and logs.
    queue_timeout: float | None  # Seconds after which a job that still waits in the queue fails; None waits for ever.
    log: Any  # The step's Dagster log.
    make_way: MakeWay | None = None  # Ends idle sessions whose nodes the waiting job could use; None leaves sessions alone.
    waiting_since: float | None = None  # Start of the queue timeout, by the cluster's clock; None for the time of submission.
    cancelled: bool = False  # Whether Slurm was asked to cancel the job.
    _snapshot: QueueSnapshot | None = None  # The last snapshot of the queue.
    # The next three are times by the monotonic clock of this machine.
    _queried_at: float = 0.0  # When this object last queried Slurm directly, because the job is cancelled.
    _exit_read_at: float = field(default_factory=lambda: time.monotonic())  # When the exit code was last read.
    _ended_at: float | None = None  # When `end_description` first saw that the job is over.
    _cancel_tried: bool = False  # Whether `cancel_until_gone` was called.
    _last_reason: str = ""  # The text about the waiting job that was logged last.
    _last_error: str | None = None  # The error that was logged last.
    _sizes_checked: bool = False  # Whether the request was compared with the sizes of the partitions.
    _too_large: str | None = None  # Why the job can never start, if it asks for more nodes than its partition has; else None.

    def __post_init__(self) -> None:
        self.job_id = self.submitted.job_id
        self.number = int(self.job_id)
        self.requeue = self.request.queue.requeue
        self.submitted_at = self.submitted.at
        self._watch = JobWatch(self.submitted_at, self.requeue)

    @property
    def status(self) -> JobStatus:
        """The state of the job at the last observation."""
        return self._watch.view

    @property
    def started_at(self) -> float | None:
        """The time at which the runtime began, by the cluster's clock; None if the runtime has not begun."""
        return self._watch.started_at

    def now(self) -> float:
        """Returns the time by the cluster's clock, in seconds since the epoch; raises OSError if the cluster cannot be asked."""
        return self.queue.clock.now()

    # ---- State

    def observe(self, started_at: float | None = None, ask: bool = True) -> bool:
        """Update `status` once, from the exit code that the batch script left and, if `ask` is True, from Slurm's queue.

        Returns True, or False if a read failed; the reason is then logged. `started_at` is the time at which the runtime began,
        in seconds since the epoch; None if the runtime is not known to have begun.
        """
        try:
            if started_at is not None and self._watch.started_at is None:
                # The clock of the payload's node may be ahead of the cluster's.
                self._watch = self._watch.started(min(started_at, self.now()))
            if ask:
                self._observe_queue()
            self._observe_exit()
        except OSError as error:
            self._warn(str(error))
            return False
        return True

    def _observe_queue(self) -> None:
        """Update the status from the snapshot of the queue that all steps share. For a cancelled job, query Slurm directly."""
        snapshot = None
        if not self.cancelled:
            now = self.now()
            if not 0 <= now - self.submitted_at < _FIRST_QUERY:
                snapshot = self.queue.latest(now)
        elif time.monotonic() - self._queried_at >= ASK_INTERVAL:
            self._queried_at = time.monotonic()
            snapshot = fetch_queue(self.commands)  # A user waits for the end of the job, which justifies a query of our own.
        if snapshot is not None:
            self.add_snapshot(snapshot)
        if self.queue.error:
            self._warn(self.queue.error)

    def add_snapshot(self, snapshot: QueueSnapshot) -> None:
        """Update the status from a snapshot of the queue."""
        self._watch = self._watch.seen(snapshot.began, snapshot.job(self.number))
        self._snapshot = snapshot

    @property
    def _rows(self) -> tuple[QueueRow, ...]:
        """The job's rows in the last snapshot of the queue, one row for each component; empty if the snapshot lacks the job."""
        return self._snapshot.components(self.number) if self._snapshot is not None else ()

    @property
    def _pending_reason(self) -> str:
        return pending_reason(self.status.reason, self._rows, self.request)

    def next_reads(self) -> list[Read]:
        """Returns the reads of files that the next `observe` will do, as tuples of path, offset and number of bytes.

        The only such file is the one with the exit code of the job's srun. The list is empty if this file was read less than
        `_EXIT_INTERVAL` seconds ago.
        """
        due = time.monotonic() - self._exit_read_at >= _EXIT_INTERVAL
        return [(os.path.join(self.directory, EXIT), 0, _LOG_BYTES)] if due else []

    def _observe_exit(self) -> None:
        for read in self.next_reads():
            self._exit_read_at = time.monotonic()
            code = parse_exit(self.commands.read(*read), self.number)
            if code is not None:
                self._watch = self._watch.exited(code)

    def _warn(self, error: str) -> None:
        """Log that the job's state is unknown because of `error`, unless the same error was logged last."""
        if error != self._last_error:
            self._last_error = error
            self.log.warning(f"[rayslurm] the job goes on, but its state cannot be asked for: {error}")

    # ---- Waiting

    def report_waiting(self) -> None:
        """If the job waits, log the reason each time it changes, and ask idle sessions whose nodes the job could use to end."""
        status = self.status
        if status.phase != JobPhase.PENDING:
            return
        row = most_informative_row(self._rows)
        start = status.expected_start if row is None else row.start
        text = waiting_text(self._pending_reason, start, self.now())
        if text and text != self._last_reason:
            self._last_reason = text
            self.log.info(f"[rayslurm] Slurm job {self.job_id} is {text}")
        if self.make_way is not None and self._snapshot is not None:
            with contextlib.suppress(OSError):  # A session that cannot be reached is asked again later.
                self.make_way(self._snapshot, self._rows)
        if not self._sizes_checked and (len(self._rows) > 1 or status.reason == "PartitionNodeLimit"):
            self._sizes_checked = True
            self._check_partition_sizes()

    def _check_partition_sizes(self) -> None:
        done = run_slurm(self.commands, ["sinfo", "--noheader", "--all", "--format=%R|%D"], timeout=60)
        lines = [line.partition("|") for line in done.stdout.decode("utf-8", "replace").splitlines()]
        problem = partition_too_small(self._rows, self.request, {name: parse_count(nodes.strip()) for name, _, nodes in lines})
        if len(self._rows) == 1:
            self._too_large = problem
        elif problem:
            self.log.warning(f"[rayslurm] {problem}")

    def check_waiting(self) -> None:
        """Call `report_waiting`; raise RunFailure if the job can never start, or has waited for longer than the queue timeout."""
        self.report_waiting()
        phase, waiting_since = self.status.phase, self.submitted_at if self.waiting_since is None else self.waiting_since
        reason = self._too_large or never_starts(self._rows, self.request)
        if reason and phase == JobPhase.PENDING:
            sentence = f"Slurm job {self.job_id} can never start: {reason}"
            raise RunFailure(FailureKind.SUBMISSION, sentence, self.metadata(Evidence()))
        if self.started_at is not None:  # Slurm has requeued the job, and the time before the requeue was not spent in the queue.
            waiting_since = max([waiting_since, *(row.submit for row in self._rows if row.submit is not None)])
        if self.queue_timeout is None or self.now() - waiting_since <= self.queue_timeout or phase == JobPhase.RUNNING:
            return
        # The shared snapshot is some seconds old; a job that has just started must not time out.
        self.add_snapshot(fetch_queue(self.commands))
        if self.status.phase == JobPhase.PENDING:
            sentence = f"Slurm job {self.job_id} was still waiting after queue_timeout={self.queue_timeout:g} s: "
            sentence += self._pending_reason or "no reason is known"
            raise RunFailure(FailureKind.ALLOCATION, sentence, self.metadata(Evidence()), retry=False)

    # ---- End

    def end_description(self, started: bool, recorded: bool = True) -> str | None:
        """Returns how the job ended, in words; None while the job lives, or while files of the ended job may still arrive.

        `started` says whether the beginning of the job's run record was read. `recorded` says whether the caller reads a run
        record at all.
        """
        status = self.status
        if not status.over:
            return None
        if self._ended_at is None:
            self._ended_at = time.monotonic()
        waited = time.monotonic() - self._ended_at
        if waited < settling_time(status, started, recorded and not self.cancelled):
            succeeded = status.state == "COMPLETED" if status.exit_code is None else status.exit_code == 0
            may_lack_record = not (started or succeeded or waited < _UNSEEN_TIMEOUT)
            if not (may_lack_record and self._log_explains_end()):
                return None
        if status.exit_code is not None and status.state not in TERMINAL:
            return f"srun ended with exit code {status.exit_code}"
        return f"Slurm calls the job {status.state}" if status.phase == JobPhase.ENDED else "Slurm no longer knows the job"

    def _log_explains_end(self) -> bool:
        """Returns whether Slurm's reason or a line of the job's logs explains the job's end.

        Lines in which `srun` reports failed tasks do not count.
        """
        if self.status.reason.startswith(_SCRIPT_NOT_RUN):
            return True
        lines = relevant_lines(f"{self._log_tail(LOG)}\n{self._log_tail(node_log(0))}")
        return not all(map(failed_tasks, lines))

    def explain(self, evidence: Evidence, timeout: float = STATE_TIMEOUT) -> None:
        """Add the last lines of the job's logs, and Slurm's accounting, to the evidence.

        Waits up to `timeout` seconds until Slurm's accounting has the job's final state.
        """
        facts = self._fetch_facts(timeout)
        evidence.job = facts and facts.with_component_ids([part.component_id for part in self.request.components])
        script_log = self._log_tail(LOG)
        evidence.runtime_log = "\n".join(text for text in (script_log, self._log_tail(node_log(0))) if text.strip())
        # After the first failure srun ends the other tasks with a signal.
        failed = [each for each in failed_tasks(script_log) if not each[2].startswith(_SIGNALLED)]
        nodes = facts.nodes if facts is not None and facts.components else ()
        for node, task, how in failed[:_MOST_LOGS]:
            # With components srun counts the tasks from 0 in each.
            counted = not self.request.further_components
            number = task if counted else nodes.index(node) if node in nodes else None
            tail = "" if number is None else self._log_tail(node_log(number))
            if number and tail.strip():
                evidence.tails[f"runtime on {node}"] = tail
            if evidence.culprit is None:
                last = (relevant_lines(tail) or [""])[-1]
                evidence.culprit = f"the runtime on node {node} ended ({how})" + (f": {last}" if last else "")

    def _log_tail(self, name: str) -> str:
        """Returns the end of the log file `name` in the job's directory; "" if the log cannot be read."""
        try:
            done = self.commands.run(["tail", "-c", str(_LOG_BYTES), "--", os.path.join(self.directory, name)], timeout=60)
        except OSError:
            return ""
        return tail_lines(done.stdout.decode("utf-8", "replace"))

    def _fetch_facts(self, timeout: float) -> JobFacts | None:
        """Query Slurm's accounting of the job until it shows the job's final state, and return the accounting.

        After `timeout` seconds, returns the last known accounting instead, or None if there is none.
        """
        deadline = time.monotonic() + timeout
        facts, pause = None, 0.5
        while True:
            with contextlib.suppress(OSError):  # Without an answer the record alone decides the verdict.
                facts = fetch_job_facts(self.commands, self.number) or facts
            if (facts is not None and facts.is_final) or time.monotonic() > deadline:
                return facts
            time.sleep(pause)
            pause = min(2 * pause, 4.0)

    def metadata(self, evidence: Evidence) -> dict[str, Any]:
        """Returns the job's id, name, partition, account and nodes, as Dagster metadata of a result or failure."""
        metadata: dict[str, Any] = {"Slurm job ID": self.job_id, "Slurm job name": self.request.job_name}
        allocation = ((evidence.end_or_partial or {}).get("context") or {}).get("allocation") or {}
        used = [each["partition"] for each in allocation.get("components") or [allocation] if each.get("partition")]
        partitions = used or [part.queue.partition for part in self.request.components if part.queue.partition]
        if partitions:
            metadata["Slurm partition"] = ", ".join(dict.fromkeys(partitions))
        if allocation.get("account"):
            metadata["Slurm account"] = allocation["account"]
        if allocation.get("nodes"):
            metadata["Slurm nodes"] = ", ".join(allocation["nodes"])
        return metadata

    def cancel_until_gone(self, grace_period: float = 0.0) -> None:
        """Cancel the job and wait until Slurm confirms its end: repeat `scancel` for at most a minute, and log the outcome.

        Before the first `scancel`, the job has `grace_period` seconds to end by itself. Further calls of this method do nothing.
        """
        if self._cancel_tried:
            return
        self._cancel_tried = True
        with deferred_interrupts():
            gone = wait_until_gone(self.commands, self.number, grace_period)
        if gone and self.cancelled:
            self.log.info(f"[rayslurm] Slurm job {self.job_id} is cancelled")
        if not gone:
            self.log.error(
                f"[rayslurm] Slurm job {self.job_id} may still be there: it was cancelled, and Slurm has not confirmed its end; "
                f"run `scancel {self.job_id}` on {self.commands.place}"
            )


def settling_time(status: JobStatus, started: bool, recorded: bool) -> float:
    """Returns how many seconds to wait after a job's end for files that become visible late on a network file system.

    `started` says whether the beginning of the job's run record was read, and `recorded` whether the caller reads a run record at
    all.
    """
    if status.exit_code is None:
        exited = status.state in _EXITED
    else:
        exited = status.exit_code < _SIGNAL_EXIT and (status.state not in TERMINAL or status.state in _EXITED)
    if exited and (started or recorded):  # The runtime ended by itself, so its record must have an `end`.
        return VISIBILITY_TIMEOUT
    return _SETTLING_TIME if started or status.exit_code is not None else 0.0


@dataclass(eq=False)
class BatchJob:
    """A payload that has a Slurm job of its own. See `RunningPayload` for what the methods do."""

    job: SlurmJob
    cluster_id: str  # Name of the payload's Ray cluster.
    directory: str  # The payload's run directory.
    step: Step
    _started: bool = False  # Whether the runtime has begun its record, and Slurm has not requeued the job since.
    _runtime_cancels: bool = False  # Whether the runtime, not Slurm, was asked to end the payload.
    # When the run directory of the waiting job was last touched, by the monotonic clock.
    _touched_at: float = field(default_factory=lambda: time.monotonic())

    def __post_init__(self) -> None:
        self.job_id: str | None = self.job.job_id
        self.requeue = self.job.requeue
        self._cancel_request = CancelRequest(self._send_cancel, self.job.log)

    @property
    def waiting(self) -> bool:
        return not self._started and self.job.status.phase in (JobPhase.UNKNOWN, JobPhase.PENDING)

    def next_reads(self) -> list[Read]:
        return self.job.next_reads()

    def poll(self, evidence: Evidence) -> str | None:
        job, started_at = self.job, self._started_at(evidence)
        # While the runtime cannot be reached, Slurm cannot be reached either.
        unreachable = self._started and isinstance(self._cancel_request.error, ConnectionFailed)
        observed = not unreachable and job.observe(started_at)
        self._started = started_at is not None and job.status.phase != JobPhase.PENDING
        self._cancel_request.resend_for(evidence)
        if not observed:
            return None
        with contextlib.suppress(OSError):
            if not self._started and time.monotonic() - self._touched_at >= _TOUCH_INTERVAL:
                self._touched_at = time.monotonic()
                job.commands.run(["touch", "--", job.directory])
            if not self._started and not job.status.over and not job.cancelled:
                job.check_waiting()
        return job.end_description(self._started)

    def cancel(self, now: bool = False) -> None:
        self._cancel_request.send(now)

    def kill(self) -> None:
        if self.step.owner.confirm_or_assume():
            self.job.cancelled = True
            self.job.cancel_until_gone()

    def explain(self, evidence: Evidence) -> None:
        if evidence.job is None:
            self.job.explain(evidence)

    def metadata(self, evidence: Evidence) -> Mapping[str, Any]:
        metadata = self.job.metadata(evidence)
        # A payload may have run and ended between two polls.
        started_at = evidence.started_at if self.job.started_at is None else self.job.started_at
        if started_at is not None and not self.step.reattached:
            metadata["Queue wait (s)"] = round(max(0.0, started_at - self.job.submitted_at), 2)
        return metadata

    def release(self, evidence: Evidence) -> None:
        """Cancel the job unless the job has ended or will end by itself. Called when the step is done with the payload.

        Cancels a job whose cancellation is not confirmed yet, a job that has not started, and a job whose srun may hang. srun may
        hang if the runtime was requested to end the payload, if nodes were lost, or if the payload ended for a reason in
        `_SRUN_MAY_HANG`. Waits up to a minute until Slurm confirms the end. Does nothing if a later attempt at the step owns the
        payload, or if the connection is lost and the job was not cancelled.
        """
        reason = (evidence.end or {}).get("reason")
        if evidence.connection_lost and not self.job.cancelled:
            return  # Slurm cannot be asked, and the job may go on.
        if self.job.cancelled or (not evidence.started and not self.job.status.over):
            if self.step.owner.confirm_or_assume():
                self.job.cancel_until_gone()
        elif (self._runtime_cancels or evidence.nodes_lost or reason in _SRUN_MAY_HANG) and self.step.owner.confirm_or_assume():
            if reason == EndReason.TERMINATED and not self._runtime_cancels:
                self.explain(evidence)  # Ask for Slurm's reason now, before `scancel` replaces that reason.
            self.job.cancelled = self._runtime_cancels
            self.job.cancel_until_gone(_END_TIMEOUT)

    def _send_cancel(self, now: bool) -> None:
        """Ask the runtime to end the payload; if the runtime has not started, ask Slurm to cancel the job.

        Does not wait for the end. If `now` is True, the payload has no grace period. Does nothing if a later attempt at the step
        owns the payload. Raises OSError if the request cannot be delivered.
        """
        if not self.step.owner.confirm():
            return
        if self._started:
            # The runtime ends the payload while Ray lives; scancel would end Ray at the same moment.
            self._runtime_cancels = True
            write_cancel_request(self.job.commands, self.directory, now)
            return
        self.job.cancelled = True
        done = run_slurm(self.job.commands, ["scancel", self.job.job_id], timeout=60)
        # In 22.05 scancel exits with 0 even if it could not reach slurmctld; for a job that is over it prints nothing.
        errors = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if "error:" in line]
        if done.returncode or errors:
            raise OSError(f"{self.job.commands.place}: {'; '.join(errors[-2:]) or f'exit code {done.returncode}'}")

    def _started_at(self, evidence: Evidence) -> float | None:
        """Returns when the runtime began its run record, by the clock of the runtime's node; None if no record has begun."""
        return evidence.started_at
