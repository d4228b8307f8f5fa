"""What a figure is: samples of one run of the benchmarks, what stands beside them, and the bar they must meet."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
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

    @property
    def spread(self) -> str:
        """From the smallest to the largest value, if they differ."""
        least, most = number(min(self.values)), number(max(self.values))
        return f"{least}-{most}" if least != most else ""

    def __str__(self) -> str:
        return f"{number(self.median)} {self.unit}".rstrip() + (f" ({self.spread})" if self.spread else "")


@dataclass(frozen=True)
class Figure:
    """One quantity: the median of `result` must meet the bar.

    Attributes:
        name: what is measured, the same in every run of the benchmarks.
        by_hand: the same done by hand, the standard in the same run.
        ours: this project.
        result: what is promised something of: `ours`, a ratio or a difference.
        bar: what is promised; None if nothing is.
        at_least: whether the result must reach the bar, instead of staying below it.
        others: the same quantity of others.
        also: what the reader may want to know beside it.
        problem: why the figure counts for nothing, such as lost lines.
        tolerance: by what part the ratio to `by_hand` may be worse in a later run before that is called a loss.
    """

    name: str
    by_hand: Sample | None
    ours: Sample
    result: Sample
    bar: float | None
    at_least: bool = False
    others: tuple[Sample, ...] = ()
    also: tuple[Sample, ...] = ()
    problem: str | None = None
    tolerance: float = 0.25

    @property
    def met(self) -> bool:
        """Whether there is no problem and the bar, if there is one, is met."""
        value = self.result.median
        if self.problem is not None or self.bar is None:
            return self.problem is None
        return value >= self.bar if self.at_least else value <= self.bar

    @property
    def ratio(self) -> float | None:
        """How this project compares with doing it by hand, the same on machines of any speed; None if it cannot be said."""
        if self.result.unit == "x":
            return self.result.median
        if self.by_hand is None or self.by_hand.unit != self.ours.unit or not self.by_hand.median:
            return None
        return self.ours.median / self.by_hand.median

    def raw(self) -> dict[str, Any]:
        """Everything, for a JSON file."""
        return {**asdict(self), "met": self.met, "ratio": self.ratio}

    @classmethod
    def from_raw(cls, raw: Mapping[str, Any]) -> Figure:
        """The figure that `raw` describes."""
        return cls(
            name=raw["name"],
            by_hand=_sample(raw["by_hand"]) if raw["by_hand"] else None,
            ours=_sample(raw["ours"]),
            result=_sample(raw["result"]),
            bar=raw["bar"],
            at_least=raw["at_least"],
            others=tuple(map(_sample, raw["others"])),
            also=tuple(map(_sample, raw["also"])),
            problem=raw["problem"],
            tolerance=raw["tolerance"],
        )


def _sample(raw: Mapping[str, Any]) -> Sample:
    return Sample.of(raw["label"], raw["values"], raw["unit"])


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    runs: int | None = None
    messages: int = 20_000
    lines: int = 1_000_000
    partition: str = "all"
    peer: bool = True
    quick: bool = False
    """Whether all that matters is that everything still works."""

    def repeat(self, usual: int) -> int:
        """How often to measure something for which `usual` is a good number."""
        if self.runs is not None:
            return self.runs
        return 1 if self.quick else usual


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
