"""The life of one payload, from its place in the queue to its `end` record."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import time
import traceback
from enum import Enum, IntEnum
from typing import Any, Callable, Dict, List, Optional, Set

from ..process import processes
from ..process.loop import Loop, Timers
from ..protocol.end import End, EndReason, PayloadEnd, defect
from ..protocol.record import RunRecord, tail_lines
from ..protocol.spec import PayloadSpec
from .environment import Environment, LaunchContext, lay_out_work_dir, payload_environment
from .measurement import UsageMeasurement
from .outputs import OutputSearch
from .preload_server import PreloadServer
from .process import PayloadProcess, spawn_error
from .record import MessageFile, PayloadRecord

_MESSAGE_POLL = 0.1
"""Seconds between two looks for new Pipes messages of the payload."""
_TURN = 0.1
"""Seconds for which messages are copied, or outputs searched for, at a stretch: other payloads must not wait longer."""
_SYNC_INTERVAL = 0.2
"""Seconds between two syncs of the run record, which make new lines visible to other hosts."""
_LAST_OUTPUT_TIMEOUT = 5.0
"""Seconds for which the `end` waits, after the process has ended, for other processes to close its output pipes."""
_SIGNAL_MARGIN = 0.25
"""Seconds for which the `end` of a failed payload waits for a signal to the runtime. Slurm signals all processes of a job, so
the signal that ended the payload may be about to reach the runtime as well."""


class _State(IntEnum):
    """The states of a payload's life, in order; a payload never returns to an earlier state."""

    QUEUED = 0
    """The payload waits in the queue."""
    STARTING = 1
    """The process is being started, or requested from a preload process."""
    RUNNING = 2
    """The process runs."""
    EXITED = 3
    """The process has ended; its last output and figures are awaited."""
    FINISHING = 4
    """The last messages are copied and the outputs searched for."""
    ENDED = 5
    """The `end` record is written, or writing it failed and is retried."""


class _Awaited(Enum):
    """What the `end` record waits for after the payload's process has ended, besides the rest of its output."""

    USAGE = "usage of the other nodes"
    LEAKS = "leak check"
    SIGNAL = "signal to the runtime"


