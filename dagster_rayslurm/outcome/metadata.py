"""What users see of a run in Dagster: metadata of results and of failures, from the record alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from ..follow import Evidence
from ..runtime.nodes import title
from ..runtime.record import Record
from ..slurm.facts import JobFacts
from .chart import MIB, usage_chart

Metadata = dict[str, Any]


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
        if context.get("dashboard_url"):
            metadata["Ray dashboard"] = dg.MetadataValue.url(context["dashboard_url"])
        metadata["Nodes"] = _nodes_table(context["nodes"], (end.get("usage") or {}).get("nodes") or {})
    elif context.get("hostname"):
        metadata["Node"] = context["hostname"]
    components = _components_table(context, (end.get("usage") or {}).get("nodes") or {})
    if components is not None:
        metadata["Components"] = components
    metadata.update(_usage_metadata(end.get("usage") or {}, context))
    if context.get("workers_killed"):
        metadata["Ray workers killed for memory"] = context["workers_killed"]
    if end.get("stdio_dropped"):
        metadata["Output not recorded (characters)"] = end["stdio_dropped"]
    if left_out := [*(end.get("outputs_failed") or ()), *end.get("outputs_left_out", ())]:
        metadata["Outputs left out"] = _code("\n".join(left_out))
    return metadata


def failure_metadata(evidence: Evidence, run_dir: str | None) -> Metadata:
    """Metadata of a failure: the last output, what the logs say, and where to look.

    Args:
        evidence: what is known of the run.
        run_dir: where its run directory is, in words; None if it is gone.
    """
    metadata: Metadata = {}
    output = evidence.output_tail()
    if output.strip():
        metadata["Last output"] = _code(output)
    for name, text in evidence.tails.items():
        metadata[f"Log: {name}"] = _code(text)
    if evidence.runtime_log.strip():
        metadata["Runtime log"] = _code(evidence.runtime_log)
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
    if run_dir is not None:
        metadata["Run directory"] = dg.MetadataValue.path(run_dir)
    return metadata


def _usage_metadata(usage: Mapping[str, Any], context: Mapping[str, Any]) -> Metadata:
    if not usage:
        return {}
    elapsed, cpus = usage["elapsed"], cpus_of(context)
    metadata: Metadata = {
        "Elapsed (s)": round(elapsed, 2),
        "CPU time (s)": round(usage["cpu_seconds"], 2),
        "Peak memory (MiB)": round(usage["peak_memory"] / MIB, 1),
    }
    if usage.get("shared_cpu_seconds") is not None:
        metadata["Shared CPU time (s)"] = round(usage["shared_cpu_seconds"], 2)
        metadata["Shared memory (MiB)"] = round(usage["shared_peak_memory"] / MIB, 1)
    if elapsed > 0 and cpus > 0:
        metadata["CPU efficiency (%)"] = round(100 * usage["cpu_seconds"] / (elapsed * cpus), 1)
    if usage["gpu_utilization_mean"] is not None:
        metadata["GPU utilization mean (%)"] = round(usage["gpu_utilization_mean"], 1)
        metadata["GPU utilization max (%)"] = round(usage["gpu_utilization_max"], 1)
        metadata["GPU memory max (MiB)"] = round(usage["gpu_memory_max"] / MIB, 1)
    if usage["spilled_bytes"]:
        metadata["Object store spilled (MiB)"] = round(usage["spilled_bytes"] / MIB, 1)
    if len(usage["points"]) >= 2:
        metadata["Usage"] = dg.MetadataValue.md(usage_chart(usage, cpus, _memory_granted(context, usage)))
    return metadata


def _memory_granted(context: Mapping[str, Any], usage: Mapping[str, Any]) -> float:
    """Bytes of memory that Slurm granted on the node that used most; 0 without an allocation."""
    granted: list[Mapping[str, Any]] = context.get("granted") or []
    used = usage.get("nodes") or {}
    largest = max(granted, key=lambda node: _of_node(used, node).get("peak_memory", 0), default=None)
    return float(largest["memory_limit"] or largest["memory"]) if largest is not None else 0.0


def cpus_of(context: Mapping[str, Any]) -> float:
    """The CPUs of all nodes that a run had."""
    nodes = context.get("nodes") or []
    return sum(node["resources"].get("CPU", 0.0) for node in nodes) or float(context.get("num_cpus") or 0)


def _nodes_table(nodes: list[Mapping[str, Any]], usage: Mapping[str, Mapping[str, Any]]) -> dg.TableMetadataValue:
    """The nodes of a cluster, with what was measured on each where there are several."""
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
                "memory (GiB)": round(node["resources"].get("memory", 0.0) / 2**30, 1),
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
    found = [_of_node(usage, node) for node in nodes]
    return {
        "CPU time (s)": round(sum(each.get("cpu_seconds", 0.0) for each in found), 2),
        "peak memory (MiB)": round(max((each.get("peak_memory", 0) for each in found), default=0) / MIB, 1),
    }


def _of_node(usage: Mapping[str, Mapping[str, Any]], node: Mapping[str, Any]) -> Mapping[str, Any]:
    """What was measured on a node; if two components share a host, the figures carry the component's name, too."""
    return usage.get(title(dict(node))) or usage.get(node["hostname"]) or {}


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
            total = {key: sum(node["resources"].get(key, 0.0) for node in own) for key in ("CPU", "GPU", "memory")}
            row |= {"CPUs": total["CPU"], "GPUs": total["GPU"], "memory (GiB)": round(total["memory"] / 2**30, 1)}
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


def _code(text: str) -> dg.MarkdownMetadataValue:
    """A Markdown code block that the text cannot close: indented, whatever is in it."""
    return dg.MetadataValue.md("\n".join("    " + line for line in text.splitlines()))
