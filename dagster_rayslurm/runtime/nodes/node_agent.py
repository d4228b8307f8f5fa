"""A node's Ray as the head of its cluster has it: started when told, measured, ended; wherever the orders come from."""

from __future__ import annotations

import os
import traceback
from typing import Any, Callable, Dict, List, Mapping, Optional

from ..node.addresses import node_address
from ..node.gpus import GpuMonitor
from ..node.ray_jobs import RayJobs
from ..node.resources import NodeResources
from ..node.usage import UsageSampler
from ..process.loop import Loop
from ..process.scratch import Scratch
from ..process.stray_processes import StrayProcesses
from ..protocol.end import ClusterError, EndReason
from ..protocol.spec import RaySpec, RuntimeSpec, from_fields, node_spec
from ..ray.cluster_dir import clear_away
from ..ray.prestart import logs_of
from ..ray.start import RayStart, StartListener

Order = Dict[str, Any]


class _Joined(StartListener):
    """A cluster that this node belongs to."""

    def __init__(self, node: Follower, order: Order, attempt: int, place: Scratch, guarded: bool) -> None:
        self.attempt = attempt
        self.place = place
        self.guarded = guarded
        self.failure: Optional[ClusterError] = None
        """Why its Ray did not start, or has ended, here."""
        self.ray: RayStart
        self._node = node
        self._order = order

    def on_failed(self, error: ClusterError) -> None:
        """Tell the head."""
        self.failure = error
        self._node._say(str(error))
        self._node._tell_failed(self._order, error, self.ray.log_tails())

    def on_phase(self, phase: str, message: str) -> None:
        """Write it to this node's log."""
        del phase
        self._node._say(message)


