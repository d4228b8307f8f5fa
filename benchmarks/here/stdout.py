"""`stdout`: a million lines of output through a step, complete and in order, in little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

from ..figures import Figure, Options, Sample
from ..steps import PAYLOADS, alternate, base_dir, timed

LINES = PAYLOADS / "lines.py"
_BAR_RATE = 20_000
_BAR_MIB = 50


def stdout(options: Options) -> list[Figure]:
    """Lines per second end to end, and how much the step's process grows meanwhile."""
    by_hand: list[float] = []
    ours: list[float] = []
    growth: list[float] = []
    problems: list[str] = []

    def run_by_hand() -> None:
        by_hand.append(options.lines / timed(lambda: run_here([str(LINES), str(options.lines)], output))[0])

    def run_ours() -> None:
        # A process of its own for each step: memory that an earlier one took and kept would hide what this one takes.
        run_here(["-m", f"{__package__}.stdout_step", str(options.lines), base, str(report)], output)
        measured = json.loads(report.read_text())
        ours.append(options.lines / measured["seconds"])
        growth.append(measured["growth"] / 2**20)
        problems.extend(differences(output, options.lines))

    with base_dir() as base:
        output, report = Path(base) / "output", Path(base) / "report.json"
        alternate(options.repeat(5), run_by_hand, run_ours)
    hand = Sample.of("script > file", by_hand, "lines/s")
    our = Sample.of("run()", ours, "lines/s")
    memory = Sample.of("growth of the step's process", growth, "MiB")
    nothing, largest = Sample.of("no step", [0.0], "MiB"), Sample.of("largest growth", [max(growth)], "MiB")
    return [
        Figure("stdout", hand, our, our, _BAR_RATE, at_least=True, problem=next(iter(problems), None)),
        Figure("stdout.memory", nothing, memory, largest, _BAR_MIB),
    ]


def run_here(arguments: list[str], output: Path) -> None:
    """Run this Python with its output in a file."""
    with output.open("wb") as file:
        subprocess.run([sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=file, check=True)


def differences(output: Path, lines: int) -> Iterator[str]:
    """Where the output is not what was printed."""
    expected = (f"{number:09d} {'x' * 39}\n" for number in range(lines))
    with output.open(encoding="utf-8") as file:
        for number, (found, wanted) in enumerate(zip_longest(file, expected)):
            if found != wanted:
                yield f"line {number} is {found!r} instead of {wanted!r}"
                return
