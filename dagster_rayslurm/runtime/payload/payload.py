"""Runs one payload, from the queue to the `end` record.

`Life`, in `life.py`, decides what happens next. `Payload` and `PayloadProcess` act on these decisions.

The run record of a payload has two files: the journal, a file of records, and the payload's output. The `end` record is the last
record of the journal, and tells how the payload ended.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, BinaryIO, Callable, Dict, List, Optional, Set, Tuple

from ..node.resources import NodeResources
from ..process import processes
from ..process.loop import Loop, Timers
from ..protocol.messages import End, EndReason, defect
from ..protocol.record import STATUS, Record, RunRecord, split_lines, tail_lines, write_atomically
from ..protocol.spec import PayloadSpec
from .environment import Environment, find_own_ray, lay_out_work_dir
from .life import Awaited, Do, Life, Phase
from .results import OutputSearch, UsageMeasurement

if TYPE_CHECKING:
    from .preload_server import Cancel, ForkResult, PreloadServer

LeakCheck = Callable[[Callable[[List[str]], None]], None]  # Calls back with sentences on a payload's leaks in Ray.

_MESSAGE_POLL = 0.1  # Seconds between two looks for new Pipes messages of the payload.
_SYNC_INTERVAL = 0.2  # Seconds between two syncs of the run record, which make new lines visible to other hosts.
# Seconds for which the `end` waits, after the process has ended, for other processes to close its output pipes.
_LAST_OUTPUT_TIMEOUT = 5.0
# Seconds for which the `end` of a failed payload waits for a signal to the runtime: Slurm signals all processes of a job.
_SIGNAL_MARGIN = 0.25
_ARCHIVE_TIMEOUT = 6.0  # Seconds that the `end` of a failed payload waits for the archives of Ray's logs.
_EXPLAINED_BY_RAY = (EndReason.CLUSTER_START, EndReason.CLUSTER_LOST, EndReason.INFEASIBLE)
_REFRESH_INTERVAL = 600.0  # Seconds between two updates of the times of directories, by which cleanup finds old ones.
_RETRY = 1.0  # Seconds between two tries to write the `end`.
_CHUNK = 256 * 1024  # Most bytes of output or messages that are read at a time.


@dataclass(eq=False)
class Payload:
    """One payload of a runtime: runs its process, and writes its run record.

    Until `start` is called, the payload waits in the queue; `start` starts the process. Callbacks of the event loop then copy
    output and messages into the run record, and write the `end` record. Afterwards, the event loop calls the functions in
    `on_ended`.
    """

    loop: Loop
    run_dir: str
    spec: PayloadSpec
    secret_env: Environment  # Variables that only the payload's own process gets; they are in no record.
    files: RunRecord
    environ: Environment  # The variables on which the environment of the process is based.
    preload_server: Optional[PreloadServer] = None  # Forks the process if the payload has modules to preload.
    ending: Life = field(default_factory=Life)  # The state of this payload.
    # Facts about the Ray cluster and the nodes; the `end` record repeats them, so that metadata needs no other record.
    context: Dict[str, Any] = field(default_factory=dict)
    place: Optional[int] = None  # Place in the queue that the Dagster log shows; None before the first report.
    companions: Set[str] = field(default_factory=set)  # Nonces (random ids) of other payloads that ran at the same time.
    # Environment variables about the other components; empty unless the topology is separate.
    component_env: Environment = field(default_factory=dict)
    # Callbacks for after the `end` record; the event loop calls them, never a method of this payload.
    on_ended: List[Callable[[], None]] = field(default_factory=list)
    # Called when the payload has failed: archives Ray's logs without blocking, and calls its argument once this has ended.
    archive_logs: Callable[[Callable[[], None]], None] = lambda done: done()
    # Asks for the joules that the payload's Slurm step has consumed; returns False if its argument will not be called.
    query_energy: Callable[[Callable[[Optional[int]], None]], bool] = lambda _: False
    # Directories beside the run directory whose modification times are kept recent as well, until the payload has ended.
    kept_fresh: List[str] = field(default_factory=list)
    _early_signals: List[int] = field(default_factory=list)  # Signals to send to the process when it starts.
    _started_at: Optional[float] = None
    _ended_at: Optional[float] = None
    _measurement: Optional[UsageMeasurement] = None
    _leak_check: Optional[LeakCheck] = None
    _message_file: Optional[BinaryIO] = None  # The file to which `dagster_pipes` appends messages.
    _messages: int = 0  # Number of Pipes messages copied so far.
    _partial: bytes = b""  # The beginning of a line of Pipes messages whose end has not been read yet.
    _unwritten_end: Optional[Record] = None  # The `end` record until it is written.
    _warned: bool = False  # Whether `check_own_ray` has warned.

    def __post_init__(self) -> None:
        self._work_dir = os.path.join(self.run_dir, "work")
        self._process = PayloadProcess(self.loop, self)
        self._timers = Timers(self.loop, self.safely)
        self._outputs = OutputSearch(self._work_dir, self.spec.outputs, self.spec.max_output_bytes)
        self.loop.call_later(0.0, self._keep_fresh)

    @property
    def ended(self) -> bool:
        """Whether the payload has ended: its `end` record is written, or writing it failed and is tried again."""
        return self.ending.phase == Phase.ENDED

    @property
    def pid(self) -> Optional[int]:
        """Id of the payload's process while the process runs; None before and afterwards."""
        return self._process.pid if self.ending.exit is None else None

    def safely(self, call: Callable[[], None]) -> None:
        """Call the function `call`, which acts for this payload; an exception in it ends this payload, but not the runtime."""
        try:
            call()
        except Exception as error:
            traceback.print_exc()
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End this payload immediately because of a bug in the runtime, which has raised `error`.

        To be called in the `except` block. The traceback goes into the run record.
        """
        with contextlib.suppress(Exception):  # The defect may be in the code that writes the record.
            self.tail("runtime traceback", tail_lines(traceback.format_exc()))
        self.abandon(defect(error))

    # ---- The run record

    def keep(self, *records: Record) -> None:
        """Append `records`, which must not be lost, to the journal.

        If this fails, the method ends the payload: without a record, its results would be lost.
        """
        self._guarded(lambda: self.files.write(*records))

    def note(self, record: Record) -> None:
        """Append `record`, which may be lost (for example a usage sample), to the journal; an OSError is ignored."""
        with contextlib.suppress(OSError):
            self.files.write(record)

    def phase(self, name: str, message: str) -> None:
        """Report a new phase of the payload: write `message` to the journal, for the Dagster log, and to the status file.

        `name` is the name of the phase, such as "running". After the payload has ended, the method does nothing.
        """
        if not self.ended:
            at = time.time()
            self.keep({"type": "phase", "phase": name, "message": message, "at": at})
            self._guarded(self.files.sync)
            self._guarded(lambda: self._write_status(name, message, at))

    def tail(self, name: str, text: str) -> None:
        """Write `text`, the last lines of the log called `name`, into the journal; does nothing after the payload has ended."""
        if not self.ended:
            self.keep({"type": "tail", "name": name, "text": text})

    def _keep_fresh(self) -> None:
        """Update the modification times of the run directory and of `kept_fresh` regularly, so that cleanup does not remove them.

        Does nothing after the payload has ended.
        """
        if not self.ended:
            for directory in [self.run_dir, *self.kept_fresh]:
                self._guarded(functools.partial(os.utime, directory))
            self.loop.call_later(_REFRESH_INTERVAL, self._keep_fresh)

    def end(self, end: Record) -> None:
        """Store `end` as the payload's `end` record, and write it; if writing fails, the event loop tries again every second."""
        self._unwritten_end = end
        if not self.write_end():
            print("rayslurm: %s: the end of the run cannot be recorded yet" % self.run_dir, file=sys.stderr)

    def write_end(self) -> bool:
        """Try to write the `end` record that the method `end` has stored; returns whether nothing is left to write.

        If writing fails, the result is False, and the event loop calls the method again a second later. If the record is already
        written, or not stored yet, does nothing and returns True.
        """
        end = self._unwritten_end
        if end is None:
            return True
        with contextlib.suppress(OSError):  # On a full disk the journal has space reserved for the `end`, the status has not.
            self._write_status("ended", end["reason"], end["ended_at"])
        try:
            self.files.end(end)
        except OSError:
            self.loop.call_later(_RETRY, self.write_end)
            return False
        self._unwritten_end = None
        return True

    def _write_status(self, state: str, message: str, at: float) -> None:
        status: Dict[str, Any] = {"state": state, "message": message, "at": at}
        status.update(nonce=self.spec.nonce, runtime_pid=os.getpid(), payload_pid=self._process.pid)
        write_atomically(os.path.join(self.run_dir, STATUS), json.dumps(status).encode("utf-8"))

    def _guarded(self, write: Callable[[], None]) -> None:
        """Call `write`, which writes to the run directory; if `write` raises OSError, end the payload with the reason RECORD.

        If the payload went on without a record, its results would be lost.
        """
        try:
            write()
        except OSError as error:
            self.end_early(End(EndReason.RECORD, "%s cannot be written: %s" % (self.run_dir, error.strerror)))

    def copy_chunk(self) -> bool:
        """Copy at most 256 KiB of the payload's Pipes messages from their file into the journal.

        Returns False if nothing was new. An incomplete line at the end is kept in memory until the rest comes.
        """
        data = self._message_file.read(_CHUNK) if self._message_file is not None else b""
        lines, self._partial = split_lines(self._partial + data)
        now = time.time()
        records = [{"type": "pipes", "at": now, "line": line.decode("utf-8", "replace")} for line in lines if line]
        self._messages += len(records)
        if records:
            self.keep(*records)
        return bool(data)

    def _close_messages(self) -> None:
        """Close and delete the file to which the payload has written its Pipes messages; does nothing if this was done before."""
        if self._message_file is not None:
            self._message_file.close()
            with contextlib.suppress(OSError):
                os.unlink(self._message_file.name)
            self._message_file = None

    # ---- What others ask of the payload

    def start(self, env: Environment, messages: str, measurement: UsageMeasurement, leak_check: Optional[LeakCheck]) -> None:
        """Start the payload's process, without waiting for it; if it cannot be started, the payload ends with an error message.

        Args:
            env: The environment variables of the process, without the secrets and the addresses of other components.
            messages: The path of a file that does not exist yet; the process appends its Pipes messages to this file.
            measurement: The object that measures the usage of the payload.
            leak_check: A function that finds what the payload leaves in a shared Ray cluster; None if the cluster is not shared.
        """
        self._measurement, self._leak_check = measurement, leak_check
        self.ending = replace(self.ending, phase=Phase.STARTING)
        self._started_at = time.time()
        try:
            self._message_file = open(messages, "xb+", buffering=0)
            lay_out_work_dir(self._work_dir, self.spec)
        except OSError as error:
            return self.end_early(End(EndReason.RECORD, "the run cannot be laid out: %s" % error))
        self._process.start({**env, **self.component_env}, self._work_dir)

    def signal(self, signum: int) -> bool:
        """Send a signal to the payload's process group; returns whether the process has started.

        If the process has not started yet, it gets the signal as soon as it starts. If the process has ended, no signal is sent.
        """
        if self._process.pid is None:
            self._early_signals.append(signum)
        elif self.ending.exit is None:
            self._process.signal(signum)
        return self._process.pid is not None

    def end_early(self, end: End, grace: Optional[float] = None) -> None:
        """End the payload before it ends by itself: send SIGTERM, and SIGKILL `grace` seconds later. Does not block.

        `end` is the reason for the `end` record; the reason of the first call counts. `grace` is the payload's own grace period
        by default; a later call can only shorten it. If the process has not started yet, it never starts.

        After the process has ended by itself, a call has an effect only in three cases: within `_SIGNAL_MARGIN` seconds after a
        failure, during the search for outputs, and before this search if the run record cannot be written.
        """
        self._go_on(self.ending.end_early(end, self.spec.grace_period if grace is None else grace, self.loop.now()))

    def abandon(self, end: End) -> None:
        """Kill the process and write the `end` record immediately, because of a bug in the runtime.

        `end` is the reason for the `end` record, unless the payload is being ended for another reason already. After the payload
        has ended, the method does nothing.
        """
        if self.ended:
            return
        self.ending = replace(self.ending, forced=self.ending.forced or end, phase=max(self.ending.phase, Phase.FINISHING))
        process = self._process
        releases = [process.cancel_start, process.kill_leftovers, self._close_messages, self._cancel_measurement]
        for release in [process.kill, *releases] if self.pid is not None else releases:
            with contextlib.suppress(Exception):  # The defect may be there.
                release()
        self._conclude()

    def check_own_ray(self, node: NodeResources) -> None:
        """If the payload has started a Ray cluster itself, and this causes a problem, warn in the Dagster log, once.

        `find_own_ray` finds the Ray cluster and decides about the warning. `node` has the resources granted on this node.
        """
        warning = None if self._warned else find_own_ray(self.run_dir, node, self.spec.uses_ray, max_age=1.0)
        if warning is not None:
            self._warned = True
            self.phase("own-ray", warning)

    # ---- What the process does

    def process_started(self, error: Optional[str], not_forked_because: Optional[str]) -> None:
        """Handle the start of the process, or its failure to start; called once. After a start, begin to copy the messages.

        `error` says why the process could not be started, which ends the payload; None if it was started. `not_forked_because`
        says why the process was not forked from a preload process; None if it was, or if the payload has no modules to preload.
        """
        if error is not None:
            return self.end_early(End(EndReason.SPAWN, error))
        self.ending = replace(self.ending, phase=Phase.RUNNING)
        self.note({"type": "context", "context": self.context})
        self.phase("running", "payload started (pid %s)" % self._process.pid)
        if not_forked_because is not None:
            self.phase("running", "a fresh interpreter, because %s" % not_forked_because)
        for signum in self._early_signals:
            name = processes.signal_name(signum)
            self.phase("running", "the payload gets %s now, which was due before it started" % name)
            self.signal(signum)
        if self.spec.time_limit is not None:
            late = End(EndReason.TIMEOUT, "the payload took longer than its time limit of %g s" % self.spec.time_limit)
            self._timers.due("limit", self.spec.time_limit, lambda: self.end_early(late))
        self._timers.due("messages", _MESSAGE_POLL, self._copy_messages)
        self._timers.due("sync", _SYNC_INTERVAL, self._sync)

    def process_exited(self, code: int, rusage: Any) -> None:
        """Called when the process has ended: kill what it has left behind, and collect the last output and usage.

        `code` is the exit code of the process, or -N if signal N ended it. `rusage` is its `resource.struct_rusage`. The `end`
        record is written later.
        """
        assert self._process.pid is not None and self._measurement is not None
        end = End(EndReason.EXIT, exit_code=code) if code >= 0 else End(EndReason.EXIT, signal=-code)
        self.ending = replace(self.ending, exit=end)  # From here on, another process may get its id.
        usage_complete = functools.partial(self.received, Awaited.USAGE)
        more_usage = self._measurement.finish(self._process.pid, rusage, str(self.context.get("hostname")), usage_complete)
        self._process.kill()
        self._process.kill_leftovers()
        self._timers.due("output", _LAST_OUTPUT_TIMEOUT, self._process.close_streams)
        self._timers.due("signal", _SIGNAL_MARGIN, functools.partial(self.received, Awaited.SIGNAL))
        may_come = {Awaited.OUTPUT: self._process.streams, Awaited.USAGE: more_usage, Awaited.LEAKS: self._leak_check}
        # There may be no time for the query if the runtime had to end the payload.
        may_come[Awaited.ENERGY] = self.ending.forced is None and self.query_energy(self._energy_known)
        self._go_on(self.ending.exited(end, frozenset(each for each, comes in may_come.items() if comes)))
        if self._leak_check is not None:
            self._leak_check(self._leaks_found)

    def received(self, awaited: Awaited) -> None:
        """Handle an event for which the `end` record may wait, such as the rest of the output.

        If the event does not come in time, a timer calls this method instead, and the `end` record stops waiting for the event.
        """
        self.safely(lambda: self._go_on(self.ending.received(awaited)))

    def _leaks_found(self, leaks: List[str]) -> None:
        if leaks and not self.ended:
            self.context["leaks"] = leaks
        self.received(Awaited.LEAKS)

    def _energy_known(self, joules: Optional[int]) -> None:
        if joules is not None and not self.ended:
            self.context["energy_joules"] = joules
        self.received(Awaited.ENERGY)

    def _copy_messages(self) -> None:
        more = self.copy_chunk()
        if self.ending.phase < Phase.FINISHING:  # It is later if the messages could not be written.
            self._timers.due("messages", 0.0 if more else _MESSAGE_POLL, self._copy_messages)

    def _sync(self) -> None:
        self._timers.due("sync", _SYNC_INTERVAL, self._sync)
        self._guarded(self.files.sync)

    # ---- The end

    def _go_on(self, step: Tuple[Life, List[Do]]) -> None:
        self.ending, orders = step
        for order in orders:
            if order == Do.TERMINATE:
                self._process.signal(signal.SIGTERM)
            elif order == Do.KILL:
                assert self.ending.kill_at is not None
                self._timers.due("kill", self.ending.kill_at - self.loop.now(), self._process.kill)
            elif order == Do.FINISH:
                self._finish()
            else:
                self._conclude()

    def _finish(self) -> None:
        """Do the last work of a payload and then write its `end` record, in steps of the event loop.

        The steps are: copy the last messages, archive Ray's logs if the payload failed by itself, and search for output files.
        """
        self._timers.cancel_all()
        self._ended_at = time.time()
        if self._process.pid is None:
            self._process.cancel_start()
            self._cancel_measurement()
        if self._message_file is not None:  # Messages that leftover processes write later do not count.
            end = os.fstat(self._message_file.fileno()).st_size
            while self._message_file.tell() < end and self.copy_chunk():
                continue
        self._close_messages()
        self.ending = replace(self.ending, phase=Phase.SEARCHING)
        search = self._outputs.run() if self._started_at is not None else iter(())

        def advance() -> None:
            for _ in search:  # One step at a time: other payloads must not wait.
                return self._timers.due("outputs", 0.0, advance)
            self._write_end()

        if not self._failed_by_itself:
            return advance()
        archived = [lambda: None if self.ended else advance()]  # Called by the archive or by the timer, whichever is first.
        go_on: Callable[[], None] = lambda: self.safely(archived.pop()) if archived else None  # noqa: E731
        self._timers.due("archive", _ARCHIVE_TIMEOUT, go_on)
        self.archive_logs(go_on)

    @property
    def _failed_by_itself(self) -> bool:
        """Whether the payload failed for a reason that Ray's logs may explain.

        There are three such reasons: the process ended with an error or by a signal, the Ray cluster failed, or the payload
        waited for resources that its Ray cluster can never grant. False if the payload succeeded or reached its time limit.
        """
        end = self.ending.result
        return end is not None and (end.reason in _EXPLAINED_BY_RAY or (end.reason == EndReason.EXIT and end.exit_code != 0))

    def _conclude(self) -> None:
        """Write the `end` record now, without the work of `_finish` that is left.

        If the outputs are being searched for at this time, the record lists no outputs, and says why.
        """
        forced = self.ending.forced
        if self.ending.phase == Phase.SEARCHING and forced is not None:
            why = "all of them: %s while they were searched for" % (forced.message or forced.reason)
            self._outputs.files, self._outputs.left_out = [], [why]
        self._write_end()

    def _cancel_measurement(self) -> None:
        if self._measurement is not None:
            self._measurement.cancel()

    def _write_end(self) -> None:
        """Write the payload's `end` record, its last record, and have the event loop call the functions in `on_ended`."""
        self._timers.cancel_all()
        end, process = self.ending.result, self.ending.exit or End(EndReason.EXIT)
        assert end is not None
        usage = self._measurement.current() if self._measurement is not None else {}
        if usage and self.ending.exit is not None:
            usage = {**usage, "shared": len(self.companions)}
        self.ending = replace(self.ending, phase=Phase.ENDED)
        self.end(
            {
                "type": "end",
                "nonce": self.spec.nonce,
                "reason": end.reason,
                "message": end.message,
                "exit_code": process.exit_code,
                "signal": process.signal,
                "started_at": self._started_at,
                "ended_at": self._ended_at or time.time(),
                "pipes_messages": self._messages,
                "usage": usage,
                "outputs": self._outputs.files,
                "outputs_left_out": self._outputs.left_out,
                "context": self.context,
            }
        )
        for call in self.on_ended:
            self.loop.call_later(0.0, call)


