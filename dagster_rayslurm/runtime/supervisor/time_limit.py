"""The time limit of a Slurm job: ask squeue for it, act before it comes, and warn payloads by a signal.

`sbatch --signal` would signal Ray's processes as well, so the runtime sends the signal itself.
"""

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
"""Seconds before a planned call at which squeue is asked again, because the limit may have moved."""
_TIMEOUT = 5.0
"""Seconds in which squeue must answer."""
_RETRY = 5.0
"""Seconds until squeue is asked again about a known limit that draws near."""
_UNKNOWN = 30.0
"""Seconds until squeue is asked again about a limit that is not known yet."""
_UNLIMITED = 600.0
"""Seconds until squeue is asked again about a job that has no limit; it may get one."""


def parse_time_left(text: str) -> Optional[float]:
    """The seconds that `squeue --format=%L` prints as "1-02:03:04" or "03:04"; None for UNLIMITED and other words (Slurm 22.05).

    A heterogeneous job has a line for each component, in no documented order; the shortest time counts.
    """
    known = [seconds for seconds in map(parse_duration, text.split()) if seconds is not None]
    return min(known) if known else None


def signal_number(name: str) -> Optional[int]:
    """The number of a signal named as in Slurm ("USR1", "SIGUSR1" or "10"); None if this system has no such signal."""
    try:
        number = int(name) if name.isdigit() else int(signal.Signals["SIG" + re.sub("^SIG", "", name.upper())])
    except (KeyError, ValueError):
        return None
    return number if 0 < number < signal.NSIG else None


class TimeLimit:
    """Knows when a Slurm job comes to its time limit, and makes calls some time before that.

    An administrator may move the limit, so squeue is asked again before a call is due.

    Args:
        loop: the event loop.
        job_id: the Slurm job.
        tell: called with the reason if squeue cannot be run and the limit is not known.
        known: called once with the seconds left, as soon as the limit is known.
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
        """Seconds until the limit; None if the job has no limit, or it is not known."""
        return None if self._end is None else self._end - self._loop.now()

    def when(self, before: float, call: Callable[[float], None]) -> None:
        """Plan a call for `before` seconds ahead of the limit; `call` gets the seconds left."""
        self._due.append((before, call))

    def start(self) -> None:
        """Ask squeue how much time is left, now and again before each planned call; the last known limit counts until then."""
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
    """Plan a signal to all payloads some time before the time limit of their Slurm job; the Dagster log says so then.

    Args:
        limit: the time limit.
        before: seconds between the signal and the limit.
        signal_name: the signal, such as "USR1", or its number; if it does not exist, the Dagster log says so.
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
