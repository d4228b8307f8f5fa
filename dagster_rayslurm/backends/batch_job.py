"""A submitted job that runs one payload: what is known of it, and how it is ended for sure."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from typing import Any

import dagster as dg

from ..connections.base import Connection
from ..errors import RunFailure
from ..follow import Evidence
from ..interrupts import deferred_interrupts
from ..runtime.record import CANCEL, EXIT, node_log, tail_lines
from ..slurm.accounting import ask_job
from ..slurm.facts import JobFacts
from ..slurm.log import failed_tasks, telling_lines
from ..slurm.queue import SharedQueue, ask_queue
from ..slurm.refusal import impossible, with_values
from ..slurm.request import JobRequest
from ..slurm.script import LOG, parse_exit
from ..slurm.states import TERMINAL, Exited, JobView, JobWatch, Started, Submission, seen
from ..slurm.submit import Submitted
from ..slurm.surroundings import cleaned

_EXIT_INTERVAL = 1.0
"""Seconds between two looks at the exit code that the batch script leaves."""
_SETTLE = 3.0
"""Seconds that the record is read on after the job is known to be over: files may arrive later than that word."""
_ASK_INTERVAL = 1.0
"""Seconds between two questions of a run that is being cancelled."""
_PATIENCE = 5.0
"""Seconds in which a job whose runtime has written the `end` of a cancelled run is over by itself."""
_KEEP_FRESH = 3600.0
_GONE_DEADLINE = 60.0
"""Seconds in which Slurm must confirm that a cancelled job is over; KillWait, after which it sends SIGKILL, is 30."""
_STATE_DEADLINE = 15.0
"""Seconds in which a job that is on its way down comes to its final state."""
_LATE = 2.0
"""Seconds in which a submission that was broken off may still come through."""
_LOG_BYTES = 65536
_SIGNALLED = ("Terminated", "Killed")
"""How srun says that a signal ended a task."""
_SHOWN = 3
"""Nodes whose logs are shown."""


class BatchJob:
    """One Slurm job and the run directory that its runtime writes to.

    Args:
        commands: runs Slurm's programs, and reaches the files.
        queue: the shared view of the queue.
        request: what was asked for.
        submitted: the job.
        run_dir: its run directory.
        cluster_id: name of the Ray cluster.
        queue_timeout: seconds after which a job that still waits is given up; None waits for ever.
        over_ssh: whether the cluster is behind SSH.
        log: the step's log.
    """

    def __init__(
        self,
        *,
        commands: Connection,
        queue: SharedQueue,
        request: JobRequest,
        submitted: Submitted,
        run_dir: str,
        cluster_id: str,
        queue_timeout: float | None,
        over_ssh: bool,
        log: Any,
    ) -> None:
        self.cluster_id = cluster_id
        self.job_id: str | None = submitted.job_id
        self._id = int(submitted.job_id)
        self._commands = commands
        self._queue = queue
        self._request = request
        self._submitted = submitted
        self._run_dir = run_dir
        self._queue_timeout = queue_timeout
        self._over_ssh = over_ssh
        self._log = log
        self._watch = JobWatch(Submission(self._id, submitted.at, request.requeue))
        self._started = False
        """Whether the runtime is at work: its record has started, and the job was not requeued since."""
        self._exit_looked = self._fresh_at = time.monotonic()
        self._told = ""
        self._trouble: str | None = None
        self._over_since: float | None = None
        self._cancelled = self._ending = self._gone = False
        self._asked_at = 0.0

    @property
    def waiting(self) -> bool:
        return not self._started and self._watch.view.kind not in ("running", "ended", "lost")

    @property
    def place(self) -> str:
        return self._commands.place if self._over_ssh else ""

    @property
    def requeue(self) -> bool:
        return self._request.requeue

    def ended(self, evidence: Evidence) -> str | None:
        try:
            now = self._queue.clock.now()
            self._observe(evidence, now)
        except OSError as error:
            self._complain(str(error))
            return None
        if not self._started and not self._watch.view.over and not self._cancelled:
            self._tell(self._watch.view)
            self._give_up_waiting(now)
        return self._how_it_ended(self._watch.view)

    def cancel(self, now: bool = False) -> None:
        if not self._started:
            return self._scancel()
        self._ending = True
        # The runtime ends the payload with Ray alive; scancel would hit all of Ray at the same moment.
        with contextlib.suppress(OSError):
            self._commands.write(os.path.join(self._run_dir, CANCEL), json.dumps({"op": "cancel", "now": now}).encode())

    def kill(self) -> None:
        self._cancelled = True
        self._confirm_gone()

    def explain(self, evidence: Evidence) -> None:
        evidence.job = self._facts()
        said = self._tail(LOG)
        evidence.runtime_log = "\n".join(text for text in (said, self._tail(node_log(0))) if text.strip())
        # Most of them srun ended itself, after the one that failed.
        failed = [each for each in failed_tasks(said) if not each[2].startswith(_SIGNALLED)]
        for node, task, how in failed[:_SHOWN]:
            tail = self._tail(node_log(task))
            if task > 0 and tail.strip():
                evidence.tails[f"runtime on {node}"] = tail
            if evidence.culprit is None:
                last = (telling_lines(tail) or [""])[-1]
                evidence.culprit = f"the runtime on node {node} ended ({how})" + (f": {last}" if last else "")

    def _tail(self, name: str) -> str:
        """The end of a log in the run directory; "" if it cannot be read."""
        try:
            done = self._commands.run(["tail", "-c", str(_LOG_BYTES), "--", os.path.join(self._run_dir, name)], timeout=60)
        except OSError:
            return ""
        return tail_lines(done.stdout.decode("utf-8", "replace"))

    def _facts(self) -> JobFacts | None:
        """What Slurm says of the job, once it has come to its end; None if it does not say."""
        deadline = time.monotonic() + _STATE_DEADLINE
        facts, pause = None, 0.5
        while True:
            with contextlib.suppress(OSError):  # Slurm that does not answer leaves the verdict to the record.
                facts = ask_job(self._commands, self._id) or facts
            if (facts is not None and facts.final_state is not None) or time.monotonic() > deadline:
                return facts
            time.sleep(pause)
            pause = min(2 * pause, 4.0)

    def metadata(self, evidence: Evidence) -> Mapping[str, Any]:
        request = self._request
        metadata: dict[str, Any] = {"Slurm job ID": self.job_id, "Slurm job name": request.job_name}
        context = (evidence.end or {}).get("context") or {}
        allocation = context.get("allocation") or {}
        partition = allocation.get("partition") or request.partition
        if partition:
            metadata["Slurm partition"] = partition
        if allocation.get("account"):
            metadata["Slurm account"] = allocation["account"]
        if allocation.get("nodes"):
            metadata["Slurm nodes"] = ", ".join(allocation["nodes"])
        if context.get("dashboard_url"):
            metadata["Ray dashboard"] = dg.MetadataValue.md(self._dashboard(context["dashboard_url"], context["hostname"]))
        if evidence.started_at is not None:
            metadata["Queue wait (s)"] = round(max(0.0, evidence.started_at - self._submitted.at), 2)
        return metadata

    def release(self, evidence: Evidence) -> None:
        """See to it that a job which was to be ended is over; one that ended by itself needs nobody."""
        if self._cancelled or (not evidence.started and not self._watch.view.over):
            self._confirm_gone()
        elif self._ending:
            self._confirm_gone(_PATIENCE)

    def _dashboard(self, url: str, head: str) -> str:
        """How the dashboard was reached while the cluster lived: it listens on its own node alone."""
        port = url.rpartition(":")[2]
        jump = f"-J {self._commands.place} " if self._over_ssh else ""
        return f"`ssh -N -L {port}:127.0.0.1:{port} {jump}{head}`, then <{url}>, while the job runs"

    def _observe(self, evidence: Evidence, now: float) -> None:
        """Take in what there is to see, without waiting for Slurm."""
        if evidence.started_at is not None and evidence.started_at != self._watch.started_at:
            self._watch = self._watch.after(Started(evidence.started_at))
        local = time.monotonic()
        if not self._cancelled:
            snapshot = self._queue.look(now)
        elif local - self._asked_at >= _ASK_INTERVAL:
            self._asked_at = local
            snapshot = ask_queue(self._commands)  # Somebody waits for this one, so it may cost a question of its own.
        else:
            snapshot = None
        if snapshot is not None:
            self._watch = self._watch.after(seen(snapshot, self._id))
        if self._queue.trouble:
            self._complain(self._queue.trouble)
        if local - self._exit_looked >= _EXIT_INTERVAL:
            self._exit_looked = local
            code = parse_exit(self._commands.read(os.path.join(self._run_dir, EXIT), 0, _LOG_BYTES), self._id)
            if code is not None:
                self._watch = self._watch.after(Exited(now, code))
        self._started = evidence.started and self._watch.view.kind != "pending"
        if not self._started and local - self._fresh_at >= _KEEP_FRESH:
            self._fresh_at = local
            self._commands.run(["touch", "--", self._run_dir])  # Else it is swept as old while its job still waits.

    def _tell(self, view: JobView) -> None:
        """Say why the job waits, whenever that changes."""
        if view.kind != "pending" or not (view.reason or view.expected_start):
            return
        start = time.strftime(", starts ~%H:%M", time.localtime(view.expected_start)) if view.expected_start else ""
        text = f"queued: {view.reason or view.state}{start}"
        if text != self._told:
            self._told = text
            self._log.info(f"[rayslurm] {text}")

    def _give_up_waiting(self, now: float) -> None:
        """End a job that cannot start as it was asked for, or has waited as long as its user allows."""
        view = self._watch.view
        never = impossible(view.reason, self._request.partition) if view.kind == "pending" else None
        if never:
            never = with_values(never, self._request)
            raise RunFailure("submission", f"Slurm job {self.job_id} can never start: {never}", self.metadata(Evidence()))
        if self._queue_timeout is None or now - self._submitted.at <= self._queue_timeout or view.kind == "running":
            return
        # The shared view is of some seconds ago; a job that has just started must not be taken for one that waits.
        self._watch = self._watch.after(seen(ask_queue(self._commands), self._id))
        view = self._watch.view
        if view.kind == "pending":
            raise RunFailure(
                "allocation",
                f"Slurm job {self.job_id} was still waiting ({view.reason or 'no reason is known'}) after "
                f"queue_timeout={self._queue_timeout:g} s",
                self.metadata(Evidence()),
                retry=False,
            )

    def _how_it_ended(self, view: JobView) -> str | None:
        if not view.over:
            return None
        if self._over_since is None:
            self._over_since = time.monotonic()
        if (self._started or view.exit_code is not None) and time.monotonic() - self._over_since < _SETTLE:
            return None
        if view.exit_code is not None and view.state not in TERMINAL:
            return f"srun ended with exit code {view.exit_code}"
        return f"Slurm calls the job {view.state}" if view.kind == "ended" else "Slurm no longer knows the job"

    def _complain(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            self._log.warning(f"[rayslurm] the job goes on, but its state cannot be asked for: {trouble}")

    def _scancel(self) -> None:
        self._cancelled = True
        with contextlib.suppress(OSError):
            self._commands.run(cleaned(["scancel", str(self._id)]), timeout=60)

    def _confirm_gone(self, patience: float = 0.0) -> None:
        """Repeat the cancellation until Slurm agrees that the job is over."""
        if self._gone:
            return
        with deferred_interrupts():
            self._gone = wait_until_gone(self._commands, self._id, patience)
        if not self._gone:
            self._log.error(
                f"[rayslurm] Slurm job {self.job_id} may still be there: it was cancelled, and Slurm has not confirmed its end; "
                f"run `scancel {self.job_id}` on {self._commands.place}"
            )


def wait_until_gone(commands: Connection, job_id: int, patience: float = 0.0) -> bool:
    """Cancel a job until Slurm says that it is over, or no longer knows it.

    Args:
        commands: runs Slurm's programs.
        job_id: the job.
        patience: seconds in which it may end by itself.

    Returns:
        Whether Slurm said so in time.
    """
    began = time.monotonic()
    pause = 0.1
    while True:
        with contextlib.suppress(OSError):
            row = ask_queue(commands).job(job_id)
            if row is None or row.state in TERMINAL:
                return True
            if row.state != "COMPLETING" and time.monotonic() - began >= patience:
                commands.run(cleaned(["scancel", str(job_id)]), timeout=60)
        if time.monotonic() - began > _GONE_DEADLINE:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 3.0)


def _jobs_named(commands: Connection, name: str) -> list[int]:
    """The jobs of a name; sbatch may have been at it just now, so one that is not there is looked for a while."""
    until = time.monotonic() + _LATE
    while True:
        jobs = [row.job_id for row in ask_queue(commands).named(name)]
        if jobs or time.monotonic() > until:
            return jobs
        time.sleep(_ASK_INTERVAL)


def cancel_named(commands: Connection, name: str, log: Any) -> None:
    """Cancel whatever job has a name: its submission was broken off, so its id is not known."""
    try:
        commands.run(cleaned(["scancel", "--quiet", "--me", f"--name={name}"]), timeout=60)
        jobs = _jobs_named(commands, name)
        gone = all(wait_until_gone(commands, job_id) for job_id in jobs)
    except OSError as error:
        gone, why = False, str(error)
    else:
        why = "Slurm has not confirmed its end"
    if not gone:
        log.error(
            f"[rayslurm] a Slurm job named {name} may have been submitted ({why}); run `scancel --name={name}` on "
            f"{commands.place}"
        )
