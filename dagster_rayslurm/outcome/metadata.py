"""Dagster metadata of results and failures, made from the evidence about a payload. Pure."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import dagster as dg

from ..errors import without_colours
from ..follow import Evidence
from ..runtime.protocol.record import Record
from ..runtime.ray.membership import title
from ..slurm.accounting import JobFacts

Metadata = dict[str, Any]  # Dagster metadata: values by the key that Dagster shows.
Node = Mapping[str, Any]  # What the record says of one node: names and resources.
# The usage of each node, by the title of the node: its hostname, with the component if components share the host.
NodeUsage = Mapping[str, Mapping[str, Any]]

MIB = 2**20
_IN_PLACE = 990  # Most characters of a text that Dagster shows in place; the run directory has the whole text.


def run_metadata(end: Record | None, mode: str, cluster_id: str) -> Metadata:
    """Returns the metadata of a run, for results and failures alike, as far as the `end` record has the facts."""
    metadata: Metadata = {"Execution mode": mode}
    if end is None:
        return metadata
    context: Mapping[str, Any] = end.get("context") or {}
    usage: Mapping[str, Any] = end.get("usage") or {}
    node_usage: NodeUsage = usage.get("nodes") or {}
    if context.get("ray_version"):
        metadata["Ray cluster ID"] = cluster_id
        metadata["Ray version"] = context["ray_version"]
        metadata["Ray cluster was warm"] = bool(context["warm"])
        metadata["Ray bring-up (s)"] = round(context["bring_up"], 2)
        if context.get("dashboard_url"):
            warm = context.get("kept_warm")  # Another cluster ends with the run.
            said = f"`rayslurm dashboard {cluster_id}` while the session lasts" if warm else "was there until the run ended"
            metadata["Ray dashboard"] = dg.MetadataValue.md(said) if warm else said
        metadata["Nodes"] = _nodes_table(context, node_usage)
    elif context.get("hostname"):
        metadata["Node"] = context["hostname"]
    components = _components_table(context, node_usage)
    if components is not None:
        metadata["Components"] = components
    metadata.update(_usage_metadata(usage, context))
    if context.get("workers_killed"):
        metadata["Ray workers killed for memory"] = context["workers_killed"]
    if end.get("stdio_dropped"):
        metadata["Output not recorded (characters)"] = end["stdio_dropped"]
    if left_out := [*(end.get("outputs_failed") or ()), *end.get("outputs_left_out", ())]:
        metadata["Outputs left out"] = _in_place("\n".join(left_out))
    return metadata


def failure_metadata(evidence: Evidence, run_dir: str | None) -> Metadata:
    """Returns the metadata of a failure; `run_dir` is host and path of the run directory, None if it will be removed."""
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


def _usage_metadata(usage: Mapping[str, Any], context: Mapping[str, Any]) -> Metadata:
    if not usage:
        return {}
    elapsed, cpus = usage["elapsed"], cpus_of(context)
    granted: Sequence[Node] = context.get("granted") or []
    node_usage: NodeUsage = usage.get("nodes") or {}
    largest = max(granted, key=lambda node: float(_usage_of(node_usage, node).get("peak_memory", 0)), default=None)
    memory = granted_memory(largest) if largest is not None else 0.0
    metadata: Metadata = {}

    def add(key: str, value: float | None, digits: int, unit: float = 1) -> None:
        if value is not None:
            metadata[key] = round(value / unit, digits)

    add("Elapsed (s)", elapsed, 2)
    add("CPU time (s)", usage["cpu_seconds"], 2)
    add("Peak memory (MiB)", usage["peak_memory"], 1, MIB)
    add("Shared CPU time (s)", usage.get("shared_cpu_seconds"), 2)
    add("Shared memory (MiB)", usage.get("shared_peak_memory"), 1, MIB)
    if elapsed > 0 and cpus > 0:
        add("CPU efficiency (%)", 100 * usage["cpu_seconds"] / (elapsed * cpus), 1)
    if largest is not None:
        metadata.update(_granted_metadata(usage, context, largest))
    add("GPU utilization mean (%)", usage["gpu_utilization_mean"], 1)
    add("GPU utilization max (%)", usage["gpu_utilization_max"], 1)
    add("GPU memory max (MiB)", usage["gpu_memory_max"], 1, MIB)
    add("Object store spilled (MiB)", usage["spilled_bytes"] or None, 1, MIB)
    if len(usage["points"]) >= 2:
        metadata["Usage"] = dg.MetadataValue.md(usage_chart(usage, cpus, memory))
    return metadata


def _granted_metadata(usage: Mapping[str, Any], context: Mapping[str, Any], largest: Node) -> Metadata:
    granted: Sequence[Node] = context["granted"]
    peak, memory, several = usage["peak_memory"], granted_memory(largest), len(granted) > 1
    cpus, gpus = sum(node["num_cpus"] for node in granted), sum(node["num_gpus"] for node in granted)
    hours = (usage["elapsed"] + (0.0 if context.get("warm") else context.get("bring_up") or 0.0)) / 3600
    busy = usage["cpu_seconds"] / usage["elapsed"] if usage["elapsed"] > 0 else 0.0
    text = f"granted {_count(cpus, 'CPU')}, {memory / MIB:.0f} MiB"
    text += f" on {title(dict(largest))}" if several else ""
    text += f", {_count(gpus, 'GPU')}" if gpus else ""
    metadata: Metadata = {
        "Memory efficiency (%)": round(100 * peak / memory, 1),
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
    """Returns the CPUs of a run on all nodes: those that Slurm granted, else those that Ray counts, limited to real ones."""
    if context.get("granted"):
        return float(sum(node["num_cpus"] for node in context["granted"]))
    nodes = context.get("nodes") or []
    counted = sum(node["resources"].get("CPU", 0.0) for node in nodes) or float(context.get("num_cpus") or 0)
    return min(counted, context.get("machine_cpus") or counted)


def granted_memory(node: Node) -> float:
    """Returns the bytes of memory granted on a node: Slurm's limit, else all memory of the node."""
    return float(node["memory_limit"] or node["memory"])


