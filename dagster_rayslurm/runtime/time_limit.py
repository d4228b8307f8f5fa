"""The warning ahead of a job's time limit, by the runtime's own clock: `sbatch --signal` would hit Ray as well."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from typing import Any, Optional

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


class LimitWarning:
    """Signals the payload some time before the job's limit, wherever an administrator moves that.

    Args:
        loop: where the timers run.
        job_id: the job whose limit it is.
        before: seconds ahead of it.
        signal_name: the signal, such as "USR1", or its number; an unknown one is told to the user, and no warning is given.
        payload: who gets it.
    """

    def __init__(self, loop: Loop, job_id: str, before: float, signal_name: str, payload: Payload) -> None:
        self._loop = loop
        self._job_id = job_id
        self._before = before
        self._signal_name = signal_name
        self._signal = signal_number(signal_name)
        self._payload = payload

    def start(self) -> None:
        """Ask how much time is left, and again when the warning is due."""
        if self._signal is None:
            return self._payload.phase(
                "time-limit", "no warning ahead of the time limit: there is no signal %r here" % self._signal_name
            )
        reader, writer = os.pipe()

        def answered(code: int, _: Any) -> None:
            with os.fdopen(reader, "rb") as file:
                left = parse_time_left(file.read().decode("utf-8", "replace"))
            if self._payload.ended:
                return
            if code != 0:
                self._loop.call_later(_LATER, self.start)  # slurmctld does not answer just now.
            elif left is not None:
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
            self._payload.phase("time-limit", "no warning ahead of the time limit: squeue cannot be run (%s)" % error.strerror)
        finally:
            os.close(writer)

    def _wait(self, left: float) -> None:
        if left > self._before + _SLACK:
            self._loop.call_later(left - self._before, self.start)
            return
        assert self._signal is not None
        sent = self._payload.signal(self._signal)
        outcome = "the payload gets %s" if sent else "the payload does not run yet, and gets %s when it starts"
        self._payload.phase("time-limit", "%d s are left; %s" % (left, outcome % processes.signal_name(self._signal)))
