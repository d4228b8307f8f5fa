"""Runs the partitions of a step in Slurm job arrays, in as few arrays as possible.

A chunk is a group of partitions for which the payload runs once. Each chunk runs as one element of an array, and so in an
allocation of its own. The run directory of the step has a directory for each array, with the batch script and the other files
that all elements of the array share. Each element makes a run directory of its own in the directory of the array. One remote call
reads the records of all elements that have ended. The states of all other elements come from a snapshot of Slurm's queue, which
all steps share.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..edge import elements
from ..edge.sessions import JOB_ID
from ..errors import FailureKind, StartError
from ..failures import RunFailure
from ..follow import Evidence
from ..follow.follower import RecordState
from ..outcome.verdict import needs_job_facts
from ..plan import Plan
from ..runtime.payload.partition_runner import PARTITIONS, Chunk
from ..runtime.protocol.messages import EndReason
from ..runtime.protocol.record import CANCEL, CONTEXT, PAYLOAD, RUNTIME, SECRETS, STDIO, LineReader, Record, tail_lines
from ..runtime.protocol.spec import to_json
from ..slurm.accounting import JobFacts, facts_in_queue, fetch_element_facts, relevant_lines
from ..slurm.arrays import Room, array_option, ask_room, by_element, count_jobs, ranges, waits
from ..slurm.request import JobRequest, is_job_of, job_comment, job_name
from ..slurm.shared_queue import QueueRow, QueueSnapshot, ask_patiently, fetch_queue, run_slurm
from ..slurm.states import TERMINAL, JobPhase, JobWatch
from ..slurm.submit import JOB_SCRIPT, SubmissionRefused, SubmittedJob, cancel_named, end_named, wait_until_gone
from ..ssh.base import ConnectionFailed
from .base import Step, run_files, write_run_dir
from .batch import CLUSTER, BatchBackend, job_script, runtime_spec
from .layout import nonce_of
from .ownership import REQUEST_FILE, fingerprint
from .slurm_job import STATE_TIMEOUT, SlurmJob, settling_time

_MOST_BYTES = 8 * 1024 * 1024  # Most bytes of one read of records or of a file.
_MOST_OVER = 500  # Most elements that Slurm calls over, and that recorded no end, whose records one call reads.
_ASK_INTERVAL = 2.0  # Seconds between two queries of Slurm's accounting.
_MOST_NAMED = 50  # Most elements that one query of Slurm's accounting names; for more elements, it names whole arrays.
_UNSEEN_TIMEOUT = 15.0  # Seconds in which the record of an element that ended without a visible one may still become visible.
_FULL_PAUSE, _MOST_PAUSE = 5.0, 60.0  # Seconds between two submissions while Slurm accepts none: the first and the longest.
_TOUCH_INTERVAL = 3600.0  # Seconds between two touches of the run directory, which keep it from being swept.


class Superseded(Exception):
    """The error that `Arrays.poll` raises if a later attempt at the step has taken the arrays over."""


@dataclass(eq=False)
class Ended:
    """One job array element that has ended: its chunk of partitions, and the evidence, messages and output of its payload."""

    keys: Sequence[str]  # The partition keys of the chunk.
    array: int  # Number of the array in the run directory.
    label: str  # The element's job id as Slurm's users write it, such as "12_7".
    evidence: Evidence
    messages: list[str] = field(default_factory=list)  # Pipes messages, as the payload wrote them.
    output: list[Record] = field(default_factory=list)
    phases: list[tuple[str, str]] = field(default_factory=list)  # Name and message of each phase in the record.
    waited: bool = False  # Whether the element waited when Slurm cancelled all waiting elements of its array.
    explain_by: float | None = None  # Until when to wait for Slurm's accounting, by the monotonic clock; None: no wait.


@dataclass(eq=False)
class _Element:
    """One job array element that `Arrays.poll` has not yet returned as ended."""

    keys: Sequence[str]  # The partition keys of the element's chunk.
    watch: JobWatch  # The element's state in Slurm, from the snapshots of the queue so far.
    row: QueueRow | None = None  # The element's row in the last snapshot of the queue that had such a row.
    begun: bool = False  # Whether the element has left the queue's waiting states, or has begun its record.
    over_at: float | None = None  # When Slurm was first seen to report the element as ended (monotonic clock); None before.
    ended: Ended | None = None  # Set once the end is recorded, while `poll` still waits for Slurm's accounting of it.


@dataclass(eq=False)
class Array:
    """One job array of a step, with the array's elements that have not ended."""

    number: int  # Number of the array in the run directory.
    job: SlurmJob
    directory: str
    open: dict[int, _Element]  # The elements that have not ended, by their number in the array.
    begun: bool = False  # Whether one of its elements has started.

    @property
    def array_id(self) -> int:
        """Slurm's id of the array."""
        return self.job.number


