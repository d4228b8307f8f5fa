"""The time limit of a Slurm job: sends payloads a warning signal before the limit, and ends a session in time.

`sbatch --signal` would signal Ray's processes as well, so the runtime sends the signal itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Callable, Optional

from ..node.allocation import parse_duration
from ..process import processes
from ..process.loop import Loop
from ..protocol.messages import End, EndReason
from .supervisor import Supervisor

# Seconds before a planned call at which squeue is run again, because an administrator may have moved the limit.
_AHEAD = 10.0
_TIMEOUT = 5.0  # Seconds in which squeue must answer.
_LONGEST_START = 60.0  # Seconds from the start of a job to that of the runtime; after a longer time, squeue is asked.
_UNKNOWN = 30.0  # Seconds until squeue is asked again about a limit that is not known yet.
_UNLIMITED = 600.0  # Seconds until squeue is asked again about a job that has no limit; it may get one.
# Seconds before the time limit at which a session ends its payloads, so that it can still write their `end` records.
_LAST_CALL = 20.0


def parse_time_left(text: str) -> Optional[float]:
    """Returns the seconds in the output of `squeue --format=%L`, such as "1-02:03:04"; None for UNLIMITED and other words.

    A heterogeneous job has a line for each component, in no documented order; the shortest time counts (Slurm 22.05).
    """
    known = [seconds for seconds in map(parse_duration, text.split()) if seconds is not None]
    return min(known) if known else None


def signal_number(name: str) -> Optional[int]:
    """Returns the number of a signal named as in Slurm ("USR1", "SIGUSR1" or "10"); None if this system has no such signal."""
    try:
        number = int(name) if name.isdigit() else int(signal.Signals["SIG" + re.sub("^SIG", "", name.upper())])
    except (KeyError, ValueError):
        return None
    return number if 0 < number < signal.NSIG else None


@dataclass
class TimeLimit:
    """The time limit of a Slurm job: finds out when the job reaches the limit, and calls functions at given times before that.

    `start` begins to find out the limit. If the job has just started, is not heterogeneous and has the variable
    SLURM_JOB_END_TIME, which newer versions of Slurm set, this variable has the limit. Otherwise squeue is run. Nothing blocks:
    the event loop calls the functions.
    """

    loop: Loop
    job_id: str
    # Called once with the seconds left, as soon as the limit is known.
    known: Callable[[float], None] = lambda _: None
    unknown: Callable[[str], None] = lambda _: None  # Called with the reason if squeue cannot be run.
    _end: Optional[float] = None

    def left(self) -> Optional[float]:
        """The seconds until the time limit; None if the job has no limit, or if the limit is not known yet."""
        return None if self._end is None else self._end - self.loop.now()

    def start(self) -> None:
        """Begin to find out the time limit; the callback `known` is called once with the seconds left, in this call or later.

        If squeue cannot be run, the callback `unknown` is called with the reason instead. Both callbacks were passed to the
        constructor. While squeue prints no limit, it is run again at intervals.
        """
        start, end = (os.environ.get("SLURM_JOB_%s_TIME" % name, "") for name in ("START", "END"))
        # These are times of the controller's clock. This node's clock agrees with it if the job has just started.
        agrees = start.isdigit() and 0 <= time.time() - int(start) <= _LONGEST_START
        if end.isdigit() and agrees and "SLURM_HET_SIZE" not in os.environ:
            self._end = self.loop.now() + int(end) - time.time()
            return self.known(int(end) - time.time())

        def answered(unlimited: bool) -> None:
            left = self.left()
            if left is not None:
                return self.known(left)
            self.loop.call_later(_UNLIMITED if unlimited else _UNKNOWN, self.start)

        try:
            self._ask(answered)
        except OSError as error:
            self.unknown("squeue cannot be run (%s)" % error.strerror)

    def when(self, before: float, call: Callable[[float], None], asked: bool = False) -> None:
        """Have `call` called when the job has `before` seconds left; its argument is the exact number of seconds left.

        If fewer seconds are left already, `call` is called immediately. If no limit is known, `call` is never called. Shortly
        before the call, squeue is run again, because an administrator may have moved the limit. If squeue does not answer, the
        last known limit counts. Callers leave out `asked`, which is True only when this method calls itself after squeue was run.
        """
        left = self.left()
        if left is None:
            return
        wait, again = left - before, partial(self.when, before, call, True)
        if wait <= 0:
            call(left)
        elif wait > _AHEAD:
            self.loop.call_later(wait - _AHEAD, partial(self.when, before, call))
        elif asked:
            self.loop.call_later(wait, again)
        else:
            with contextlib.suppress(OSError):
                return self._ask(lambda _: again())
            again()

    def _ask(self, then: Callable[[bool], None]) -> None:
        """Start squeue to learn the time limit.

        When it has ended, call `then` with True if the job has no limit, otherwise with False. If squeue does not answer, `then`
        is called with False, and the last known limit stays. Raises OSError if squeue cannot be run.
        """

        def answered(said: Optional[str]) -> None:
            left, unlimited = parse_time_left(said or ""), set((said or "").split()) == {"UNLIMITED"}
            if left is not None or unlimited:
                self._end = None if left is None else self.loop.now() + left
            then(unlimited)

        words = ["squeue", "--noheader", "--jobs=" + self.job_id, "--format=%L"]
        processes.query_program(self.loop, words, _TIMEOUT, answered)


def watch(supervisor: Supervisor, job_id: str) -> None:
    """Arrange what happens before a Slurm job's time limit, and return at once; the event loop does the rest.

    If the runtime's start record has `warn_before_limit`, payloads get the signal `warn_signal` this many seconds before the
    limit. A session first accepts no more payloads, and ends its payloads shortly before the limit. If squeue cannot be run, or
    if the signal does not exist, the payloads' logs say so.
    """
    spec = supervisor.spec
    signum = signal_number(spec.warn_signal)

    def say(message: str) -> None:
        for payload in supervisor.payloads:
            payload.phase("time-limit", message)

    def warn(left: float) -> None:
        assert signum is not None
        for payload in supervisor.payloads:
            gets = "the payload gets %s" if payload.signal(signum) else "the payload does not run yet, and gets %s when it starts"
            payload.phase("time-limit", "%d s are left; %s" % (round(left), gets % processes.signal_name(signum)))

    def known(left: float) -> None:
        if spec.warn_before_limit is not None and signum is not None:
            limit.when(spec.warn_before_limit, warn)
        if spec.idle_timeout is not None:
            # At most a tenth of the time, so that a short allocation takes payloads for most of its time.
            margin = min(spec.drain_margin, left / 10)
            supervisor.queue = replace(supervisor.queue, margin=margin)
            end = End(EndReason.TIMEOUT, "the session's allocation came to its time limit")
            limit.when(margin, lambda left: supervisor.drain("its time limit comes in %d s" % round(left)))
            limit.when(_LAST_CALL, lambda _: supervisor.close(end, grace=_LAST_CALL / 2))

    limit = TimeLimit(supervisor.loop, job_id, known, lambda why: say("no warning ahead of the time limit: " + why))
    if spec.idle_timeout is not None:
        supervisor.time_left = limit.left
    if spec.warn_before_limit is not None and signum is None:
        say("no warning ahead of the time limit: there is no signal %r here" % spec.warn_signal)
    if spec.warn_before_limit is not None or spec.idle_timeout is not None:
        limit.start()
