"""The centre of the runtime on the first node: takes each payload from the queue through its Ray cluster to its end.

A runtime for one payload and a session for many both use it. They differ in who submits payloads (`local_server`,
`session_server`) and in when the runtime ends (`shutdown_policy`).
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
from ..node.memory import MemoryWatch
from ..node.resources import count_cpus, footprint_error, runtime_footprint
from ..node.usage import GpuMonitor
from ..node.worker_node import WorkerNode
from ..payload.environment import LaunchContext
from ..payload.own_ray import OwnRayWatch
from ..payload.payload import Payload
from ..payload.preload_server import PreloadServer
from ..process import processes, scratch
from ..process.loop import Loop, Timers
from ..process.processes import StrayProcesses
from ..protocol.end import ClusterError, End, EndReason, defect
from ..protocol.messages import NodeCommand, NodeEvent
from ..protocol.record import PAYLOAD, RunRecord, tail_lines
from ..protocol.spec import PROTOCOL_VERSION, PayloadSpec, RuntimeSpec, SpecError, from_json, read_text, take_secrets
from ..ray.cluster import UNSCHEDULABLE, RayCluster
from ..ray.internals import installed_version
from ..ray.leak_check import LeakCheck
from ..ray.start import RayListener
from .admission import Claims, Closing, Misfit, capacities_of, claims_of, misfit
from .clusters import LOST_GRACE, Clusters
from .node_group import NodeGroup
from .queue import PayloadQueue
from .shutdown_policy import ShutdownPolicy

RAY_CHANGED = "the environment's Ray has changed"
"""Why a session closes after another version of Ray was installed in its environment."""

_SAME_SIGNAL = 1.0
"""Seconds within which a second signal counts as the same one: Slurm also signals the keeper process, which passes it on."""
_REFRESH_INTERVAL = 600.0
"""Seconds between two updates of the run directories' times; directories that are days old are removed."""
_END_TIMEOUT = 5.0
"""Seconds at this runtime's end for which it tries again to write `end` records that could not be written before."""
_LATE_NODES = 15.0
"""Seconds at this runtime's end for which it waits for worker nodes that have not connected yet, because only it can stop them.

After a signal it does not wait, because Slurm sends the signal to those nodes as well.
"""
_LATE_INTERVAL = 5.0
"""Seconds between two checks whether the allocation has enough time left for the waiting payloads."""


class Hooks:
    """Callbacks with which another module changes when payloads start and when the runtime ends; set `Supervisor.hooks`.

    This base class has the usual behaviour. For the end of one payload, use `Payload.on_ended`.
    """

    def may_start(self, payload: Payload) -> bool:  # noqa: ARG002
        """Whether a payload whose Ray cluster is up may start; call `Supervisor.schedule` when the answer changes."""
        return True

    def finished(self, loop: Loop) -> None:
        """Called when the last payload has ended and no other one will come."""
        loop.stop()

    def interrupted(self, loop: Loop, signum: int) -> None:  # noqa: ARG002
        """Called when the runtime received a signal while it had no payload."""
        loop.stop()

    def cluster_lost(self, why: str) -> None:
        """Called when the warm Ray cluster failed while the runtime had no payload; `why` is a sentence."""


