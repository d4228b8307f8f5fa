"""What users see of a run in Dagster: metadata of results and of failures, from the record alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from ..errors import without_colours
from ..follow import Evidence
from ..runtime.protocol.record import Record
from ..runtime.ray.node_table import title
from ..slurm.accounting import JobFacts
from .chart import MIB
from .figures import Metadata, memory_granted, of_node, usage_metadata

_IN_PLACE = 990
"""Characters of a text that a failure shows; the run directory has all of it."""


def run_metadata(end: Record | None, mode: str, cluster_id: str) -> Metadata:
    """Metadata that is attached to every result of a run.

    Args:
        end: the `end` record, whose figures are the runtime's own measurements; None for a run without one.
        mode: execution mode.
        cluster_id: name of the Ray cluster.
    """
    metadata: Metadata = {"Execution mode": mode}
    if end is None:
        return metadata
    context: Mapping[str, Any] = end.get("context") or {}
    if context.get("ray_version"):
        metadata["Ray cluster ID"] = cluster_id
        metadata["Ray version"] = context["ray_version"]
        metadata["Ray cluster was warm"] = bool(context["warm"])
        metadata["Ray bring-up (s)"] = round(context["bring_up"], 2)
        if context.get("dashboard_url") and context.get("kept_warm"):  # Any other has ended with the run.
            metadata["Ray dashboard"] = dg.MetadataValue.url(context["dashboard_url"])
        metadata["Nodes"] = _nodes_table(context, (end.get("usage") or {}).get("nodes") or {})
    elif context.get("hostname"):
        metadata["Node"] = context["hostname"]
    components = _components_table(context, (end.get("usage") or {}).get("nodes") or {})
    if components is not None:
        metadata["Components"] = components
    metadata.update(usage_metadata(end.get("usage") or {}, context))
    if context.get("workers_killed"):
        metadata["Ray workers killed for memory"] = context["workers_killed"]
    if end.get("stdio_dropped"):
        metadata["Output not recorded (characters)"] = end["stdio_dropped"]
    if left_out := [*(end.get("outputs_failed") or ()), *end.get("outputs_left_out", ())]:
        metadata["Outputs left out"] = _in_place("\n".join(left_out))
    return metadata


def failure_metadata(evidence: Evidence, run_dir: str | None) -> Metadata:
    """Metadata of a failure, the cause first: the last output, what the logs say, where the rest is, and how it ended.

    Args:
        evidence: what is known of the run.
        run_dir: where its run directory is, in words; None if it is gone.
    """
    texts = {"Last output": evidence.output_tail()}
    texts.update((f"Log: {name}", text) for name, text in evidence.tails.items())
    texts["Runtime log"] = evidence.runtime_log
    metadata: Metadata = {label: _in_place(text) for label, text in texts.items() if text.strip()}
    if run_dir is not None:
        metadata["Run directory"] = dg.MetadataValue.path(run_dir)
    end = evidence.end or {}
    for key, label in (("exit_code", "Exit code"), ("signal", "Signal")):
        if end.get(key) is not None:
            metadata[label] = int(end[key])
    if evidence.job is not None:
        metadata["Slurm state"] = evidence.job.final_state or evidence.job.state
        if evidence.job.reason:
            metadata["Slurm reason"] = evidence.job.reason
        if evidence.job.components:
            metadata["Slurm components"] = _states_table(evidence.job)
    return metadata


def _nodes_table(context: Mapping[str, Any], usage: Mapping[str, Mapping[str, Any]]) -> dg.TableMetadataValue:
    """The nodes of a cluster, with what was measured on each where there are several."""
    nodes: list[Mapping[str, Any]] = context["nodes"]
    in_components = any(node.get("component") for node in nodes)
    records = [
        dg.TableRecord(
            {
                "node": node["hostname"],
                "address": node["address"],
                "head": bool(node["head"]),
                **({"component": str(node.get("component") or "")} if in_components else {}),
                "CPUs": float(node["resources"].get("CPU", 0.0)),
                "GPUs": float(node["resources"].get("GPU", 0.0)),
                "memory (GiB)": round(_memory(context, node) / 2**30, 1),
                "object store (GiB)": round(node["resources"].get("object_store_memory", 0.0) / 2**30, 2),
                **_used(usage, [node]),
            }
        )
        for node in nodes
    ]
    return dg.MetadataValue.table(records)


def _used(usage: Mapping[str, Mapping[str, Any]], nodes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What was measured on some nodes: the sum of their CPU time, and the memory of the one that used most."""
    if not usage:
        return {}
    found = [of_node(usage, node) for node in nodes]
    return {
        "CPU time (s)": round(sum(each.get("cpu_seconds", 0.0) for each in found), 2),
        "peak memory (MiB)": round(max((each.get("peak_memory", 0) for each in found), default=0) / MIB, 1),
    }


def _memory(context: Mapping[str, Any], node: Mapping[str, Any]) -> float:
    """Bytes of memory that Slurm granted on a node, or else those that Ray schedules."""
    granted = {title(each): each for each in context.get("granted") or []}.get(title(dict(node)))
    return memory_granted(granted) if granted is not None else node["resources"].get("memory", 0.0)


def _components_table(context: Mapping[str, Any], usage: Mapping[str, Mapping[str, Any]]) -> dg.TableMetadataValue | None:
    """The components of a run, as Slurm and Ray know them; None for a run without any."""
    nodes = context.get("nodes") or []
    granted = (context.get("allocation") or {}).get("components") or []
    by_name = {each["component"]: each for each in granted}
    names = list(by_name) or list(dict.fromkeys(node["component"] for node in nodes if node.get("component")))
    records = []
    for name in names:
        own = [node for node in nodes if node.get("component") == name]
        slurm = by_name.get(name)
        row: dict[str, Any] = {"component": name}
        if slurm is not None:
            row |= {"Slurm job ID": slurm["job_id"], "partition": slurm["partition"]}
        row["nodes"] = ", ".join([node["hostname"] for node in own] if slurm is None else slurm["nodes"])
        if nodes:
            total = {key: sum(node["resources"].get(key, 0.0) for node in own) for key in ("CPU", "GPU")}
            memory = sum(_memory(context, node) for node in own)
            row |= {"CPUs": total["CPU"], "GPUs": total["GPU"], "memory (GiB)": round(memory / 2**30, 1)}
            row |= _used(usage, own)
        records.append(dg.TableRecord(row))
    return dg.MetadataValue.table(records) if records else None


def _states_table(job: JobFacts) -> dg.TableMetadataValue:
    """What Slurm says of each component."""
    records = [
        dg.TableRecord(
            {
                "component": each.component_id or "",
                "Slurm job ID": f"{job.job_id}+{number}",
                "state": each.final_state or each.state,
                "reason": each.reason,
                "nodes": ", ".join(each.nodes),
            }
        )
        for number, each in enumerate(job.components)
    ]
    return dg.MetadataValue.table(records)


def _in_place(text: str) -> dg.TextMetadataValue:
    """The end of a text. Dagster shows it as it is, without a click; so it is short, and no Markdown, which it might break."""
    text = without_colours(text).rstrip()
    if len(text) > _IN_PLACE:
        text = "…\n" + text[-_IN_PLACE:].partition("\n")[2]
    return dg.MetadataValue.text(text)
