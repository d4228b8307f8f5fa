"""Whether ratios got worse from one file of results to another. Seconds are never compared: machines and days differ."""

from __future__ import annotations

from dataclasses import dataclass

from .figures import Figure, number
from .results import Results


@dataclass(frozen=True)
class Comparison:
    """What two files of results say together.

    Attributes:
        losses: one sentence for each figure that got worse by more than its tolerance.
        compared: how many ratios both have.
        left_out: names of figures with a ratio that only one of them has.
    """

    losses: tuple[str, ...]
    compared: int
    left_out: tuple[str, ...]


def compare(old: Results, new: Results) -> Comparison:
    """Compare the ratios of figures with the same name, by the tolerances that the older file states."""
    before = {figure.name: figure for figure in old.figures}
    after = {figure.name: figure for figure in new.figures}
    losses, compared = [], 0
    for name in before.keys() & after.keys():
        compared += before[name].ratio is not None and after[name].ratio is not None
        losses.append(_loss(before[name], after[name]))
    only_one = [name for name in before.keys() ^ after.keys() if (before.get(name) or after[name]).ratio is not None]
    return Comparison(tuple(sorted(filter(None, losses))), compared, tuple(sorted(only_one)))


def _loss(old: Figure, new: Figure) -> str | None:
    if new.problem is not None:
        return f"{new.name}: {new.problem}." if old.problem is None else None
    if old.ratio is None or new.ratio is None or old.problem is not None:
        return None
    if new.at_least:
        allowed = old.ratio / (1 + old.tolerance)
        worse = new.ratio < allowed
    else:
        allowed = old.ratio * (1 + old.tolerance)
        worse = new.ratio > allowed
    if not worse:
        return None
    limit = f"{'at least' if new.at_least else 'at most'} {number(allowed)}"
    return f"{new.name}: {number(new.ratio)} times by hand, was {number(old.ratio)}; {limit} is tolerated."
