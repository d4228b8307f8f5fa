"""Slurm's commands that give no answer, in one sentence."""

from __future__ import annotations

from ..connections.base import Completed


class SlurmUnanswered(OSError):
    """A command of Slurm did not answer; that says nothing of any job. The message is one sentence."""


def unanswered(place: str, program: str, done: Completed) -> SlurmUnanswered:
    """Say why a command gave no answer.

    Args:
        place: where it ran.
        program: its name.
        done: how it ended.
    """
    said = " ".join(done.stderr.decode("utf-8", "replace").split())[-500:]
    if done.returncode == 127:
        return SlurmUnanswered(f"{place}: {program} is not on the PATH that a non-interactive login has; add it there ({said})")
    return SlurmUnanswered(f"{place}: {program} did not answer (exit code {done.returncode}): {said or 'it said nothing'}")