class Supervisor(RayListener):
    """Queues and runs payloads: all on one warm Ray cluster if the start record describes one, otherwise each on its own.

    Args:
        loop: the event loop.
        spec: the start record.
        private: scratch directory of this runtime.
        allocation: the Slurm step whose first node this is; None outside Slurm.
        log_dir: directory in which the nodes of the allocation write their logs.
        here: the resources of this node; None to detect them.
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
        self.nodes = NodeGroup(loop, spec, private, self._handle_message, allocation, log_dir, here)
        self.spec = spec = self.nodes.spec
        self.exit_code = 0
        """The exit code of the last payload that ended; this process exits with it, so that Slurm's accounting shows it."""
        self.hooks = Hooks()
        self._scratch = private
        self._unwritten: List[Payload] = []
        """Payloads that have ended, but whose `end` record could not be written yet."""
        self._signalled = False
        self._timers = Timers(loop)
        self._gpus = GpuMonitor(loop)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.on_signal(signum, self._interrupted)
        loop.call_later(_REFRESH_INTERVAL, self._refresh)
        self.queue = PayloadQueue(spec, self._claims, loop.now)
        self.lifetime = ShutdownPolicy(
            loop, spec, self.queue, allocation is not None, lambda: self.hooks.finished(loop), self.close
        )
        self._preload_server = PreloadServer(loop, private.join("preload")) if self.lifetime.is_session else None
        self._ray_version = installed_version() if self.lifetime.is_session else None
        self._leaks = LeakCheck(loop, lambda: self.cluster)
        self._strays = StrayProcesses(loop)
        self.clusters = Clusters(loop, spec, self.nodes.head, private, self)
        if allocation is not None:
            MemoryWatch(loop, self.nodes.machine.name, self.clusters.guarded_pids, self._driver_pids, self._report_memory)

    @property
    def cluster(self) -> Optional[RayCluster]:
        """The Ray cluster that is kept warm for all payloads; None if there is none."""
        return self.clusters.warm

    @property
    def payloads(self) -> List[Payload]:
        """The waiting and the running payloads."""
        return list(self.queue)

    @property
    def closing(self) -> Optional[str]:
        """Why no more payloads are taken; None while payloads are taken."""
        return self.lifetime.closing

    def run(self) -> None:
        """Run payloads until the runtime must end, then end every process that it started, also on the other nodes."""
        try:
            if self.cluster is not None:
                self.cluster.start()
            if self._preload_server is not None:
                ray_env = self.cluster.environment if self.cluster is not None else None
                self._preload_server.preload(self.spec.preload, ray_env, self.nodes.payload_environ(dict(os.environ)))
            if self.cluster is None:
                problem = footprint_error(runtime_footprint(self.spec, self.nodes.machine.component), self.nodes.machine)
                if problem:
                    self.close(End(EndReason.ALLOCATION, problem))
            self.lifetime.settle()
            self.loop.run()
        except BaseException as error:
            # A defect here must not leave a client waiting for an `end` that is never written.
            self._abort(error)
            raise
        finally:
            self.clusters.end()
            if self._preload_server is not None:
                self._preload_server.close()
            workers = self.nodes.workers
            if workers is not None:
                workers.dismiss()
            processes.kill_descendants(os.getpid(), collect=self.loop.reap)
            self._write_ends()
            self._scratch.remove()
            if workers is not None:
                workers.wait_gone(0.0 if self._signalled else _LATE_NODES)

    def _write_ends(self) -> None:
        """Try for some seconds to write the `end` records that could not be written before."""
        deadline = self.loop.now() + _END_TIMEOUT
        left = [payload for payload in {*self._unwritten, *self.queue} if payload.ended]
        while True:
            left = [payload for payload in left if not payload.record.write_end()]
            if not left or self.loop.now() > deadline:
                return
            time.sleep(_END_TIMEOUT / 10)

    def submit(self, run_dir: str, environ: Optional[Dict[str, str]] = None) -> Payload:
        """Queue the payload of a run directory, and start it if it can start now.

        Args:
            run_dir: the run directory.
            environ: the environment on which the payload's environment is based; None for the runtime's own.

        Returns:
            The payload.

        Raises:
            Closing: this runtime takes no more payloads, or has too little time left for this one.
            Misfit: the payload needs more than the nodes have.
            SpecError: the payload's specification in the run directory is not valid.
            OSError: the run directory cannot be read or written.
        """
        if self.closing is None and self._ray_has_changed():
            self.drain(RAY_CHANGED)
        if self.closing is not None:
            raise Closing(self.closing)
        spec = from_json(PayloadSpec, read_text(os.path.join(run_dir, PAYLOAD)))
        problem = misfit(spec, self.nodes.machines())
        if problem:
            raise Misfit(problem)
        late = self.queue.refusal(spec, self.lifetime.time_left())
        if late:
            raise Closing(late)  # The runtime stays open for other payloads, which may take less time.
        attempt = self.nodes.allocation.restarts if self.nodes.allocation is not None else 0
        record = RunRecord(run_dir, spec.max_stdio_bytes, attempt)
        try:
            secrets = take_secrets(run_dir, keep=self.spec.requeue)
        except BaseException:
            record.withdraw()
            raise
        payload = Payload(self.loop, run_dir, spec, secrets, record, self.nodes.payload_environ(environ or dict(os.environ)))
        payload.preload_server = self._preload_server
        payload.on_ended.append(lambda: self._ended(payload))
        self.queue.add(payload)
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
                "allocation": self._allocation_facts(),
            }
        )
        if self.cluster is not None and spec.uses_ray and self.cluster.ready:
            payload.phase("cluster-ready", "the warm Ray cluster %s is up" % self.spec.cluster_id)
        elif self.clusters.waits(spec):
            where = self.nodes.in_words(self.spec.ray)
            payload.phase("cluster-start", "starting the Ray cluster %s on %s" % (self.spec.cluster_id, where))
        for remark in self.nodes.remarks(spec.uses_ray):
            payload.phase("cluster-start", remark)
        for leak in self._leaks.found:
            payload.phase("leaks", "left in the Ray cluster by payloads before: " + leak)
        self.schedule()
        return payload

    def close(self, end: End, grace: Optional[float] = None, queued: Optional[End] = None) -> None:
        """Take no more payloads, end the present ones and then the runtime.

        Args:
            end: how running payloads end.
            grace: seconds between SIGTERM and SIGKILL; None for each payload's own grace period.
            queued: how waiting payloads end; None for the same as running ones, except that the time limit gives waiting
                payloads back to their clients.
        """
        self.lifetime.end(end)
        if end.reason == EndReason.TIMEOUT and queued is None:
            queued = End(EndReason.RETURNED, "%s before the payload's turn came" % end.message)
        for payload in self.queue.waiting:
            payload.end_early(queued or end, grace)
        for payload in list(self.queue.running):
            payload.end_early(end, grace)
        self.lifetime.settle()

    def drain(self, why: str) -> None:
        """Take no more payloads, let the present ones finish, and then end the runtime. Later clients are told `why`."""
        if self.closing is None:
            self.lifetime.draining = why
            self.on_phase("drain", "the runtime takes no more payloads: " + why)
            self.lifetime.settle()

    def describe(self) -> Dict[str, Any]:
        """The state of the runtime, its payloads and its Ray cluster, as JSON for clients and the command line."""
        cluster = self.cluster.facts() if self.cluster is not None else {}
        idle = self.lifetime.idle_for
        return {
            "cluster_id": self.spec.cluster_id,
            "protocol": PROTOCOL_VERSION,
            "pid": os.getpid(),
            "ready": self.cluster is None or self.cluster.ready,
            "closing": self.lifetime.ending is not None,
            "draining": self.closing,
            "running": len(self.queue.running),
            "waiting": len(self.queue.waiting),
            "payloads": self.queue.facts(each for each in self._unwritten if not each.record.ended),
            "served": self.queue.served,
            "idle": None if idle is None else round(idle, 1),
            "nodes": self.nodes.facts(),
            "ray_version": cluster.get("ray_version"),
            "address": cluster.get("ray_address"),
            "dashboard_url": cluster.get("dashboard_url"),
            "leaks": self._leaks.found,
            "time_left": self.lifetime.time_left(),
        }

    def schedule(self) -> None:
        """Start the waiting payloads that fit now, in turn. Give those for which the time is too short back to their clients."""
        left = self.lifetime.time_left()
        self._timers.cancel("late")
        for payload, why in self.queue.late(left):
            payload.end_early(End(EndReason.RETURNED, "the session gives the payload back unstarted: " + why))
        if left is not None and self.queue.waiting:
            self._timers.due("late", _LATE_INTERVAL, self.schedule)
        while self.lifetime.ending is None:
            started = self.queue.next(capacities_of(self.nodes.machines()), self._may_start)
            if started is None:
                break
            if not started.ended:  # A payload that was cancelled in the queue leaves it soon.
                self._begin(started)
        for place, payload in enumerate(self.queue.waiting, 1):
            if payload.place != place and self._may_start(payload):
                payload.place = place
                payload.phase("queued", "place %d in the queue of the Ray cluster %s" % (place, self.spec.cluster_id))

    def on_ready(self) -> None:
        """Called when the warm Ray cluster is complete: start payloads."""
        self.schedule()

    def on_phase(self, phase: str, message: str) -> None:
        """Called when something happens to the warm Ray cluster: write it to the Dagster log of each payload.

        That something cannot be scheduled is told to running payloads with Ray only.
        """
        for payload in self.payloads:
            if phase != UNSCHEDULABLE or (payload.spec.uses_ray and payload.pid is not None):
                payload.phase(phase, message)

    def on_node_lost(self, name: str) -> None:
        """Called when the Ray cluster has lost a worker node: payloads go on, but a session takes no more of them."""
        if self.lifetime.is_session:
            self.drain("node %s is lost" % name)

    def on_failed(self, error: ClusterError) -> None:
        """Called when the warm Ray cluster did not start or was lost: end all payloads and the runtime."""
        assert self.cluster is not None
        if self.lifetime.ending is not None:
            return  # The runtime is ending anyway, for instance because Slurm signals every process of the job.
        for name, text in self.cluster.log_tails().items():
            for payload in self.payloads:
                payload.tail(name, text)
            if not self.queue.served:  # No payload can report it; the runs that started the session read this node's log.
                print("rayslurm: the end of %s:\n%s" % (name, tail_lines(text)), file=sys.stderr)
        if not len(self.queue):
            self.hooks.cluster_lost(str(error))
        queued = End(error.reason, "the payload never started: " + str(error)) if self.cluster.ready else None
        self.close(End(error.reason, str(error)), LOST_GRACE, queued)

    def _ray_has_changed(self) -> bool:
        """Whether another version of Ray was installed in this Python's environment since this session started."""
        version = installed_version() if self._ray_version is not None else None
        return version is not None and version != self._ray_version

    def _claims(self, payload: Payload) -> Claims:
        fresh = self.clusters.is_fresh(payload.spec)
        return claims_of(payload.spec, fresh, capacities_of(self.nodes.machines()), self.nodes.machine.component)

    def _may_start(self, payload: Payload) -> bool:
        """Whether a payload could start if it had room: its Ray cluster is up, and the hooks permit the start."""
        return not self.clusters.waits(payload.spec) and self.hooks.may_start(payload)

    def _begin(self, payload: Payload) -> None:
        """Start a payload whose turn it is, as soon as its Ray cluster is up."""
        self._strays.begin(payload.spec.nonce)
        if self.clusters.is_fresh(payload.spec):
            where = self.nodes.in_words(payload.spec.ray)
            payload.phase("cluster-start", "starting a Ray cluster of the payload's own on %s" % where)

        def start(cluster: Optional[RayCluster]) -> None:
            payload.safely(lambda: self._start(payload, cluster))

        payload.safely(lambda: self.clusters.serve(payload, start))

    def _start(self, payload: Payload, cluster: Optional[RayCluster]) -> None:
        """Start the process of a payload whose Ray cluster is up."""
        messages = self._scratch.join("messages-%s.jsonl" % payload.spec.nonce)
        payload.context = self._context(payload, cluster)
        for other in self.queue.running:
            if other is not payload and other.pid is not None:
                other.companions.add(payload.spec.nonce)
                payload.companions.add(other.spec.nonce)
        OwnRayWatch(self.loop, payload, self.nodes.machine)
        if cluster is None:  # The payload uses only this node.
            return payload.start(LaunchContext(messages, self._gpus, foreign_pids=lambda: self._foreign_pids(payload)))
        is_warm = cluster is self.cluster
        payload.start(
            LaunchContext(
                messages,
                self._gpus,
                ray_env=cluster.environment,
                worker_env=self.spec.worker_env,
                ray_temp_dir=cluster.ray_temp_dir,
                shared_ray_pid=(lambda: cluster.pid) if is_warm and self.lifetime.is_session else None,
                workers=self.nodes.workers,
                foreign_pids=lambda: self._foreign_pids(payload),
                leak_check=self._leaks.at_end(payload.spec.nonce) if is_warm else None,
            )
        )

    def _context(self, payload: Payload, cluster: Optional[RayCluster]) -> Dict[str, Any]:
        """The facts for the `end` record about where a payload ran: node, Python, allocation and Ray cluster."""
        context: Dict[str, Any] = {
            "hostname": self.nodes.machine.hostname,
            "num_cpus": self.nodes.machine.num_cpus,
            "python": sys.executable,
            "python_version": sys.version.split()[0],
            "warm": self.queue.served > 1 and not self.clusters.is_fresh(payload.spec),
        }
        allocation = self._allocation_facts()
        if allocation is None:
            context["machine_cpus"] = count_cpus(os.environ)  # `num_cpus` may be simulated, and differ from this number.
        else:
            context["allocation"] = allocation
            only_here = cluster is None and self.lifetime.is_session  # A job without a session belongs wholly to its payload.
            machines = [self.nodes.machine] if only_here else self.nodes.machines()
            context["granted"] = [machine.facts() for machine in machines]
        if cluster is not None:
            context.update(cluster.facts(), kept_warm=self.lifetime.is_session and cluster is self.cluster)
        return context

    def _allocation_facts(self) -> Optional[Dict[str, Any]]:
        return self.nodes.allocation.facts() if self.nodes.allocation is not None else None

    def _foreign_pids(self, payload: Payload) -> List[int]:
        """Process ids on this node that, with all their descendants, do not belong to this payload."""
        drivers = [other.pid for other in self.queue.running if other is not payload and other.pid is not None]
        preloading = self._preload_server.pids() if self._preload_server is not None else []
        return drivers + preloading + self.clusters.foreign_pids(payload)

    def _ended(self, payload: Payload) -> None:
        self.exit_code = payload.ending.exit_code
        if not payload.record.ended:
            self._unwritten = [each for each in self._unwritten if not each.record.ended] + [payload]
        if self.spec.requeue and not payload.ending.terminated and self.spec.meeting is None:
            with contextlib.suppress(OSError, SpecError):
                take_secrets(payload.run_dir, keep=False)  # Slurm will not run this job again, so nobody needs them.
        self.queue.remove(payload)
        self.clusters.release(payload)
        self._strays.end(payload.spec.nonce)
        if not self.queue.running:
            self._leaks.check_when_idle(lambda: not self.queue.running)
        self.schedule()
        if not self.queue.running and self.closing is None and self.cluster is not None:
            self.cluster.prestart()  # Only when no payload runs, because new Ray workers take CPU time.
        self.lifetime.settle()

    def _handle_message(self, member: WorkerNode, message: Dict[str, Any]) -> None:
        """Called when a worker node sends a message: pass it to the Ray clusters, and report lack of memory and lost nodes."""
        self.clusters.handle(member, message)
        if message.get("event") == NodeEvent.MEMORY:
            self._report_memory(str(message["message"]), bool(message["killed"]))
        elif message.get("event") == NodeEvent.LOST:
            member.await_back(self.loop, lambda: self.on_node_lost(member.title))

    def _driver_pids(self) -> List[int]:
        return [payload.pid for payload in self.queue.running if payload.pid is not None]

    def _report_memory(self, message: str, killed: bool) -> None:
        """Report to running payloads that a node is nearly out of memory, and count the Ray workers killed while each ran."""
        for payload in self.queue.running:
            payload.phase("memory", message)
            if killed:
                payload.context["workers_killed"] = payload.context.get("workers_killed", 0) + 1

    def _refresh(self) -> None:
        """Update the times of the run directories now and then, so that no clean-up removes them."""
        for payload in self.payloads:
            payload.record.keep_fresh()
        self.loop.call_later(_REFRESH_INTERVAL, self._refresh)

    def _interrupted(self, signum: int) -> None:
        self._signalled = True
        again = self.lifetime.ending_for > _SAME_SIGNAL
        name = signal.Signals(signum).name
        workers = self.nodes.workers
        if workers is not None:
            # Worker nodes that got the same signal must stay until the payloads have ended.
            workers.send_command(workers.members, op=NodeCommand.ENDING)
        self.close(End(EndReason.TERMINATED, "the runtime received %s" % name), grace=0 if again else None)
        if not len(self.queue):
            self.hooks.interrupted(self.loop, signum)

    def _abort(self, error: BaseException) -> None:
        """End all payloads because the runtime itself has a defect, and write their `end` records."""
        end = defect(error)
        said = tail_lines(traceback.format_exc())
        self.lifetime.ending = "it has a defect: %s" % end.message
        for payload in self.payloads:
            with contextlib.suppress(Exception):  # The record may be what is broken.
                payload.tail("runtime traceback", said)
            payload.safely(functools.partial(payload.abandon, end))  # Another defect here must not stop the loop.
