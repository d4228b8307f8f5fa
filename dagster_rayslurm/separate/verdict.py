"""One verdict for payloads that run together: what failed first, everything that failed, and what only ended with it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import FailureKind, may_retry
from ..outcome import SUCCESS, Judged, Verdict, judge_job
from ..runtime.protocol.end import EndReason

_UNEXPLAINED = 1
"""Rank of a runtime that ended without a word: of itself, or as srun ended it after another one."""
_CAUSED_BY_OTHERS = {EndReason.TERMINATED: 2, EndReason.OTHER_COMPONENT: 3}
"""Ranks of ends for the reasons that come from elsewhere."""

_OF_THE_WHOLE = (FailureKind.ALLOCATION, FailureKind.CANCELLED, FailureKind.CONNECTION)
"""Kinds that befall all components at once, such as the end of their job, if all of them tell the same."""


def _rank(judged: Judged) -> int:
    """Order of causes: 0 for a failure of its own, more for one that another failure may have caused."""
    if judged.evidence.end is None:
        return _UNEXPLAINED if judge_job(judged.evidence) is None else 0
    return _CAUSED_BY_OTHERS.get(judged.evidence.end["reason"], 0)


def _of_the_job(judged: Judged) -> bool:
    """Whether the failure may be the job's, and not this component's alone."""
    # A component with fewer resources than it asked for has the same kind, but fails alone.
    return judged.verdict.kind in _OF_THE_WHOLE and (judged.evidence.end or {}).get("reason") != EndReason.ALLOCATION


def _ended_at(judged: Judged) -> float:
    """End time by the node's clock, or 0.0 if the payload wrote no end record."""
    return float((judged.evidence.end or {}).get("ended_at") or 0.0)


def judge_components(judged: Mapping[str, Judged]) -> Verdict:
    """The verdict on a run.

    Args:
        judged: what became of each component's payload.

    Returns:
        Success if all of them succeeded; else the kind of the first one that failed by itself, and a sentence that names all.
    """
    failed = {component: each for component, each in judged.items() if each.verdict.kind is not None}
    if not failed:
        return SUCCESS
    own = root_failures(failed)
    first = next(iter(own.values()))
    assert first.verdict.kind is not None
    if _of_the_job(first) and len(own) == len(judged) and len({each.verdict for each in own.values()}) == 1:
        return first.verdict
    said: dict[str, list[str]] = {}
    for component, each in own.items():
        said.setdefault(each.verdict.sentence, []).append(component)
    sentences = [f"{_named(components)}: {sentence}" for sentence, components in said.items()]
    others = [component for component in failed if component not in own]
    if others:
        sentences.append(f"{_named(others)} {'were' if len(others) > 1 else 'was'} ended because of that")
    retry = all(may_retry(each.verdict.kind, each.verdict.retry) for each in own.values())
    return Verdict(first.verdict.kind, "; ".join(sentences), retry)


def root_failures(judged: Mapping[str, Judged]) -> dict[str, Judged]:
    """Those that failed by themselves, the first one first; if there is none, those that come nearest to it."""
    failed = {component: each for component, each in judged.items() if each.verdict.kind is not None}
    last = max(_UNEXPLAINED, min((_rank(each) for each in failed.values()), default=0))
    own = [(component, each) for component, each in failed.items() if _rank(each) <= last]
    return dict(sorted(own, key=lambda item: (_rank(item[1]), _ended_at(item[1]))))


def _named(components: Sequence[str]) -> str:
    names = [repr(each) for each in components]
    return f"component {names[0]}" if len(names) == 1 else f"components {', '.join(names[:-1])} and {names[-1]}"