def _usage_of(usage: NodeUsage, node: Node) -> Mapping[str, Any]:
    return usage.get(title(dict(node))) or usage.get(node["hostname"]) or {}


def _nodes_table(context: Mapping[str, Any], usage: NodeUsage) -> dg.TableMetadataValue:
    nodes: list[Mapping[str, Any]] = context["nodes"]
    in_components = any(node.get("component") for node in nodes)
    return _table(
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
        for node in nodes
    )


def _components_table(context: Mapping[str, Any], usage: NodeUsage) -> dg.TableMetadataValue | None:
    """Returns a table of the components of a run: job id, nodes and resources; None for a run without components."""
    nodes = context.get("nodes") or []
    granted = (context.get("allocation") or {}).get("components") or []
    by_name = {each["component"]: each for each in granted}
    names = list(by_name) or list(dict.fromkeys(node["component"] for node in nodes if node.get("component")))
    rows = []
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
        rows.append(row)
    return _table(rows) if rows else None


def _states_table(job: JobFacts) -> dg.TableMetadataValue:
    return _table(
        {
            "component": each.component_id or "",
            "Slurm job ID": f"{job.job_id}+{number}",
            "state": each.final_state or each.state,
            "reason": each.reason,
            "nodes": ", ".join(each.nodes),
        }
        for number, each in enumerate(job.components)
    )


def _table(rows: Iterable[dict[str, Any]]) -> dg.TableMetadataValue:
    return dg.MetadataValue.table([dg.TableRecord(row) for row in rows])


def _used(usage: NodeUsage, nodes: Sequence[Node]) -> dict[str, float]:
    """Returns two columns of a table about some nodes: the sum of their CPU time, and their highest peak of memory."""
    if not usage:
        return {}
    found = [_usage_of(usage, node) for node in nodes]
    return {
        "CPU time (s)": round(sum(each.get("cpu_seconds", 0.0) for each in found), 2),
        "peak memory (MiB)": round(max((each.get("peak_memory", 0) for each in found), default=0) / MIB, 1),
    }


def _memory(context: Mapping[str, Any], node: Node) -> float:
    """Returns the bytes of memory that Slurm granted on a node; without Slurm, the bytes that Ray schedules."""
    granted = {title(each): each for each in context.get("granted") or []}.get(title(dict(node)))
    return granted_memory(granted) if granted is not None else node["resources"].get("memory", 0.0)


def _in_place(text: str) -> dg.TextMetadataValue:
    """Returns the end of a text as plain text, cut so that Dagster shows it inside the table of metadata."""
    text = without_colours(text).rstrip()
    if len(text) > _IN_PLACE:
        text = "…\n" + text[-_IN_PLACE:].partition("\n")[2]
    return dg.MetadataValue.text(text)


