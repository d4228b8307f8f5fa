"""One payload from its place in the queue to its `end`: when it starts, what ends it, and what its end waits for.

Its process is in `payload_process`, its record in `payload_record`, its figures in `measurement`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import time
import traceback
from typing import Any, Callable, Dict, List, Optional, Set

from ..process import processes
from ..process.loop import Loop, Timers
from ..protocol.end import End, Ending, EndReason, defect
from ..protocol.record import RunRecord, tail_lines
from ..protocol.spec import PayloadSpec
from .environment import Environment, LaunchContext, lay_out_work_dir, payload_environment
from .measurement import UsageMeasurement
from .output_streams import OutputStreams
from .outputs import OutputSearch
from .preload_server import Templates
from .process import PayloadProcess, why_not_started
from .record import MessageFile, PayloadRecord

_MESSAGE_POLL = 0.1
_TURN = 0.1
"""Seconds for which messages are copied, or outputs searched for, at a stretch: other payloads must not wait longer."""
_SYNC_INTERVAL = 0.2
_DRAIN_DEADLINE = 5.0
_SIGNAL_MARGIN = 0.25
"""Seconds that a failed payload's end waits for a signal which ended it and the runtime alike: Slurm signals all
processes of a job, the payload perhaps before the runtime."""


class Payload:
    """Runs one payload and writes its record.

    Args:
        loop: where everything happens.
        run_dir: the run directory, with the Pipes context in it.
        spec: what to run.
        secret_env: variables for the driver only, which the record never sees.
        record: the record of this run.
        environ: what its environment is made from.
    """

    def __init__(
        self,
        loop: Loop,
        run_dir: str,
        spec: PayloadSpec,
        secret_env: Environment,
        record: RunRecord,
        environ: Environment,
    ) -> None:
        self.loop = loop
        self.run_dir = run_dir
        self.spec = spec
        self.context: Dict[str, Any] = {}
        """Facts about the cluster that the `end` repeats, so that metadata needs no other record."""
        self.place: Optional[int] = None
        """Place in the queue that was last told to the user."""
        self.companions: Set[str] = set()
        """Other payloads that ran at the same time, by nonce."""
        self.templates: Optional[Templates] = None
        """What it may be forked from, if it asks for preloaded modules."""
        self.company: Environment = {}
        """Variables that tell it of payloads that run with it."""
        self.on_ended: List[Callable[[], None]] = []
        """Called after the `end` is written, from the loop: never from within a call into this payload."""
        self.ended = False
        self.ending = Ending()
        self.record = PayloadRecord(loop, record, spec.nonce, lambda: self._process.pid, self._unrecordable)
        self._environ = environ
        self._secret_env = secret_env
        self._work_dir = os.path.join(run_dir, "work")
        self._streams = OutputStreams(loop, self._take_output, self._finish_if_complete, self.safely)
        self._process = PayloadProcess(loop, run_dir, self._streams)
        self._timers = Timers(loop, self.safely)
        self._due_signals: List[int] = []
        self._started_at: Optional[float] = None
        self._ended_at = 0.0
        self._setting: Optional[LaunchContext] = None
        self._messages: Optional[MessageFile] = None
        self._measurement: Optional[UsageMeasurement] = None
        self._kill_at: Optional[float] = None
        self._awaited: Set[str] = set()
        """What the `end` waits for once the process has ended."""
        self._finishing = False
        self._outputs: Optional[OutputSearch] = None
        self._told_ended = False

    def start(self, setting: LaunchContext) -> None:
        """Start the process; a payload that cannot start ends at once."""
        self._started_at = time.time()
        self._setting = setting
        try:
            self._messages = MessageFile(setting.messages_path)
            lay_out_work_dir(self._work_dir, self.spec)
        except OSError as error:
            return self._finish(End(EndReason.RECORD, "the run cannot be laid out: %s" % error))
        argv = list(self.spec.argv)
        if argv[0] in ("python", "python3"):
            argv[0] = sys.executable  # The environment's Python started this runtime.
        env = payload_environment(
            self.spec,
            self._environ,
            sys.executable,
            self.run_dir,
            setting.messages_path,
            setting.ray_env,
            setting.worker_env,
        )
        self._measurement = UsageMeasurement(self.loop, self.spec.nonce, setting, self.record.note)
        self._start_process(argv, {**env, **self.company})

    def _begun(self, argv: List[str], error: Optional[Exception]) -> None:
        """The process has started, or cannot be."""
        if error is not None:
            why = why_not_started(error, argv[0], self._work_dir)
            return self._finish(End(EndReason.SPAWN, "the command %r cannot be started: %s" % (argv[0], why)))
        self.record.note({"type": "context", "context": self.context})
        self.record.phase("running", "payload started (pid %s)" % self._process.pid)
        if self._process.why_fresh is not None:
            self.record.phase("running", "a fresh interpreter, because %s" % self._process.why_fresh)
        for signum in self._due_signals:
            name = processes.signal_name(signum)
            self.record.phase("running", "the payload gets %s now, which was due before it started" % name)
            self.signal(signum)
        if self.spec.time_limit is not None:
            late = End(EndReason.TIMEOUT, "the payload took longer than its time limit of %g s" % self.spec.time_limit)
            self._timers.due("limit", self.spec.time_limit, lambda: self.end_early(late))
        self._timers.due("messages", _MESSAGE_POLL, self._copy_messages)
        self._timers.due("sync", _SYNC_INTERVAL, self._sync)

    def _start_process(self, argv: List[str], env: Environment) -> None:
        def started(error: Optional[Exception]) -> None:
            self.safely(lambda: self._begun(argv, error))

        self._process.start(self.spec, argv, self._work_dir, env, self._secret_env, self._exited, self.templates, started)

    def end_early(self, end: End, grace: Optional[float] = None) -> None:
        """End the payload for a reason of the runtime's own: SIGTERM to its group, SIGKILL after the grace period.

        The first reason stands; asking again shortens the wait if `grace` is shorter, and never lengthens it. Outputs that are
        still being searched for are given up, and the reason is how the payload ended.
        """
        grace = self.spec.grace_period if grace is None else grace
        if self._outputs is not None and not self.ended:
            if end.reason != EndReason.RECORD:  # Nothing but the `end` is still to be recorded.
                self._give_up_outputs(end)
            return
        itself = self.ending.exit is not None and "settling" not in self._awaited
        if self.ended or (itself and end.reason != EndReason.RECORD):
            return  # It ended by itself first, and that is the truth.
        self.ending.decide(end)
        if self._process.pid is None:
            return self._finish(self.ending.verdict or end)
        if self.ending.exit is not None:
            return self._finish_if_complete()
        if grace > 0 and self._kill_at is None:
            self._process.signal(signal.SIGTERM)
        self._kill_within(grace)

    def signal(self, signum: int) -> bool:
        """Send a signal to the payload's process group, unless it has ended; one that comes too early is kept for its start.

        Returns:
            False if the payload does not run yet.
        """
        if self._process.pid is None:
            self._due_signals.append(signum)
            return False
        if self.ending.exit is None:
            self._process.signal(signum)
        return True

    @property
    def pid(self) -> Optional[int]:
        """Its process, while that runs."""
        return self._process.pid if self.ending.exit is None else None

    def phase(self, name: str, message: str) -> None:
        """Tell the user what happens now, unless the payload has ended."""
        if not self.ended:
            self.record.phase(name, message)

    def tail(self, name: str, text: str) -> None:
        """Write the last lines of a log that explains a failure, unless the payload has ended."""
        if not self.ended:
            self.record.tail(name, text)

    def safely(self, call: Callable[[], None]) -> None:
        """Do something for this payload; a defect in that ends it alone, and not what others have here."""
        try:
            call()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        traceback.print_exc()
        if self._told_ended:
            return
        with contextlib.suppress(Exception):  # What failed may be this very record.
            self.tail("runtime traceback", tail_lines(traceback.format_exc()))
        with contextlib.suppress(Exception):
            if self._measurement is not None:
                self._measurement.cancel()
        with contextlib.suppress(Exception):
            if self._messages is not None:
                self._messages.remove()
        self.ending.verdict = end = defect(error)
        self._finishing = self.ended = True
        self._process.give_up()
        self._timers.cancel_all()
        self._streams.close()
        if self.pid is not None:
            self._process.kill()
        self._process.kill_leftovers()
        self._ended_at, self._outputs = time.time(), None
        self.record.end(self._end_record(end))
        self._tell_ended()

    def abandon(self, end: End) -> None:
        """Write the `end` without waiting for the process, which the caller ends with everything else."""
        if not self.ended:
            self._finish(end)
            self._give_up_outputs(end)

    def _unrecordable(self, why: str) -> None:
        """A record that cannot be kept ends the payload, because results would be lost."""
        if not self.ended:
            self.end_early(End(EndReason.RECORD, why))

    def _kill_within(self, grace: float) -> None:
        """Have it killed after so many seconds, unless that is to happen earlier anyway."""
        at = self.loop.now() + grace
        if self._kill_at is None or at < self._kill_at:
            self._kill_at = at
            self._timers.due("kill", grace, self._process.kill)

    def _take_output(self, stream: str, text: str) -> None:
        self.record.output(stream, text)

    def _copy_messages(self) -> None:
        """Copy what messages there are, and see later whether there are more."""
        assert self._messages is not None
        until, more = self.loop.now() + _TURN, True
        while more and not self._finishing and self.loop.now() < until:
            more = self._messages.copy(self.record.keep)
        if not self._finishing:
            self._timers.due("messages", 0.0 if more else _MESSAGE_POLL, self._copy_messages)

    def _sync(self) -> None:
        self.record.sync()
        if not self._finishing:
            self._timers.due("sync", _SYNC_INTERVAL, self._sync)

    def _exited(self, code: int, rusage: Any) -> None:
        self.safely(lambda: self._take_exit(code, rusage))

    def _take_exit(self, code: int, rusage: Any) -> None:
        assert self._process.pid is not None and self._measurement is not None and self._setting is not None
        self.ending.exit = End(EndReason.EXIT, exit_code=code) if code >= 0 else End(EndReason.EXIT, signal=-code)
        measured = functools.partial(self.safely, functools.partial(self._have, "usage"))
        if self._measurement.finish(self._process.pid, rusage, str(self.context.get("hostname")), measured):
            self._awaited.add("usage")
        if self._setting.leak_check is not None:
            self._awaited.add("audit")
            self._setting.leak_check(lambda leaks: self.safely(lambda: self._take_leaks(leaks)))
        self._process.kill()
        self._process.kill_leftovers()
        if code != 0 and self.ending.verdict is None:
            self._awaited.add("settling")
            self._timers.due("settle", _SIGNAL_MARGIN, lambda: self._have("settling"))
        self._timers.due("drain", _DRAIN_DEADLINE, self._give_up_draining)
        self._finish_if_complete()

    def _take_leaks(self, leaks: List[str]) -> None:
        """Take what this payload leaves alive in its cluster."""
        if leaks and not self.ended:
            self.context["leaks"] = leaks
        self._have("audit")

    def _have(self, what: str) -> None:
        """The `end` waits for this no longer."""
        self._awaited.discard(what)
        self._finish_if_complete()

    def _finish_if_complete(self) -> None:
        if self.ending.exit is None or self._streams:
            return
        # Whether the end was a signal to all does not matter once there is a verdict.
        if not self._awaited or (self.ending.verdict is not None and self._awaited == {"settling"}):
            self._finish(self.ending.verdict or self.ending.exit)

    def _give_up_draining(self) -> None:
        """A process that cannot be killed holds the pipe: what it may still write is not waited for."""
        self._streams.close()
        self._finish_if_complete()

    def _finish(self, end: End) -> None:
        """Copy what is left to copy, and write the one `end`; nothing is written to the run directory afterwards."""
        if self._finishing:
            return
        self._finishing = True
        if self._process.pid is None:
            self._process.give_up()
            if self._measurement is not None:
                self._measurement.cancel()
        if self._messages is not None:
            self._messages.copy_rest(self.record.keep)
            self._messages.remove()
            end = self.ending.verdict or end  # Copying the last messages may itself have failed.
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
        """Write the `end` without the outputs that are still being searched for."""
        if self._outputs is not None and not self.ended:
            self.ending.decide(end)  # A success would have them all.
            self._outputs.files = []
            self._outputs.left_out = ["all of them: %s while they were searched for" % (end.message or end.reason)]
            self._conclude(end)

    def _conclude(self, end: End) -> None:
        """Write the one `end`."""
        self._timers.cancel_all()
        self.ended = True
        self.record.end(self._end_record(self.ending.verdict or end))
        self._tell_ended()

    def _end_record(self, end: End) -> Dict[str, Any]:
        process = self.ending.exit or end
        return {
            "type": "end",
            "nonce": self.spec.nonce,
            "reason": end.reason,
            "message": end.message,
            "exit_code": process.exit_code,
            "signal": process.signal,
            "started_at": self._started_at,
            "ended_at": self._ended_at,
            "pipes_messages": self._messages.count if self._messages else 0,
            "usage": self._usage(),
            "outputs": self._outputs.files if self._outputs is not None else [],
            "outputs_left_out": self._outputs.left_out if self._outputs is not None else [],
            "context": self.context,
        }

    def _usage(self) -> Dict[str, Any]:
        usage = self._measurement.current() if self._measurement is not None else {}
        return {**usage, "shared": len(self.companions)} if usage and self.ending.exit is not None else usage

    def _tell_ended(self) -> None:
        self._told_ended = True
        for call in self.on_ended:
            self.loop.call_later(0.0, call)
