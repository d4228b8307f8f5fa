"""Which cluster serves which payload: the one that is kept warm, a fresh one of its own, or none."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Callable, Dict, List, Mapping, Optional

from ..node.resources import NodeResources, node_footprint, runtime_footprint
from ..node.worker_node import WorkerNode, WorkerNodes
from ..payload.payload import Payload
from ..process.loop import Loop
from ..process.scratch import Scratch
from ..protocol.end import ClusterError, End, EndReason
from ..protocol.spec import PayloadSpec, RuntimeSpec, node_spec
from ..ray.cluster import RayCluster
from ..ray.cluster_dir import ClusterDir, ClusterDirs, clear_away, token_of, worker_env_of

LOST_GRACE = 1.0
"""Seconds a payload gets after its cluster is lost: `ray.init` would hang for 40 s and more (Ray 2.60)."""

_KEEPS_READY = "ray"
"""Module that, imported ahead of payloads, has Ray's workers kept ready for them, too."""


class Clusters:
    """The clusters whose head is on this node.

    Args:
        loop: where everything happens.
        spec: the runtime; it keeps a cluster warm if there is one in it.
        machine: what this node grants.
        private: scratch directory of the runtime.
        team: the other nodes; None if there are none.
        address: the address by which this node is known to them; None for the one that Ray finds.
        on_ready: called when the warm cluster is complete.
        on_failed: called when the warm cluster does not start or is lost.
        on_phase: told what becomes of the warm cluster.
        on_node_lost: called with the name of a node that the warm cluster has lost; that of a payload's own ends with it, and
            the next one may have the node again.
        environ: variables for Ray's daemons on this node; None for one that they must not have.
    """

    def __init__(
        self,
        loop: Loop,
        spec: RuntimeSpec,
        machine: NodeResources,
        private: Scratch,
        team: Optional[WorkerNodes],
        address: Optional[str],
        on_ready: Callable[[], None],
        on_failed: Callable[[ClusterError], None],
        on_phase: Callable[[str, str], None],
        on_node_lost: Callable[[str], None],
        environ: Mapping[str, Optional[str]] = MappingProxyType({}),
    ) -> None:
        self._loop = loop
        self._spec = spec
        self._machine = machine
        self._corners = ClusterDirs(private)
        self._fresh: Dict[str, _Fresh] = {}
        self._team = team
        self._address = address
        self._environ = environ
        self.warm: Optional[RayCluster] = None
        if spec.ray is not None:
            self.warm = RayCluster(
                loop,
                spec.ray,
                lambda component: runtime_footprint(spec, component),
                machine,
                private,
                token_of(spec, ""),
                on_ready,
                on_failed,
                on_phase,
                on_node_lost,
                worker_env={**worker_env_of(spec, ""), **environ},
                prestart=_KEEPS_READY in spec.preload,
            )

    def start(self) -> None:
        """Begin to start the warm cluster."""
        if self.warm is not None:
            self.warm.start(self._team, self._address)

    def waits(self, spec: PayloadSpec) -> bool:
        """Whether a payload cannot start before the warm cluster is up."""
        return self.warm is not None and spec.uses_ray and not self.warm.ready

    def is_fresh(self, spec: PayloadSpec) -> bool:
        """Whether a payload gets a cluster of its own."""
        return self.warm is None and spec.ray is not None

    def serve(self, payload: Payload, start: Callable[[Optional[RayCluster]], None]) -> None:
        """Call `start` with the payload's cluster, once it is up; a cluster that fails ends the payload instead."""
        if not self.is_fresh(payload.spec):
            return start(self.warm if payload.spec.uses_ray else None)
        ray = payload.spec.ray
        assert ray is not None
        key = payload.spec.nonce
        try:
            corner = self._corners.take()
        except OSError as error:
            return payload.end_early(End(EndReason.CLUSTER_START, "no directory for its cluster: %s" % error))

        def failed(error: ClusterError) -> None:
            for name, text in cluster.log_tails().items():
                payload.tail(name, text)
            payload.end_early(End(error.reason, str(error)), LOST_GRACE)

        cluster = RayCluster(
            self._loop,
            ray,
            lambda component: node_footprint(node_spec(ray, component)),
            self._machine,
            corner,
            token_of(self._spec, key),
            lambda: None if payload.ended else start(cluster),
            failed,
            payload.phase,
            key=key,
            worker_env={**worker_env_of(self._spec, key), **self._environ},
        )
        self._fresh[key] = _Fresh(cluster, corner)
        cluster.start(self._team, self._address)

    def release(self, payload: Payload) -> None:
        """End the cluster of a payload that has ended, on all nodes, if it was its own."""
        fresh = self._fresh.pop(payload.spec.nonce, None)
        if fresh is not None:
            fresh.cluster.stop()
            clear_away(self._loop, fresh.corner, payload.spec.nonce)

    def prestart(self) -> None:
        """Have the warm cluster keep workers ready for the next payload, if payloads begin with Ray imported."""
        if self.warm is not None and _KEEPS_READY in self._spec.preload:
            self.warm.prestart()

    def others(self, payload: Payload) -> List[int]:
        """The processes of other nodes, and of clusters that are other payloads' own, or that it does not use."""
        pids = [fresh.cluster.pid for nonce, fresh in self._fresh.items() if nonce != payload.spec.nonce]
        if self.warm is not None and not payload.spec.uses_ray:
            pids.append(self.warm.pid)
        if self._team is not None:
            pids.extend(self._team.pids)
        return [pid for pid in pids if pid is not None]

    def guarded(self) -> List[int]:
        """The processes on this node below which Ray's workers may be killed for their memory."""
        there = [] if self.warm is None else [self.warm]
        there += [fresh.cluster for fresh in self._fresh.values()]
        return [cluster.pid for cluster in there if cluster.spec.memory_guard and cluster.pid is not None]

    def take(self, member: WorkerNode, message: Dict[str, Any]) -> None:
        """Pass on what another node says to the clusters that it concerns."""
        warm = [] if self.warm is None else [self.warm]
        for cluster in [*warm, *(fresh.cluster for fresh in self._fresh.values())]:
            cluster.take(member, message)

    def stop(self) -> None:
        """End every process of Ray on this node at once."""
        if self.warm is not None:
            self.warm.end()
        for fresh in self._fresh.values():
            fresh.cluster.end()


class _Fresh:
    def __init__(self, cluster: RayCluster, corner: ClusterDir) -> None:
        self.cluster = cluster
        self.corner = corner
