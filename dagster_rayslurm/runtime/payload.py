"""One payload: its directory and environment, its process, its output and Pipes messages into the record."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Set

from . import processes
from .loop import Loop, Timer
from .messages import MessageFile
from .outputs import Collection, Entry
from .record import STATUS, RunRecord, tail_lines, write_atomically
from .spec import PayloadSpec
from .streams import Streams
from .team import Others
from .templates import Templates
from .usage import Sampler, merge
from .workspace import Environment, lay_out_work_dir, payload_environment

_MESSAGE_POLL = 0.1
_SYNC_INTERVAL = 0.2
_DRAIN_DEADLINE = 5.0
_END_AGAIN = 1.0
"""Seconds until an `end` is written again that could not be."""
_SIGNAL_MARGIN = 0.25
"""Seconds that a failed payload's end waits for a signal which ended it and the runtime alike: Slurm signals all
processes of a job, the payload perhaps before the runtime."""


@dataclass(frozen=True)
class End:
    """How a payload ended. `reason` is one of the words of the `end` record; see `dagster_rayslurm.outcome`."""

    reason: str
    message: Optional[str] = None
    exit_code: Optional[int] = None
    signal: Optional[int] = None


@dataclass(frozen=True)
class Setting:
    """Where a payload runs.

    Attributes:
        messages_path: where its Pipes messages go.
        ray_env: how it reaches its cluster.
        worker_env: variables that the cluster's workers have anyway.
        spill_dir: Ray's temporary directory, or None.
        team: the other nodes, which measure as well, or None.
        others: processes that, with all below them, are other payloads' own.
        audit: asks what the payload leaves behind in its cluster, and calls with that, soon; None if the cluster ends with it.
    """

    messages_path: str
    ray_env: Environment = field(default_factory=dict)
    worker_env: Mapping[str, str] = field(default_factory=dict)
    spill_dir: Optional[str] = None
    team: Optional[Others] = None
    others: Callable[[], Iterable[int]] = tuple
    audit: Optional[Callable[[Callable[[List[str]], None]], None]] = None


def defect(error: BaseException) -> End:
    """The end of a payload that a defect of the runtime has ended: one line; where it happened is in the tail."""
    said = " ".join(str(error).split())
    return End("runtime", type(error).__name__ + (": " + said if said else ""))


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
        self.record = record
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
        self._environ = environ
        self._secret_env = secret_env
        self._work_dir = os.path.join(run_dir, "work")
        self._pid: Optional[int] = None
        self._why_fresh: Optional[str] = None
        self._due_signals: List[int] = []
        self._exit: Optional[End] = None
        self._verdict: Optional[End] = None
        self._usage: Dict[str, Any] = {}
        self._streams = Streams(loop, self._take_output, self._finish_if_complete, self.safely)
        self._messages: Optional[MessageFile] = None
        self._timers: Dict[str, Timer] = {}
        self._sampler: Optional[Sampler] = None
        self._setting: Optional[Setting] = None
        self._measuring: Optional[Others] = None
        """The other nodes, while they measure for this payload."""
        self._awaited: Set[str] = set()
        self._settled = True
        self._kill_at: Optional[float] = None
        self._finishing = False
        self._outputs: Optional[Collection] = None
        self._cut: Optional[End] = None
        """Why the copying of outputs is cut short."""
        self._started_at: Optional[float] = None
        self._unwritten: Optional[Dict[str, Any]] = None
        """The `end`, while it cannot be written."""
        self._told_ended = False
        self.ended = False

    def start(self, setting: Setting) -> None:
        """Start the process; a payload that cannot start ends at once."""
        self._started_at = time.time()
        self._setting = setting
        messages_path = setting.messages_path
        try:
            self._messages = MessageFile(messages_path)
            lay_out_work_dir(self._work_dir, self.spec)
        except OSError as error:
            return self._finish(End("record", "the run cannot be laid out: %s" % error))
        env = payload_environment(
            self.spec, self._environ, sys.executable, self.run_dir, messages_path, setting.ray_env, setting.worker_env
        )
        env.update(self.company)
        env.update(self._secret_env)
        argv = list(self.spec.argv)
        if argv[0] in ("python", "python3"):
            argv[0] = sys.executable  # The environment's Python started this runtime.
        self._sampler = Sampler(self.loop, setting.spill_dir, setting.others)
        if setting.team is not None:
            self._measuring = setting.team
            setting.team.measure(self.spec.nonce)
        try:
            self._spawn(argv, env)
        except (OSError, ValueError) as error:
            self._sampler.cancel()
            self._collect(lambda _: None)
            why = error.strerror if isinstance(error, OSError) else str(error)
            return self._finish(End("spawn", "the command %r cannot be started: %s" % (argv[0], why)))
        self._phase("running", "payload started (pid %s)" % self._pid)
        if self._why_fresh is not None:
            self._phase("running", "a fresh interpreter, because %s" % self._why_fresh)
        for signum in self._due_signals:
            self._phase("running", "the payload gets %s now, which was due before it started" % processes.signal_name(signum))
            self.signal(signum)
        if self.spec.time_limit is not None:
            late = End("timeout", "the payload took longer than its time limit of %g s" % self.spec.time_limit)
            self._due("limit", self.spec.time_limit, lambda: self.end_early(late))
        self._every(_MESSAGE_POLL, "messages", self._copy_messages)
        self._every(_SYNC_INTERVAL, "sync", self.record.sync)

    def _spawn(self, argv: List[str], env: Environment) -> None:
        out, err = os.pipe(), os.pipe()
        try:
            self._pid = self._fork(argv, env, out[1], err[1]) or self.loop.spawn(
                argv,
                self._exited,
                cwd=self._work_dir,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out[1],
                stderr=err[1],
                preexec_fn=processes.die_with_parent(),
            )
        except BaseException:
            os.close(out[0])
            os.close(err[0])
            raise
        finally:
            os.close(out[1])
            os.close(err[1])
        self._streams.add("stdout", out[0])
        self._streams.add("stderr", err[0])

    def _fork(self, argv: List[str], env: Environment, stdout: int, stderr: int) -> Optional[int]:
        """The process, forked from one that has imported what the payload asks for; None if it needs one of its own."""
        if self.templates is None or not self.spec.preload:
            return None
        pid = self.templates.spawn(
            self.spec.preload,
            argv,
            self._exited,
            cwd=self._work_dir,
            env=env,
            secrets=self._secret_env,
            stdout=stdout,
            stderr=stderr,
        )
        if isinstance(pid, int):
            return pid
        self._why_fresh = pid
        return None

    def end_early(self, end: End, grace: Optional[float] = None) -> None:
        """End the payload for a reason of the runtime's own: SIGTERM to its group, SIGKILL after the grace period.

        The first reason stands; asking again shortens the wait if `grace` is shorter, and never lengthens it. Outputs that are
        still being copied get the grace period, too; without them the reason is how the payload ended.
        """
        grace = self.spec.grace_period if grace is None else grace
        if self._outputs is not None and not self.ended:
            if end.reason != "record":  # Nothing but the `end` is still to be recorded.
                self._cut = self._cut or end
                self._kill_within(grace)
            return
        if self.ended or (self._exit is not None and self._settled and end.reason != "record"):
            return  # It ended by itself first, and that is the truth.
        if self._verdict is None:
            self._verdict = end
        if self._pid is None:
            return self._finish(self._verdict)
        if self._exit is not None:
            return self._finish_if_complete()
        if grace > 0 and self._kill_at is None:
            processes.signal_group(self._pid, signal.SIGTERM)
        self._kill_within(grace)

    def signal(self, signum: int) -> bool:
        """Send a signal to the payload's process group, unless it has ended; one that comes too early is kept for its start.

        Returns:
            False if the payload does not run yet.
        """
        if self._pid is None:
            self._due_signals.append(signum)
            return False
        if self._exit is None:
            processes.signal_group(self._pid, signum)
        return True

    @property
    def pid(self) -> Optional[int]:
        """Its process, while that runs."""
        return self._pid if self._exit is None else None

    @property
    def pids(self) -> List[int]:
        """The processes that work for it here; what is below them is its own, too."""
        copying = self._outputs.pid if self._outputs is not None else None
        return [pid for pid in (self.pid, copying) if pid is not None]

    @property
    def ended_by_itself(self) -> bool:
        """Whether it ran to an end of its own, so that it took as long as it takes."""
        return self._verdict is None and self._exit is not None and self._exit.signal is None

    @property
    def terminated(self) -> bool:
        """Whether a signal from outside ended the run, so that Slurm may run it again."""
        return self._verdict is not None and self._verdict.reason == "terminated"

    @property
    def exit_code(self) -> int:
        """The exit code that a shell would report for the payload; 1 if something else ended the run."""
        if self._verdict is not None or self._exit is None:
            return 1
        return 128 + self._exit.signal if self._exit.signal is not None else int(self._exit.exit_code or 0)

    @property
    def how_it_ended(self) -> Optional[End]:
        """Why it was ended, or how it ended by itself; None while it has not."""
        return self._verdict or self._exit

    def keep_fresh(self) -> None:
        """Mark the run directory as in use, for whoever sweeps old ones."""
        self._guarded(lambda: os.utime(self.run_dir))

    def phase(self, name: str, message: str, **detail: Any) -> None:
        """Write a phase into the journal, unless the payload ended."""
        if not self.ended:
            self._phase(name, message, **detail)

    def start_record(self, start: Dict[str, Any]) -> None:
        """Write the first record of the run."""
        self._keep(start)

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
            self.keep_tail("runtime traceback", tail_lines(traceback.format_exc()))
        with contextlib.suppress(Exception):
            self._collect(lambda _: None)
        self._verdict, self._finishing, self.ended = defect(error), True, True
        self._cancel_timers()
        self._streams.close()
        if self._sampler is not None and self._pid is None:
            self._sampler.cancel()
        for pid in self.pids:
            processes.signal_group(pid, signal.SIGKILL)
        self._kill_leftovers()
        self._write_end(self._end_record(self._verdict, time.time()))
        self._tell_ended()

    def keep_tail(self, name: str, text: str) -> None:
        """Write the last lines of a log that explains a failure."""
        if not self.ended:
            self._keep({"type": "tail", "name": name, "text": text})

    def abandon(self, end: End) -> None:
        """Write the `end` without waiting for the process, which the caller ends with everything else."""
        if not self.ended:
            self._cut = self._cut or end
            self._finish(end)
            self._cut_outputs()

    def _phase(self, name: str, message: str, **detail: Any) -> None:
        at = time.time()
        self._keep({"type": "phase", "phase": name, "message": message, "at": at, **detail})
        self._guarded(self.record.sync)
        self._guarded(lambda: self._write_status({"state": name, "message": message, "at": at}))

    def _write_status(self, status: Dict[str, Any]) -> None:
        status.update(nonce=self.spec.nonce, runtime_pid=os.getpid(), payload_pid=self._pid)
        write_atomically(os.path.join(self.run_dir, STATUS), json.dumps(status).encode("utf-8"))

    def _kill_within(self, grace: float) -> None:
        """Have it killed after so many seconds, unless that is to happen earlier anyway."""
        at = self.loop.now() + grace
        if self._kill_at is None or at < self._kill_at:
            self._kill_at = at
            self._due("kill", grace, self._kill)

    def _kill(self) -> None:
        if self._outputs is not None:
            self._cut_outputs()
        elif self._pid is not None:
            processes.signal_group(self._pid, signal.SIGKILL)

    def _cut_outputs(self) -> None:
        """Write the `end` without the outputs that are still being copied."""
        if self._outputs is not None and self._cut is not None and not self.ended:
            self._verdict = self._verdict or self._cut  # A success would have them all.
            self._outputs.cut(self._cut.message or self._cut.reason)

    def _due(self, name: str, delay: float, call: Callable[[], None]) -> None:
        """Have `call` made later, instead of what was due under this name."""
        if name in self._timers:
            self._timers[name].cancel()
        self._timers[name] = self.loop.call_later(delay, lambda: self.safely(call))

    def _every(self, interval: float, name: str, call: Callable[[], None]) -> None:
        def again() -> None:
            self._guarded(call)
            if not self._finishing:
                self._due(name, interval, again)

        self._due(name, interval, again)

    def _cancel_timers(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    def _take_output(self, stream: str, text: str) -> None:
        self.record.output(stream, text, time.time())

    def _copy_messages(self) -> None:
        assert self._messages is not None
        while self._messages.copy(self._keep):
            continue

    def _keep(self, *records: Dict[str, Any]) -> None:
        self._guarded(lambda: self.record.write(*records))

    def _guarded(self, write: Callable[[], None]) -> None:
        """Write to the record; a record that cannot be kept ends the payload, because results would be lost."""
        try:
            write()
        except OSError as error:
            if not self.ended:
                why = "%s cannot be written: %s" % (self.run_dir, error.strerror)
                self.end_early(End("record", why))

    def _exited(self, code: int, rusage: Any) -> None:
        self.safely(lambda: self._take_exit(code, rusage))

    def _take_exit(self, code: int, rusage: Any) -> None:
        assert self._pid is not None and self._sampler is not None
        self._exit = End("exit", exit_code=code) if code >= 0 else End("exit", signal=-code)
        self._usage = self._sampler.stop(self._pid, rusage)
        self._usage["shared"] = len(self.companions)
        assert self._setting is not None
        if self._measuring is not None:
            self._awaited.add("usage")
            self._collect(lambda others: self.safely(lambda: self._take_usage(others)))
        if self._setting.audit is not None:
            self._awaited.add("audit")
            self._setting.audit(lambda leaks: self.safely(lambda: self._take_leaks(leaks)))
        self._kill()
        self._kill_leftovers()
        if code != 0 and self._verdict is None:
            self._settled = False
            self._due("settle", _SIGNAL_MARGIN, self._settle)
        self._due("drain", _DRAIN_DEADLINE, self._give_up_draining)
        self._finish_if_complete()

    def _collect(self, done: Callable[[Dict[str, Dict[str, Any]]], None]) -> None:
        """Have the other nodes measure no longer, if they do, and hand over their figures."""
        team, self._measuring = self._measuring, None
        if team is not None:
            team.collect(self.spec.nonce, done)

    def _take_usage(self, others: Dict[str, Dict[str, Any]]) -> None:
        """Take what the other nodes measured."""
        with contextlib.suppress(Exception):  # Figures that no node of this version tells are worth no payload.
            self._usage = merge({str(self.context.get("hostname")): self._usage, **others})
        self._awaited.discard("usage")
        self._finish_if_complete()

    def _take_leaks(self, leaks: List[str]) -> None:
        """Take what this payload leaves alive in its cluster."""
        if leaks and not self.ended:
            self.context["leaks"] = leaks
        self._awaited.discard("audit")
        self._finish_if_complete()

    def _settle(self) -> None:
        self._settled = True
        self._finish_if_complete()

    def _kill_leftovers(self) -> None:
        """End what the payload left behind in other process groups; its environment names this run."""
        mark = "RAYSLURM_RUN_DIR=" + self.run_dir
        below = [process.pid for process in processes.descendants(os.getpid())]
        processes.kill_all(pid for pid in below if processes.has_environment(pid, mark))

    def _finish_if_complete(self) -> None:
        complete = not self._streams and not self._awaited and (self._settled or self._verdict is not None)
        if self._exit is not None and complete:
            self._finish(self._verdict or self._exit)

    def _give_up_draining(self) -> None:
        """A process that cannot be killed holds the pipe: what it may still write is not waited for."""
        self._streams.close()
        self._finish_if_complete()

    def _finish(self, end: End) -> None:
        """Copy what is left to copy, and write the one `end`; nothing is written to the run directory afterwards."""
        if self._finishing:
            return
        self._finishing = True
        if self._messages is not None:
            self._copy_messages()
            self._messages.remove()
            end = self._verdict or end  # Copying the last messages may itself have failed.
        self._cancel_timers()
        self._kill_at = None
        ended_at = time.time()
        target = os.path.join(self.run_dir, "outputs")
        patterns = self.spec.outputs if self._started_at is not None else []

        def copied(taken: List[Entry], left_out: List[str]) -> None:
            self.safely(lambda: self._conclude(end, ended_at, taken, left_out))

        outputs = Collection(self.loop, self._work_dir, target, patterns, self.spec.max_output_bytes, copied)
        if not self.ended:
            self._outputs = outputs
            self._phase("outputs", "copying the outputs")

    def _conclude(self, end: End, ended_at: float, taken: List[Entry], left_out: List[str]) -> None:
        """Write the one `end`."""
        if self.ended:
            return  # A defect has ended it.
        self._cancel_timers()
        end = self._verdict or end
        self.ended = True
        self._write_end(self._end_record(end, ended_at, taken, left_out))
        self._tell_ended()

    def _end_record(self, end: End, ended_at: float, taken: Sequence[Entry] = (), left_out: Sequence[str] = ()) -> Dict[str, Any]:
        fields = self._exit or end
        return {
            "type": "end",
            "nonce": self.spec.nonce,
            "reason": end.reason,
            "message": end.message,
            "exit_code": fields.exit_code,
            "signal": fields.signal,
            "started_at": self._started_at,
            "ended_at": ended_at,
            "pipes_messages": self._messages.count if self._messages else 0,
            "usage": self._usage,
            "outputs": list(taken),
            "outputs_left_out": list(left_out),
            "context": self.context,
        }

    def _tell_ended(self) -> None:
        self._told_ended = True
        for call in self.on_ended:
            self.loop.call_later(0.0, call)

    def _write_end(self, end: Dict[str, Any]) -> None:
        self._unwritten = end

        def again() -> None:
            if not self.write_end():
                self.loop.call_later(_END_AGAIN, again)

        if not self.write_end():
            # Whoever follows waits for it, and a session outlives what keeps it from being written.
            print("rayslurm: %s: the end of the run cannot be recorded yet" % self.run_dir, file=sys.stderr)
            self.loop.call_later(_END_AGAIN, again)

    def write_end(self) -> bool:
        """Write the `end`, if that could not be done so far.

        Returns:
            Whether nothing is left to be written.
        """
        end = self._unwritten
        if end is None:
            return True
        try:
            self._write_status({"state": "ended", "message": end["reason"], "at": end["ended_at"]})
            end.pop("status_stale", None)
        except OSError:
            end["status_stale"] = True  # A full disk: the journal's `end` has space set aside, the status has not.
        try:
            self.record.end(end)
        except OSError:
            return False
        self._unwritten = None
        return True
