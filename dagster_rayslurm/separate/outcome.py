"""Verdict and metadata of payloads that run together, one for each component. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from ..errors import FailureKind, may_retry
from ..outcome import SUCCESS, Judged, Verdict, judge_job
from ..outcome.chart import MIB
from ..outcome.metadata import failure_metadata
from ..outcome.usage import Metadata, cpus_of
from ..runtime.protocol.end import EndReason
from ..runtime.protocol.record import Record

_RANK_UNEXPLAINED = 1
"""Rank of a failure without an `end`: the runtime ended by itself, or srun ended it after another runtime failed.

A rank is 0 for a failure with a cause of its own, and the higher, the likelier another component's failure is the cause.
"""
_RANKS_OF_CONSEQUENCES = {EndReason.TERMINATED: 2, EndReason.OTHER_COMPONENT: 3}
"""Ranks of those reasons of an `end` that the failure of another component may have caused; other reasons have rank 0."""
_KINDS_OF_THE_JOB = (FailureKind.ALLOCATION, FailureKind.CANCELLED, FailureKind.CONNECTION)
"""Kinds of failure that concern the whole job, such as its cancellation, if all components have the same verdict."""
_TABLE_COLUMNS = (
    "CPU efficiency (%)",
    "CPU time (s)",
    "Elapsed (s)",
    "Node",
    "Peak memory (MiB)",
    "Ray bring-up (s)",
    "Ray cluster was warm",
    "Slurm nodes",
    "Slurm partition",
)
"""Keys of one payload's metadata that are left out of the run's metadata, because the table of components has them."""


def judge_components(judged: Mapping[str, Judged]) -> Verdict:
    """Returns the verdict on the run: success if all payloads succeeded, else the kind of the first failure and a sentence.

    The sentence names each failure that no other failure caused.
    """
    failed = {component: each for component, each in judged.items() if each.verdict.kind is not None}
    if not failed:
        return SUCCESS
    roots = root_failures(failed)
    first = next(iter(roots.values()))
    if _concerns_job(first) and len(roots) == len(judged) and len({each.verdict for each in roots.values()}) == 1:
        return first.verdict
    components_by_sentence: dict[str, list[str]] = {}
    for component, each in roots.items():
        components_by_sentence.setdefault(each.verdict.sentence, []).append(component)
    sentences = [f"{_named(components)}: {sentence}" for sentence, components in components_by_sentence.items()]
    others = [component for component in failed if component not in roots]
    if others:
        sentences.append(f"{_named(others)} {'were' if len(others) > 1 else 'was'} ended because of that")
    retry = all(may_retry(each.verdict.kind, each.verdict.retry) for each in roots.values())
    return Verdict(first.verdict.kind, "; ".join(sentences), retry)


def root_failures(judged: Mapping[str, Judged]) -> dict[str, Judged]:
    """Returns the failures that are the likeliest causes, the earliest first; other failures are consequences of these."""
    failed = {component: each for component, each in judged.items() if each.verdict.kind is not None}
    highest = max(_RANK_UNEXPLAINED, min((_rank(each) for each in failed.values()), default=0))
    roots = [(component, each) for component, each in failed.items() if _rank(each) <= highest]
    return dict(sorted(roots, key=lambda item: (_rank(item[1]), _ended_at(item[1]))))


def components_metadata(own: Mapping[str, Metadata], judged: Mapping[str, Judged], mode: str, job_id: str | None) -> Metadata:
    """Returns the metadata of the run, for results and failures alike, with a table of the components.

    Args:
        own: the metadata of each component's payload, in the order of the components in the job.
        job_id: the id of the shared Slurm job; None without Slurm.
    """
    apart = {name: {key: value for key, value in each.items() if key not in _TABLE_COLUMNS} for name, each in own.items()}
    metadata = {"Execution mode": mode, **merge_metadata(apart)}
    rows = []
    for index, component in enumerate(own):
        # squeue shows "7+0" for a component of a heterogeneous job; a job with one component is not heterogeneous.
        component_job = job_id if job_id is None or len(own) == 1 else f"{job_id}+{index}"
        rows.append(_row(component, component_job, judged[component].evidence.end_or_partial))
    metadata["Components"] = dg.MetadataValue.table([dg.TableRecord(row) for row in rows])
    elapsed = [row["elapsed (s)"] for row in rows if row["elapsed (s)"]]
    if elapsed:
        metadata["Elapsed (s)"] = max(elapsed)
    return metadata


def failures_metadata(judged: Mapping[str, Judged], run_dir: str | None) -> Metadata:
    """Returns the metadata of a failed run: last output and logs of each component that failed by itself.

    Args:
        run_dir: the path of the run directory, with its host; None if the directory was removed.
    """
    own = {component: failure_metadata(each.evidence, None) for component, each in root_failures(judged).items()}
    metadata = merge_metadata(own, always=True)
    if run_dir is not None:
        metadata["Run directory"] = dg.MetadataValue.path(run_dir)
    return metadata


def merge_metadata(own: Mapping[str, Metadata], always: bool = False) -> Metadata:
    """Merges the metadata of all components: a value that all share appears once, any other under "key (component)".

    Args:
        own: the metadata of each component.
        always: whether shared values, too, appear under "key (component)", except values of Slurm.
    """
    metadata: Metadata = {}
    for key in dict.fromkeys(key for each in own.values() for key in each):
        values = {component: each[key] for component, each in own.items() if key in each}
        first, *others = values.values()
        shared = len(values) == len(own) and all(value == first for value in others)
        if shared and (not always or key.startswith("Slurm")):
            metadata[key] = first
        else:
            metadata.update({f"{key} ({component})": value for component, value in values.items()})
    return metadata


def _rank(judged: Judged) -> int:
    """Returns the rank of a failure: 0 if it has a cause of its own; higher, the likelier another failure caused it."""
    if judged.evidence.end is None:
        return _RANK_UNEXPLAINED if judge_job(judged.evidence) is None else 0
    return _RANKS_OF_CONSEQUENCES.get(judged.evidence.end["reason"], 0)


def _concerns_job(judged: Judged) -> bool:
    """Whether a failure may concern the whole job."""
    # A component that got fewer resources than it asked for fails alone, though with the same kind of failure.
    return judged.verdict.kind in _KINDS_OF_THE_JOB and (judged.evidence.end or {}).get("reason") != EndReason.ALLOCATION


def _ended_at(judged: Judged) -> float:
    """Returns when a payload ended, by its node's clock; 0.0 without an `end`."""
    return float((judged.evidence.end or {}).get("ended_at") or 0.0)