class ArrayBackend(BatchBackend):
    """Runs the partitions of a step as elements of job arrays. Callers use `arrays` instead of `start`."""

    def can_reattach(self, plan: Plan, run_dir: str, step: Step) -> bool:
        if not (asked := self.connection.read(os.path.join(run_dir, REQUEST_FILE), 0, _MOST_BYTES)):
            return False
        same = asked == self.prepare(plan, run_dir, step).fingerprint
        queue = ask_patiently(lambda: fetch_queue(self.connection), self.patience, True, step.log.warning)
        alive = [row for row in queue.rows if is_job_of(row.name, plan.payload.nonce) and row.state not in TERMINAL]
        if not same and alive:
            step.log.warning(
                f"[rayslurm] job array {alive[0].label} still runs with the settings of an earlier attempt, which have changed "
                f"since; see {run_dir} on {self.connection.place}, where `scancel --name={alive[0].name}` ends the array"
            )
        return same and any(array["job_id"] for array in self._found(run_dir, queue))

    def end_abandoned(self, run_dir: str, grace_period: float) -> None:  # noqa: ARG002
        queue = ask_patiently(lambda: fetch_queue(self.connection), self.patience, True)
        for array in self._found(run_dir, queue):
            if array["job_id"] and not wait_until_gone(self.connection, int(array["job_id"])):
                sentence = f"job array {array['job_id']} of an earlier attempt is cancelled, and Slurm has not confirmed its end"
                raise StartError(FailureKind.SUBMISSION, sentence, retry=True)

    def prepare(self, plan: Plan, run_dir: str, step: Step) -> _Prepared:
        """Send a plan's files to the cluster, and return the values from which the files of each job array are made.

        `run_dir` is the run directory of the step; the function writes nothing into the directory. Raises StartError if the
        plan's files, the environment or the base directory cannot be used, and OSError if the cluster cannot be reached.
        """
        packed, interpreter, runtime = self.deliver(plan, step)
        plan = packed.plan
        base = self._request(plan, job_name="rayslurm", comment="")
        spec = runtime_spec(f"{CLUSTER}{plan.payload.nonce}", plan, base)
        lasting = to_json(replace(spec, control_key="", control_ports=[]))

        def script(request: JobRequest, directory: str) -> bytes:
            return job_script(request, interpreter, runtime, directory, self.slurm, "element").encode("utf-8", "surrogateescape")

        asked = script(base, run_dir).decode("utf-8", "surrogateescape")
        return _Prepared(plan, base, to_json(spec).encode(), script, fingerprint(to_json(plan.payload), lasting, asked))

    def _found(self, run_dir: str, queue: QueueSnapshot) -> list[dict[str, Any]]:
        """Returns the arrays of a run directory, by ascending number; [] if the run directory does not exist.

        Each array is a dictionary with `number`, `job_id` and `chunks` (see `edge.elements.arrays`). If no job id is stored for
        an array, the function looks in `queue` for a job with the name of the array's job. The id of such a job is stored and
        becomes `job_id`. Without such a job, `job_id` is "".
        """
        try:
            arrays = self.connection.call(elements.arrays, run_dir, repeat=True)
        except FileNotFoundError:
            return []
        for array in arrays:
            rows = [row for row in queue.rows if is_job_of(row.name, f"{array['number']}-{nonce_of(run_dir)}")]
            if rows and not array["job_id"]:
                array["job_id"] = rows[0].label.partition("_")[0]
                self.connection.write(_array_dir(run_dir, array["number"], JOB_ID), array["job_id"].encode() + b"\n")
        return arrays

    def arrays(self, plan: Plan, run_dir: str, context: Mapping[str, Any], step: Step, max_concurrent: int | None) -> Arrays:
        """Returns an `Arrays` object that runs the chunks which a Pipes context lists. The function itself submits no array.

        If `step.reattached` is True, the object continues the arrays that an earlier attempt submitted. Otherwise the function
        creates the run directory.

        Args:
            plan: The plan of the payload that runs for each chunk.
            run_dir: The run directory of the step.
            context: The Pipes context with the chunks.
            step: The attempt at the step.
            max_concurrent: The largest number of elements that run at the same time; None for no limit.

        Raises:
            StartError: The plan's files, the environment or the base directory cannot be used.
            OSError: The cluster cannot be reached, or Slurm does not answer.
        """
        prepared = self.prepare(plan, run_dir, step)
        made = Arrays(self, prepared, run_dir, context, step, max_concurrent, list(context[PARTITIONS]))
        if step.reattached:
            queue = ask_patiently(lambda: fetch_queue(self.connection), self.patience, True, step.log.warning)
            for array in self._found(run_dir, queue):
                made.adopt(array["number"], array["job_id"], array["chunks"], queue)
        else:
            # The sweep of old files finds the names of the run's bundles and runtime in PAYLOAD and JOB_SCRIPT. The `rayslurm`
            # commands find the run by PAYLOAD and CONTEXT.
            files = run_files(prepared.plan, {**context, PARTITIONS: []}, step)  # type: ignore[typeddict-item]
            script = prepared.script(prepared.request, run_dir)  # Not submitted.
            own = {PAYLOAD: files[PAYLOAD], CONTEXT: files[CONTEXT], JOB_SCRIPT: script}
            write_run_dir(self.connection, run_dir, {**own, REQUEST_FILE: prepared.fingerprint, step.owner.name: b""})
        return made