class Payload:
    """Runs one payload and writes its run record.

    Args:
        run_dir: the run directory, with the Pipes context in it.
        secret_env: environment variables that only the payload's own process gets; they are in no record.
        record: the files of the run record.
        environ: environment variables that the payload inherits.
    """

    def __init__(
        self, loop: Loop, run_dir: str, spec: PayloadSpec, secret_env: Environment, record: RunRecord, environ: Environment
    ) -> None:
        self.loop = loop
        self.run_dir = run_dir
        self.spec = spec
        self.context: Dict[str, Any] = {}
        """Facts about the Ray cluster and the nodes; the `end` record repeats them, so that metadata needs no other record."""
        self.place: Optional[int] = None
        """Place in the queue that the Dagster log shows; None before the first report."""
        self.companions: Set[str] = set()
        """Nonces (random ids) of other payloads that ran at the same time."""
        self.preload_server: Optional[PreloadServer] = None
        """Forks the payload's process if it has modules to preload; None for a fresh interpreter in any case."""
        self.component_env: Environment = {}
        """Environment variables about the other components; empty unless the topology is separate."""
        self.on_ended: List[Callable[[], None]] = []
        """Callbacks for after the `end` record; the event loop calls them, never a method of this payload."""
        self.ending = PayloadEnd()
        """How the payload ends, as far as that is known."""
        self.record = PayloadRecord(loop, record, spec.nonce, self._record_failed)
        self._environ = environ
        self._secret_env = secret_env
        self._work_dir = os.path.join(run_dir, "work")
        self._state = _State.QUEUED
        self._process = PayloadProcess(loop, run_dir, self)
        self._timers = Timers(loop, self.safely)
        self._early_signals: List[int] = []
        """Signals that came before the process had started; the process gets them when it starts."""
        self._started_at: Optional[float] = None
        self._ended_at = 0.0
        self._argv = list(spec.argv)
        self._leak_check: Optional[Callable[[Callable[[List[str]], None]], None]] = None
        self._messages: Optional[MessageFile] = None
        self._measurement: Optional[UsageMeasurement] = None
        self._kill_at: Optional[float] = None
        """When SIGKILL is due, in seconds of the loop's clock; None unless the payload is being ended."""
        self._awaited: Set[_Awaited] = set()
        self._outputs: Optional[OutputSearch] = None

    @property
    def facts(self) -> Dict[str, Any]:
        """Run directory, Dagster run and step, for clients of a session."""
        return {"run_dir": self.run_dir, "run_id": self.spec.run_id, "step": self.spec.step}

    @property
    def ended(self) -> bool:
        """Whether the payload is over: its `end` record is written, or writing it failed and is retried."""
        return self._state == _State.ENDED

    @property
    def pid(self) -> Optional[int]:
        """Id of the payload's process while it runs; None before and afterwards."""
        return self._process.pid if self.ending.exit is None else None

    def safely(self, call: Callable[[], None]) -> None:
        """Make a call on behalf of this payload; an exception in the call ends this payload and nothing else."""
        try:
            call()
        except Exception as error:
            self._fail(error)

    def phase(self, name: str, message: str) -> None:
        """Show in the Dagster log what happens now; does nothing after the payload has ended."""
        if not self.ended:
            self.record.phase(name, message)

    def tail(self, name: str, text: str) -> None:
        """Record the last lines of a log that explains a failure; does nothing after the payload has ended."""
        if not self.ended:
            self.record.tail(name, text)

    # ---- Start

    def start(self, launch: LaunchContext) -> None:
        """Start the payload's process; if it cannot be started, the payload ends with an error message."""
        self._state = _State.STARTING
        self._started_at = time.time()
        self._leak_check = launch.leak_check
        try:
            self._messages = MessageFile(launch.messages_path)
            lay_out_work_dir(self._work_dir, self.spec)
        except OSError as error:
            return self._finish(End(EndReason.RECORD, "the run cannot be laid out: %s" % error))
        if self._argv[0] in ("python", "python3"):
            self._argv[0] = sys.executable  # The environment's Python started this runtime.
        env = payload_environment(
            self.spec, self._environ, sys.executable, self.run_dir, launch.messages_path, launch.ray_env, launch.worker_env
        )
        self._measurement = UsageMeasurement(self.loop, self.spec.nonce, launch, self.record.note)
        env.update(self.component_env)
        self._process.start(self.spec, self._argv, self._work_dir, env, self._secret_env, self.preload_server)

    def process_started(self, error: Optional[Exception]) -> None:
        """Called when the process has started, or when it cannot be started because of `error`."""
        if error is not None:
            why = spawn_error(error, self._argv[0], self._work_dir)
            return self._finish(End(EndReason.SPAWN, "the command %r cannot be started: %s" % (self._argv[0], why)))
        self._state = _State.RUNNING
        self.record.payload_pid = self._process.pid
        self.record.note({"type": "context", "context": self.context})
        self.record.phase("running", "payload started (pid %s)" % self._process.pid)
        if self._process.not_forked_because is not None:
            self.record.phase("running", "a fresh interpreter, because %s" % self._process.not_forked_because)
        for signum in self._early_signals:
            name = processes.signal_name(signum)
            self.record.phase("running", "the payload gets %s now, which was due before it started" % name)
            self.signal(signum)
        if self.spec.time_limit is not None:
            late = End(EndReason.TIMEOUT, "the payload took longer than its time limit of %g s" % self.spec.time_limit)
            self._timers.due("limit", self.spec.time_limit, lambda: self.end_early(late))
        self._timers.due("messages", _MESSAGE_POLL, self._copy_messages)
        self._timers.due("sync", _SYNC_INTERVAL, self._sync)

    # ---- While the process runs

    def process_output(self, stream: str, text: str) -> None:
        """Called with new output of the process; `stream` is "stdout" or "stderr"."""
        self.record.output(stream, text)

    def _copy_messages(self) -> None:
        assert self._messages is not None
        until, more = self.loop.now() + _TURN, True
        while more and self._state < _State.FINISHING and self.loop.now() < until:
            more = self._messages.copy(self.record.keep)
        if self._state < _State.FINISHING:
            self._timers.due("messages", 0.0 if more else _MESSAGE_POLL, self._copy_messages)

    def _sync(self) -> None:
        self.record.sync()
        if self._state < _State.FINISHING:
            self._timers.due("sync", _SYNC_INTERVAL, self._sync)

    def signal(self, signum: int) -> bool:
        """Send a signal to the payload's process group; a signal that comes before the process has started is sent at its start.

        Returns:
            Whether the process has started, so that the signal need not wait.
        """
        if self._process.pid is None:
            self._early_signals.append(signum)
            return False
        if self.ending.exit is None:
            self._process.signal(signum)
        return True

    def end_early(self, end: End, grace: Optional[float] = None) -> None:
        """End a payload before it ends by itself, for instance at its time limit: SIGTERM, and SIGKILL after the grace period.

        The reason of the first call is recorded. A second call can shorten the grace period, never lengthen it. A payload
        whose process has ended by itself keeps that end, with two exceptions: for `_SIGNAL_MARGIN` after a failure, and while
        its outputs are searched for, the given reason is recorded; the search stops.

        Args:
            end: the reason.
            grace: seconds between SIGTERM and SIGKILL; None for those of the configuration.
        """
        unrecorded = end.reason == EndReason.RECORD
        if self._outputs is not None:
            if not unrecorded:  # Otherwise the search goes on: only the `end` remains to be recorded.
                self._give_up_outputs(end)
            return
        if self.ended or (self.ending.exit is not None and _Awaited.SIGNAL not in self._awaited and not unrecorded):
            return
        self.ending.force(end)
        if self._process.pid is None:
            return self._finish(self.ending.forced or end)
        if self.ending.exit is not None:
            return self._finish_if_complete()
        grace = self.spec.grace_period if grace is None else grace
        if grace > 0 and self._kill_at is None:
            self._process.signal(signal.SIGTERM)
        kill_at = self.loop.now() + grace
        if self._kill_at is None or kill_at < self._kill_at:
            self._kill_at = kill_at
            self._timers.due("kill", grace, self._process.kill)

    def abandon(self, end: End) -> None:
        """Write the `end` record at once; the process may still run, and the caller must end it."""
        if not self.ended:
            self._finish(end)
            self._give_up_outputs(end)

    def _record_failed(self, why: str) -> None:
        """Called when the run record cannot be written: ends the payload, because its results would be lost."""
        self.end_early(End(EndReason.RECORD, why))

    # ---- After the process has ended

    def process_exited(self, code: int, rusage: Any) -> None:
        """Called when the process has ended with an exit code, or with the negative number of a signal.

        The `end` record waits for the rest of the output and for everything in `_awaited`.
        """
        assert self._process.pid is not None and self._measurement is not None
        self._state = max(self._state, _State.EXITED)
        self.ending.exit = End(EndReason.EXIT, exit_code=code) if code >= 0 else End(EndReason.EXIT, signal=-code)
        hostname = str(self.context.get("hostname"))
        if self._measurement.finish(self._process.pid, rusage, hostname, functools.partial(self.safely, self._usage_complete)):
            self._awaited.add(_Awaited.USAGE)
        if self._leak_check is not None:
            self._awaited.add(_Awaited.LEAKS)
            self._leak_check(lambda leaks: self.safely(lambda: self._leaks_found(leaks)))
        self._process.kill()
        self._process.kill_leftovers()
        if code != 0 and self.ending.forced is None:
            self._awaited.add(_Awaited.SIGNAL)
            self._timers.due("signal", _SIGNAL_MARGIN, lambda: self._received(_Awaited.SIGNAL))
        self._timers.due("drain", _LAST_OUTPUT_TIMEOUT, self._stop_draining)
        self._finish_if_complete()

    def process_stream_ended(self) -> None:
        """Called when an output stream of the process has ended."""
        self._finish_if_complete()

    def _stop_draining(self) -> None:
        """Called after `_LAST_OUTPUT_TIMEOUT`: gives up the rest of the output, because some process still holds a pipe open."""
        self._process.close_streams()
        self._finish_if_complete()

    def _usage_complete(self) -> None:
        self._received(_Awaited.USAGE)

    def _leaks_found(self, leaks: List[str]) -> None:
        if leaks and not self.ended:
            self.context["leaks"] = leaks
        self._received(_Awaited.LEAKS)

    def _received(self, awaited: _Awaited) -> None:
        """Called when something that the `end` record waits for has come."""
        self._awaited.discard(awaited)
        self._finish_if_complete()

    def _finish_if_complete(self) -> None:
        """Finish the payload if its process has ended and the `end` record has nothing left to wait for."""
        if self.ending.exit is None or self._process.streams_open:
            return
        # Once the runtime has a reason of its own, a signal to the runtime makes no difference.
        if not self._awaited or (self.ending.forced is not None and self._awaited == {_Awaited.SIGNAL}):
            self._finish(self.ending.forced or self.ending.exit)

    # ---- The end

    def _finish(self, end: End) -> None:
        """Copy the last messages, search for outputs, and write the `end` record."""
        if self._state >= _State.FINISHING:
            return
        self._state = _State.FINISHING
        if self._process.pid is None:
            self._process.cancel_start()
            if self._measurement is not None:
                self._measurement.cancel()
        if self._messages is not None:
            self._messages.copy_rest(self.record.keep)
            self._messages.remove()
            end = self.ending.forced or end  # Copying the last messages may have failed.
        self._timers.cancel_all()
        self._ended_at = time.time()
        if self._started_at is None or not self.spec.outputs:
            return self._conclude(end)
        self._outputs = OutputSearch(self._work_dir, self.spec.outputs, self.spec.max_output_bytes)
        search = self._outputs.run()

        def advance() -> None:
            until = self.loop.now() + _TURN
            for _ in search:
                if self.loop.now() > until:
                    return self._timers.due("outputs", 0.0, advance)
            self._conclude(end)

        advance()

    def _give_up_outputs(self, end: End) -> None:
        """Stop the search for outputs and write the `end` record without outputs."""
        if self._outputs is not None and not self.ended:
            self.ending.force(end)  # Without its outputs, the payload must not count as a success.
            self._outputs.files = []
            self._outputs.left_out = ["all of them: %s while they were searched for" % (end.message or end.reason)]
            self._conclude(end)

    def _fail(self, error: Exception) -> None:
        """End this payload because of an exception that nothing handles, which is a defect of the runtime."""
        traceback.print_exc()
        if self.ended:
            return
        with contextlib.suppress(Exception):  # The defect may be in the code that writes the record.
            self.tail("runtime traceback", tail_lines(traceback.format_exc()))
        with contextlib.suppress(Exception):
            if self._measurement is not None:
                self._measurement.cancel()
        with contextlib.suppress(Exception):
            if self._messages is not None:
                self._messages.remove()
        self._state = _State.FINISHING
        self._process.cancel_start()
        self._process.close_streams()
        if self.pid is not None:
            self._process.kill()
        self._process.kill_leftovers()
        self.ending.forced = end = defect(error)
        self._timers.cancel_all()
        self._ended_at, self._outputs = time.time(), None
        self._write_end(end)

    def _conclude(self, end: End) -> None:
        """Write the `end` record, with the runtime's reason instead of `end` if there is one."""
        self._timers.cancel_all()
        self._write_end(self.ending.forced or end)

    def _write_end(self, end: End) -> None:
        """Write the payload's only `end` record; afterwards nothing is written to the run directory."""
        process = self.ending.exit or end
        usage = self._measurement.current() if self._measurement is not None else {}
        if usage and self.ending.exit is not None:
            usage = {**usage, "shared": len(self.companions)}
        self.record.end(
            {
                "type": "end",
                "nonce": self.spec.nonce,
                "reason": end.reason,
                "message": end.message,
                "exit_code": process.exit_code,
                "signal": process.signal,
                "started_at": self._started_at,
                "ended_at": self._ended_at,
                "pipes_messages": self._messages.count if self._messages else 0,
                "usage": usage,
                "outputs": self._outputs.files if self._outputs is not None else [],
                "outputs_left_out": self._outputs.left_out if self._outputs is not None else [],
                "context": self.context,
            }
        )
        self._state = _State.ENDED
        for call in self.on_ended:
            self.loop.call_later(0.0, call)
