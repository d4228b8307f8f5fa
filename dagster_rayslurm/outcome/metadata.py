"""Makes the Dagster metadata of results and failures from the evidence about a payload. Nothing here has side effects."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import dagster as dg

from ..config import ExecutionMode
from ..errors import without_colours
from ..follow import Evidence
from ..runtime.protocol.record import Record
from ..runtime.ray.membership import title
from ..slurm.accounting import JobFacts
from .pictures import MIB, NodeShare, nodes_chart, timeline, usage_chart

Metadata = dict[str, Any]  # Dagster metadata: values by the key that Dagster shows.
Node = Mapping[str, Any]  # What the record says of one node: names and resources.
# The usage of each node, by the title of the node: its hostname, with the component if components share the host.
NodeUsage = Mapping[str, Mapping[str, Any]]

# The phases that the timeline shows, by their names in the record. A phase lasts until the next of these phases is recorded.
_PHASES = {"queued": "waits for its turn", "cluster-start": "Ray starts", "running": "payload runs"}
_HEADROOM, _WORTH_IT = (
    1.25,
    0.5,
)  # Advice on memory: the safety factor, and the share of granted memory above which there is no advice.
_IN_PLACE = 990  # Most characters of a text that Dagster shows in place; the run directory has the whole text.


def run_metadata(end: Record | None, mode: str, cluster_id: str) -> Metadata:
    """Returns the metadata that both results and failures of a run have; facts that the `end` record lacks are left out.

    `mode` is the execution mode, and `cluster_id` is the id of the Ray cluster. If `end` is None, nothing is known about the run,
    and the metadata has the execution mode only.
    """
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
    metadata.update(_usage_metadata(usage, context, mode))
    if context.get("energy_joules"):
        metadata["Energy (kWh)"] = round(context["energy_joules"] / 3.6e6, 6)
    if context.get("workers_killed"):
        metadata["Ray workers killed for memory"] = context["workers_killed"]
    if end.get("stdio_dropped"):
        metadata["Output not recorded (characters)"] = end["stdio_dropped"]
    if left_out := [*(end.get("outputs_failed") or ()), *end.get("outputs_left_out", ())]:
        metadata["Outputs left out"] = _in_place("\n".join(left_out))
    return metadata


def timeline_metadata(evidence: Evidence, mode: str, queue_wait: float | None) -> Metadata:
    """Returns metadata with a picture of a payload's phases; {} if there is no `end`, or if fewer than two phases took time.

    `mode` is the execution mode. `queue_wait` is the time in seconds for which the payload waited for a job or session; None if
    the time is unknown.
    """
    if evidence.end is None or evidence.started_at is None:
        return {}
    marks = [("runtime starts", evidence.started_at)]
    marks += [(_PHASES[name], at) for name, at in evidence.phases if name in _PHASES and _PHASES[name] != marks[-1][0]]
    awaited = "a session" if mode == ExecutionMode.SLURM_SESSION else "Slurm"
    phases: dict[str, float] = {} if queue_wait is None else {f"waits for {awaited}": queue_wait}
    for (name, since), (_, until) in pairwise([*marks, ("", float(evidence.end["ended_at"]))]):
        phases[name] = phases.get(name, 0.0) + max(0.0, until - since)
    shown = [(name, seconds) for name, seconds in phases.items() if round(seconds, 1) > 0]
    return {"Timeline": dg.MetadataValue.md(timeline(shown))} if len(shown) > 1 else {}


def failure_metadata(evidence: Evidence, run_dir: str | None) -> Metadata:
    """Returns the metadata of a failure: the ends of output and logs, the exit code, and the state of the Slurm job.

    `run_dir` is host and path of the run directory. If `run_dir` is None, the metadata has no paths.
    """
    texts = {"Last output": evidence.output_tail()}
    texts.update((f"Log: {name}", text) for name, text in evidence.tails.items())
    texts["Runtime log"] = evidence.runtime_log
    metadata: Metadata = {label: _in_place(text) for label, text in texts.items() if text.strip()}
    if run_dir is not None:
        metadata["Run directory"] = dg.MetadataValue.path(run_dir)
        metadata.update(ray_logs(evidence, run_dir))
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


def ray_logs(evidence: Evidence, directory: str) -> Metadata:
    """Returns metadata with the path of Ray's log archives; {} without archives. `directory` is the payload's run directory."""
    names = ((evidence.end or {}).get("context") or {}).get("ray_logs")
    name = names[0] if names and len(names) == 1 else "ray-logs-*.tar.gz"
    return {"Ray logs": dg.MetadataValue.path(f"{directory}/{name}")} if names else {}


def _usage_metadata(usage: Mapping[str, Any], context: Mapping[str, Any], mode: str) -> Metadata:
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
        if mode != ExecutionMode.SLURM_SESSION and (advice := _advice(usage, context, largest)):
            metadata["Granted and used"] += f": {advice}"
    add("GPU utilization mean (%)", usage["gpu_utilization_mean"], 1)
    add("GPU utilization max (%)", usage["gpu_utilization_max"], 1)
    add("GPU memory max (MiB)", usage["gpu_memory_max"], 1, MIB)
    add("Object store spilled (MiB)", usage["spilled_bytes"] or None, 1, MIB)
    if len(usage["points"]) >= 2:
        metadata["Usage"] = dg.MetadataValue.md(usage_chart(usage, cpus, memory))
    if elapsed > 0 and len(shares := _node_shares(elapsed, node_usage, granted)) > 1:
        metadata["Usage by node"] = dg.MetadataValue.md(nodes_chart(shares))
    return metadata


def _node_shares(elapsed: float, usage: NodeUsage, granted: Sequence[Node]) -> list[NodeShare]:
    """Returns the CPU time and the peak memory of each node, as shares of what was granted on the node.

    `elapsed` is the duration of the payload in seconds. Nodes without usage in `usage` are left out.
    """
    pairs = [(node, _usage_of(usage, node)) for node in granted]
    return [
        (
            title(dict(node)),
            used["cpu_seconds"] / (elapsed * max(1, node["num_cpus"])),
            used["peak_memory"] / granted_memory(node),
        )
        for node, used in pairs
        if used
    ]


def _advice(usage: Mapping[str, Any], context: Mapping[str, Any], largest: Node) -> str:
    """Returns advice to request less memory next time if the run used much less than Slurm granted on the node `largest`.

    `largest` is the node with the highest memory peak. The result is "" without advice. A run that spilled objects to disk, or in
    which a Ray worker was killed, gets no advice.
    """
    enough = math.ceil(_HEADROOM * usage["peak_memory"] / 2**30)
    lacked = usage["spilled_bytes"] or context.get("workers_killed")
    much_less = 0 < enough * 2**30 <= _WORTH_IT * (largest["memory_limit"] or 0)
    return f'mem="{enough}G" would do' if much_less and not lacked else ""


def _granted_metadata(usage: Mapping[str, Any], context: Mapping[str, Any], largest: Node) -> Metadata:
    granted: Sequence[Node] = context["granted"]
    peak, memory, several = usage["peak_memory"], granted_memory(largest), len(granted) > 1
    cpus, gpus = sum(node["num_cpus"] for node in granted), sum(node["num_gpus"] for node in granted)
    hours = (usage["elapsed"] + (0.0 if context.get("warm") else context.get("bring_up") or 0.0)) / 3600
    busy = usage["cpu_seconds"] / usage["elapsed"] if usage["elapsed"] > 0 else 0.0
    text = f"granted {_count(cpus, 'CPU')}, {_size(memory)}"
    text += f" on {title(dict(largest))}" if several else ""
    text += f", {_count(gpus, 'GPU')}" if gpus else ""
    metadata: Metadata = {
        "Memory efficiency (%)": round(100 * peak / memory, 1),
        "Granted and used": f"{text}; used {busy:.1f} CPUs, {_size(peak)}",
        "Node hours": round(hours * len(granted), 3),
        "CPU hours": round(hours * cpus, 3),
    }
    if gpus:
        metadata["GPU hours"] = round(hours * gpus, 3)
    if several and not usage.get("nodes"):
        metadata["Usage measured on"] = f"{context['hostname']} alone, as the others were not asked in time"
    return metadata


def _size(memory: float) -> str:
    return f"{memory / MIB:.0f} MiB" if memory < 10 * 2**30 else f"{memory / 2**30:.0f} GiB"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def cpus_of(context: Mapping[str, Any]) -> float:
    """Returns the number of CPUs of a run, added up over all nodes: granted by Slurm, or else counted by Ray.

    The number that Ray counted is limited to the number of CPUs of the machine.
    """
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
    """Returns two fields of a table row: the total CPU time and the highest memory peak of `nodes`; {} if `usage` is empty."""
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
    """Returns a text as metadata without colour codes; a text longer than `_IN_PLACE` characters is cut to the last lines."""
    text = without_colours(text).rstrip()
    if len(text) > _IN_PLACE:
        text = "…\n" + text[-_IN_PLACE:].partition("\n")[2]
    return dg.MetadataValue.text(text)
