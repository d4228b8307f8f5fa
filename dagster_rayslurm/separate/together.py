"""Merges the results of the payloads of all components into one result of the run.

A run without components has a single payload; the name of its component is None.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import dagster as dg

from ..errors import FailureKind, may_retry
from ..outcome.metadata import Metadata, cpus_of, failure_metadata, ray_logs
from ..outcome.pictures import MIB
from ..outcome.verdict import SUCCESS, Judged, Verdict, judge_job
from ..runtime.protocol.messages import EndReason
from ..runtime.protocol.record import Record, component_dir

Message = dict[str, Any]  # A Pipes message with method and parameters, or only its parameters.
# All reports about one asset or asset check: for each, the reporting component and the parameters of its message.
Reports = Sequence[tuple[str, Mapping[str, Any]]]

_KEPT = ("report_asset_materialization", "report_asset_check", "closed")  # Methods of messages that wait for the end.
_SEVERITIES = ("WARN", "ERROR")  # Severities of asset checks, the worst last.
# Ranks of failures: 0 for one with a cause of its own, and the higher, the likelier another component's failure is the cause.
_RANKS_OF_CONSEQUENCES = {EndReason.TERMINATED: 2, EndReason.OTHER_COMPONENT: 3}
_RANK_UNEXPLAINED = 1  # Without an `end`: the runtime ended by itself, or srun ended it after another runtime failed.
# Kinds of failure that concern the whole job, such as its cancellation, if all components have the same verdict.
_KINDS_OF_THE_JOB = (FailureKind.ALLOCATION, FailureKind.CANCELLED, FailureKind.CONNECTION)
# Keys of one payload's metadata that are left out of the run's metadata, because the table of components has them.
_TABLE_COLUMNS = (
    *("CPU efficiency (%)", "CPU time (s)", "Elapsed (s)", "Node", "Peak memory (MiB)"),
    *("Ray bring-up (s)", "Ray cluster was warm", "Slurm nodes", "Slurm partition"),
)


@dataclass
class ReportMerger:
    """Passes the Pipes messages of several components to Dagster's one handler, and merges the components' results.

    Results (reports of materializations and asset checks) and `closed` messages are stored until `hand_over` is called; other
    messages are passed on at once. Results are merged in the order of `components`, the names of all components.
    """

    handler: Any  # Dagster's handler of Pipes messages.
    components: Iterable[Any]
    check: Callable[[Any], object]  # Raises the exception that Dagster's handler would raise for an invalid result.
    results: dict[str, list[Message]] = field(default_factory=dict)  # The stored messages, by component.

    def of(self, component: str) -> Any:
        """Returns a handler, with the method `handle_message`, for the Pipes messages from the payload of `component`."""
        return SimpleNamespace(handle_message=lambda message: self._add(component, message))

    def _add(self, component: str, message: Message) -> None:
        """Store a result or `closed` message of `component` for `hand_over`; pass any other Pipes message on to Dagster at once.

        If a result is invalid, the function raises Dagster's error, or KeyError if the result has no `params`, and does not store
        the message. A `closed` message may lack `params`.
        """
        if message["method"] not in _KEPT:
            self.handler.handle_message(message)
            return
        if message["method"] != "closed":
            self.check(message)
        kept = {"method": message["method"], "params": message.get("params")}
        self.results.setdefault(component, []).append(kept)

    def hand_over(self) -> list[tuple[str, Exception]]:
        """Merge the stored results of all components, and pass the merged results to Dagster's handler. Called once, at the end.

        Returns a pair for each result that cannot be merged or that Dagster refuses: the name of a component that reported it,
        and the error.
        """
        refused: list[tuple[str, Exception]] = []
        reports: dict[tuple[Any, ...], list[tuple[str, Mapping[str, Any]]]] = {}
        for component in self.components:
            for message in self.results.pop(component, ()):
                method, params = message["method"], message["params"]
                what = (component,) if method == "closed" else (params["asset_key"], params.get("check_name"))
                reports.setdefault((method, *what), []).append((component, params))
        for (method, *_), same in sorted(reports.items(), key=lambda item: item[0][0] == "closed"):
            try:
                for params in merge(same):
                    self.handler.handle_message({"method": method, "params": params})
            except Exception as error:  # noqa: BLE001 - Dagster's handler raises anything on a malformed message
                refused.append((same[-1][0], error))
        return refused


def merge(reports: Reports) -> list[Any]:
    """Merge the reports of all components about one asset or asset check; returns the parameters of the merged Pipes messages.

    If all reports are from one component, the result has the parameters of each report, unchanged. Otherwise, the result has one
    item. A merged asset check has passed if it has passed in all components. If it has failed, its severity is the worst severity
    of the components' failed checks. Raises ValueError if several components have reports, and one component has two reports or
    the data versions differ.
    """
    by_component, names, first = dict(reports), [component for component, _ in reports], reports[0][1]
    if len(by_component) == 1:
        return [params for _, params in reports]
    what = f"asset {first['asset_key']!r}"
    if len(by_component) < len(names):
        what = f"asset check {first['check_name']!r} of {first['asset_key']!r}" if "check_name" in first else what
        twice = next(component for component in names if names.count(component) > 1)
        raise ValueError(f"component {twice!r} reports {what} twice, and another component reports it, too; report it once")
    own = {component: params["metadata"] or {} for component, params in by_component.items()}
    # Values are compared as JSON, in which they came, because 1, 1.0 and True are equal in Python.
    metadata = merge_metadata(own, lambda _, values: len({json.dumps(value, sort_keys=True) for value in values}) == 1)
    if "check_name" in first:
        failed = [params for params in by_component.values() if not params["passed"]]
        severity = max((params["severity"] for params in failed or by_component.values()), key=_SEVERITIES.index)
        return [{**first, "passed": not failed, "severity": severity, "metadata": metadata}]
    versions: dict[str, str] = {}
    for component, params in by_component.items():
        if params["data_version"] is not None:
            versions.setdefault(params["data_version"], component)
    if len(versions) > 1:
        each = " and ".join(f"{version!r} in component {component!r}" for version, component in versions.items())
        raise ValueError(f"{what} has data_version {each}; report it in one of them")
    return [{"asset_key": first["asset_key"], "metadata": metadata, "data_version": next(iter(versions), None)}]


def merge_metadata(own: Mapping[str, Mapping[str, Any]], is_shared: Callable[[str, list[Any]], bool]) -> dict[str, Any]:
    """Returns the metadata of all components as one dictionary; `own` has the metadata of each component.

    `is_shared` is called with a key and the values of all components that have this key. If `is_shared` returns True, the first
    value is stored under the key; otherwise each value is stored under "key (component)".
    """
    taken = {key for metadata in own.values() for key in metadata}
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for metadata in own.values() for key in metadata):
        values = {component: metadata[key] for component, metadata in own.items() if key in metadata}
        if is_shared(key, list(values.values())):
            merged[key] = next(iter(values.values()))
            continue
        for component, value in values.items():
            name = f"{key} ({component})"
            while name in taken:
                name += " 2"
            taken.add(name)
            merged[name] = value
    return merged


def judge_components(judged: Mapping[Any, Judged]) -> Verdict:
    """Returns the verdict on the whole run: success, or the kind of failure and a sentence for the user.

    `judged` has the verdict on each component and the evidence for it, by component name; for a run without components, its only
    key is None. The run succeeds if no component failed. Otherwise, the kind is that of the failure that most likely caused the
    other failures. The sentence describes the failure of each component that failed by itself, and names the components that were
    ended because of these failures. If all components have the same verdict about the whole job, such as a cancellation, the
    result is this verdict.
    """
    failed = {component: each for component, each in judged.items() if each.verdict.kind is not None}
    if not failed or None in failed:
        return failed[None].verdict if failed else SUCCESS
    roots = root_failures(failed)
    first = next(iter(roots.values()))
    # A component that got fewer resources than it asked for fails alone, though with the same kind of failure.
    alone = (first.evidence.end or {}).get("reason") == EndReason.ALLOCATION
    alike = len(roots) == len(judged) and len({each.verdict for each in roots.values()}) == 1
    if first.verdict.kind in _KINDS_OF_THE_JOB and alike and not alone:
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


def root_failures(judged: Mapping[Any, Judged]) -> dict[Any, Judged]:
    """Returns the failures that no failure of another component seems to have caused, by component name.

    The most likely cause of all failures is the first of the result. `judged` has the verdict on each component and the
    evidence for it. The result is empty if no component failed.
    """

    def rank(each: Judged) -> int:
        if each.evidence.end is None:
            return _RANK_UNEXPLAINED if judge_job(each.evidence) is None else 0
        return _RANKS_OF_CONSEQUENCES.get(each.evidence.end["reason"], 0)

    def order(item: tuple[Any, Judged]) -> tuple[int, float]:
        return rank(item[1]), float((item[1].evidence.end or {}).get("ended_at") or 0.0)

    failed = {component: each for component, each in judged.items() if each.verdict.kind is not None}
    highest = max(_RANK_UNEXPLAINED, min(map(rank, failed.values()), default=0))
    return dict(sorted(((component, each) for component, each in failed.items() if rank(each) <= highest), key=order))


def metadata_of_all(own: Mapping[Any, Metadata], judged: Mapping[Any, Judged], mode: str, job_id: str | None) -> Metadata:
    """Returns the Dagster metadata of the run, for a success and a failure alike, with a table of all components.

    `own` has the metadata of each component, and `judged` the verdict on each component and the evidence for it, by component
    name. `mode` is the execution mode. `job_id` is Slurm's id of the job; None without Slurm. For a run without components, the
    result is the metadata of the single payload, without a table.
    """
    if None in own:
        return own[None]
    apart = {name: {key: value for key, value in each.items() if key not in _TABLE_COLUMNS} for name, each in own.items()}
    merged = merge_metadata(apart, lambda _, values: len(values) == len(own) and values.count(values[0]) == len(own))
    metadata = {"Execution mode": mode, **merged}
    rows = []
    for index, component in enumerate(own):
        # squeue shows "7+0" for a component of a heterogeneous job; a job with one component is not heterogeneous.
        component_job = job_id if job_id is None or len(own) == 1 else f"{job_id}+{index}"
        rows.append(_row(component, component_job, judged[component].evidence.end_or_partial or {}))
    metadata["Components"] = dg.MetadataValue.table([dg.TableRecord(row) for row in rows])
    elapsed = max(row["elapsed (s)"] for row in rows)
    return {**metadata, "Elapsed (s)": elapsed} if elapsed else metadata


def failures_metadata(judged: Mapping[Any, Judged], run_dir: str | None) -> Metadata:
    """Returns the Dagster metadata of a failed run: the last output and the logs of each payload that failed by itself.

    `judged` has the verdict on each component and the evidence for it, by component name. The metadata contains `run_dir`, the
    path of the run directory, unless `run_dir` is None.
    """
    if None in judged:
        return failure_metadata(judged[None].evidence, run_dir)
    own = {component: failure_metadata(each.evidence, None) for component, each in root_failures(judged).items()}
    metadata = merge_metadata(own, lambda key, values: key.startswith("Slurm") and values.count(values[0]) == len(own))
    if run_dir is not None:
        for component in own:
            logs = ray_logs(judged[component].evidence, component_dir(run_dir, component))
            metadata.update((f"{key} ({component})", value) for key, value in logs.items())
        metadata["Run directory"] = dg.MetadataValue.path(run_dir)
    return metadata


def _named(components: Sequence[str]) -> str:
    names = [repr(each) for each in components]
    return f"component {names[0]}" if len(names) == 1 else f"components {', '.join(names[:-1])} and {names[-1]}"


def _row(component: str, job_id: str | None, end: Record) -> dict[str, Any]:
    context: Mapping[str, Any] = end.get("context") or {}
    usage: Mapping[str, Any] = end.get("usage") or {}
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
