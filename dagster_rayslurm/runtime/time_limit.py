"""A job's time limit by the runtime's own clock, and the warning ahead of it: `sbatch --signal` would hit Ray as well."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from typing import Any, Callable, List, Optional, Tuple

from . import processes
from .duration import parse_duration
from .loop import Loop
from .payload import Payload

_SLACK = 5.0
"""Seconds by which a limit must have moved for the warning to wait for it."""
_LATER = 60.0


def parse_time_left(text: str) -> Optional[float]:
    """Seconds of `squeue --format=%L` ("1-02:03:04", "03:04"); None for UNLIMITED and other words (squeue(1), Slurm 22.05)."""
    return parse_duration(text.strip())


def signal_number(name: str) -> Optional[int]:
    """The number of a signal: "USR1", "SIGUSR1" or "10", as Slurm takes them; None if this system has no such signal."""
    try:
        number = int(name) if name.isdigit() else int(signal.Signals["SIG" + re.sub("^SIG", "", name.upper())])
    except (KeyError, ValueError):
        return None
    return number if 0 < number < signal.NSIG else None


class TimeLimit:
    """When a job ends, wherever an administrator moves that.

    Args:
        loop: where the timers run.
        job_id: the job whose limit it is.
        tell: told, once, that the limit cannot be known, and why.
    """

    def __init__(self, loop: Loop, job_id: str, tell: Callable[[str], None] = lambda _: None) -> None:
        self._loop = loop
        self._job_id = job_id
        self._tell = tell
        self._end: Optional[float] = None
        self._due: List[Tuple[float, Callable[[float], None]]] = []

    def left(self) -> Optional[float]:
        """Seconds until the limit, as far as is known; None for no limit."""
        return None if self._end is None else self._end - self._loop.now()

    def when(self, before: float, call: Callable[[float], None]) -> None:
        """Have something called, with the seconds that are left, so many seconds ahead of the limit."""
        self._due.append((before, call))

    def start(self) -> None:
        """Ask how much time is left, and again when something is due: the limit may have moved."""
        reader, writer = os.pipe()

        def answered(code: int, _: Any) -> None:
            with os.fdopen(reader, "rb") as file:
                left = parse_time_left(file.read().decode("utf-8", "replace"))
            if code != 0:
                self._loop.call_later(_LATER, self.start)  # slurmctld does not answer just now.
            elif left is None:
                self._end = None
            else:
                self._end = self._loop.now() + left
                self._wait(left)

        try:
            self._loop.spawn(
                ["squeue", "--noheader", "--jobs=" + self._job_id, "--format=%L"],
                answered,
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=subprocess.DEVNULL,
                preexec_fn=processes.die_with_parent(),
            )
        except OSError as error:
            os.close(reader)
            self._tell("squeue cannot be run (%s)" % error.strerror)
        finally:
            os.close(writer)

    def _wait(self, left: float) -> None:
        ready = [each for each in self._due if left <= each[0] + _SLACK]
        self._due = [each for each in self._due if each not in ready]
        for _, call in ready:
            call(left)
        if self._due:
            self._loop.call_later(left - max(before for before, _ in self._due), self.start)


def warn_payloads(limit: TimeLimit, before: float, signal_name: str, payloads: Callable[[], List[Payload]]) -> None:
    """Have payloads signalled some time before the limit of their job.

    Args:
        limit: the limit.
        before: seconds ahead of it.
        signal_name: the signal, such as "USR1", or its number; an unknown one is told to the user, and no warning is given.
        payloads: those that are here.
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
            payload.phase("time-limit", "%d s are left; %s" % (left, outcome % processes.signal_name(signum)))

    limit.when(before, warn)
