"""The heart of the runtime: payloads wait for the cluster, run, end; the cluster serves them and ends last.

A runtime for one payload and a session that stays warm are the same thing here: they differ in who hands payloads
over (`control`, `requests`) and in when there is nothing left to wait for (`lifetime`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import time
import traceback
from typing import Any, Dict, List, Optional

from ..node import resources
from ..node.allocation import Allocation
from ..node.memory_watch import MemoryWatch
from ..node.resources import footprint_error, runtime_footprint
from ..node.worker_node import WorkerNode
from ..payload.payload import Payload
from ..payload.preload_server import Templates
from ..process import processes, scratch
from ..process.loop import Loop
from ..process.stray_processes import StrayProcesses
from ..protocol.end import ClusterError, End, EndReason, defect
from ..protocol.record import PAYLOAD, RunRecord, tail_lines
from ..protocol.spec import PROTOCOL_VERSION, PayloadSpec, RuntimeSpec, SpecError, from_json
from ..protocol.start_files import read_text, take_secrets
from ..ray.cluster import UNSCHEDULABLE, RayCluster
from ..ray.version_watch import RayVersionWatch
from .clusters import LOST_GRACE, Clusters
from .dispatch import RAY_CHANGED, Dispatcher
from .leak_watch import LeakWatch
from .node_group import NodeGroup
from .queue import Closing, Misfit, PayloadQueue, misfit
from .shutdown_policy import ShutdownPolicy

_SAME_SIGNAL = 1.0
"""Seconds within which another signal is the same one: Slurm sends it to the keeper too, which passes it on."""

_FRESH_INTERVAL = 600.0
"""Seconds between two marks that run directories are in use; old ones are swept after days."""

_END_PATIENCE = 5.0
"""Seconds at this runtime's own end in which an `end` that could not be written is tried again."""

_LATECOMERS = 15.0
"""Seconds that this runtime outlasts its work for nodes whose runtimes have not come yet; signals reach them without it."""


class Hooks:
    """What a subclass may decide or learn; the base class changes nothing. Set it as `Supervisor.hooks`.

    `Payload.on_ended` tells of the end of one payload.
    """

    def may_start(self, payload: Payload) -> bool:  # noqa: ARG002
        """Whether a payload may start whose cluster is up; call `Supervisor.look_again` once the answer changes."""
        return True

    def finished(self, loop: Loop) -> None:
        """The last payload has ended and no other one will come."""
        loop.stop()

    def interrupted(self, loop: Loop, signum: int) -> None:  # noqa: ARG002
        """The runtime received a signal while it had no payload."""
        loop.stop()

    def cluster_lost(self, why: str) -> None:
        """The warm cluster was lost while the runtime had no payload."""


