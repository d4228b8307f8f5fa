"""The centre of the runtime on the first node: takes payloads from the queue, runs them with their Ray clusters, and ends them.

`queue` decides which payload starts and when the runtime ends. The runtime of a session gets its payloads from clients. The
runtime of a single payload gets this payload at its start. A runtime drains when it lets its present payloads finish and accepts
no more.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Optional

from ..node import local_copy, resources
from ..node.allocation import Allocation, head_address
from ..node.energy import StepEnergy, own_step
from ..node.memory import MemoryWatch
from ..node.resources import NodeResources, Share, count_cpus, footprint_error, may_need_gpus, named, runtime_footprint
from ..node.worker_nodes import WorkerNode, WorkerNodes
from ..payload.environment import fabric_in_words, payload_environment
from ..payload.payload import Payload
from ..payload.results import UsageMeasurement
from ..process import processes
from ..process.loop import Loop, Timers
from ..process.scratch import Scratch
from ..protocol.messages import ClusterError, End, EndReason, NodeCommand, NodeEvent, Unhealthy, defect
from ..protocol.record import PAYLOAD, RunRecord, node_log, tail_lines
from ..protocol.rpc import Message
from ..protocol.spec import PROTOCOL_VERSION, PayloadSpec, RaySpec, RuntimeSpec, SpecError, from_json, read_text, take_secrets
from ..ray.agent import NodeAgent, simulate
from ..ray.cluster import RayCluster
from ..ray.internals import installed_version
from ..ray.membership import CLUSTER_READY, UNSCHEDULABLE, Action, NodeLost, Say, nodes_expected
from ..ray.ray_node import granted_defaults
from .access import Relays, dashboard_hint, remove_access
from .queue import Closing, Misfit, Next, Queue, capacities_of, misfit

if TYPE_CHECKING:
    from ..payload.preload_server import PreloadServer

# Seconds between SIGTERM and SIGKILL for a payload whose Ray cluster was lost; `ray.init` may hang for 40 s (Ray 2.60).
_LOST_GRACE = 1.0
# Seconds within which a second signal counts as the same one: Slurm also signals the keeper process, which passes it on.
_SAME_SIGNAL = 1.0
_END_TIMEOUT = 5.0  # Seconds at this runtime's end for which it tries again to write `end` records.
# Seconds at this runtime's end for which it waits for worker nodes that have not connected yet, because only it can stop them.
# After a signal it does not wait, because Slurm sends the signal to those nodes as well.
_LATE_NODES = 15.0
_LATE_INTERVAL = 5.0  # Seconds between two checks whether there is enough time left for the waiting payloads.
_MOST_NAMES = 8  # Most nodes that one message in the Dagster log names.


@dataclass(eq=False)
class Supervisor:
    """Queues and runs the payloads of one runtime, on the first node of its allocation or on this machine.

    The start record `spec` (`runtime.json`) may describe a Ray cluster, the warm cluster, which stays up for all payloads. If it
    describes none, each payload that uses Ray gets a Ray cluster of its own. `submit` queues a payload; `run` blocks until the
    runtime ends.
    """

    loop: Loop
    spec: RuntimeSpec
    scratch: Scratch  # The private directory of this runtime.
    allocation: Optional[Allocation] = None  # The Slurm step of which this node is the first; None without Slurm.
    log_dir: str = ""  # The directory in which the nodes of the allocation write their logs; not used without Slurm.
    here: Optional[NodeResources] = None  # The resources of this node; None to detect them.
    # Exit code of the payload that ended last. This process exits with the same code, so that Slurm's accounting shows it.
    exit_code: int = 0
    cluster: Optional[RayCluster] = None  # The warm cluster; None if payloads have their own.
    time_left: Callable[[], Optional[float]] = lambda: None  # Seconds until the allocation's time limit, if it is known.
    on_ready: Callable[[], None] = lambda: None  # Called when the warm cluster is up, before its first payload starts.
    # Whether a payload may start now; called only if the warm cluster is up or not needed. A function that returns False must
    # call `schedule` as soon as the payload may start.
    may_start: Callable[[Payload], bool] = lambda _: True

    def __post_init__(self) -> None:
        loop, spec, allocation = self.loop, self.spec, self.allocation
        # Called when the last payload has ended and no other will come, and when a signal arrives while there is no payload. Both
        # end the runtime; with `topology="separate"`, the module `separate.participant` replaces them.
        self.on_finished: Callable[[], None] = loop.stop
        self.on_interrupted: Callable[[int], None] = lambda _: loop.stop()
        # The resources of this node.
        self.machine = resources.detect(with_gpus=may_need_gpus(spec)) if self.here is None else self.here
        # The share of this machine's resources that each simulated node gets, the head's first; empty if no nodes are simulated.
        self._shares: List[Share] = []
        self.workers = WorkerNodes(loop, {}, self._handle_message, self._log_path)  # The other nodes.
        self._address: Optional[str] = None  # This node's address for the worker nodes; None if Ray finds the address.
        environ: Mapping[str, Optional[str]] = {}  # Variables for Ray's daemons; None removes a variable.
        if allocation is not None:
            self._address = head_address(allocation)
            self.machine = replace(self.machine, component=allocation.component_of(0))
            for place, name in list(enumerate(allocation.nodes))[1:]:
                self.workers.members[place] = WorkerNode(place, name, allocation.component_of(place))
            if self.workers.members:
                assert spec.control_key is not None
                self.workers.listen(spec.control_key, spec.control_ports)
        elif spec.components or (spec.ray is not None and spec.ray.simulate):
            self._shares = shares = resources.simulated_shares(spec, self.machine)
            self.machine, environ, _ = shares[0]
            if spec.components:
                self._address, self.spec = "127.0.0.1", simulate(self.workers, spec, shares, self.scratch)
        self.relays = Relays(loop, self.spec, self.machine.hostname, allocation)
        shared = self.log_dir if allocation is not None else None
        self.agent = NodeAgent(loop, self.spec, self.machine, self.scratch, environ, shared=shared)
        self.is_session = spec.idle_timeout is not None
        self.queue = Queue(
            spec.max_concurrent_payloads, spec.drain_margin, spec.idle_timeout, allocation is not None, idle_since=loop.now()
        )
        self._fresh: Dict[str, RayCluster] = {}  # The payloads' own Ray clusters, by the payload's nonce.
        self._unhealthy: List[Unhealthy] = []  # Nodes that failed the health check of a payload's own Ray cluster.
        self.unrecorded: List[Payload] = []  # All payloads whose `end` record is not written yet, and perhaps others.
        self._remarks = local_copy.Remarks(self.name)
        self._signalled_at: Optional[float] = None  # When this runtime received its first signal.
        self._timers = Timers(loop)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.on_signal(signum, self._interrupted)
        self._preload_server: Optional[PreloadServer] = None
        if self.is_session:
            from ..payload.preload_server import PreloadServer

            self._preload_server = PreloadServer(loop, self.scratch.join("preload"))
        self._ray_version = installed_version() if self.is_session else None
        if spec.ray is not None:
            self.cluster = RayCluster(self.agent, self.workers, self._address, self._handle_cluster)
        if allocation is not None:
            MemoryWatch(loop, self.machine.name, self.agent.guarded_pids, self._driver_pids, self._report_memory)
        step = own_step(os.environ)
        # The step of a session serves many payloads.
        self._energy = StepEnergy(loop, step) if allocation is not None and step is not None and not self.is_session else None

    def _log_path(self, place: int) -> str:  # Simulated nodes have no log of their own.
        return "" if self.allocation is None else os.path.join(self.log_dir, node_log(self.allocation.first + place))

    @property
    def payloads(self) -> List[Payload]:
        """The waiting and the running payloads."""
        return [entry.payload for entry in (*self.queue.waiting, *self.queue.running)]

    @property
    def unhealthy(self) -> List[Unhealthy]:
        """The nodes that failed a health check, each as a dictionary with `node`, `check` and `found`.

        With a warm Ray cluster, these are its nodes that failed. Without one, these are the nodes that failed while a payload's
        own Ray cluster started; a session accepts no further payloads after that. The list is empty if no node failed.
        """
        return self._unhealthy if self.cluster is None else self.cluster.unhealthy

    @property
    def machines(self) -> List[NodeResources]:
        """The resources of each node that has connected so far, the head first."""
        machines = [member.machine for member in self.workers.members.values()]
        return [self.machine, *(machine for machine in machines if machine is not None)]

    @property
    def _running(self) -> List[Payload]:
        return [entry.payload for entry in self.queue.running]

    @property
    def _clusters(self) -> List[RayCluster]:
        return [*([] if self.cluster is None else [self.cluster]), *self._fresh.values()]

    # ---- From the start to the end of the runtime

    def run(self) -> None:
        """Run payloads, and block until the runtime must end; then end every process that the runtime started, on all nodes.

        If the runtime itself fails, the payloads end with the reason RUNTIME, and the exception is raised.
        """
        preload_server, cluster = self._preload_server, self.cluster
        try:
            if cluster is not None:
                cluster.start()
            if preload_server is not None:
                ray_env = cluster.environment if cluster is not None else None
                preload_server.preload(self.spec.preload, ray_env, self._payload_environ(dict(os.environ)))
            problem = footprint_error(runtime_footprint(self.spec, self.machine.component), self.machine)
            if problem and cluster is None:
                self.close(End(EndReason.ALLOCATION, problem))
            self.settle()
            self.loop.run()
        except BaseException as error:
            self.queue = replace(self.queue, ending="it has a defect: %s" % defect(error).message)
            for payload in self.payloads:  # A client must not wait for an `end` that is never written.
                with contextlib.suppress(Exception):  # The record may be what is broken.
                    payload.fail(error)
            raise
        finally:
            for each in self._clusters:
                each.end()
            if preload_server is not None:
                preload_server.close()
            self.workers.dismiss()
            processes.kill_descendants(os.getpid(), collect=self.loop.reap)
            deadline = self.loop.now() + _END_TIMEOUT
            while [each for each in self.unrecorded if not each.write_end()] and self.loop.now() < deadline:
                time.sleep(_END_TIMEOUT / 10)
            self.scratch.remove()
            self.workers.wait_gone(_LATE_NODES if self._signalled_at is None else 0.0)

    def close(self, end: End, grace: Optional[float] = None, queued: Optional[End] = None) -> None:
        """Accept no more payloads, begin to end the present payloads, and end the runtime when all have ended. Does not block.

        Args:
            end: The reason for the end of the running payloads.
            grace: Seconds from SIGTERM to SIGKILL; None for each payload's own grace period.
            queued: The reason for the end of the waiting payloads; None for the same reason as `end`. But if `end` is the time
                limit and `queued` is None, waiting payloads are returned to their clients, which may run them elsewhere.
        """
        self.queue = self.queue.ended_by(end)
        if end.reason == EndReason.TIMEOUT and queued is None:
            queued = End(EndReason.RETURNED, "%s before the payload's turn came" % end.message)
        running = self._running
        for payload in self.payloads:
            payload.end_early(end if payload in running else queued or end, grace)
        self.settle()

    def drain(self, why: str) -> None:
        """Accept no more payloads from now on, and end the runtime when the present payloads have finished. Does not block.

        Waiting payloads still run. `why` is the reason for clients and for the payloads' logs. If the runtime already refuses
        new payloads, the call has no effect.
        """
        if self.queue.closing is None:
            self.queue = replace(self.queue, draining=why)
            for payload in self.payloads:
                payload.phase("drain", "the runtime takes no more payloads: " + why)
            self.settle()

    def give_way(self) -> bool:
        """End the session if it is idle, so that another Slurm job of its user gets the nodes; return whether it ends.

        The session must have served a payload and then been idle for some seconds (`Queue.may_give_way`); otherwise nothing
        changes. Clients request this if another job of the session's user waits for nodes.
        """
        ends = self.queue.may_give_way(self.loop.now())
        if ends and self.queue.ending is None:
            self.close(End(EndReason.CANCEL, "it was idle, and another job of its user waits for its nodes"))
        return ends

    def settle(self) -> None:
        """If this runtime has no payload, end it, at once or later; if it has a payload, do nothing.

        A session that accepts payloads ends after its idle timeout, unless a payload comes before. A runtime without idle
        timeout whose first payload has not come yet goes on. `Queue.settled` decides this. Must be called after each change
        that may leave the runtime without payloads.
        """
        self.queue, then = self.queue.settled(self.loop.now())
        what, delay = then or (None, 0.0)
        if what == Next.FINISH:
            self.on_finished()
        elif what == Next.STOP:
            self.loop.call_later(delay, self.loop.stop)
        elif what == Next.IDLE:
            self._timers.due("idle", delay, lambda: self.close(End(EndReason.CANCEL, "it was idle for %g s" % delay)))

    def _interrupted(self, signum: int) -> None:
        """Handle the signal `signum`: begin to end all payloads, with their grace periods, and then the runtime.

        At a second signal, more than `_SAME_SIGNAL` seconds after the first, kill the payloads without a grace period.
        """
        now = self.loop.now()
        again = self._signalled_at is not None and now - self._signalled_at > _SAME_SIGNAL
        if self._signalled_at is None:
            self._signalled_at = now
        # Worker nodes that got the same signal must stay until the payloads have ended.
        self.workers.send_command(self.workers.members, op=NodeCommand.ENDING)
        why = "the runtime received %s" % signal.Signals(signum).name
        self.close(End(EndReason.TERMINATED, why), grace=0 if again else None)
        if not self.payloads:
            self.on_interrupted(signum)

    # ---- From the start to the end of a payload

    def submit(self, run_dir: str, environ: Optional[Dict[str, str]] = None) -> Payload:
        """Queue the payload of a run directory and return it; the payload starts during this call if its turn has come.

        The payload's environment is based on `environ`; None stands for the environment of this process. Raises `Closing` if the
        runtime accepts no more payloads or has too little time left, and `Misfit` if the payload needs more than the nodes have.
        Raises SpecError if the payload's specification is not valid, and OSError if the run directory cannot be read or written.
        """
        version = self._ray_version
        if self.queue.closing is None and version is not None and (installed_version() or version) != version:
            self.drain("the environment's Ray has changed")
        if self.queue.closing is not None:
            raise Closing(self.queue.closing)
        spec = from_json(PayloadSpec, read_text(os.path.join(run_dir, PAYLOAD)))
        problem = misfit(spec, self.machines)
        if problem:
            raise Misfit(problem)
        late = self.queue.refusal(spec, self.time_left(), self.loop.now())
        if late:
            raise Closing(late)  # The runtime stays open for other payloads, which may take less time.
        attempt = self.allocation.restarts if self.allocation is not None else 0
        record = RunRecord(run_dir, spec.max_stdio_bytes, attempt)
        try:
            secrets = take_secrets(run_dir, keep=self.spec.requeue)
        except BaseException:
            record.withdraw()
            raise
        environ = self._payload_environ(environ or dict(os.environ))
        payload = Payload(self.loop, run_dir, spec, secrets, record, environ, self._preload_server)
        payload.on_ended.append(lambda: self._ended(payload))
        payload.archive_logs = functools.partial(self._archive_logs, payload)
        if self._energy is not None:
            payload.query_energy = self._energy.query
        self.unrecorded = [each for each in self.unrecorded if not each.files.ended] + [payload]
        self.queue = self.queue.added(payload, self._is_fresh(spec), self.loop.now())
        self._timers.cancel("idle")
        start = {"type": "start", "nonce": spec.nonce, "attempt": attempt, "protocol": PROTOCOL_VERSION, "at": time.time()}
        start.update(cluster_id=self.spec.cluster_id, hostname=self.machine.hostname, pid=os.getpid())
        start.update(python=sys.version.split()[0], allocation=self.allocation and self.allocation.facts())
        payload.keep(start)
        if self._waits(spec):
            where = self._in_words(self.spec.ray)
            payload.phase("cluster-start", "starting the Ray cluster %s on %s" % (self.spec.cluster_id, where))
        elif self.cluster is not None and spec.uses_ray:
            said = "the warm Ray cluster %s is up" % self.spec.cluster_id
            payload.phase(CLUSTER_READY, said + dashboard_hint(payload, self.cluster))
        for share in self._shares if spec.uses_ray else self._shares[:1]:
            if share.remark:
                payload.phase("cluster-start", share.remark)
        for remark in self._remarks.said:
            payload.phase(*remark)
        for leak in self.cluster.leaks if self.cluster is not None else ():
            payload.phase("leaks", "left in the Ray cluster by payloads before: " + leak)
        self.schedule()
        return payload

    def schedule(self) -> None:
        """Start the waiting payloads that fit on the nodes now, in the order of the queue; the others go on waiting.

        Waiting payloads that can no longer finish before the time limit end unstarted, so that their clients run them elsewhere.
        """
        left = self.time_left()
        self._timers.cancel("late")
        for payload, why in self.queue.late(left):
            payload.end_early(End(EndReason.RETURNED, "the session gives the payload back unstarted: " + why))
        if left is not None and self.queue.arrived:
            self._timers.due("late", _LATE_INTERVAL, self.schedule)
        while True:
            self.queue, started = self.queue.start_next(capacities_of(self.machines), self._may_start, self.loop.now())
            if started is None:
                break
            if not started.ended:  # A payload that was cancelled in the queue leaves it soon.
                started.safely(functools.partial(self._begin, started))
        for place, entry in enumerate(self.queue.waiting, 1):
            payload = entry.payload
            if payload.place != place and self._may_start(payload):
                payload.place = place
                payload.phase("queued", "place %d in the queue of the Ray cluster %s" % (place, self.spec.cluster_id))

    def _is_fresh(self, spec: PayloadSpec) -> bool:
        """Whether a payload gets a new Ray cluster of its own instead of the warm cluster."""
        return self.cluster is None and spec.ray is not None

    def _waits(self, spec: PayloadSpec) -> bool:
        """Whether a payload must wait until the warm Ray cluster is up."""
        return self.cluster is not None and spec.uses_ray and not self.cluster.ready

    def _may_start(self, payload: Payload) -> bool:
        return not self._waits(payload.spec) and self.may_start(payload)

    def _begin(self, payload: Payload) -> None:
        """Begin a payload whose turn it is: start its process, or first its own Ray cluster if it gets one.

        If the payload gets its own Ray cluster, `_start` starts the process later, when this Ray cluster is up.
        """
        self.agent.strays.begin(payload.spec.nonce)
        if not self._is_fresh(payload.spec):
            return self._start(payload, self.cluster if payload.spec.uses_ray else None)
        where = self._in_words(payload.spec.ray)
        payload.phase("cluster-start", "starting a Ray cluster of the payload's own on %s" % where)
        key = payload.spec.nonce
        try:
            cluster = RayCluster(self.agent, self.workers, self._address, self._handle_cluster, payload.spec.ray, key)
        except OSError as error:
            return payload.end_early(End(EndReason.CLUSTER_START, "no directory for its cluster: %s" % error))
        self._fresh[key] = cluster
        cluster.start()

    def _start(self, payload: Payload, cluster: Optional[RayCluster]) -> None:
        """Start the process of a payload.

        `cluster` is the payload's Ray cluster, which is up, or None for a payload without Ray.
        """
        payload.context = self._context(payload, cluster)
        for other in self._running:
            if other is not payload and other.pid is not None:
                other.companions.add(payload.spec.nonce)
                payload.companions.add(other.spec.nonce)
        spec, is_warm = payload.spec, cluster is not None and cluster is self.cluster
        messages = self.scratch.join("messages-%s.jsonl" % spec.nonce)
        ray_env, worker_env = ({}, {}) if cluster is None else (cluster.environment, self.spec.worker_env)
        fabric = fabric_in_words(spec, payload.environ)
        if fabric:
            payload.phase("fabric", fabric)
        if cluster is not None:
            self.relays.write(payload.run_dir, cluster)
        env = payload_environment(spec, payload.environ, sys.executable, payload.run_dir, messages, ray_env, worker_env)
        shared, workers = is_warm and self.is_session, self.workers if self.workers.members and cluster is not None else None
        sampler = self.agent.sampler(spec.nonce, cluster is not None, shared, lambda: self._foreign_pids(payload))
        check_ray = functools.partial(payload.check_own_ray, self.machine)
        measurement = UsageMeasurement(spec.nonce, sampler, payload.note, check_ray, workers)
        payload.start(env, messages, measurement, cluster.leak_check(spec.nonce) if cluster is not None and is_warm else None)

    def _archive_logs(self, payload: Payload, done: Callable[[], None]) -> None:
        """Archive the logs of a failed payload's Ray cluster in the payload's run directory; call `done` once after that.

        Does not block. Two kinds of payloads have nothing to archive: those without a Ray cluster, and those in a session that
        never left the queue. For these, `done` is called immediately.
        """
        cluster = self._fresh.get(payload.spec.nonce) or (self.cluster if payload.spec.uses_ray else None)
        if cluster is None or (self.is_session and payload not in self._running):
            return done()  # Many payloads may wait in a session, and the session's logs are the same for all of them.
        names: List[str] = []
        payload.context["ray_logs"] = names
        cluster.archive_logs(payload.run_dir, names, done)

    def _ended(self, payload: Payload) -> None:
        self.exit_code = payload.ending.exit_code
        if self.spec.requeue and not payload.ending.terminated and self.spec.meeting is None:
            with contextlib.suppress(OSError, SpecError):
                take_secrets(payload.run_dir, keep=False)  # Slurm will not run this job again, so nobody needs them.
        remove_access(payload.run_dir)
        self.queue = self.queue.removed(payload, payload.ending.ran_to_exit, self.loop.now())
        cluster = self._fresh.pop(payload.spec.nonce, None)
        if cluster is not None:
            cluster.stop()
        self.agent.strays.end(payload.spec.nonce)
        if not self.queue.running and self.cluster is not None:
            self.cluster.check_when_idle(lambda: not self.queue.running)
        self.schedule()
        if not self.queue.running and self.queue.closing is None and self.cluster is not None:
            self.cluster.prestart()  # Only when no payload runs, because new Ray workers take CPU time.
        self.settle()

    # ---- Events of the Ray clusters and of the nodes

    def _handle_cluster(self, cluster: RayCluster, action: Action) -> None:
        """React to `action`, which a Ray cluster reports: log it, and start or end the payloads that use this Ray cluster.

        `action` is a text for the log, the loss of a node, the failure of the Ray cluster, or the report that the cluster is up.
        `cluster` is the warm Ray cluster or a payload's own cluster.
        """
        is_warm = cluster is self.cluster
        payloads = self.payloads if is_warm else [each for each in self._running if each.spec.nonce == cluster.key]
        if isinstance(action, Say) and action.phase == UNSCHEDULABLE:
            self._report_demand(cluster, [each for each in payloads if each.spec.uses_ray and each.pid is not None], action)
        elif isinstance(action, Say):
            for payload in payloads:
                hint = dashboard_hint(payload, cluster) if action.phase == CLUSTER_READY else ""
                payload.phase(action.phase, action.message + hint)
        elif isinstance(action, NodeLost):
            if is_warm:  # A payload's next cluster of its own may have the node again.
                self._lose_node(action.title)
        elif isinstance(action, ClusterError):
            self._lose_cluster(cluster, payloads, action)
        elif is_warm:
            self.on_ready()
            self.schedule()
        else:
            for payload in payloads:
                if not payload.ended:
                    payload.safely(functools.partial(self._start, payload, cluster))

    def _report_demand(self, cluster: RayCluster, payloads: List[Payload], said: Say) -> None:
        """Log `said`, a text about resources that Ray tasks wait for and `cluster` can never grant, in the logs of `payloads`.

        The payload is ended if three conditions hold: it is the only one in `payloads`, its setting `fails_infeasible` is True,
        and no further node of the Ray cluster is expected.
        """
        for payload in payloads:
            payload.phase(*said)
        # A node that joins later may have what is asked for; if it has not, the demand is reported again.
        if len(payloads) == 1 and payloads[0].spec.fails_infeasible and cluster.complete:
            payloads[0].end_early(End(EndReason.INFEASIBLE, said.message))

    def _lose_node(self, name: str) -> None:
        """Handle the loss of the worker node `name`: a session drains, and any other runtime goes on."""
        if self.is_session:
            self.drain("node %s is lost" % name)

    def _lose_cluster(self, cluster: RayCluster, payloads: List[Payload], error: ClusterError) -> None:
        """Handle the failure `error` of a Ray cluster that did not start or was lost: end its `payloads`.

        If it is the warm Ray cluster, the runtime ends too; but a runtime that is already ending does nothing. If nodes of a
        payload's own Ray cluster failed a health check, and the payload's setting `leaves_unhealthy` is True, a session drains.
        """
        is_warm, end = cluster is self.cluster, End(error.reason, str(error))
        if is_warm and self.queue.ending is not None:
            return  # The runtime is ending anyway, for instance because Slurm signals every process of the job.
        for payload in payloads:
            payload.context["unhealthy"] = cluster.unhealthy
        for name, text in cluster.log_tails().items():
            for payload in payloads:
                payload.tail(name, text)
            if not self.queue.served:  # No payload can report it; the runs that started the session read this node's log.
                print("rayslurm: the end of %s:\n%s" % (name, tail_lines(text)), file=sys.stderr)
        if is_warm:
            never = End(error.reason, "the payload never started: " + str(error)) if cluster.ready else None
            return self.close(end, _LOST_GRACE, never)
        for payload in payloads:
            payload.end_early(end, _LOST_GRACE)
        if cluster.unhealthy and self.is_session and any(payload.spec.leaves_unhealthy for payload in payloads):
            self._unhealthy = cluster.unhealthy
            self.drain("%s failed a health check" % ", ".join(each["node"] for each in cluster.unhealthy))

    def _handle_message(self, member: WorkerNode, message: Message) -> None:
        """Pass a message of the worker node `member` to all Ray clusters, and react to three kinds of messages.

        These say that the node is nearly out of memory, that the node is lost, or that the node has joined. The last kind may
        have a remark about the node's copy of the environment.
        """
        for cluster in self._clusters:
            cluster.handle(member, message)
        if message.get("event") == NodeEvent.MEMORY:
            self._report_memory(str(message["message"]), bool(message["killed"]))
        elif message.get("event") == NodeEvent.GONE:
            self._lose_node(member.title)
        elif message.get("event") == NodeEvent.JOINED:
            said = self._remarks.add(member.title, message.get("remark"))
            if said is not None:
                for payload in self.payloads:
                    payload.phase(*said)

    def _report_memory(self, message: str, killed: bool) -> None:
        """Write `message`, which says that a node is nearly out of memory, to the logs of all running payloads.

        `killed` is True if a Ray worker was killed to free memory. The number of killed workers is part of the `end` record of
        each payload that ran then.
        """
        for payload in self._running:
            payload.phase("memory", message)
            if killed:
                payload.context["workers_killed"] = payload.context.get("workers_killed", 0) + 1

    # ---- Facts

    def _context(self, payload: Payload, cluster: Optional[RayCluster]) -> Dict[str, Any]:
        """Returns facts for the run record of a payload, as a dictionary for JSON: host, Python, granted nodes and Ray cluster.

        The run record has the dictionary in its `context` and `end` lines. `cluster` is the Ray cluster that the payload uses;
        None for a payload without Ray.
        """
        context: Dict[str, Any] = {
            "hostname": self.machine.hostname,
            "num_cpus": self.machine.num_cpus,
            "python": sys.executable,
            "python_version": sys.version.split()[0],
            "warm": self.queue.served > 1 and not self._is_fresh(payload.spec),
        }
        if self.allocation is None:
            context["machine_cpus"] = count_cpus(os.environ)  # `num_cpus` may be simulated, and differ from this number.
        else:
            only_here = cluster is None and self.is_session  # A job without a session belongs wholly to its payload.
            granted = [machine.facts() for machine in ([self.machine] if only_here else self.machines)]
            context.update(allocation=self.allocation.facts(), granted=granted)
        if cluster is not None:
            context.update(cluster.facts(), kept_warm=self.is_session and cluster is self.cluster)
        return context

    def _payload_environ(self, environ: Dict[str, str]) -> Dict[str, str]:
        """Returns `environ` with variables that limit a payload to its share of this node.

        In a Slurm allocation, the variables limit the CPUs and the memory of a Ray cluster that the payload starts by
        `ray.init`; `environ` takes precedence over them. In local mode with simulated resources, the variables limit the GPUs
        to those of the head's share, and take precedence over `environ`.
        """
        if self.allocation is not None:
            environ = {**granted_defaults(self.machine), **environ}
        own = {**environ, **(self._shares[0].environ if self._shares else {})}  # Payloads see the GPUs of the head's component.
        return {name: value for name, value in own.items() if value is not None}

    @property
    def name(self) -> str:
        """The name of the head node: its name in Slurm, or the host name without Slurm."""
        return self.machine.hostname if self.allocation is None else self.allocation.nodes[0]

    def _in_words(self, ray: Optional[RaySpec]) -> str:
        """Returns the names of the nodes that a Ray cluster with the settings `ray` will have, such as "2 nodes: c1, c2".

        If `ray` is None, the text has all nodes of the runtime. At most `_MOST_NAMES` nodes are named; "…" stands for the others.
        """
        names = [named(self.name, self.machine.component), *(member.title for member in self.workers.members.values())]
        names = names if ray is None else names[: nodes_expected(ray, len(names))]
        more = ["…"] * (len(names) > _MOST_NAMES)
        return names[0] if len(names) == 1 else "%d nodes: %s" % (len(names), ", ".join(names[:_MOST_NAMES] + more))

    # ---- Processes

    def _driver_pids(self) -> List[int]:
        return [payload.pid for payload in self._running if payload.pid is not None]

    def _foreign_pids(self, payload: Payload) -> List[int]:
        """Returns the ids of processes that, with all processes below them, do not count for the usage of `payload`.

        These are other payloads, simulated nodes, relays, and preload processes, which import modules in advance for payloads.
        """
        preloading = [] if self._preload_server is None else self._preload_server.pids()
        return [*(pid for pid in self._driver_pids() if pid != payload.pid), *preloading, *self.workers.pids, *self.relays.pids]
