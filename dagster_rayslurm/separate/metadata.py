"""What users see of payloads that ran together: a table of the components, and the rest under each one's name. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg

from ..outcome import Judged
from ..outcome.chart import MIB
from ..outcome.figures import Metadata, cpus_of
from ..outcome.metadata import failure_metadata
from ..runtime.protocol.record import Record
from .verdict import root_failures

_IN_TABLE = (
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
"""Metadata of a payload that are columns of the table."""


def components_metadata(own: Mapping[str, Metadata], judged: Mapping[str, Judged], mode: str, job_id: str | None) -> Metadata:
    """Metadata that is attached to every result of a run.

    Args:
        own: that of each component's payload, in the order of the job.
        judged: what became of each.
        mode: execution mode.
        job_id: Slurm's id of the job that they share; None where there is no Slurm.
    """
    apart = {component: {key: value for key, value in found.items() if key not in _IN_TABLE} for component, found in own.items()}
    metadata = {"Execution mode": mode, **merge_metadata(apart)}
    rows = [
        _row(component, _job_id(job_id, place, len(own)), judged[component].evidence.end_or_partial)
        for place, component in enumerate(own)
    ]
    metadata["Components"] = dg.MetadataValue.table([dg.TableRecord(row) for row in rows])
    elapsed = [row["elapsed (s)"] for row in rows if row["elapsed (s)"]]
    if elapsed:
        metadata["Elapsed (s)"] = max(elapsed)
    return metadata


def failures_metadata(judged: Mapping[str, Judged], run_dir: str | None) -> Metadata:
    """Metadata of a failure: of each component that failed by itself, its last output and what the logs say.

    Args:
        judged: what became of each component's payload.
        run_dir: where the run's directory is, in words; None if it is gone.
    """
    metadata = merge_metadata(
        {component: failure_metadata(each.evidence, None) for component, each in root_failures(judged).items()}, always=True
    )
    if run_dir is not None:
        metadata["Run directory"] = dg.MetadataValue.path(run_dir)
    return metadata


def merge_metadata(own: Mapping[str, Metadata], always: bool = False) -> Metadata:
    """The metadata of all components: once what is the same for all of them, the rest with the component's name.

    Args:
        own: of each component.
        always: whether even what all of them have in common gets the names, unless it is Slurm's.
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


def _job_id(job_id: str | None, place: int, components: int) -> str | None:
    """A component's job, as squeue shows it: of a job with one component Slurm makes no heterogeneous one."""
    return job_id if job_id is None or components == 1 else f"{job_id}+{place}"


def _row(component: str, job_id: str | None, end: Record | None) -> dict[str, Any]:
    """The line of a component in the table; what is not known is left empty."""
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
