"""Who starts next, and where: payloads get their turn, the cluster that serves them, and what they find there."""

from __future__ import annotations

import os
import sys
from typing import Callable, List, Optional

from ..node.gpus import GpuMonitor
from ..node.resources import count_cpus
from ..payload.environment import LaunchContext
from ..payload.own_ray import OwnRayWatch
from ..payload.payload import Payload
from ..payload.preload_server import Templates
from ..process.loop import Loop, Timers
from ..process.scratch import Scratch
from ..process.stray_processes import StrayProcesses
from ..protocol.end import End, EndReason
from ..protocol.spec import RuntimeSpec
from ..ray.cluster import RayCluster
from ..ray.version_watch import RayVersionWatch
from .clusters import Clusters
from .leak_watch import LeakWatch
from .node_group import NodeGroup
from .queue import Claims, PayloadQueue, claims_of
from .shutdown_policy import ShutdownPolicy

RAY_CHANGED = "the environment's Ray has changed"

_LATE_INTERVAL = 5.0
"""Seconds between two looks at whether the time still suffices for those who wait."""


class Dispatcher:
    """Starts payloads.

    Args:
        loop: where everything happens.
        spec: the runtime.
        nodes: its nodes.
        private: its scratch directory.
        roster: its payloads.
        clusters: what serves them.
        lifetime: whether there is time for them.
        gate: asked whether a payload may start whose cluster is up.
        ray: the environment's Ray that a session began with; None for a runtime that lives no longer than its payload.
        templates: what a session's payloads may be forked from; None for any other runtime.
        leftovers: looks for what payloads leave in the warm cluster.
        strays: ends what payloads leave on this node.
    """

    def __init__(
        self,
        loop: Loop,
        spec: RuntimeSpec,
        nodes: NodeGroup,
        private: Scratch,
        roster: PayloadQueue,
        clusters: Clusters,
        lifetime: ShutdownPolicy,
        gate: Callable[[Payload], bool],
        ray: Optional[RayVersionWatch],
        templates: Optional[Templates],
        leftovers: LeakWatch,
        strays: StrayProcesses,
    ) -> None:
        self._loop = loop
        self._spec = spec
        self._nodes = nodes
        self._private = private
        self._roster = roster
        self._clusters = clusters
        self._lifetime = lifetime
        self._gate = gate
        self._ray = ray
        self._templates = templates
        self._leftovers = leftovers
        self._strays = strays
        self._timers = Timers(loop)
        self._gpus = GpuMonitor(loop)

    def ray_has_changed(self) -> bool:
        """Whether a session's cluster is of another Ray than its payloads would import."""
        return self._ray is not None and self._ray.has_changed()

    def claims(self, payload: Payload) -> Claims:
        """What a payload claims of the nodes."""
        fresh = self._clusters.is_fresh(payload.spec)
        return claims_of(payload.spec, fresh, self._nodes.capacities(), self._nodes.component)

    def pump(self) -> None:
        """Start what may start now, in turn."""
        self._return_the_late()
        while self._lifetime.ending is None:
            payload = self._roster.next(self._nodes.capacities(), self._may_start)
            if payload is None:
                break
            if payload.spec.uses_ray and self.ray_has_changed():
                payload.end_early(End(EndReason.RETURNED, "the session gives the payload back unstarted: " + RAY_CHANGED))
            if not payload.ended:  # One that was cancelled in the queue is on its way out.
                self._begin(payload)
        for place, payload in enumerate(self._roster.waiting, 1):
            if payload.place != place and self._may_start(payload):
                payload.place = place
                payload.phase("queued", "place %d in the queue of the Ray cluster %s" % (place, self._spec.cluster_id))

    def _may_start(self, payload: Payload) -> bool:
        return not self._clusters.waits(payload.spec) and self._gate(payload)

    def _return_the_late(self) -> None:
        """Give those back that cannot end in time any more: they never started, and run elsewhere."""
        left = self._lifetime.time_left()
        self._timers.cancel("late")
        for payload, why in self._roster.late(left):
            payload.end_early(End(EndReason.RETURNED, "the session gives the payload back unstarted: " + why))
        if left is not None and self._roster.waiting:
            self._timers.due("late", _LATE_INTERVAL, self.pump)

    def _begin(self, payload: Payload) -> None:
        """Start a payload, once the cluster is there that serves it."""
        self._strays.begin(payload.spec.nonce)
        if self._clusters.is_fresh(payload.spec):
            where = self._nodes.in_words(payload.spec.ray)
            payload.phase("cluster-start", "starting a Ray cluster of the payload's own on %s" % where)

        def served(cluster: Optional[RayCluster]) -> None:
            payload.safely(lambda: self._start(payload, cluster))

        payload.safely(lambda: self._clusters.serve(payload, served))

    def _start(self, payload: Payload, cluster: Optional[RayCluster]) -> None:
        messages = self._private.join("messages-%s.jsonl" % payload.spec.nonce)
        payload.context = {
            "hostname": self._nodes.machine.hostname,
            "num_cpus": self._nodes.machine.num_cpus,
            "python": sys.executable,
            "python_version": sys.version.split()[0],
            "warm": self._roster.served > 1 and not self._clusters.is_fresh(payload.spec),
        }
        allocation = self._nodes.allocation_facts()
        if allocation is None:
            payload.context["machine_cpus"] = count_cpus(os.environ)  # Of which some are simulated, perhaps.
        else:
            payload.context["allocation"] = allocation
            only_here = cluster is None and self._ray is not None  # In a session; another job is the payload's as a whole.
            machines = [self._nodes.machine] if only_here else self._nodes.machines()
            payload.context["granted"] = [machine.facts() for machine in machines]
        for other in self._roster.running:
            if other is not payload and other.pid is not None:
                other.companions.add(payload.spec.nonce)
                payload.companions.add(other.spec.nonce)
        OwnRayWatch(self._loop, payload, self._nodes.machine)
        if cluster is None:  # Nothing of it is on the other nodes.
            return payload.start(LaunchContext(messages, self._gpus, foreign_pids=lambda: self._others(payload)))
        kept_warm = self._ray is not None and cluster is self._clusters.warm
        payload.context.update(cluster.facts(), kept_warm=kept_warm)
        payload.start(
            LaunchContext(
                messages,
                self._gpus,
                ray_env=cluster.environment,
                worker_env=self._spec.worker_env,
                ray_temp_dir=cluster.ray_temp_dir,
                shared_ray_pid=(lambda: cluster.pid) if kept_warm else None,
                workers=self._nodes.others,
                foreign_pids=lambda: self._others(payload),
                leak_check=None if cluster is not self._clusters.warm else self._leftovers.of(payload.spec.nonce),
            )
        )

    def _others(self, payload: Payload) -> List[int]:
        """The processes that, with all below them, are not this payload's."""
        drivers = [other.pid for other in self._roster.running if other is not payload and other.pid is not None]
        templates = self._templates.pids() if self._templates is not None else []
        return drivers + templates + self._clusters.others(payload)
