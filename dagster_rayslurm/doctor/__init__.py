"""`rayslurm doctor`: facts of a cluster, and the lines that say what is right, doubtful or wrong with it.

`collect` and `probe` collect facts. The other modules are pure: they turn facts into lines.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..environments import Environment
from ..runtime.protocol.messages import TextEnum
from ..slurm.config import SlurmQueueConfig, SlurmResource


class Verdict(TextEnum):
    """What a line says of its subject."""

    OK = "ok"
    WARNING = "warning"  # Runs work, but something is slow, unusual or will fail in some cases.
    FAILURE = "failure"  # Runs fail until it is mended.
    SKIPPED = "skipped"  # Not looked at.


@dataclass(frozen=True)
class Line:
    """One subject, what was found, and what to do about it; "" if nothing is to be done."""

    name: str
    verdict: Verdict
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Wanted:
    """The resource that is examined."""

    slurm: SlurmResource
    environment: Environment

    @property
    def queue(self) -> SlurmQueueConfig:
        """The footprint of jobs."""
        return self.slurm.queue


def ok(name: str, text: str) -> Line:
    """A line about something that is right."""
    return Line(name, Verdict.OK, text)


def warning(name: str, text: str, remedy: str) -> Line:
    """A line about something doubtful."""
    return Line(name, Verdict.WARNING, text, remedy)


def failure(name: str, text: str, remedy: str) -> Line:
    """A line about something that makes runs fail."""
    return Line(name, Verdict.FAILURE, text, remedy)


def skipped(name: str, text: str) -> Line:
    """A line about something that was not looked at."""
    return Line(name, Verdict.SKIPPED, text)


def has_failure(lines: Iterable[Line]) -> bool:
    """Whether one of the lines is a failure."""
    return any(line.verdict is Verdict.FAILURE for line in lines)


def size(count: float) -> str:
    """A number of bytes in words, such as "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