class Follower:
    """One node of one cluster or several.

    Args:
        loop: where everything happens.
        spec: the start record, the same as the head's.
        machine: what this node grants.
        place: makes the directory of a cluster, by its key.
        send: tells the head something.
        say: writes to this node's log.
        environ: variables for Ray's daemons on this node; None for one that they must not have.
        alone: whether this node is all that its runtime has; else it is measured by the processes of its own Ray, and the
            runtime ends stray processes.
    """

    def __init__(
        self,
        loop: Loop,
        spec: RuntimeSpec,
        machine: NodeResources,
        place: Callable[[str], Scratch],
        send: Callable[..., None],
        say: Callable[[str], None],
        environ: Optional[Mapping[str, Optional[str]]] = None,
        alone: bool = True,
    ) -> None:
        self._loop = loop
        self._spec = spec
        self._machine = machine
        self._place = place
        self._send = send
        self._say = say
        self._environ = environ or {}
        self._alone = alone
        self._gpus = GpuMonitor(loop)
        self._clusters: Dict[str, _Joined] = {}
        self._samplers: Dict[str, UsageSampler] = {}
        self._strays = StrayProcesses(loop) if alone else None

    @property
    def pids(self) -> List[int]:
        """The processes below which all of Ray on this node is."""
        return [joined.ray.pid for joined in self._clusters.values() if joined.ray.pid is not None]

    @property
    def guarded(self) -> List[int]:
        """The processes below which Ray's workers may be killed for their memory."""
        return [each.ray.pid for each in self._clusters.values() if each.guarded and each.ray.pid is not None]

    def obey(self, order: Order) -> None:
        """Do what the head says; an order that is not for Ray is not for here."""
        try:
            self._obey(order)
        except Exception as error:
            if order.get("op") != "ray":
                raise
            traceback.print_exc()
            said = "node %s: %s: %s" % (self._machine.name, type(error).__name__, error)
            self._tell_failed(order, ClusterError(EndReason.CLUSTER_START, said), {})

    def end(self) -> None:
        """End all of Ray on this node at once."""
        for joined in self._clusters.values():
            joined.ray.end()

    def _obey(self, order: Order) -> None:
        op = order.get("op")
        if op == "ray":
            self._start_ray(order)
        elif op == "ready":
            joined = self._clusters.get(order.get("cluster", ""))
            if joined is not None and order["attempt"] == joined.attempt:
                joined.ray.ready = True
        elif op == "end-ray":
            self._end_ray(order["cluster"])
            self._send(event="ended", cluster=order["cluster"])
        elif op == "measure":
            if self._strays is not None and order["id"] not in self._samplers:
                self._strays.begin(order["id"])
            self._measure(order["id"], order.get("jobs"))
        elif op == "report":
            sampler = self._samplers.pop(order["id"], None)
            self._send(event="usage", id=order["id"], usage=None if sampler is None else sampler.stop())
            if self._strays is not None:
                self._strays.end(order["id"])

    def _measure(self, nonce: str, job_ids: Optional[List[str]]) -> None:
        """Measure what Ray uses on this node, but for clusters that are another payload's own.

        Args:
            nonce: the payload's.
            job_ids: its jobs as far as they are known, in a cluster that payloads share; None for a cluster of its own.
        """
        measured = self._samplers.get(nonce)
        if measured is not None:
            if measured.jobs is not None:
                measured.jobs.job_ids.update(job_ids or ())
            return
        own = self._clusters.get(nonce) or self._clusters.get("")

        def not_mine() -> List[int]:
            others = [joined.ray.pid for key, joined in self._clusters.items() if key and key != nonce]
            return [pid for pid in others if pid is not None]

        def mine() -> List[int]:
            return [own.ray.pid] if own is not None and own.ray.pid is not None else []

        jobs = None
        if job_ids is not None and own is not None:
            jobs = RayJobs(logs_of(own.place.ray_temp_dir), lambda: own.ray.pid)
            jobs.job_ids.update(job_ids)
        where = None if own is None else own.place.ray_temp_dir
        self._samplers[nonce] = UsageSampler(self._loop, self._gpus, where, not_mine, None if self._alone else mine, jobs)

    def _start_ray(self, order: Order) -> None:
        """Start Ray, or start it anew for a head that had to take another port; after a reconnection it runs already."""
        key, attempt = str(order.get("cluster", "")), int(order["attempt"])
        before = self._clusters.get(key)
        if before is not None and before.attempt == attempt:
            if before.failure is not None:  # Told while nobody was there to hear it, perhaps.
                self._tell_failed(order, before.failure, before.ray.log_tails())
            return
        if before is not None:
            before.ray.end()
            os.unlink(before.ray.token_path)
            place = before.place
        else:
            try:
                place = self._place(key)
            except OSError as error:
                why = ClusterError(EndReason.CLUSTER_START, "node %s: %s" % (self._machine.name, error))
                self._say(str(why))
                return self._tell_failed(order, why, {})
        self._start_anew(order, key, attempt, place)

    def _start_anew(self, order: Order, key: str, attempt: int, place: Scratch) -> None:
        whole = from_fields(RaySpec, order["ray"]) if key else self._spec.ray
        assert whole is not None
        spec = node_spec(whole, self._machine.component)

        joined = _Joined(self, order, attempt, place, whole.memory_guard)
        joined.ray = RayStart(self._loop, self._spec, spec, key, self._machine, place, int(order["nodes"]), joined, self._environ)
        self._clusters[key] = joined
        try:
            joined.ray.start(node_address(spec, order["gcs"]), order["gcs"])
        except ClusterError as error:
            joined.on_failed(error)

    def _tell_failed(self, order: Order, error: ClusterError, tails: Mapping[str, str]) -> None:
        named = {"cluster": order["cluster"]} if order.get("cluster") else {}
        self._send(
            event="failed", attempt=order.get("attempt"), reason=error.reason, message=str(error), tails=dict(tails), **named
        )

    def _end_ray(self, key: str) -> None:
        joined = self._clusters.pop(key, None)
        if joined is not None:
            joined.ray.end()
            clear_away(self._loop, joined.place, key)