class Supervisor:
    """Runs payloads, on one Ray cluster if the spec has one, else on one of each payload's own.

    Args:
        loop: where everything happens.
        spec: the cluster and the runtime's own life.
        private: scratch directory of this runtime.
        allocation: the Slurm step whose first node this is; None elsewhere.
        log_dir: directory of the logs of an allocation's nodes.
        here: what this node grants; None to find out.
    """

    def __init__(
        self,
        loop: Loop,
        spec: RuntimeSpec,
        private: scratch.Scratch,
        allocation: Optional[Allocation] = None,
        log_dir: str = "",
        here: Optional[resources.NodeResources] = None,
    ) -> None:
        self.loop = loop
        self.nodes = NodeGroup(loop, spec, private, self._hear, allocation, log_dir, here)
        self.spec = spec = self.nodes.spec
        self.exit_code = 0
        """What the last payload's end makes of this process's own, so that Slurm's books tell the same."""
        self.hooks = Hooks()
        self._scratch = private
        self._unwritten: List[Payload] = []
        """Those whose `end` could not be written yet."""
        self._signalled = False
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.on_signal(signum, self._interrupted)
        loop.call_later(_FRESH_INTERVAL, self._keep_fresh)
        self._roster = PayloadQueue(spec, lambda payload: self._dispatch.claims(payload), loop.now)
        self.lifetime = ShutdownPolicy(loop, spec, self._roster, allocation is not None, self.close)
        self.lifetime.leave = lambda: self.hooks.finished(loop)
        is_session = self.lifetime.is_session
        self._templates = Templates(loop, private.join("preload")) if is_session else None
        self._leftovers = LeakWatch(loop, lambda: self.cluster)
        self._strays = StrayProcesses(loop)
        self.clusters = Clusters(
            loop,
            spec,
            self.nodes.machine,
            private,
            self.nodes.others,
            self.nodes.address,
            self.look_again,
            self._cluster_failed,
            self._tell,
            self._node_lost,
            self.nodes.ray_environ,
        )
        if allocation is not None:
            MemoryWatch(loop, self.nodes.machine.name, self.clusters.guarded, self._drivers, self._tell_of_memory)
        self._dispatch = Dispatcher(
            loop,
            spec,
            self.nodes,
            private,
            self._roster,
            self.clusters,
            self.lifetime,
            lambda payload: self.hooks.may_start(payload),
            RayVersionWatch() if is_session else None,
            self._templates,
            self._leftovers,
            self._strays,
        )

    @property
    def cluster(self) -> Optional[RayCluster]:
        """The cluster that is kept warm."""
        return self.clusters.warm

    @property
    def payloads(self) -> List[Payload]:
        """Those that wait and those that run."""
        return list(self._roster)

    @property
    def durations(self) -> Dict[str, float]:
        """Seconds that the longest run of each step took."""
        return self._roster.durations

    @property
    def served(self) -> int:
        """Payloads that were taken so far."""
        return self._roster.served

    def set_margin(self, seconds: float) -> None:
        """Say what a payload is taken to need at least that does not say so itself."""
        self._roster.margin = seconds

    @property
    def closing(self) -> Optional[str]:
        """Why no more payloads are taken; None while they are."""
        return self.lifetime.closing

    def run(self) -> None:
        """React until there is nothing left to do, then end everything that was started here."""
        try:
            self.clusters.start()
            if self._templates is not None:
                ray_env = self.cluster.environment if self.cluster is not None else None
                self._templates.warm(self.spec.preload, ray_env, self.nodes.payload_environ(dict(os.environ)))
            if self.cluster is None:
                problem = footprint_error(runtime_footprint(self.spec, self.nodes.machine.component), self.nodes.machine)
                if problem:
                    self.close(End(EndReason.ALLOCATION, problem))
            self.lifetime.settle()
            self.loop.run()
        except BaseException as error:
            # A defect here must not leave anybody waiting for an `end` that nobody writes.
            self._abort(error)
            raise
        finally:
            self.clusters.stop()
            if self._templates is not None:
                self._templates.close()
            self.nodes.dismiss()
            processes.kill_descendants(os.getpid(), collect=self.loop.reap)
            self._write_ends()
            self._scratch.remove()
            self.nodes.wait_gone(0.0 if self._signalled else _LATECOMERS)

    def _write_ends(self) -> None:
        """Write what could not be written so far; nobody writes it later."""
        deadline = self.loop.now() + _END_PATIENCE
        left = [payload for payload in {*self._unwritten, *self._roster} if payload.ended]
        while True:
            left = [payload for payload in left if not payload.record.write_end()]
            if not left or self.loop.now() > deadline:
                return
            time.sleep(_END_PATIENCE / 10)

    def submit(self, run_dir: str, environ: Optional[Dict[str, str]] = None) -> Payload:
        """Take over the payload of a run directory.

        Args:
            run_dir: the run directory.
            environ: what the payload's environment is made from; None for the runtime's own.

        Raises:
            Closing: this runtime is about to end, and says why.
            Misfit: the payload asks for more than the nodes grant.
            SpecError: the run directory's start record cannot be used.
            OSError: the run directory cannot be read or written.
        """
        if self.closing is None and self._dispatch.ray_has_changed():
            self.drain(RAY_CHANGED)
        if self.closing is not None:
            raise Closing(self.closing)
        spec = from_json(PayloadSpec, read_text(os.path.join(run_dir, PAYLOAD)))
        problem = misfit(spec, self.nodes.machines())
        if problem:
            raise Misfit(problem)
        late = self._roster.refusal(spec, self.lifetime.time_left())
        if late:
            raise Closing(late)  # For this payload alone: others may take less time.
        attempt = self.nodes.allocation.restarts if self.nodes.allocation is not None else 0
        record = RunRecord(run_dir, spec.max_stdio_bytes, attempt)
        try:
            secrets = take_secrets(run_dir, keep=self.spec.requeue)
        except BaseException:
            record.withdraw()
            raise
        payload = Payload(self.loop, run_dir, spec, secrets, record, self.nodes.payload_environ(environ or dict(os.environ)))
        payload.templates = self._templates
        payload.on_ended.append(lambda: self._ended(payload))
        self._roster.add(payload)
        self.lifetime.busy()
        payload.record.keep(
            {
                "type": "start",
                "nonce": spec.nonce,
                "attempt": attempt,
                "protocol": PROTOCOL_VERSION,
                "at": time.time(),
                "cluster_id": self.spec.cluster_id,
                "hostname": self.nodes.machine.hostname,
                "pid": os.getpid(),
                "python": sys.version.split()[0],
                "allocation": self.nodes.allocation_facts(),
            }
        )
        if self.cluster is not None and spec.uses_ray and self.cluster.ready:
            payload.phase("cluster-ready", "the warm Ray cluster %s is up" % self.spec.cluster_id)
        elif self.clusters.waits(spec):
            where = self.nodes.in_words(self.spec.ray)
            payload.phase("cluster-start", "starting the Ray cluster %s on %s" % (self.spec.cluster_id, where))
        for remark in self.nodes.remarks(spec.uses_ray):
            payload.phase("cluster-start", remark)
        for leak in self._leftovers.found:
            payload.phase("leaks", "left in the Ray cluster by payloads before: " + leak)
        self.look_again()
        return payload

    def close(self, end: End, grace: Optional[float] = None, queued: Optional[End] = None) -> None:
        """Take no more payloads, end those that are here and then the runtime.

        Args:
            end: how they end.
            grace: seconds between SIGTERM and SIGKILL; None for what each payload asks for.
            queued: how those end that never started; None for the same.
        """
        self.lifetime.end(end)
        if end.reason == EndReason.TIMEOUT and queued is None:
            queued = End(EndReason.RETURNED, "%s before the payload's turn came" % end.message)
        for payload in self._roster.waiting:
            payload.end_early(queued or end, grace)
        for payload in list(self._roster.running):
            payload.end_early(end, grace)
        self.lifetime.settle()

    def drain(self, why: str) -> None:
        """Take no more payloads, let those finish that are here, and then end.

        Args:
            why: what whoever comes with another payload is told.
        """
        if self.closing is None:
            self.lifetime.draining = why
            self._tell("drain", "the runtime takes no more payloads: " + why)
            self.lifetime.settle()

    def describe(self) -> Dict[str, Any]:
        """What a session tells who asks."""
        cluster = self.cluster.facts() if self.cluster is not None else {}
        idle = self.lifetime.idle_for
        return {
            "cluster_id": self.spec.cluster_id,
            "protocol": PROTOCOL_VERSION,
            "pid": os.getpid(),
            "ready": self.cluster is None or self.cluster.ready,
            "closing": self.lifetime.ending is not None,
            "draining": self.closing,
            "running": len(self._roster.running),
            "waiting": len(self._roster.waiting),
            "payloads": self._roster.facts(each for each in self._unwritten if not each.record.ended),
            "served": self._roster.served,
            "idle": None if idle is None else round(idle, 1),
            "nodes": self.nodes.facts(),
            "ray_version": cluster.get("ray_version"),
            "address": cluster.get("ray_address"),
            "dashboard_url": cluster.get("dashboard_url"),
            "leaks": self._leftovers.found,
            "time_left": self.lifetime.time_left(),
        }

    def look_again(self) -> None:
        """Start what may start now, as when the gate has opened or the cluster is up."""
        self._dispatch.pump()

    def _ended(self, payload: Payload) -> None:
        self.exit_code = payload.ending.exit_code
        if not payload.record.ended:
            self._unwritten = [each for each in self._unwritten if not each.record.ended] + [payload]
        if self.spec.requeue and not payload.ending.terminated and self.spec.meeting is None:
            with contextlib.suppress(OSError, SpecError):
                take_secrets(payload.run_dir, keep=False)  # No other attempt will need them.
        self._roster.remove(payload)
        self.clusters.release(payload)
        self._strays.end(payload.spec.nonce)
        if not self._roster.running:
            self._leftovers.look_when_idle(lambda: not self._roster.running)
        self.look_again()
        if not self._roster.running and self.closing is None:
            self.clusters.prestart()  # Not while others run, whose CPU they would take.
        self.lifetime.settle()

    def _hear(self, member: WorkerNode, message: Dict[str, Any]) -> None:
        self.clusters.take(member, message)
        if message.get("event") == "memory":
            self._tell_of_memory(str(message["message"]), bool(message["killed"]))
        elif message.get("event") == "lost":
            member.await_back(self.loop, lambda: self._node_lost(member.title))

    def _drivers(self) -> List[int]:
        return [payload.pid for payload in self._roster.running if payload.pid is not None]

    def _tell_of_memory(self, message: str, killed: bool) -> None:
        """Tell all payloads that run of a node that is nearly full, and count the Ray workers killed while each ran."""
        for payload in self._roster.running:
            payload.phase("memory", message)
            if killed:
                payload.context["workers_killed"] = payload.context.get("workers_killed", 0) + 1

    def _node_lost(self, name: str) -> None:
        """Payloads go on without it; a session that is whole takes those that come."""
        if self.lifetime.is_session:
            self.drain("node %s is lost" % name)

    def _cluster_failed(self, error: ClusterError) -> None:
        assert self.cluster is not None
        if self.lifetime.ending is not None:
            return  # It is going down with all else, as when Slurm signals every process of the job.
        for name, text in self.cluster.log_tails().items():
            for payload in self.payloads:
                payload.tail(name, text)
            if not self.served:  # Nobody has a record; whoever waits for the session looks at this node's log.
                print("rayslurm: the end of %s:\n%s" % (name, tail_lines(text)), file=sys.stderr)
        if not len(self._roster):
            self.hooks.cluster_lost(str(error))
        queued = End(error.reason, "the payload never started: " + str(error)) if self.cluster.ready else None
        self.close(End(error.reason, str(error)), LOST_GRACE, queued)

    def _keep_fresh(self) -> None:
        for payload in self.payloads:
            payload.record.keep_fresh()
        self.loop.call_later(_FRESH_INTERVAL, self._keep_fresh)

    def _tell(self, phase: str, message: str) -> None:
        for payload in self.payloads:
            if phase != UNSCHEDULABLE or (payload.spec.uses_ray and payload.pid is not None):
                payload.phase(phase, message)

    def _interrupted(self, signum: int) -> None:
        self._signalled = True
        again = self.lifetime.ending_for > _SAME_SIGNAL
        name = signal.Signals(signum).name
        self.nodes.tell(op="ending")  # Those that were signalled, too, stay until all is over.
        self.close(End(EndReason.TERMINATED, "the runtime received %s" % name), grace=0 if again else None)
        if not len(self._roster):
            self.hooks.interrupted(self.loop, signum)

    def _abort(self, error: BaseException) -> None:
        end = defect(error)
        said = tail_lines(traceback.format_exc())
        self.lifetime.ending = "it has a defect: %s" % end.message
        for payload in self.payloads:
            with contextlib.suppress(Exception):  # What failed may be this very record.
                payload.tail("runtime traceback", said)
            payload.safely(functools.partial(payload.abandon, end))  # Whatever this one's has: the others get theirs.
