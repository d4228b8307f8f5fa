"""What a run was granted, what it used of that, and what it held. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from ..runtime.ray.node_table import title
from .chart import MIB, usage_chart

Metadata = dict[str, Any]
Node = Mapping[str, Any]
Figures = Mapping[str, Mapping[str, Any]]
"""Figures by node."""


def usage_metadata(usage: Mapping[str, Any], context: Mapping[str, Any]) -> Metadata:
    """Metadata of the figures that were measured.

    Args:
        usage: of the `end` record, or what is known without one; empty if nothing was measured.
        context: facts about the nodes.
    """
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
    if context.get("granted"):
        metadata.update(_granted_metadata(usage, context))
    if usage["gpu_utilization_mean"] is not None:
        metadata["GPU utilization mean (%)"] = round(usage["gpu_utilization_mean"], 1)
        metadata["GPU utilization max (%)"] = round(usage["gpu_utilization_max"], 1)
        metadata["GPU memory max (MiB)"] = round(usage["gpu_memory_max"] / MIB, 1)
    if usage["spilled_bytes"]:
        metadata["Object store spilled (MiB)"] = round(usage["spilled_bytes"] / MIB, 1)
    if len(usage["points"]) >= 2:
        memory = memory_granted(_largest(usage, context)) if context.get("granted") else 0.0
        metadata["Usage"] = dg.MetadataValue.md(usage_chart(usage, cpus, memory))
    return metadata


def _granted_metadata(usage: Mapping[str, Any], context: Mapping[str, Any]) -> Metadata:
    """What Slurm granted beside what was used, and for how long it was held."""
    granted: Sequence[Node] = context["granted"]
    largest, peak = _largest(usage, context), usage["peak_memory"]
    cpus, gpus = sum(node["num_cpus"] for node in granted), sum(node["num_gpus"] for node in granted)
    hours = (usage["elapsed"] + (0.0 if context.get("warm") else context.get("bring_up") or 0.0)) / 3600
    several = len(granted) > 1
    busy = usage["cpu_seconds"] / usage["elapsed"] if usage["elapsed"] > 0 else 0.0
    text = f"granted {_count(cpus, 'CPU')}, {memory_granted(largest) / MIB:.0f} MiB"
    text += f" on {title(dict(largest))}" if several else ""
    text += f", {_count(gpus, 'GPU')}" if gpus else ""
    metadata: Metadata = {
        "Memory efficiency (%)": round(100 * peak / memory_granted(largest), 1),
        "Granted and used": f"{text}; used {busy:.1f} CPUs, {peak / MIB:.0f} MiB",
        "Node hours": round(hours * len(granted), 3),
        "CPU hours": round(hours * cpus, 3),
    }
    if gpus:
        metadata["GPU hours"] = round(hours * gpus, 3)
    if several and not usage.get("nodes"):
        metadata["Usage measured on"] = f"{context['hostname']} alone, as the others were not asked in time"
    return metadata


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def cpus_of(context: Mapping[str, Any]) -> float:
    """The CPUs of all nodes that a run had: those that Slurm granted, or those that Ray and this machine have."""
    if context.get("granted"):
        return float(sum(node["num_cpus"] for node in context["granted"]))
    nodes = context.get("nodes") or []
    counted = sum(node["resources"].get("CPU", 0.0) for node in nodes) or float(context.get("num_cpus") or 0)
    return min(counted, context.get("machine_cpus") or counted)


def memory_granted(node: Node) -> float:
    """Bytes of memory that Slurm granted on a node; all of its memory where Slurm sets no limit."""
    return float(node["memory_limit"] or node["memory"])


def of_node(figures: Figures, node: Node) -> Mapping[str, Any]:
    """What was measured on a node; if two components share a host, the figures carry the component's name, too."""
    return figures.get(title(dict(node))) or figures.get(node["hostname"]) or {}


def _largest(usage: Mapping[str, Any], context: Mapping[str, Any]) -> Node:
    """The granted node that used most memory."""
    figures: Figures = usage.get("nodes") or {}
    granted: Sequence[Node] = context["granted"]
    return max(granted, key=lambda node: float(of_node(figures, node).get("peak_memory", 0)))
