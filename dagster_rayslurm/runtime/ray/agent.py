"""The agent on each node of a Ray cluster: the agent starts and ends Ray on its node, and measures payloads.

On the head, `node.worker_nodes` represents the worker nodes. On each worker node, the runtime is a `Worker`, which connects the
node's agent to the head. In local mode, this machine simulates the nodes of other components (`SimulatedNode`); their agents run
in the head's own runtime.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from dataclasses import dataclass, field, replace
from typing import Callable, Dict, List, Mapping, Optional

from ..node import health, local_copy, resources
from ..node.allocation import Allocation
from ..node.log_archive import archive_name
from ..node.memory import MemoryWatch
from ..node.resources import NodeResources, Share, named
from ..node.usage import GpuMonitor, RayJobs, UsageSampler, logs_of
from ..node.worker_nodes import WorkerNode, WorkerNodes
from ..process import processes
from ..process.loop import Loop
from ..process.processes import StrayProcesses, query_program
from ..process.scratch import Scratch
from ..protocol.messages import ClusterError, EndReason, NodeCommand, NodeEvent
from ..protocol.rpc import HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT, Channel, Listener, Message, RpcClient, all_addresses
from ..protocol.spec import RaySpec, RuntimeSpec, from_fields
from .membership import Event, Report
from .ray_node import ClusterDir, RayNode

ARCHIVE_TIMEOUT = 5.0  # Seconds in which an archive of Ray's logs must be written.


@dataclass(eq=False)
class NodeAgent:
    """Runs Ray and measures payloads on one node, for one or several Ray clusters.

    The head's runtime calls the agent of its own node directly; the agent of a worker node carries out the head's commands
    (`handle`). The agent of a simulated node runs in the head's runtime. It measures only the processes of its own Ray, and
    leaves stray processes, which payloads have left behind, to the agent of the head.
    """

    loop: Loop
    spec: RuntimeSpec
    machine: NodeResources
    scratch: Scratch
    environ: Mapping[str, Optional[str]] = field(default_factory=dict)  # For Ray's daemons; None removes a variable.
    send: Callable[..., None] = lambda **_: None  # Sends an event of this worker node to the head; does nothing on the head.
    simulated: bool = False
    shared: Optional[str] = None  # A directory on the file system that all nodes share; None in local mode.

    def __post_init__(self) -> None:
        self.rays: Dict[str, RayNode] = {}  # Ray on this node, by the key of its cluster.
        self.strays = StrayProcesses(self.loop)
        self._gpus = GpuMonitor(self.loop)
        self._attempts: Dict[str, int] = {}  # The attempt that the head has commanded last, by the key of the cluster.
        self._failures: Dict[str, Message] = {}  # The event by which a failure of that attempt was reported.
        self._samplers: Dict[str, UsageSampler] = {}

    def pids(self, chosen: Callable[[RayNode], bool] = lambda _: True) -> List[int]:
        """Returns one process id for each Ray cluster that runs on this node: the id of the common ancestor of its processes.

        The result leaves out a Ray cluster if `chosen` returns False for its `RayNode`.
        """
        return [ray.pid for ray in self.rays.values() if ray.pid is not None and chosen(ray)]

    def guarded_pids(self) -> List[int]:
        """Returns the result of `pids` for the Ray clusters whose workers may be killed when the node's memory is nearly full."""
        return self.pids(lambda ray: ray.cluster.memory_guard)

    def prepare_ray(self, spec: RaySpec, key: str, nodes: int, on_event: Callable[[Event], None]) -> RayNode:
        """Create the `RayNode` that runs Ray for a Ray cluster on this node, without starting Ray yet.

        An earlier `RayNode` of the same Ray cluster is ended. `spec` has the settings of the Ray cluster, and `nodes` is its
        number of nodes when it is complete. `key` is "" for the warm Ray cluster, and the payload's nonce for a payload's own.
        `on_event` is called with each report about Ray on this node. Raises OSError if no directory can be made for the Ray
        cluster.
        """
        before = self.rays.get(key)
        if before is not None:
            before.end()
            scratch = before.scratch
        else:
            scratch = ClusterDir(self.scratch) if key or self.simulated else self.scratch
        ray = RayNode(self.loop, self.spec, spec, key, self.machine, scratch, nodes, on_event, self.environ, self.shared)
        self.rays[key] = ray
        return ray

    def end_ray(self, key: str) -> None:
        """Kill Ray on this node for the Ray cluster with the key `key`; without such a Ray cluster, do nothing.

        `key` is "" for the warm Ray cluster, and the payload's nonce for a payload's own. The directory of a payload's own Ray
        cluster is removed soon after.
        """
        ray = self.rays.pop(key, None)
        if ray is not None:
            ray.end()
            if isinstance(ray.scratch, ClusterDir):
                ray.scratch.remove_later(self.loop)

    def end(self) -> None:
        """Kill Ray on this node, for all Ray clusters; their directories stay."""
        for ray in self.rays.values():
            ray.end()

    def sampler(self, nonce: str, uses_ray: bool, shared: bool, foreign: Callable[[], List[int]] = list) -> UsageSampler:
        """Begin to measure a payload on this node; returns the sampler, whose `stop` ends the measurement and returns the usage.

        All processes of this runtime count, except the Ray clusters of other payloads and the processes whose ids `foreign`
        returns. `nonce` is the random name of the payload. `uses_ray` tells whether the payload uses a Ray cluster, and
        `shared` tells whether several payloads share this Ray cluster; then only the Ray jobs of this payload count.
        """
        own = (nonce if nonce in self.rays else "") if uses_ray else None
        ray = None if own is None else self.rays.get(own)
        temp_dir = None if ray is None else ray.scratch.ray_temp_dir
        jobs = RayJobs(logs_of(temp_dir), lambda: None if ray is None else ray.pid) if shared and temp_dir is not None else None
        roots = (lambda: self.pids(lambda each: each.key == own)) if self.simulated else None
        excluded: Callable[[], List[int]] = lambda: [*foreign(), *self.pids(lambda each: each.key != own)]  # noqa: E731
        return UsageSampler(self.loop, self._gpus, temp_dir, excluded, roots, jobs)

    def archive_logs(self, key: str, run_dir: str, done: Callable[[Optional[str]], None]) -> None:
        """Archive the logs of a Ray cluster on this node into the run directory `run_dir`, in another process. Does not block.

        `key` is "" for the warm Ray cluster, and the payload's nonce for a payload's own. `done` is called once, with the file
        name of the archive, or with None if there are no logs or if the archive cannot be written in time.
        """
        name = archive_name(named(health.node_name(os.environ), self.machine.component))
        logs = logs_of(self.rays[key].scratch.ray_temp_dir) if key in self.rays else ""
        if not os.path.isdir(logs):
            return done(None)
        program = [sys.executable, sys.argv[0], "archive", logs, os.path.join(run_dir, name)]
        try:
            query_program(self.loop, program, ARCHIVE_TIMEOUT, lambda said: done(None if said is None else name))
        except OSError:
            done(None)

    # ---- The head's commands to a worker node

    def log(self, text: str) -> None:
        """Write a line to the node's log; if the node fails, the head shows the last lines of the log."""
        print("rayslurm on %s: %s" % (self.machine.name, text), file=sys.stderr, flush=True)

    def handle(self, command: Message) -> None:
        """Carry out a command of the head (`NodeCommand`) on this worker node; an unknown command is ignored.

        If Ray cannot be started, the agent reports the failure to the head.
        """
        op = command.get("op")
        if op == NodeCommand.START_RAY:
            try:
                self._start_ray(command)
            except Exception as error:
                traceback.print_exc()
                message = "node %s: %s: %s" % (self.machine.name, type(error).__name__, error)
                self.send(**self._failure(command, ClusterError(EndReason.CLUSTER_START, message), {}))
        elif op == NodeCommand.END_RAY:
            self.end_ray(command["cluster"])
            self.send(event=NodeEvent.RAY_ENDED, cluster=command["cluster"])
        elif op == NodeCommand.MEASURE:
            self._measure(command["id"], command["jobs"])
        elif op == NodeCommand.REPORT:
            sampler = self._samplers.pop(command["id"], None)
            self.send(event=NodeEvent.USAGE, id=command["id"], usage=None if sampler is None else sampler.stop())
            if not self.simulated:
                self.strays.end(command["id"])
        elif op == NodeCommand.ARCHIVE:
            run_dir = command["run_dir"]
            answer = {"event": NodeEvent.ARCHIVED, "cluster": command["cluster"], "run_dir": run_dir}
            self.archive_logs(command["cluster"], run_dir, lambda name: self.send(name=name, **answer))
        elif op == NodeCommand.STOP:
            self.end()

    def _failure(self, command: Message, error: ClusterError, tails: Mapping[str, str]) -> Message:
        """Log the failure `error` of Ray on this node, and return the event by which the caller reports it to the head.

        `command` is the command by which Ray was started, and `tails` has the last lines of Ray's logs by name of log.
        """
        self.log(str(error))
        what = {"cluster": command["cluster"], "attempt": command["attempt"], "tails": dict(tails)}
        said = {"reason": error.reason, "message": str(error), "unhealthy": error.unhealthy}
        return {"event": NodeEvent.RAY_FAILED, **said, **what}

    def _start_ray(self, command: Message) -> None:
        """Carry out the head's command to start Ray on this node.

        If the command is new, any earlier Ray of this Ray cluster ends first: the head may have another address now. If the
        head only repeats the command after a reconnection, Ray is not started again. A failure is then reported again, because
        the head may have missed the first report.
        """
        key, attempt = command["cluster"], command["attempt"]
        if key in self.rays and self._attempts[key] == attempt:
            return self.send(**self._failures[key]) if key in self._failures else None
        spec = from_fields(RaySpec, command["ray"]) if key else self.spec.ray
        assert spec is not None

        def on_event(event: Event) -> None:
            if event["event"] == Report.FAILED:
                self._failures[key] = self._failure(command, event["error"], ray.log_tails())
                self.send(**self._failures[key])
            elif event["event"] == Report.PHASE:
                self.log(event["message"])

        self._attempts[key] = attempt
        self._failures.pop(key, None)
        ray = self.prepare_ray(spec, key, command["nodes"], on_event)
        ray.start(command["gcs"])

    def _measure(self, nonce: str, job_ids: Optional[List[str]]) -> None:
        """Begin to measure a payload on this node; if it is measured already, only add `job_ids` to its known Ray jobs.

        `nonce` is the random name of the payload. `job_ids` are the ids of its Ray jobs, if payloads share the Ray cluster; None
        if the Ray cluster is the payload's own.
        """
        if nonce not in self._samplers:
            if not self.simulated:
                self.strays.begin(nonce)
            self._samplers[nonce] = self.sampler(nonce, uses_ray=True, shared=job_ids is not None)
        jobs = self._samplers[nonce].jobs
        if jobs is not None:
            jobs.job_ids.update(job_ids or ())


