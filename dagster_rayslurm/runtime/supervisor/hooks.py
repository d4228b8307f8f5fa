"""The points at which a runtime may wait for other runtimes: before a payload starts, and before the runtime ends."""

from __future__ import annotations

from ..payload.payload import Payload
from ..process.loop import Loop


class Hooks:
    """Callbacks that the supervisor calls before it starts a payload, and when the runtime is to end.

    The methods of this class never delay a start or an end. With `topology="separate"`, a subclass does: it waits for the
    runtimes of the other components.
    """

    def may_start(self, payload: Payload) -> bool:  # noqa: ARG002
        """Whether a payload may start now; called only if the warm Ray cluster is up or not needed.

        If an override returns False, the override must call `Supervisor.schedule` as soon as the payload may start.
        """
        return True

    def finished(self, loop: Loop) -> None:
        """Called when the last payload of the runtime has ended and no other will come.

        Stops the event loop, which ends the runtime.
        """
        loop.stop()

    def interrupted(self, loop: Loop, signum: int) -> None:  # noqa: ARG002
        """Called when the runtime has no payload and receives the signal `signum`.

        Stops the event loop, which ends the runtime.
        """
        loop.stop()
