"""Dagster metadata about the resources that Slurm or Ray granted to a run, and those that the run used. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from ..runtime.ray.membership import title
from .chart import MIB, usage_chart

Metadata = dict[str, Any]
"""Dagster metadata: values by the key that Dagster shows."""
Node = Mapping[str, Any]
"""What the record says of one node: names and resources."""
NodeUsage = Mapping[str, Mapping[str, Any]]
"""The usage of each node, by the title of the node: its hostname, with the component if components share the host."""


def usage_metadata(usage: Mapping[str, Any], context: Mapping[str, Any]) -> Metadata:
    """Returns the metadata of a run's usage; empty if nothing was measured."""
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
        memory = granted_memory(_largest(usage, context)) if context.get("granted") else 0.0
        metadata["Usage"] = dg.MetadataValue.md(usage_chart(usage, cpus, memory))
    return metadata


def _granted_metadata(usage: Mapping[str, Any], context: Mapping[str, Any]) -> Metadata:
    """Returns metadata that compares granted with used resources, and the hours for which the run held them."""
    granted: Sequence[Node] = context["granted"]
    largest, peak = _largest(usage, context), usage["peak_memory"]
    cpus, gpus = sum(node["num_cpus"] for node in granted), sum(node["num_gpus"] for node in granted)
    hours = (usage["elapsed"] + (0.0 if context.get("warm") else context.get("bring_up") or 0.0)) / 3600
    several = len(granted) > 1
    busy = usage["cpu_seconds"] / usage["elapsed"] if usage["elapsed"] > 0 else 0.0
    text = f"granted {_count(cpus, 'CPU')}, {granted_memory(largest) / MIB:.0f} MiB"
    text += f" on {title(dict(largest))}" if several else ""
    text += f", {_count(gpus, 'GPU')}" if gpus else ""
    metadata: Metadata = {
        "Memory efficiency (%)": round(100 * peak / granted_memory(largest), 1),
        "Granted and used": f"{text}; used {busy:.1f} CPUs, {peak / MIB:.0f} MiB",
        "Node hours": round(hours * len(granted), 3),
        "CPU hours": round(hours * cpus, 3),
    }
    if gpus:
        metadata["GPU hours"] = round(hours * gpus, 3)
    if several and not usage.get("nodes"):
        metadata["Usage measured on"] = f"{context['hostname']} alone, as the others were not asked in time"
    return metadata


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def cpus_of(context: Mapping[str, Any]) -> float:
    """Returns how many CPUs a run has on all nodes: those that Slurm granted, else those of Ray, at most the machine's."""
    if context.get("granted"):
        return float(sum(node["num_cpus"] for node in context["granted"]))
    nodes = context.get("nodes") or []
    counted = sum(node["resources"].get("CPU", 0.0) for node in nodes) or float(context.get("num_cpus") or 0)
    return min(counted, context.get("machine_cpus") or counted)


def granted_memory(node: Node) -> float:
    """Returns the bytes of memory granted on a node: Slurm's limit, else all memory of the node."""
    return float(node["memory_limit"] or node["memory"])


def usage_of(usage: NodeUsage, node: Node) -> Mapping[str, Any]:
    """Returns the usage of one node; empty if it was not measured."""
    return usage.get(title(dict(node))) or usage.get(node["hostname"]) or {}


def _largest(usage: Mapping[str, Any], context: Mapping[str, Any]) -> Node:
    """Returns the granted node with the highest peak memory."""
    nodes: NodeUsage = usage.get("nodes") or {}
    granted: Sequence[Node] = context["granted"]
    return max(granted, key=lambda node: float(usage_of(nodes, node).get("peak_memory", 0)))