# ---- Simulated nodes: each component of a heterogeneous job gets a Ray node of its own on this machine


def simulate(nodes: WorkerNodes, spec: RuntimeSpec, shares: List[Share], private: Scratch) -> RuntimeSpec:
    """Add a simulated node to `nodes` for each component but the head's, and return a start record for all components.

    The start record is a copy of `spec` with a new secret and without the numbers of CPUs and GPUs that were requested of
    Slurm. `shares` has the part of this machine that each component gets, the head's first; the CPUs and GPUs in `shares` count
    instead. `private` is the scratch directory of the runtime.
    """
    components = [replace(each, asked_cpus=None, asked_gpus=None) for each in spec.components]
    spec = replace(spec, components=components, control_key=os.urandom(32).hex())
    for node_id, share in enumerate(shares[1:], 1):
        nodes.members[node_id] = SimulatedNode(nodes, spec, node_id, share, private)
    return spec


class SimulatedNode(WorkerNode):
    """A worker node that is simulated on this machine, for a component other than the head's.

    Its agent runs in the head's runtime. Messages go to the agent by a direct call, without a connection.
    """

    def __init__(self, nodes: WorkerNodes, spec: RuntimeSpec, node_id: int, share: Share, private: Scratch) -> None:
        machine = share.machine
        super().__init__(node_id, machine.hostname, machine.component, machine)

        def send(**event: object) -> None:
            # Not at once: the agent sends this from within a call of the head.
            nodes.loop.call_later(0.0, lambda: nodes.handle(self, event))

        self._agent = NodeAgent(nodes.loop, spec, machine, private, share.environ, send, simulated=True)

    @property
    def here(self) -> bool:
        return True

    @property
    def pids(self) -> List[int]:
        return self._agent.pids()

    def send(self, **message: object) -> None:
        self._agent.handle(message)


