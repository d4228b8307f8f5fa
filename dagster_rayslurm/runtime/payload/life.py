"""`Life`, the state machine of one payload: decides what happens next, without side effects.

The `end` record is the last record that `Payload` writes about a payload; it tells how the payload ended.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import FrozenSet, List, Optional, Tuple

from ..protocol.messages import End, EndReason


class Phase(IntEnum):
    """The phases of a payload's life, in order; a payload never returns to an earlier phase."""

    QUEUED = 0
    STARTING = 1  # The process is being started, or requested from a preload process.
    RUNNING = 2
    EXITED = 3  # The process has ended; its last output and figures are awaited.
    FINISHING = 4  # The last messages are copied.
    SEARCHING = 5  # The outputs are searched for.
    ENDED = 6  # The `end` record is written, or writing it failed and is retried.


class Awaited(Enum):
    """An event that may come after the end of a payload's process, and for which the `end` record waits if it is expected."""

    OUTPUT = "the rest of the output"
    USAGE = "usage of the other nodes"
    LEAKS = "leak check"
    ENERGY = "energy of the Slurm step"
    SIGNAL = "signal to the runtime"


class Do(Enum):
    """What `Payload` must do after an event; the methods of `Life` return such actions together with the next state."""

    TERMINATE = "send SIGTERM to the process"
    KILL = "send SIGKILL at `kill_at`"
    FINISH = "copy the last messages and search for outputs"
    CONCLUDE = "write the `end` record without outputs"


@dataclass(frozen=True)
class Life:
    """The immutable state of one payload; for each event, a method returns the next state and the actions to take.

    The methods themselves take no action: `Payload` does.
    """

    phase: Phase = Phase.QUEUED
    exit: Optional[End] = None  # How the payload's process ended; None as long as it runs.
    forced: Optional[End] = None  # Why the runtime ends the payload; None if the runtime does not.
    # When SIGKILL is due, in seconds of the loop's clock; None unless the payload is being ended.
    kill_at: Optional[float] = None
    awaited: FrozenSet[Awaited] = frozenset()  # The events for which the `end` record still waits.

    @property
    def result(self) -> Optional[End]:
        """How the payload ended: the reason if the runtime ended it, otherwise how its process exited; None while it goes on."""
        return self.forced or self.exit

    @property
    def ran_to_exit(self) -> bool:
        """Whether the payload's process exited by itself, neither ended by the runtime nor by a signal."""
        return self.forced is None and self.exit is not None and self.exit.signal is None

    @property
    def terminated(self) -> bool:
        """Whether the payload ended because the runtime received a signal; Slurm may then run the job again."""
        return self.forced is not None and self.forced.reason == EndReason.TERMINATED

    @property
    def exit_code(self) -> int:
        """The exit code that a shell would report for the payload's process: 128 + N if signal N ended it.

        The exit code is 1 if the runtime ended the payload, or if the process has not ended.
        """
        if self.forced is not None or self.exit is None:
            return 1
        return 128 + self.exit.signal if self.exit.signal is not None else int(self.exit.exit_code or 0)

    def end_early(self, end: End, grace: float, now: float) -> Tuple[Life, List[Do]]:
        """Handle the runtime's decision to end the payload; returns the next state and the actions to take now.

        `end` is the reason for the `end` record; only the reason of the first such decision counts. `grace` has the seconds from
        SIGTERM to SIGKILL, and `now` is the current time by the clock of `Loop.now`. A decision after the end of the process has
        an effect only in the cases that `Payload.end_early` describes.
        """
        unrecorded, forced = end.reason == EndReason.RECORD, replace(self, forced=self.forced or end)
        if self.phase == Phase.SEARCHING:  # Only the `end` remains to be recorded, so a failed write changes nothing.
            return (self, []) if unrecorded else (forced, [Do.CONCLUDE])
        if self.phase == Phase.ENDED or (self.exit is not None and Awaited.SIGNAL not in self.awaited and not unrecorded):
            return self, []
        if self.phase != Phase.RUNNING:
            return forced._finish_if_complete()
        kill_at = now + grace
        if self.kill_at is not None and self.kill_at <= kill_at:
            return forced, []
        return replace(forced, kill_at=kill_at), [Do.TERMINATE] * (grace > 0 and self.kill_at is None) + [Do.KILL]

    def exited(self, end: End, awaited: FrozenSet[Awaited]) -> Tuple[Life, List[Do]]:
        """Handle the end of the payload's process; returns the next state and the actions to take.

        `end` tells how the process ended. The `end` record waits for the events `awaited`. If the process failed by itself, the
        record also waits a moment for a signal to the runtime, which would explain the failure.
        """
        if self.forced is None and end.exit_code != 0:
            awaited |= {Awaited.SIGNAL}
        return replace(self, phase=max(self.phase, Phase.EXITED), exit=end, awaited=awaited)._finish_if_complete()

    def received(self, awaited: Awaited) -> Tuple[Life, List[Do]]:
        """Handle an event for which the `end` record waits; also called if the wait for the event has timed out.

        Returns the next state and the actions to take. An event that is not awaited has no effect.
        """
        life = replace(self, awaited=self.awaited - {awaited})
        return life._finish_if_complete() if self.phase == Phase.EXITED else (life, [])

    def _finish_if_complete(self) -> Tuple[Life, List[Do]]:
        # Once the runtime has a reason of its own, a signal to the runtime makes no difference.
        waits = self.awaited - {Awaited.SIGNAL} if self.forced is not None else self.awaited
        if self.phase < Phase.RUNNING or (self.phase == Phase.EXITED and not waits):
            return replace(self, phase=Phase.FINISHING), [Do.FINISH]
        return self, []
