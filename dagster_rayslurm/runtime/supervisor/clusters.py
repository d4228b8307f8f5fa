"""The Ray clusters of this runtime: give each payload the warm cluster, a new one of its own, or none, and clean up."""

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
"""Seconds between SIGTERM and SIGKILL for a payload whose Ray cluster was lost; `ray.init` may hang for 40 s (Ray 2.60)."""


class Clusters:
    """The Ray clusters whose head is on this node: at most one that is kept warm for all payloads, or one per payload.

    Args:
        loop: the event loop.
        spec: the start record; if it has `ray`, one cluster is kept warm.
        head: this node and those that join.
        private: scratch directory of the runtime.
        listener: gets the events of the warm cluster. Events of a payload's own cluster go to that payload alone.
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
        """The warm Ray cluster, if there is one, and the payloads' own clusters."""
        return [*([] if self.warm is None else [self.warm]), *self._fresh.values()]

    def waits(self, spec: PayloadSpec) -> bool:
        """Whether a payload must wait until the warm Ray cluster is up."""
        return self.warm is not None and spec.uses_ray and not self.warm.ready

    def is_fresh(self, spec: PayloadSpec) -> bool:
        """Whether a payload gets a new Ray cluster of its own."""
        return self.warm is None and spec.ray is not None

    def serve(self, payload: Payload, start: Callable[[Optional[RayCluster]], None]) -> None:
        """Call `start` with the payload's Ray cluster once the cluster is up; end the payload if its own cluster fails.

        Args:
            start: gets None if the payload does not use Ray.
        """
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
        """End the Ray cluster of a payload that has ended, on all nodes; the warm cluster stays."""
        cluster = self._fresh.pop(payload.spec.nonce, None)
        if cluster is not None:
            cluster.stop()
            clean_up_cluster(self._loop, cluster.scratch, cluster.key)

    def foreign_pids(self, payload: Payload) -> List[int]:
        """Process ids, on this machine, of simulated nodes and of all Ray clusters that the payload does not use."""
        own = self._fresh.get(payload.spec.nonce) or (self.warm if payload.spec.uses_ray else None)
        pids = [cluster.pid for cluster in self.all if cluster is not own]
        if self._head.workers is not None:
            pids.extend(self._head.workers.pids)
        return [pid for pid in pids if pid is not None]

    def guarded_pids(self) -> List[int]:
        """Process ids of Ray on this node, for clusters with a memory guard: it may kill Ray workers below these processes."""
        return [cluster.pid for cluster in self.all if cluster.spec.memory_guard and cluster.pid is not None]

    def handle(self, member: WorkerNode, message: Dict[str, Any]) -> None:
        """Pass a message of another node on to all Ray clusters."""
        for cluster in self.all:
            cluster.handle(member, message)

    def end(self) -> None:
        """End every process of Ray on this node at once."""
        for cluster in self.all:
            cluster.end()


class _FreshListener(RayListener):
    """Starts a payload once its own Ray cluster is up; ends the payload if the cluster fails."""

    cluster: RayCluster

    def __init__(self, payload: Payload, start: Callable[[Optional[RayCluster]], None]) -> None:
        self._payload = payload
        self._start = start

    def on_ready(self) -> None:
        if not self._payload.ended:
            self._start(self.cluster)

    def on_failed(self, error: ClusterError) -> None:
        for name, text in self.cluster.log_tails().items():
            self._payload.tail(name, text)
        self._payload.end_early(End(error.reason, str(error)), LOST_GRACE)

    def on_phase(self, phase: str, message: str) -> None:
        self._payload.phase(phase, message)