def _named(components: Sequence[str]) -> str:
    names = [repr(each) for each in components]
    return f"component {names[0]}" if len(names) == 1 else f"components {', '.join(names[:-1])} and {names[-1]}"


def _row(component: str, job_id: str | None, end: Record | None) -> dict[str, Any]:
    """Returns the row of a component in the table of components; unknown values are empty."""
    context: Mapping[str, Any] = (end or {}).get("context") or {}
    usage: Mapping[str, Any] = (end or {}).get("usage") or {}
    allocation: Mapping[str, Any] = context.get("allocation") or {}
    nodes = context.get("nodes") or []
    slurm = {} if job_id is None else {"Slurm job ID": job_id, "partition": str(allocation.get("partition") or "")}
    return {
        "component": component,
        **slurm,
        "nodes": ", ".join(allocation.get("nodes") or [node["hostname"] for node in nodes] or [context.get("hostname") or ""]),
        "CPUs": cpus_of(context),
        "GPUs": float(sum(node["resources"].get("GPU", 0.0) for node in nodes)),
        "bring-up (s)": round(context.get("bring_up") or 0.0, 2),
        "elapsed (s)": round(usage.get("elapsed") or 0.0, 2),
        "CPU time (s)": round(usage.get("cpu_seconds") or 0.0, 2),
        "peak memory (MiB)": round((usage.get("peak_memory") or 0) / MIB, 1),
    }
