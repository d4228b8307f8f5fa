"""Whose fault it is that sbatch refuses a heterogeneous job: of the whole it does not say, of one component alone it does."""

from __future__ import annotations

import contextlib
import re
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ..ssh.base import Connection
from .commands import CLEAN
from .errors import is_temporary
from .request import JobRequest
from .script import render_script

_TIMEOUT = 120.0
"""Seconds for all questions together."""


@dataclass(frozen=True)
class Findings:
    """What could be found out about a refusal.

    Attributes:
        partitions: the partitions that there are; none if that is not known.
        about: the first component that sbatch refuses alone as well; None if there is none, or it is not known.
        said: what sbatch has against it.
    """

    partitions: tuple[str, ...] = ()
    about: JobRequest | None = None
    said: str = ""


def ask(commands: Connection, request: JobRequest, kept: Sequence[str], run_dir: str, alone: bool) -> Findings:
    """Ask Slurm, in one command, about a request that it has refused; it stays refused whatever comes of that.

    Args:
        commands: runs commands on the edge node.
        request: what was asked for.
        kept: variables of sbatch that counted for it, and so count here.
        run_dir: its run directory.
        alone: whether to put each component to sbatch alone.
    """
    mark = f"rayslurm-{secrets.token_hex(8)}"
    with contextlib.suppress(OSError):
        done = commands.run(["sh", "-s"], questions(request.parts if alone else (), kept, run_dir, mark), _TIMEOUT)
        return findings(done.stdout.decode("utf-8", "replace"), request, mark)
    return Findings()


def questions(parts: Sequence[JobRequest], kept: Sequence[str], run_dir: str, mark: str) -> bytes:
    """Shell text that asks for the partitions, and has sbatch look at each component, as `findings` reads the answers.

    Args:
        parts: the components.
        kept: variables of sbatch that count.
        run_dir: where a job would run.
        mark: a word that stands in none of it.
    """
    lines = [
        f"kept_variables={shlex.quote(' '.join(kept))}",
        CLEAN,
        f'alone() {{ said=$(sbatch --test-only 2>&1 >/dev/null); printf \'\\n{mark} %s\\n%s\\n\' "$?" "$said"; }}',
        "sinfo --noheader --format=%R 2>/dev/null </dev/null",
    ]
    for part in parts:
        lines += [f"alone <<'{mark}'", render_script(part.alone, ["true"], run_dir, {}), mark]
    return "\n".join([*lines, ""]).encode("utf-8", "surrogateescape")


def findings(text: str, request: JobRequest, mark: str) -> Findings:
    """What the answers to `questions` tell."""
    names, *answers = re.split(rf"^{mark} ([0-9]+)\n", text, flags=re.MULTILINE)
    partitions = tuple(names.split())
    for part, code, said in zip(request.parts, answers[::2], answers[1::2], strict=False):
        if 0 < int(code) < 128 and not is_temporary(said):
            return Findings(partitions, part.alone, said)
    return Findings(partitions)