# ---- The runtime of a worker node

# Seconds until a head that was never reached counts as lost; usually the head itself ends the Slurm step long before.
_FIRST_CONNECT_TIMEOUT = 600.0
# Seconds after a signal in which the head must say that it ends as well. After 30 s Slurm sends SIGKILL (KillWait).
_HEAD_SIGNAL_TIMEOUT = 20.0


@dataclass(eq=False)
class Worker(Listener):
    """The runtime of one worker node: connects to the head's runtime, and has a `NodeAgent` carry out the head's commands."""

    loop: Loop
    spec: RuntimeSpec
    allocation: Allocation
    scratch: Scratch
    log_dir: str = ""  # The directory in which the nodes write their logs, on the file system that they share.
    on_connected: Callable[[], None] = lambda: None  # Called each time that this node has connected to the head's runtime.
    exit_code: int = 0  # Of this node's Slurm task; any but 0 ends the Slurm step on all nodes.

    def __post_init__(self) -> None:
        spec, allocation = self.spec, self.allocation
        assert spec.control_key is not None
        detected = resources.detect(with_gpus=resources.may_need_gpus(spec))
        self._machine = replace(detected, component=allocation.component_of(allocation.node_id))
        override = [spec.ray.node_ip_address] if spec.ray is not None and spec.ray.node_ip_address else []
        addresses = all_addresses([*allocation.head_addresses, *override], spec.control_ports)
        self._head = RpcClient(self.loop, spec.control_key, addresses, self)
        self._agent = NodeAgent(self.loop, spec, self._machine, self.scratch, send=self._head.send, shared=self.log_dir or None)
        MemoryWatch(self.loop, self._machine.name, self._agent.guarded_pids, lambda: [], self._report_memory)
        self._parent = os.getppid()
        self._was_signalled = self._head_is_ending = self._was_connected = False
        self._logged_problem = ""
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self.loop.on_signal(signum, self._signalled)

    def run(self) -> None:
        """Connect to the head node, and carry out its commands, until it sends STOP or is lost, or a signal ends this runtime.

        Then kill all processes that this runtime has started, and remove its scratch directory.
        """
        try:
            self._head.connect()
            self._check_head()
            self.loop.run()
        finally:
            self._agent.end()
            processes.kill_descendants(os.getpid(), collect=self.loop.reap)
            self.scratch.remove()

    def authenticated(self, channel: Channel) -> None:  # noqa: ARG002
        self._was_connected = True
        self._head.send(node_id=self.allocation.node_id, machine=self._machine.facts(), remark=local_copy.remark)
        self.on_connected()

    def received(self, channel: Channel, message: Message) -> None:  # noqa: ARG002
        op = message.get("op")
        if op == NodeCommand.ENDING:
            self._head_is_ending = True
        elif op == NodeCommand.STOP:
            self.loop.stop()
        else:
            self._agent.handle(message)

    def closed(self, channel: Channel, why: str) -> None:  # noqa: ARG002
        if self._was_signalled:
            self.loop.stop()  # Slurm ends the step, and the head ended first.

    def _signalled(self, signum: int) -> None:
        """Handle a signal: end this runtime if the head or this process's parent is gone; otherwise wait for the head to end it.

        Slurm usually signals all processes of the step, so the head gets the signal as well, gives payloads their grace period,
        and then sends STOP. If the job has several components, Slurm may end only the component of this node. In such a job,
        `_leave_component` decides some seconds later whether this runtime ends without the head.
        """
        self._agent.log("received %s" % signal.Signals(signum).name)
        self._was_signalled = True
        # If the keeper, this runtime's parent, is gone, nothing cleans up after SIGKILL: end while there is time.
        lost = not self._head.is_connected and (self._was_connected or len(self.spec.components) <= 1)
        if lost or os.getppid() != self._parent:
            self.loop.stop()
        elif len(self.spec.components) > 1:
            self.loop.call_later(_HEAD_SIGNAL_TIMEOUT, self._leave_component)

    def _leave_component(self) -> None:
        """End this runtime, unless the head has sent the message ENDING. Called some seconds after a signal.

        ENDING means that the head ends too, and sends STOP later. Without ENDING, the head goes on, and Slurm is ending only
        the component of this node.
        """
        if not self._head_is_ending:
            self._agent.log("its component is being ended, and the head's goes on; ending")
            self.exit_code = 128 + signal.SIGTERM
            self.loop.stop()

    def _check_head(self) -> None:
        """End this runtime if the head has been silent for too long; otherwise have the event loop check again later."""
        silent = self._head.measure_silence()
        if silent > (HEARTBEAT_TIMEOUT if self._was_connected else _FIRST_CONNECT_TIMEOUT):
            self._agent.log("the head's runtime has been out of reach for %d s; ending" % silent)
            return self.loop.stop()
        if self._head.problem != self._logged_problem:
            self._logged_problem = self._head.problem
            self._agent.log("the head's runtime cannot be reached at " + self._logged_problem)
        self.loop.call_later(HEARTBEAT_INTERVAL, self._check_head)

    def _report_memory(self, message: str, killed: bool) -> None:
        self._agent.log(message)
        self._head.send(event=NodeEvent.MEMORY, message=message, killed=killed)