@dataclass(frozen=True)
class _Prepared:
    """The values that all job arrays of a step share, and from which `Arrays` makes the files of each array."""

    plan: Plan  # With the files' paths on the cluster.
    request: JobRequest  # Without job name, comment and array option.
    runtime: bytes  # The content of `runtime.json`, with which the runtime of each element starts.
    script: Callable[[JobRequest, str], bytes]  # Returns the batch script for a request and the directory of an array.
    fingerprint: bytes  # The content of `REQUEST_FILE`: a hash of the settings, which a later attempt compares.


@dataclass(eq=False)
class Arrays:
    """Submits, watches and cancels the job arrays of one step."""

    backend: ArrayBackend
    prepared: _Prepared
    run_dir: str
    context: Mapping[str, Any]
    step: Step
    max_concurrent: int | None
    waiting: list[Chunk]  # Chunks that no array has yet.
    running: list[Array] = field(default_factory=list)  # All arrays so far, those that have ended included.
    room: Room | None = None  # How many elements Slurm allows; None before Slurm was asked.
    _next_number: int = 1
    _doubtful: str | None = None  # Job name of the last array if it may have been submitted although its submission failed.
    _next_attempt: float = 0.0  # The earliest time of the next submission, by the monotonic clock.
    _pause: float = _FULL_PAUSE  # Seconds to wait after Slurm refuses even an array of one element.
    _told_full: bool = False  # Whether a warning about such a refusal was logged.
    _full_since: float | None = None  # When Slurm first had no room, by the monotonic clock; None since the last submission.
    _snapshot: QueueSnapshot | None = None  # The last snapshot of the queue that `poll` has used.
    _asked_at: float = 0.0  # When Slurm's accounting was last asked, by the monotonic clock.
    _ready: list[Ended] = field(default_factory=list)  # Elements that the next `poll` without an error returns.
    _touched_at: float = field(default_factory=time.monotonic)  # When the run directory was last touched.

    def __post_init__(self) -> None:
        self.connection = self.backend.connection
        self.queue = self.backend.user_queue
        self.cluster_id = f"{CLUSTER}{self.prepared.plan.payload.nonce}"

    @property
    def open(self) -> int:
        """The number of elements that have not ended."""
        return sum(len(array.open) for array in self.running)

    @property
    def job_ids(self) -> str:
        """The Slurm job ids of all arrays so far, separated by commas; "" if no array was submitted."""
        return ", ".join(array.job.job_id for array in self.running)

    @property
    def begun(self) -> bool:
        """Whether at least one array has both an element that has started and an element that has not ended."""
        return any(array.begun for array in self.running if array.open)

    # ---- Submission

    def adopt(self, number: int, job_id: str, chunks: Sequence[Sequence[str]], queue: QueueSnapshot) -> None:
        """Continue an array of an earlier attempt, so that `poll` watches it; or cancel it if too little is known about it.

        Raises StartError if an array that must be cancelled cannot be cancelled.

        Args:
            number: The number of the array in the run directory.
            job_id: Slurm's id of the array. If the id is "", the submission failed or is still under way. Then the function
                cancels the array by the name of the array's job, and leaves the partitions to a new array.
            chunks: The partitions of the array: element 0 runs `chunks[0]`. If `chunks` is empty, the partitions are not known,
                and the function cancels the array, too.
            queue: A recent snapshot of the queue. Its time stands for the time of the array's submission, which is not known.
        """
        self._next_number = max(self._next_number, number + 1)
        request = self._request(number, len(chunks))
        if not (job_id and chunks):
            if not cancel_named(self.connection, request.job_name, self.step.log):
                sentence = f"an earlier attempt may still have a job array {request.job_name}, which could not be cancelled"
                raise StartError(FailureKind.SUBMISSION, sentence, retry=True)
            with contextlib.suppress(OSError):
                self.connection.remove(os.path.join(_array_dir(self.run_dir, number), SECRETS))
            return
        # The time of the submission is not known, so this snapshot of the queue is the first that counts.
        submitted = SubmittedJob(job_id, queue.began - 1.0)
        job = self.backend.slurm_job(request, submitted, _array_dir(self.run_dir, number), self.step, ends_idle_sessions=False)
        wanted = {key for chunk in self.waiting for key in chunk}
        self._add(number, job, {at: keys for at, keys in enumerate(chunks) if not wanted.isdisjoint(keys)})
        self.step.log.info(f"[rayslurm] reattached to Slurm job array {job_id} of {len(chunks):,} elements")

    def submit_next(self) -> bool:
        """Submit one array of waiting chunks, as large as Slurm has room for; returns whether an array was submitted.

        Returns False if no chunk waits, if Slurm has no room, or if Slurm refused an array a short time ago. If
        `max_concurrent` is not None, the function also returns False as long as an element of an earlier array has not ended.

        Raises RunFailure if Slurm has had no room for longer than the queue timeout, and all elements of earlier arrays have
        ended. Raises StartError or OSError if the submission fails for another reason. After an OSError, the array may exist,
        so the function submits no other array, and raises OSError, until Slurm confirms that the array is gone.
        """
        if not self.waiting or time.monotonic() < self._next_attempt or (self.max_concurrent is not None and self.open):
            return False
        if self._doubtful is not None and (problem := end_named(self.connection, self._doubtful)):
            raise ConnectionFailed(problem, temporary=True)
        self._doubtful = None
        if self.room is None:
            self.room = ask_room(self.connection, self.prepared.request.queue)
        now = self.queue.clock.now()
        jobs = self.open
        if self.room.limit is not None and (snapshot := self.queue.latest(now)) is not None:
            jobs = max(jobs, count_jobs(snapshot.rows))
        size = self.room.next_size(len(self.waiting), self.open, jobs)
        if size == 0:
            return False
        number, chunks = self._next_number, self.waiting[:size]
        self._next_number += 1  # Not used again: after a lost connection, an array of this name may be cancelled late.
        request = self._request(number, size)
        request = self.backend.placed(request, self.step)
        directory = _array_dir(self.run_dir, number)
        try:
            with self.backend.cancel_on_error(request, self.step):
                job = self.backend.submit_job(directory, self._files(request, directory, chunks), request, self.step)
                self._add(number, job, dict(enumerate(map(list, chunks))))
        except SubmissionRefused as refusal:
            # Where Slurm allows no arrays (MaxArraySize=0), it refuses an array of one element, too.
            if not refusal.lacks_room or (size == 1 and "array specification" in str(refusal)):
                raise
            self._next_number = number
            self._wait_for_room(refusal, size)
            return False
        except OSError:
            self._doubtful = request.job_name
            raise
        self.room, self._pause, self._full_since = self.room.taken(size), _FULL_PAUSE, None
        left = f", {sum(map(len, self.waiting)):,} partitions wait for the next one" if self.waiting else ""
        self.step.log.info(f"[rayslurm] Slurm job array {job.job_id} has {size:,} elements{left}")
        return True

    def _wait_for_room(self, refusal: SubmissionRefused, size: int) -> None:
        assert self.room is not None
        now = time.monotonic()
        self.room = self.room.refused(size)
        self._full_since = now if self._full_since is None else self._full_since
        timeout = self.backend.queue_timeout
        if timeout is not None and now - self._full_since > timeout and not self.open:
            sentence = f"Slurm took no job array for queue_timeout={timeout:g} s: {refusal}"
            raise RunFailure(FailureKind.SUBMISSION, sentence, retry=True)
        if size == 1:
            self._next_attempt = now + self._pause
            self._pause = min(2 * self._pause, _MOST_PAUSE)
        if size == 1 and not self._told_full:
            self._told_full = True
            self.step.log.warning(f"[rayslurm] the next job array waits until others of your jobs have ended: {refusal}")

    def _request(self, number: int, size: int) -> JobRequest:
        step, nonce = self.step, self.prepared.plan.payload.nonce
        return replace(
            self.prepared.request,
            job_name=job_name(step.step_key, f"{number}-{nonce}"),
            comment=job_comment(step.run_id, step.step_key, None),
            array=array_option(size, self.max_concurrent),
        )

    def _files(self, request: JobRequest, directory: str, chunks: Sequence[Chunk]) -> dict[str, bytes]:
        """Returns the files of an array's directory, by name: the batch script, and all files with which the elements start.

        `request` is the request for the array's job. `directory` is the array's directory on the cluster. `chunks` are the
        chunks of partitions that the array's elements run.
        """
        files = run_files(self.prepared.plan, {**self.context, PARTITIONS: chunks}, self.step)  # type: ignore[typeddict-item]
        own = {name: files[name] for name in (PAYLOAD, CONTEXT, SECRETS) if name in files}
        return {**own, RUNTIME: self.prepared.runtime, JOB_SCRIPT: self.prepared.script(request, directory), CANCEL: b""}

    def _add(self, number: int, job: SlurmJob, chunks: Mapping[int, Sequence[str]]) -> None:
        watch = JobWatch(job.submitted_at, job.requeue)
        self.running.append(Array(number, job, job.directory, {at: _Element(keys, watch) for at, keys in chunks.items()}))
        taken = {key for keys in chunks.values() for key in keys}
        left = [{key: window for key, window in chunk.items() if key not in taken} for chunk in self.waiting]
        self.waiting = [chunk for chunk in left if chunk]
        if len(self.running) > 1:
            return
        with contextlib.suppress(OSError):  # `rayslurm` finds the job of a run by this file.
            self.connection.write(os.path.join(self.run_dir, JOB_ID), job.job_id.encode() + b"\n")

    # ---- Watching

    def poll(self) -> list[Ended]:
        """Look at the queue and the records once; returns the elements that have ended since the last call.

        Raises RunFailure if an array can never start, or has waited for longer than the queue timeout. Raises Superseded if a
        later attempt has taken the arrays over. Raises OSError if the cluster is out of reach. After an error, the next call
        returns the elements that were found before the error.
        """
        self._look_at_queue()
        self._read_records()
        self._explain()
        ready, self._ready = self._ready, []
        return ready

    def _look_at_queue(self) -> None:
        snapshot = self.queue.latest(self.queue.clock.now())
        if snapshot is None or (self._snapshot is not None and snapshot.began <= self._snapshot.began):
            return
        self._snapshot = snapshot
        rows = by_element((row.label, row) for row in snapshot.rows)
        for array in self.running:
            for number, element in array.open.items():
                row = rows.get((array.array_id, number))
                element.watch = element.watch.seen(snapshot.began, row)
                element.row = row or element.row
                element.begun |= row is not None and not waits(row)
                array.begun |= element.begun
                if element.watch.view.over and element.over_at is None:
                    element.over_at = time.monotonic()
            if array.open:
                array.job.add_snapshot(snapshot)
            if array.open and not array.begun and not array.job.status.over:
                array.job.check_waiting()

    def _read_records(self) -> None:
        """Find the elements that have ended, by their records or by Slurm's state, and keep them for the result of `poll`.

        An element whose record has no `end` line counts as ended some seconds after Slurm has reported the element as ended.
        Raises Superseded if a later attempt has taken the arrays over, and OSError if the cluster is out of reach.
        """
        wanted: dict[str, list[list[int]]] = {}
        over: dict[str, list[int]] = {}
        gone = []
        for array in self.running:
            unread = {number: each for number, each in array.open.items() if each.ended is None}
            for number, element in unread.items():
                if element.over_at is not None and not element.begun and element.watch.view.state == "CANCELLED":
                    gone.append((array, number))  # Slurm cancelled the element while it waited, so there is no record.
                elif element.over_at is not None and sum(map(len, over.values())) < _MOST_OVER:
                    over.setdefault(str(array.number), []).append(number)
            if unread:
                wanted[str(array.number)] = ranges(unread)
        for array, number in gone:
            self._without_record(array, number)
        if not wanted:
            return
        if time.monotonic() - self._touched_at > _TOUCH_INTERVAL:
            self._touched_at = time.monotonic()
            self.connection.call(elements.touch, self.run_dir, repeat=True)
        names, rows, data = self.connection.call(elements.ended, self.run_dir, wanted, over, _MOST_BYTES, repeat=True)
        if not any(name.startswith(self.step.owner.name) for name in names):
            raise Superseded
        by_number, start = {array.number: array for array in self.running}, 0
        for array_number, number, *sizes in rows:
            journal, output, whole, logs = sizes
            texts = [data[start : start + journal], data[start + journal : start + journal + output]]
            start += journal + output
            log, start = data[start : start + logs].decode("utf-8", "replace"), start + logs
            self._with_record(by_number[array_number], number, texts[0], texts[1], whole, log)

    def _with_record(self, array: Array, number: int, journal: bytes, output: bytes, whole: int, log: str) -> None:
        """Read the record of element `number` of an array, and call `_take` if the element has ended.

        `journal` and `output` are the contents of the record's two files. `output` may have only the beginning of the output
        file; `whole` is the size of the whole output file in bytes. `log` is the end of the element's logs, or "" if the logs
        were not read.
        """
        element = array.open[number]
        nonce = f"{self.prepared.plan.payload.nonce}-{number}"
        state = RecordState(nonce, 0.0, array.job.requeue)
        ended = Ended(element.keys, array.number, f"{array.array_id}_{number}", state.evidence)
        for record in state.journal.feed(journal):
            if state.add(record):
                ended.messages, ended.phases = [], []
            if record.get("type") == "pipes":
                ended.messages.append(record["line"])
            elif record.get("type") == "phase":
                ended.phases.append((record["phase"], record["message"]))
        evidence = ended.evidence = state.evidence
        evidence.damaged_lines = state.journal.damaged
        element.begun |= evidence.started
        array.begun |= element.begun
        end = evidence.end
        final = end is not None and not (array.job.requeue and end["reason"] == EndReason.TERMINATED)
        if not final and not self._is_settled(element, evidence.started, log):
            return
        ended.output = list(self._output(array, number, state.output, output, whole))
        for record in ended.output:
            evidence.add_output(record)
        evidence.runtime_log = tail_lines(log) if log.strip() else ""
        if not final:
            evidence.runtime_exit = self._how(element)
        self._take(array, number, ended)

    def _without_record(self, array: Array, number: int) -> None:
        element = array.open[number]
        evidence = Evidence(runtime_exit=self._how(element))
        ended = Ended(element.keys, array.number, f"{array.array_id}_{number}", evidence)
        ended.waited = element.row is not None and element.row.state == "CANCELLED"
        self._take(array, number, ended)

    def _take(self, array: Array, number: int, ended: Ended) -> None:
        """Remove an element that has ended from the array, and store its result `ended`, which the next `poll` returns.

        If Slurm's accounting may explain the end better than the record, the element stays in the array until `_explain` has
        asked the accounting. `number` is the number of the element in the array.
        """
        if not needs_job_facts(ended.evidence):
            del array.open[number]
            self._ready.append(ended)
            return
        ended.explain_by = time.monotonic() + STATE_TIMEOUT + self.backend.slurm.poll_interval
        array.open[number].ended = ended

    def _output(self, array: Array, number: int, reader: LineReader, data: bytes, whole: int) -> Iterator[Record]:
        """Yields the lines of an element's recorded output.

        `data` is the beginning of the output file, and `whole` the size of the file in bytes. The function reads the rest of
        the file from the cluster. `reader` splits the data into lines.
        """
        path = os.path.join(array.directory, str(number), STDIO)
        while data:
            yield from reader.feed(data)
            data = self.connection.read(path, reader.next_read, _MOST_BYTES) if reader.next_read < whole else b""

    def _is_settled(self, element: _Element, started: bool, log: str) -> bool:
        """Returns whether an element whose record has no `end` line can be judged now.

        The element's files may become visible late, so the result is False until some time after Slurm has reported the element
        as ended. The wait depends on the element's state in Slurm, and on `started`: whether the beginning of the record was
        read (see `settling_time`). If the record has not begun, and Slurm's state does not explain the end, the wait is
        `_UNSEEN_TIMEOUT` seconds, unless a line of `log`, the end of the element's logs, explains the end.
        """
        if element.over_at is None:
            return False
        status, waited = element.watch.view, time.monotonic() - element.over_at
        timeout = settling_time(status, started, started)
        if not started and status.state in ("COMPLETED", "FAILED", "") and not relevant_lines(log):
            timeout = _UNSEEN_TIMEOUT
        return waited >= timeout

    def _how(self, element: _Element) -> str:
        status = element.watch.view
        return f"Slurm calls the job {status.state}" if status.phase == JobPhase.ENDED else "Slurm no longer knows the job"

    def _explain(self) -> None:
        """Ask Slurm's accounting, at most every `_ASK_INTERVAL` seconds, about ended elements that `_take` has not removed.

        An element is removed, and added to the result of the next `poll`, once the accounting or the queue shows its final state,
        and at the latest at the time `explain_by` of the element.
        """
        pending = [(array, number, each) for array in self.running for number, each in array.open.items() if each.ended]
        if not pending or time.monotonic() - self._asked_at < _ASK_INTERVAL:
            return
        self._asked_at = time.monotonic()
        jobs = [f"{array.array_id}_{number}" for array, number, _ in pending]
        if len(jobs) > _MOST_NAMED or not all(each.begun for _, _, each in pending):
            jobs = list(dict.fromkeys(array.job.job_id for array, _, _ in pending))
        try:
            facts = fetch_element_facts(self.connection, jobs)
        except TimeoutError:  # sacct hangs; the other elements must not wait for it.
            facts = {}
        for array, number, element in pending:
            ended = element.ended
            assert ended is not None and ended.explain_by is not None
            known = facts.get((array.array_id, number)) or _facts_of(ended.label, element)
            late = time.monotonic() > ended.explain_by
            if late or (known is not None and known.is_final):
                ended.evidence.job = known
                del array.open[number]
                self._ready.append(ended)

    # ---- The end

    def cancel(self) -> None:
        """Cancel all arrays, and wait up to a minute for each until Slurm confirms its end. Submits no further array after that.

        Logs an error if Slurm does not confirm an end.
        """
        self.waiting = []
        alive = [array for array in self.running if array.open]
        if alive:
            with_all = ["scancel", *(array.job.job_id for array in alive)]
            with contextlib.suppress(OSError):  # Each array is cancelled once more below.
                run_slurm(self.connection, with_all, timeout=60)
        for array in alive:
            array.job.cancelled = True
            array.job.cancel_until_gone()


def _array_dir(run_dir: str, number: int, *names: str) -> str:
    return os.path.join(run_dir, f"{elements.ARRAY}{number}", *names)


def _facts_of(label: str, element: _Element) -> JobFacts | None:
    """Returns how an element ended, according to the queue, in the form of Slurm's accounting; None if the queue showed no end.

    An element counts as cancelled if the element disappeared from the queue before it started. `label` is the element's job id,
    such as "12_7".
    """
    row = element.row
    if row is not None and row.state in TERMINAL:
        return facts_in_queue(label, row)
    if element.over_at is not None and not element.begun:
        return JobFacts(label, "CANCELLED")  # Slurm keeps no entry of an element that is cancelled while it waits.
    return None
