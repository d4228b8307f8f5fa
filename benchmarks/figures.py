"""What a figure is: samples of one run of the benchmarks, the result drawn from them, and the bar it must meet."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Sample:
    """Repeated measurements of one thing."""

    label: str
    values: tuple[float, ...]
    unit: str = "s"

    @classmethod
    def of(cls, label: str, values: Sequence[float], unit: str = "s") -> Sample:
        return cls(label, tuple(values), unit)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def p95(self) -> float:
        """What 19 of 20 do not exceed."""
        return statistics.quantiles(self.values, n=20, method="inclusive")[-1] if len(self.values) > 1 else self.values[0]

    def __str__(self) -> str:
        spread = f" ({number(min(self.values))}-{number(max(self.values))})" if len(self.values) > 1 else ""
        return f"{number(self.median)} {self.unit}{spread}"


@dataclass(frozen=True)
class Figure:
    """One row of the table: the median of `result` must meet the bar."""

    name: str
    by_hand: Sample
    ours: Sample
    result: Sample
    bar: float
    at_least: bool = False
    """Whether the result must reach the bar, instead of staying below it."""
    also: tuple[Sample, ...] = ()
    """What the reader may want to know beside it."""
    problem: str | None = None
    """Why the figure counts for nothing, such as lost lines."""

    @property
    def met(self) -> bool:
        value = self.result.median
        return self.problem is None and (value >= self.bar if self.at_least else value <= self.bar)

    def raw(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    runs: int | None = None
    messages: int = 20_000
    lines: int = 1_000_000
    partition: str = "compute"
    peer: bool = True

    def repeat(self, usual: int) -> int:
        """How often to measure something for which `usual` is a good number."""
        return usual if self.runs is None else self.runs


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
