"""Slurm's programs on the edge node, run by `edge.slurm`, and what their answers mean."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..edge import slurm
from ..ssh.base import Backoff, Completed, Connection, ConnectionFailed
from ..ssh.local import LocalConnection

T = TypeVar("T")


class SlurmUnanswered(OSError):
    """Raised when a command of Slurm gives no answer, which says nothing about any job. The message is one sentence."""


def run_slurm(
    connection: Connection,
    command: Sequence[str],
    stdin: bytes = b"",
    timeout: float | None = None,
    keep: Sequence[str] = (),
    function: Callable[..., Any] = slurm.run,
    options: Sequence[Any] = (),
) -> Completed:
    """As `Connection.run`, for a command that is or runs a program of Slurm; `keep` names `SBATCH_*` variables for it."""
    of_dagster = isinstance(connection, LocalConnection)
    return connection.run(command, stdin, timeout, function, (list(keep), of_dagster, *options))


def stderr_of(done: Completed) -> str:
    """The error output of a command, as text."""
    return done.stderr.decode("utf-8", "replace").strip()


def unanswered(place: str, program: str, done: Completed) -> SlurmUnanswered:
    """The error to raise for a program of Slurm that gave no answer; `place` names the host."""
    said = " ".join(stderr_of(done).split())[-500:]
    if done.returncode == 127:
        return SlurmUnanswered(f"{place}: {program} is not on the PATH that a non-interactive login has; add it there ({said})")
    return SlurmUnanswered(f"{place}: {program} did not answer (exit code {done.returncode}): {said or 'it said nothing'}")


def ask_patiently(
    ask: Callable[[], T], patience: float, unanswered_too: bool = False, warn: Callable[[str], None] = lambda _: None
) -> T:
    """What `ask` returns, which is called again for `patience` seconds while the edge node, or Slurm too, is out of reach."""
    outage, warned = Backoff(), False
    while True:
        try:
            return ask()
        except (ConnectionFailed, SlurmUnanswered) as error:
            pause, again = outage.pause(), error.temporary if isinstance(error, ConnectionFailed) else unanswered_too
            if not again or outage.seconds + pause > patience:
                raise
            if not warned:
                warn(f"[rayslurm] trying again for up to {patience:g} s: {error}")
            warned = True
            time.sleep(pause)
