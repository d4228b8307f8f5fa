"""A job's time limit by the runtime's own clock, and the warning before it: `sbatch --signal` would signal Ray as well."""

from __future__ import annotations

import re
import signal
from typing import Callable, List, Optional, Tuple

from ..payload.payload import Payload
from ..process import processes
from ..process.loop import Loop, Timer
from ..process.processes import query_program
from ..protocol.slurm_text import parse_duration

_AHEAD = 10.0
"""Seconds before a call is due at which squeue is asked whether the limit has moved."""
_TIMEOUT = 5.0
"""Seconds in which squeue must answer."""
_RETRY = 5.0
"""Seconds until squeue is asked again about a known limit that draws near."""
_UNKNOWN = 30.0
"""Seconds until squeue is asked again about a limit that is not known yet."""
_UNLIMITED = 600.0
"""Seconds until squeue is asked again about a job that has no limit; it may get one."""


def parse_time_left(text: str) -> Optional[float]:
    """Seconds of `squeue --format=%L` ("1-02:03:04", "03:04"); None for UNLIMITED and other words (squeue(1), Slurm 22.05).

    A heterogeneous job has a line for each component, in no documented order; the component that ends first counts.
    """
    known = [seconds for seconds in map(parse_duration, text.split()) if seconds is not None]
    return min(known) if known else None


def signal_number(name: str) -> Optional[int]:
    """The number of a signal given as Slurm takes it ("USR1", "SIGUSR1" or "10"); None if this system has no such signal."""
    try:
        number = int(name) if name.isdigit() else int(signal.Signals["SIG" + re.sub("^SIG", "", name.upper())])
    except (KeyError, ValueError):
        return None
    return number if 0 < number < signal.NSIG else None


class TimeLimit:
    """The time limit of a job, which an administrator may move.

    Args:
        loop: where the timers run.
        job_id: the job.
        tell: called once with the reason if the limit cannot be known.
        known: called once with the seconds left, when they are first known.
    """

    def __init__(
        self,
        loop: Loop,
        job_id: str,
        tell: Callable[[str], None] = lambda _: None,
        known: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._loop = loop
        self._job_id = job_id
        self._tell = tell
        self._known: Optional[Callable[[float], None]] = known
        self._end: Optional[float] = None
        self._due: List[Tuple[float, Callable[[float], None]]] = []
        self._timer: Optional[Timer] = None
        self._asking = False

    def left(self) -> Optional[float]:
        """Seconds until the limit; None if there is none, or none is known."""
        return None if self._end is None else self._end - self._loop.now()

    def when(self, before: float, call: Callable[[float], None]) -> None:
        """Have `call` called, with the seconds left, `before` seconds ahead of the limit."""
        self._due.append((before, call))

    def start(self) -> None:
        """Ask squeue how much time is left, and again before a call is due: the limit may have moved.

        Without an answer the last known limit counts.
        """
        if self._asking:
            return
        try:
            query_program(self._loop, ["squeue", "--noheader", "--jobs=" + self._job_id, "--format=%L"], _TIMEOUT, self._answered)
        except OSError as error:
            if self._end is None:
                return self._tell("squeue cannot be run (%s)" % error.strerror)
            return self._ask_later()
        self._asking = True

    def _answered(self, said: Optional[str]) -> None:
        self._asking = False
        text = said or ""
        left = parse_time_left(text)
        if left is None and set(text.split()) != {"UNLIMITED"}:
            return self._ask_later()  # slurmctld does not answer just now.
        self._end = None if left is None else self._loop.now() + left
        if left is None:
            self._loop.call_later(_UNLIMITED, self.start)
            return
        if self._known is not None:
            known, self._known = self._known, None
            known(left)
        self._plan(asked=True)

    def _ask_later(self) -> None:
        if self._end is None:
            self._loop.call_later(_UNKNOWN, self.start)
        elif self._due:
            self._loop.call_later(_RETRY, self.start)

    def _plan(self, asked: bool = False) -> None:
        """Make the calls that are due by the known limit, and schedule the next one."""
        if self._timer is not None:
            self._timer.cancel()
        left = self.left()
        if left is None:
            return
        ready = [each for each in self._due if left <= each[0]]
        self._due = [each for each in self._due if each not in ready]
        for _, call in ready:
            call(left)
        if not self._due:
            return
        wait = left - max(before for before, _ in self._due)
        if wait > _AHEAD:
            self._timer = self._loop.call_later(wait - _AHEAD, self._plan)
            return
        if not asked:
            self.start()
        self._timer = self._loop.call_later(wait, lambda: self._plan(asked=True))


def warn_payloads(limit: TimeLimit, before: float, signal_name: str, payloads: Callable[[], List[Payload]]) -> None:
    """Signal payloads some time before the limit of their job.

    Args:
        limit: the limit.
        before: seconds ahead of it.
        signal_name: the signal, such as "USR1", or its number; an unknown one is reported to the user instead.
        payloads: returns the present payloads.
    """
    signum = signal_number(signal_name)
    if signum is None:
        for payload in payloads():
            payload.phase("time-limit", "no warning ahead of the time limit: there is no signal %r here" % signal_name)
        return

    def warn(left: float) -> None:
        assert signum is not None
        for payload in payloads():
            outcome = (
                "the payload gets %s" if payload.signal(signum) else "the payload does not run yet, and gets %s when it starts"
            )
            payload.phase("time-limit", "%d s are left; %s" % (round(left), outcome % processes.signal_name(signum)))

    limit.when(before, warn)
