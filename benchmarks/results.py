"""What runs of the benchmarks leave behind: one JSON file with every sample, to which later runs may add."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .figures import Figure

_FORMAT = 1
_NUMBERS = re.compile(r"\[\n([-+.e\d,\s]+)\]")
SAME = ("cpus", "memory_gib", "slurm", "ray", "dagster", "dagster-slurm")
"""What the parts of one file must agree on."""


class ResultsError(Exception):
    """A file that is none of these, or parts that do not belong together."""


@dataclass(frozen=True)
class Measured:
    """One benchmark of a part.

    Attributes:
        benchmark: its name.
        seconds: how long it took.
        figures: what it found.
    """

    benchmark: str
    seconds: float
    figures: tuple[Figure, ...]

    def raw(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "seconds": round(self.seconds, 1),
            "figures": [figure.raw() for figure in self.figures],
        }


@dataclass(frozen=True)
class Part:
    """One call of `python -m benchmarks run`; comparisons hold within each of its benchmarks.

    Attributes:
        begun: when, in UTC.
        machine: where, with the versions of what was compared.
        options: how.
        measured: what.
    """

    begun: str
    machine: Mapping[str, Any]
    options: Mapping[str, Any]
    measured: tuple[Measured, ...] = ()

    def raw(self) -> dict[str, Any]:
        measured = [each.raw() for each in self.measured]
        return {"begun": self.begun, "machine": dict(self.machine), "options": dict(self.options), "measured": measured}


@dataclass(frozen=True)
class Results:
    """The parts of one file, in the order of their beginning."""

    parts: tuple[Part, ...] = ()

    @property
    def measured(self) -> tuple[Measured, ...]:
        return tuple(each for part in self.parts for each in part.measured)

    @property
    def figures(self) -> tuple[Figure, ...]:
        return tuple(figure for each in self.measured for figure in each.figures)

    def with_part(self, part: Part) -> Results:
        """The same with one part more; a benchmark that it has measured again is not kept twice.

        Raises:
            ResultsError: it was measured elsewhere, or with other versions.
        """
        for other in self.parts:
            for fact in SAME:
                mine, theirs = part.machine.get(fact), other.machine.get(fact)
                if mine is not None and theirs is not None and mine != theirs:
                    raise ResultsError(f"{fact} is {mine} now and was {theirs} in the part of {other.begun}: begin another file")
        again = {each.benchmark for each in part.measured}
        kept = (
            replace(other, measured=tuple(each for each in other.measured if each.benchmark not in again)) for other in self.parts
        )
        return Results((*(other for other in kept if other.measured), part))

    def to_json(self) -> str:
        """The file: numbers are rounded to what a clock can tell, and those of a sample are on one line."""
        raw = {"format": _FORMAT, "parts": [part.raw() for part in self.parts]}
        text = json.dumps(_rounded(raw), indent=1, ensure_ascii=False)
        return _NUMBERS.sub(lambda found: "[" + ", ".join(found[1].replace(",", " ").split()) + "]", text) + "\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(each) for each in value]
    return value


def from_json(text: str) -> Results:
    """What a file says.

    Raises:
        ResultsError: it is none of these.
    """
    try:
        raw = json.loads(text)
        if raw["format"] != _FORMAT:
            raise ResultsError(f"format {raw['format']} instead of {_FORMAT}")
        return Results(tuple(map(_part, raw["parts"])))
    except (ValueError, KeyError, TypeError) as error:
        raise ResultsError(f"no results of benchmarks: {type(error).__name__} {error}") from error


def _part(raw: Mapping[str, Any]) -> Part:
    measured = tuple(
        Measured(each["benchmark"], each["seconds"], tuple(map(Figure.from_raw, each["figures"]))) for each in raw["measured"]
    )
    return Part(raw["begun"], raw["machine"], raw["options"], measured)


def read(path: Path) -> Results:
    """The results in a file.

    Raises:
        ResultsError: there are none.
    """
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ResultsError) as error:
        raise ResultsError(f"{path}: {error}") from error