# ---- The chart of CPU and memory usage over time

_LIMIT = 1000  # Characters of Markdown from which on Dagster shows a link instead of the text (Dagster 1.13).
_WIDTH, _HEIGHT, _TOP = 400, 100, 34  # Pixels of the plot: its width, its height, and room for two lines of text above it.
# Numbers of points to try; the first whose drawing is shorter than `_LIMIT` is used.
_COLUMNS = range(80, 3, -4)
_CPU, _MEMORY = "#26e", "#d70"  # Colours of the line of CPUs and the line of memory.

Point = Sequence[float]  # Seconds since the start, CPUs busy since the point before, and bytes of memory.


def usage_chart(usage: Mapping[str, Any], cpus: float = 0.0, memory: float = 0.0) -> str:
    """Returns a chart as Markdown: the busy CPUs of all nodes, and the memory of the node that uses most memory.

    `cpus` and `memory` (bytes) are the granted amounts; 0 if unknown. Each curve is drawn relative to its granted amount, so one
    dashed line marks both amounts.
    """
    points: list[Point] = usage["points"]
    drawings = (_draw(usage, _resample(points, columns), cpus, memory) for columns in _COLUMNS)
    return next(drawing for drawing in drawings if len(drawing) < _LIMIT)


def _resample(points: Sequence[Point], columns: int) -> list[Point]:
    """Returns at most one point for each of `columns` columns of a chart: the mean of busy CPUs and the peak of the memory."""
    width = points[-1][0] / columns or 1.0
    resampled: list[Point] = []
    column, since, cpu_seconds, peak = -1, 0.0, 0.0, 0.0
    for place, (at, busy, memory) in enumerate(points):
        before, here = points[place - 1][0] if place else 0.0, min(int(at / width), columns - 1)
        if here != column:
            column, since, cpu_seconds, peak = here, before, 0.0, 0.0
        else:
            resampled.pop()
        cpu_seconds, peak = cpu_seconds + busy * (at - before), max(peak, memory)
        resampled.append((at, cpu_seconds / (at - since) if at > since else busy, peak))
    return resampled


def _draw(usage: Mapping[str, Any], points: Sequence[Point], cpus: float, memory: float) -> str:
    """Returns the points as an SVG image in Markdown; the other arguments are those of `usage_chart`."""
    last = points[-1][0] or 1.0
    peak = max(usage["peak_memory"], *(point[2] for point in points))
    busiest = max(point[1] for point in points)
    cpu_unit, memory_unit = cpus or busiest or 1.0, memory or peak or 1.0
    scale = _HEIGHT / max(1.0, busiest / cpu_unit, peak / memory_unit)
    bottom = _TOP + _HEIGHT

    def line(index: int, unit: float, colour: str) -> str:
        dots = [(round(_WIDTH * point[0] / last), round(bottom - scale * point[index] / unit)) for point in points]
        steps = [f"{x - before_x} {y - before_y}" for (before_x, before_y), (x, y) in pairwise(dots)]
        path = f"M{dots[0][0]} {dots[0][1]}l{' '.join(steps)}".replace(" -", "-")
        return f'<path stroke="{colour}" d="{path}"/>'

    grant = f'<path stroke="#999" stroke-dasharray="4" d="M0 {bottom - scale:.0f}h{_WIDTH}"/>' if cpus and memory else ""
    several = len(usage.get("nodes") or ()) > 1
    mean = usage["cpu_seconds"] / (usage["elapsed"] or last)
    busy = f"CPUs busy{' on all nodes' if several else ''}: {mean:.1f}{f' of {cpus:g}' if cpus else ''} on average"
    limit = f" of {memory / MIB:.0f}" if memory else ""
    used = f"memory{' on the largest node' if several else ''}: up to {peak / MIB:.0f}{limit} MiB"
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + 4}" height="{bottom + 18}" font-family="Arial" font-size="12">'
        f'<text y="11" fill="{_CPU}">{busy}</text><text y="26" fill="{_MEMORY}">{used}</text>'
        f'<text y="{bottom + 14}" fill="#888">{last:.{1 if last < 100 else 0}f} s{", dashes: granted" if grant else ""}</text>'
        f'<g fill="none"><path stroke="#999" d="M0 {_TOP}V{bottom}H{_WIDTH}"/>'
        f"{grant}{line(1, cpu_unit, _CPU)}{line(2, memory_unit, _MEMORY)}</g></svg>"
    )
    return f"![usage](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})"
