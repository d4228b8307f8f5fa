"""Where a payload runs: what its place has to offer, and who else is there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Iterable, List, Mapping, Optional

from ..node.usage import Gauges
from ..node.worker_node import WorkerNodes
from .environment import Environment


@dataclass(frozen=True)
class Setting:
    """Where a payload runs.

    Attributes:
        messages_path: where its Pipes messages go.
        gauges: what is read once on this node.
        ray_env: how it reaches its cluster.
        worker_env: variables that the cluster's workers have anyway.
        spill_dir: Ray's temporary directory, or None.
        shared_ray: tells the process of a Ray cluster that payloads share; None for a cluster of the payload's own.
        team: the other nodes, which measure as well, or None.
        others: processes that, with all below them, are other payloads' own.
        audit: asks what the payload leaves behind in its cluster, and calls with that, soon; None if the cluster ends with it.
    """

    messages_path: str
    gauges: Gauges
    ray_env: Environment = field(default_factory=dict)
    worker_env: Mapping[str, str] = field(default_factory=dict)
    spill_dir: Optional[str] = None
    shared_ray: Optional[Callable[[], Optional[int]]] = None
    team: Optional[WorkerNodes] = None
    others: Callable[[], Iterable[int]] = tuple
    audit: Optional[Callable[[Callable[[List[str]], None]], None]] = None
