"""What users see of a run in Dagster: metadata of results and of failures, from the record alone. Pure."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from ..follow import Evidence
from ..runtime.nodes import title
from ..runtime.record import Record
from ..slurm.facts import JobFacts

MIB = 2**20

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
    metadata.update(_usage_metadata(end.get("usage") or {}, cpus_of(context)))
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


def _usage_metadata(usage: Mapping[str, Any], cpus: float) -> Metadata:
    if not usage:
        return {}
    elapsed = usage["elapsed"]
    metadata: Metadata = {
        "Elapsed (s)": round(elapsed, 2),
        "CPU time (s)": round(usage["cpu_seconds"], 2),
        "Peak memory (MiB)": round(usage["peak_memory"] / MIB, 1),
    }
    if elapsed > 0 and cpus > 0:
        metadata["CPU efficiency (%)"] = round(100 * usage["cpu_seconds"] / (elapsed * cpus), 1)
    if usage["gpu_utilization_mean"] is not None:
        metadata["GPU utilization mean (%)"] = round(usage["gpu_utilization_mean"], 1)
        metadata["GPU utilization max (%)"] = round(usage["gpu_utilization_max"], 1)
        metadata["GPU memory max (MiB)"] = round(usage["gpu_memory_max"] / MIB, 1)
    if usage["spilled_bytes"]:
        metadata["Object store spilled (MiB)"] = round(usage["spilled_bytes"] / MIB, 1)
    if len(usage["points"]) >= 2:
        metadata["Usage"] = dg.MetadataValue.md(usage_chart(usage["points"]))
    return metadata


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
    # Where two components have a node each on one host, the second one is known by both names.
    found = [usage.get(title(dict(node))) or usage.get(node["hostname"]) or {} for node in nodes]
    return {
        "CPU time (s)": round(sum(each.get("cpu_seconds", 0.0) for each in found), 2),
        "peak memory (MiB)": round(max((each.get("peak_memory", 0) for each in found), default=0) / MIB, 1),
    }


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


def usage_chart(points: list[list[float]]) -> str:
    """A Markdown picture of CPUs busy and memory over time, from (seconds, CPUs, bytes) points."""
    width, height, left, top = 400, 130, 8, 22
    last = points[-1][0] or 1.0
    cpu_top = max(point[1] for point in points) or 1.0
    memory_top = max(point[2] for point in points) or 1.0

    def line(index: int, highest: float, colour: str) -> str:
        dots = " ".join(
            f"{left + width * point[0] / last:.1f},{top + height * (1 - point[index] / highest):.1f}" for point in points
        )
        return f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{dots}"/>'

    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 16}" height="{height + 48}" '
        'font-family="sans-serif" font-size="11">'
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#999"/>'
        f'<text x="{left}" y="14" fill="#2563eb">CPUs busy, up to {cpu_top:.1f}</text>'
        f'<text x="{left + width}" y="14" fill="#d97706" text-anchor="end">memory, up to {memory_top / MIB:.0f} MiB</text>'
        f'<text x="{left + width}" y="{top + height + 16}" fill="#666" text-anchor="end">{last:.1f} s</text>'
        f"{line(1, cpu_top, '#2563eb')}{line(2, memory_top, '#d97706')}</svg>"
    )
    return f"![usage over time](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})"


def _code(text: str) -> dg.MarkdownMetadataValue:
    """A Markdown code block that the text cannot close: indented, whatever is in it."""
    return dg.MetadataValue.md("\n".join("    " + line for line in text.splitlines()))
