"""Collects facts about a cluster for `rayslurm doctor`, and turns the facts into report lines.

`collect`, `login` and `probe` query the cluster. The other modules only turn facts into lines, and are pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..environments import Environment
from ..launchers import Launcher, RayLauncher
from ..runtime.protocol.messages import TextEnum
from ..slurm.config import SlurmQueueConfig, SlurmResource


class Verdict(TextEnum):
    """The result of one check, as the word at the beginning of a report line."""

    OK = "ok"
    WARNING = "warning"  # Runs work, but something is slow, unusual or will fail in some cases.
    FAILURE = "failure"  # Runs fail until the defect is mended.
    SKIPPED = "skipped"  # The check was not made.


@dataclass(frozen=True)
class Line:
    """One line of the report: the subject of a check, the verdict, the finding, and the remedy ("" if none is needed)."""

    name: str
    verdict: Verdict
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Wanted:
    """The configuration to examine: a Slurm cluster, the environment of payloads there, and the launcher of payloads."""

    slurm: SlurmResource
    environment: Environment
    launcher: Launcher = field(default_factory=RayLauncher)

    @property
    def queue(self) -> SlurmQueueConfig:
        """The allocation (partition, nodes, CPUs, GPUs, time) that jobs request of Slurm."""
        return self.slurm.queue

    @property
    def port_range(self) -> str | None:
        """The ports that Ray may use, as "LOW-HIGH"; None for any ports."""
        ray = self.launcher.ray_spec()
        return ray.port_range if ray is not None else None

    @property
    def network_interface(self) -> str | None:
        """The network interface whose address Ray uses on each node; None if no interface is configured."""
        ray = self.launcher.ray_spec()
        return ray.network_interface if ray is not None else None


def ok(name: str, text: str) -> Line:
    """Returns a line about a check that passed."""
    return Line(name, Verdict.OK, text)


def warning(name: str, text: str, remedy: str) -> Line:
    """Returns a line about a finding that makes runs slow, unusual, or fail in some cases."""
    return Line(name, Verdict.WARNING, text, remedy)


def failure(name: str, text: str, remedy: str) -> Line:
    """Returns a line about a defect that makes runs fail."""
    return Line(name, Verdict.FAILURE, text, remedy)


def failed(name: str, error: object, remedy: str) -> Line:
    """Returns a line about a failed check, made from the message of `error`.

    The message up to the first "; " is the text of the line. The rest of the message is the remedy of the line. If the message
    has no such rest, the remedy is `remedy`.
    """
    sentence, _, advice = str(error).partition("; ")
    return failure(name, sentence or "no answer in time", advice or remedy)  # A `TimeoutError` has no message.


def skipped(name: str, text: str) -> Line:
    """Returns a line about a check that was not made."""
    return Line(name, Verdict.SKIPPED, text)


def has_failure(lines: Iterable[Line]) -> bool:
    """Returns True if at least one line has the verdict FAILURE."""
    return any(line.verdict is Verdict.FAILURE for line in lines)


def size(count: float) -> str:
    """Returns a number of bytes as text, such as "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