@dataclass(eq=False)
class PayloadProcess:
    """The process of one payload: starts it, records its output, and kills it with all processes that it has started."""

    loop: Loop
    payload: Payload
    pid: Optional[int] = None  # Id of the process and of its process group; None before the process has started.
    # Name and decoder of each output pipe that may have more to read, by file descriptor.
    streams: Dict[int, Tuple[str, codecs.IncrementalDecoder]] = field(default_factory=dict)
    _cancel_fork: Cancel = lambda: None  # Cancels the requested fork; does nothing if no fork is requested.
    _ends: List[int] = field(default_factory=list)  # The write ends of the output pipes, until the process has started.

    def start(self, env: Environment, work_dir: str) -> None:
        """Start the process, or request a fork of a preload process if the payload has modules to preload. Does not wait.

        `Payload.process_started` is called once, when the process has started or could not be started, perhaps during this call.
        `env` has the environment variables without the secrets, which this method adds. `work_dir` is the working directory.
        """
        payload, spec = self.payload, self.payload.spec
        argv = list(spec.argv)
        if argv[0] in ("python", "python3"):
            argv[0] = sys.executable  # The environment's Python started this runtime.
        options: Dict[str, Any] = {"cwd": work_dir, "env": {**env, **payload.secret_env}}
        for name in ("stdout", "stderr"):
            reader, writer = os.pipe()
            self._ends.append(writer)
            self.read_stream(name, reader)
        out, err = self._ends

        def exited(code: int, rusage: Any) -> None:
            payload.safely(lambda: payload.process_exited(code, rusage))

        def begin(result: Optional[ForkResult]) -> None:
            self._cancel_fork, error = (lambda: None), None
            if isinstance(result, int):
                self.pid = result
            else:
                options.update(stdin=subprocess.DEVNULL, stdout=out, stderr=err, preexec_fn=processes.die_with_parent())
                try:
                    self.pid = self.loop.spawn(argv, exited, **options)
                except Exception as failure:
                    why = _spawn_error(failure, argv[0], work_dir)
                    error = "the command %r cannot be started: %s" % (argv[0], why)
            self._close_ends()
            payload.safely(lambda: payload.process_started(error, result if isinstance(result, str) else None))

        if payload.preload_server is None or not spec.preload:
            return begin(None)
        forking = payload.preload_server.fork(
            spec.preload, argv, exited, begin, streams=(out, err), secrets=payload.secret_env, **options
        )
        if isinstance(forking, str):
            return begin(forking)
        self._cancel_fork = forking

    def cancel_start(self) -> None:
        """Cancel the start of the process if it is still under way, such as a requested fork, so that no process starts.

        Also closes the pipes for the output.
        """
        self._cancel_fork()
        self._cancel_fork = lambda: None
        self._close_ends()
        self.close_streams()

    def signal(self, signum: int) -> None:
        """Send a signal to the process group; does nothing before the process has started."""
        if self.pid is not None:
            processes.signal_group(self.pid, signum)

    def kill(self) -> None:
        """Send SIGKILL to the process group; does nothing before the process has started."""
        self.signal(signal.SIGKILL)

    def kill_leftovers(self) -> None:
        """Send SIGKILL to all processes of this run that are left, also to those in other process groups.

        They are found by the run directory in their environment.
        """
        processes.kill_all(processes.with_environment("RAYSLURM_RUN_DIR=" + self.payload.run_dir))

    def read_stream(self, name: str, fd: int) -> None:
        """Begin to record what the process writes to an output pipe; the event loop reads until the pipe ends.

        `fd` is the file descriptor from which the pipe is read. `name` is "stdout" or "stderr". Bytes that are not UTF-8 become
        U+FFFD.
        """
        self.streams[fd] = (name, codecs.getincrementaldecoder("utf-8")("replace"))
        self.loop.on_readable(fd, lambda: self.payload.safely(lambda: self._read(fd)))

    def close_streams(self) -> None:
        """Close the output pipes without reading the rest: another process may hold them open, so that they might never end."""
        for fd in list(self.streams):
            self._close_stream(fd)

    def _close_ends(self) -> None:
        while self._ends:
            os.close(self._ends.pop())

    def _close_stream(self, fd: int) -> None:
        self.loop.forget(fd)
        os.close(fd)
        del self.streams[fd]
        if not self.streams:
            self.payload.received(Awaited.OUTPUT)

    def _read(self, fd: int) -> None:
        data = os.read(fd, _CHUNK)
        name, decoder = self.streams[fd]
        text = decoder.decode(data, final=not data)
        if text:
            self.payload.files.output(name, text, time.time())
        if not data:
            self._close_stream(fd)


def _spawn_error(error: Exception, command: str, work_dir: str) -> str:
    why = str(error.strerror if isinstance(error, OSError) else error)
    if not isinstance(error, FileNotFoundError):
        return why
    if os.path.exists(os.path.join(work_dir, command)):
        return why + "; the file is there, but not the interpreter that its first line names"
    return why + '; the PATH there has no such program, and no shell reads the command: for that use ["bash", "-c", "…"]'
