"""What the figures of sessions share: a warm session of the stack, and steps in it one after the other or at once."""

import contextlib
import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Optional

import dagster as dg

from dagster_rayslurm import (
    BashLauncher,
    CompletedRun,
    ComputeResource,
    RayLauncher,
    SessionConfig,
    SlurmQueueConfig,
    SlurmResource,
)

from ..steps import PAYLOADS, process_seconds
from .edge import Edge
from .runs import CPUS, MARKS, STORE_GB, Run, Shape, clocked

# No annotations from the future here: Dagster wants the type of `context` itself, not its name.

DRIVER, HELLO = PAYLOADS / "ray_driver.py", PAYLOADS / "hello.py"
_IDLE = 60
"""Seconds after which a session ends that a failed measurement has left."""
_names = itertools.count()


class Session:
    """A session of its own name, used by the steps of this process.

    Args:
        edge: the stack.
        directory: on the edge, for its files.
        partition: where it runs.
        shape: what it asks for.
        at_once: payloads at the same time.
        key: the private key to log in with, if not the stack's.
        preload: modules of its template process.
    """

    def __init__(
        self,
        edge: Edge,
        directory: str,
        partition: str,
        shape: Shape,
        at_once: int = 1,
        key: Optional[str] = None,
        preload: tuple[str, ...] = (),
    ) -> None:
        self._edge = edge
        self._base = f"{directory}/sessions"
        queue = SlurmQueueConfig(
            partition=partition, num_nodes=shape.nodes, mem=shape.memory, cpus_per_node=CPUS, time_limit="00:20:00"
        )
        ray = RayLauncher(dashboard=False, object_store_memory_gb=STORE_GB, preload=list(preload))
        self.compute = ComputeResource(
            mode="slurm-session",
            slurm=SlurmResource(ssh=edge.resource(key=key), queue=queue, remote_base=self._base),
            pre_deployed_env_path=edge.env["RAYSLURM_ENV_PATH"],
            default_launcher=ray if shape.ray else BashLauncher(),
            session=SessionConfig(name=f"bench-{next(_names)}", idle_timeout=_IDLE, max_concurrent_payloads=at_once),
            enable_cluster_reuse=shape.ray,
        )
        self._clusters: set[str] = set()
        self.jobs: set[str] = set()
        """Slurm jobs that its payloads ran in; more than one if the session was lost in between."""

    def run(self, context: dg.AssetExecutionContext, payload: Path = MARKS, **arguments: Any) -> CompletedRun:
        """One payload."""
        run = self.compute.run(context=context, payload_path=payload, **arguments)
        self._clusters.add(run.cluster_id)
        self.jobs.add(str(run.job_id))
        return run

    def marked(self, context: dg.AssetExecutionContext) -> tuple[Run, float]:
        """One payload with marks, and the seconds that its process took."""
        runs: list[CompletedRun] = []
        before = self._edge.controller_calls()
        start, returned = clocked(lambda: runs.append(self.run(context)))
        marks = self._edge.read_json(f"{self._base}/data/marks.json")
        calls = max(0, self._edge.controller_calls() - before)
        return Run(start, returned, marks, returned, calls), process_seconds(runs[0])

    def several(self, context: dg.AssetExecutionContext, payload: Path, count: int, at_once: int) -> float:
        """Payloads per second of many, some at once."""
        with ThreadPoolExecutor(at_once) as pool:
            began = time.perf_counter()
            list(pool.map(lambda _: self.run(context, payload), range(count)))
            return count / (time.perf_counter() - began)

    def end(self) -> None:
        """End it, with its job."""
        for cluster in self._clusters:
            self.compute.cleanup_cluster(cluster)


@contextlib.contextmanager
def session(edge: Edge, directory: str, partition: str, shape: Shape, **options: Any) -> Iterator[Session]:
    """A session for a while; it starts with its first payload."""
    made = Session(edge, directory, partition, shape, **options)
    try:
        yield made
    finally:
        made.end()
        edge.end_jobs_below(directory)
