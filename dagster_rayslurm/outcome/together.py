"""One verdict for payloads that run together: what failed first, everything that failed, and what only ended with it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import may_retry
from ..follow import Evidence
from . import SUCCESS, Verdict, judge_job

_UNEXPLAINED = 1
"""Rank of a runtime that ended without a word: of itself, or as srun ended it after another one."""
_BROUGHT_ABOUT = {"terminated": 2, "other-component": 3}
"""Ranks of ends for the reasons that come from elsewhere."""

_OF_THE_WHOLE = ("allocation", "cancelled", "connection")
"""Kinds that befall all components at once, such as the end of their job, if all of them tell the same."""


@dataclass(frozen=True)
class Judged:
    """What became of one component's payload."""

    verdict: Verdict
    evidence: Evidence

    @property
    def rank(self) -> int:
        """How much of a reason it is: 0 for a failure of its own, more for one that another failure may have brought about."""
        if self.evidence.end is None:
            # Nobody knows when it ended; Slurm may know of what.
            return _UNEXPLAINED if judge_job(self.evidence) is None else 0
        return _BROUGHT_ABOUT.get(self.evidence.end["reason"], 0)

    @property
    def of_the_job(self) -> bool:
        """Whether it may be what befell the job, and not this component alone."""
        # A component that did not get what it asked for is of that kind, too.
        return self.verdict.kind in _OF_THE_WHOLE and (self.evidence.end or {}).get("reason") != "allocation"

    @property
    def ended_at(self) -> float:
        """When it ended, by the clock of its node; one that says no end came to it in a hurry."""
        return float((self.evidence.end or {}).get("ended_at") or 0.0)


def judge_together(judged: Mapping[str, Judged]) -> Verdict:
    """The verdict on a run.

    Args:
        judged: what became of each component's payload.

    Returns:
        Success if all of them succeeded; else the kind of the first one that failed by itself, and a sentence that names all.
    """
    failed = {component: each for component, each in judged.items() if each.verdict.kind is not None}
    if not failed:
        return SUCCESS
    own = by_themselves(failed)
    first = next(iter(own.values()))
    assert first.verdict.kind is not None
    if first.of_the_job and len(own) == len(judged) and len({each.verdict for each in own.values()}) == 1:
        return first.verdict
    said: dict[str, list[str]] = {}
    for component, each in own.items():
        said.setdefault(each.verdict.sentence, []).append(component)
    sentences = [f"{_named(components)}: {sentence}" for sentence, components in said.items()]
    others = [component for component in failed if component not in own]
    if others:
        sentences.append(f"{_named(others)} {'were' if len(others) > 1 else 'was'} ended because of that")
    retry = all(may_retry(each.verdict.kind or "", each.verdict.retry) for each in own.values())
    return Verdict(first.verdict.kind, "; ".join(sentences), retry)


def by_themselves(judged: Mapping[str, Judged]) -> dict[str, Judged]:
    """Those that failed by themselves, the first one first; if there is none, those that come nearest to it."""
    failed = {component: each for component, each in judged.items() if each.verdict.kind is not None}
    last = max(_UNEXPLAINED, min((each.rank for each in failed.values()), default=0))
    own = [(component, each) for component, each in failed.items() if each.rank <= last]
    return dict(sorted(own, key=lambda item: (item[1].rank, item[1].ended_at)))


def _named(components: Sequence[str]) -> str:
    names = [repr(each) for each in components]
    return f"component {names[0]}" if len(names) == 1 else f"components {', '.join(names[:-1])} and {names[-1]}"
