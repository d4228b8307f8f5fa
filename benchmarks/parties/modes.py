"""This project's other modes, as they run a payload with nothing started before: local, slurm-session, slurm-hetjob."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Optional

import dagster as dg

from dagster_rayslurm import ComputeResource, HetComponent, RayLauncher, SlurmQueueConfig

from ..steps import base_dir
from .edge import Edge
from .runs import CPUS, MARKS, STORE_GB, Ours, Run, Shape, clocked, measured
from .sessions import session

# No annotations from the future here: Dagster wants the type of `context` itself, not its name.

Running = Callable[[dg.AssetExecutionContext, Shape], Optional[Run]]


def local(edge: Edge) -> Running:  # noqa: ARG001 - the modes look alike.
    """On this machine, which is one node."""

    def run(context: dg.AssetExecutionContext, shape: Shape) -> Optional[Run]:
        if shape.nodes > 1:
            return None
        with base_dir() as base:
            marks = Path(base) / "marks.json"
            ray = RayLauncher(dashboard=False, object_store_memory_gb=STORE_GB, num_cpus_per_node=CPUS)
            compute = ComputeResource(mode="local", local_base=base, default_launcher=ray)
            environment = shape.environment(str(marks))
            start, returned = clocked(lambda: compute.run(context=context, payload_path=MARKS, extra_env=environment))
            return Run(start, returned, json.loads(marks.read_text()), returned)

    return run


def first_of_session(edge: Edge, directory: str, partition: str) -> Running:
    """The step that starts a session."""

    def run(context: dg.AssetExecutionContext, shape: Shape) -> Run:
        with session(edge, directory, partition, shape) as new:
            return new.marked(context)[0]

    return run


def heterogeneous(edge: Edge, directory: str) -> Running:
    """One cluster over two components with half of the nodes each; the partitions are the stack's."""
    count = 0

    def run(context: dg.AssetExecutionContext, shape: Shape) -> Optional[Run]:
        nonlocal count
        if shape.nodes < 2:
            return None
        count += 1
        marks = f"{directory}/hetjob-{count}.json"
        first = SlurmQueueConfig(partition="compute", num_nodes=shape.nodes // 2, cpus_per_node=CPUS, mem=shape.memory)
        components = [
            HetComponent(component_id="cpu", queue=first),
            HetComponent(component_id="gpu", queue=first.model_copy(update={"partition": "gpu", "gpus_per_node": 1})),
        ]
        resource = Ours(edge, directory, "compute").resource(shape)
        compute = resource.model_copy(update={"mode": "slurm-hetjob", "components": components})

        def call() -> None:
            compute.run(context=context, payload_path=MARKS, extra_env=shape.environment(marks))

        return measured(edge, marks, lambda: clocked(call))

    return run
