"""Which Ray cluster serves which payload: the warm one, a fresh one of the payload's own, or none."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional

from ..node.worker_node import WorkerNode
from ..payload.payload import Payload
from ..process.loop import Loop
from ..process.scratch import Scratch
from ..protocol.end import ClusterError, End, EndReason
from ..protocol.spec import PayloadSpec, RuntimeSpec
from ..ray.cluster import HeadNode, RayCluster
from ..ray.cluster_dir import ClusterDirs, clean_up_cluster
from ..ray.start import RayListener

LOST_GRACE = 1.0
"""Seconds that a payload gets after its cluster was lost: `ray.init` would hang for 40 s and more (Ray 2.60)."""


class Clusters:
    """The clusters whose head is on this node.

    Args:
        loop: where everything happens.
        spec: the start record; with `ray` in it, one cluster is kept warm.
        head: this node and those that join.
        private: scratch directory of the runtime.
        listener: told what becomes of the warm cluster. A payload's own cluster is told to the payload alone: it may lose a
            node that the next cluster has again.
    """

    def __init__(self, loop: Loop, spec: RuntimeSpec, head: HeadNode, private: Scratch, listener: RayListener) -> None:
        self._loop = loop
        self._spec = spec
        self._head = head
        self._dirs = ClusterDirs(private)
        self._fresh: Dict[str, RayCluster] = {}
        self.warm: Optional[RayCluster] = None
        if spec.ray is not None:
            self.warm = RayCluster(loop, spec, head, private, listener)

    @property
    def all(self) -> List[RayCluster]:
        return [*([] if self.warm is None else [self.warm]), *self._fresh.values()]

    def waits(self, spec: PayloadSpec) -> bool:
        """Whether a payload must wait for the warm cluster."""
        return self.warm is not None and spec.uses_ray and not self.warm.ready

    def is_fresh(self, spec: PayloadSpec) -> bool:
        """Whether a payload gets a cluster of its own."""
        return self.warm is None and spec.ray is not None

    def serve(self, payload: Payload, start: Callable[[Optional[RayCluster]], None]) -> None:
        """Call `start` with the payload's cluster once it is up; a cluster that fails ends the payload instead."""
        if not self.is_fresh(payload.spec):
            return start(self.warm if payload.spec.uses_ray else None)
        key = payload.spec.nonce
        try:
            scratch = self._dirs.take()
        except OSError as error:
            return payload.end_early(End(EndReason.CLUSTER_START, "no directory for its cluster: %s" % error))
        listener = _FreshListener(payload, start)
        cluster = RayCluster(self._loop, self._spec, self._head, scratch, listener, payload.spec.ray, key)
        listener.cluster = self._fresh[key] = cluster
        cluster.start()

    def release(self, payload: Payload) -> None:
        """End the own cluster of a payload that has ended, on all nodes."""
        cluster = self._fresh.pop(payload.spec.nonce, None)
        if cluster is not None:
            cluster.stop()
            clean_up_cluster(self._loop, cluster.scratch, cluster.key)

    def foreign_pids(self, payload: Payload) -> List[int]:
        """The processes of other nodes, of other payloads' clusters, and of the warm one if the payload does not use it."""
        own = self._fresh.get(payload.spec.nonce) or (self.warm if payload.spec.uses_ray else None)
        pids = [cluster.pid for cluster in self.all if cluster is not own]
        if self._head.workers is not None:
            pids.extend(self._head.workers.pids)
        return [pid for pid in pids if pid is not None]

    def guarded_pids(self) -> List[int]:
        """The processes on this node below which Ray's workers may be killed for their memory."""
        return [cluster.pid for cluster in self.all if cluster.spec.memory_guard and cluster.pid is not None]

    def handle(self, member: WorkerNode, message: Dict[str, Any]) -> None:
        """Pass a message of another node on to the clusters."""
        for cluster in self.all:
            cluster.handle(member, message)

    def end(self) -> None:
        """End every process of Ray on this node at once."""
        for cluster in self.all:
            cluster.end()


class _FreshListener(RayListener):
    """Starts a payload once its own cluster is up, or ends it."""

    cluster: RayCluster

    def __init__(self, payload: Payload, start: Callable[[Optional[RayCluster]], None]) -> None:
        self._payload = payload
        self._start = start

    def on_ready(self) -> None:
        """Start the payload."""
        if not self._payload.ended:
            self._start(self.cluster)

    def on_failed(self, error: ClusterError) -> None:
        """End the payload."""
        for name, text in self.cluster.log_tails().items():
            self._payload.tail(name, text)
        self._payload.end_early(End(error.reason, str(error)), LOST_GRACE)

    def on_phase(self, phase: str, message: str) -> None:
        """Tell the user."""
        self._payload.phase(phase, message)
