"""The node agent: starts, measures and ends Ray on one worker node, as the head's runtime commands. `worker` connects it."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Callable, Dict, List, Mapping, Optional

from ..node.ray_jobs import RayJobs, logs_of
from ..node.resources import NodeResources
from ..node.usage import GpuMonitor, UsageSampler
from ..process.loop import Loop
from ..process.processes import StrayProcesses
from ..process.scratch import Scratch
from ..protocol.messages import ClusterError, EndReason, NodeCommand, NodeEvent
from ..protocol.rpc import Message
from ..protocol.spec import RaySpec, RuntimeSpec, from_fields
from ..ray.membership import Event, Report
from ..ray.ray_node import RayNode, clean_up_cluster


@dataclass(eq=False)
class _NodeCluster:
    """This node's part of one Ray cluster; `failure` is the event by which its failure was reported."""

    attempt: int
    ray: RayNode
    failure: Optional[Message] = None


@dataclass(eq=False)
class NodeAgent:
    """Carries out the head's commands on one node, for one or several Ray clusters.

    A simulated node shares the machine and the runtime with others. Its usage counts only the processes of its Ray, and the
    runtime itself looks for stray processes.
    """

    loop: Loop
    spec: RuntimeSpec
    machine: NodeResources
    send: Callable[..., None]  # Sends an event to the head.
    log: Callable[[str], None]  # Writes to the node's log; if the node fails, the head shows the last lines of that log.
    scratch_for: Callable[[str], Scratch]  # Returns a scratch directory for a Ray cluster, given its key; may raise OSError.
    environ: Mapping[str, Optional[str]] = field(default_factory=dict)  # For Ray's daemons; None removes a variable.
    simulated: bool = False

    def __post_init__(self) -> None:
        self._gpus = GpuMonitor(self.loop)
        self._clusters: Dict[str, _NodeCluster] = {}
        self._samplers: Dict[str, UsageSampler] = {}
        self._strays = None if self.simulated else StrayProcesses(self.loop)

    @property
    def pids(self) -> List[int]:
        """Process ids of Ray's root processes on this node, one for each Ray cluster."""
        return [pid for cluster in self._clusters.values() for pid in _pids(cluster)]

    @property
    def guarded(self) -> List[int]:
        """Process ids of those root processes below which Ray workers may be killed when the node's memory is nearly full."""
        return [pid for each in self._clusters.values() if each.ray.spec.memory_guard for pid in _pids(each)]

    def handle(self, command: Message) -> None:
        """Carry out a command of the head; unknown commands are ignored."""
        op = command.get("op")
        if op == NodeCommand.START_RAY:
            try:
                self._start_ray(command)
            except Exception as error:
                traceback.print_exc()
                message = "node %s: %s: %s" % (self.machine.name, type(error).__name__, error)
                self.send(**self._failure(command, ClusterError(EndReason.CLUSTER_START, message), {}))
        elif op == NodeCommand.RAY_READY:
            cluster = self._clusters.get(command["cluster"])
            if cluster is not None and command["attempt"] == cluster.attempt:
                cluster.ray.ready = True
        elif op == NodeCommand.END_RAY:
            ended = self._clusters.pop(command["cluster"], None)
            if ended is not None:
                ended.ray.end()
                clean_up_cluster(self.loop, ended.ray.scratch, command["cluster"])
            self.send(event=NodeEvent.RAY_ENDED, cluster=command["cluster"])
        elif op == NodeCommand.MEASURE:
            self._measure(command["id"], command["jobs"])
        elif op == NodeCommand.REPORT:
            sampler = self._samplers.pop(command["id"], None)
            self.send(event=NodeEvent.USAGE, id=command["id"], usage=None if sampler is None else sampler.stop())
            if self._strays is not None:
                self._strays.end(command["id"])
        elif op == NodeCommand.STOP:
            self.end()

    def end(self) -> None:
        """End Ray at once on this node, for all Ray clusters."""
        for cluster in self._clusters.values():
            cluster.ray.end()

    def _failure(self, command: Message, error: ClusterError, tails: Mapping[str, str]) -> Message:
        """The event that Ray did not start on this node after a command, or ended; logs the error."""
        self.log(str(error))
        what = {"cluster": command["cluster"], "attempt": command["attempt"], "tails": dict(tails)}
        return {"event": NodeEvent.RAY_FAILED, "reason": error.reason, "message": str(error), **what}

    def _start_ray(self, command: Message) -> None:
        """Start Ray on this node, or start it again if the head had to take another port.

        After a reconnection the head repeats the command. Then nothing happens, except that the head may have missed a failure.
        """
        key, attempt = command["cluster"], command["attempt"]
        before = self._clusters.get(key)
        if before is not None and before.attempt == attempt:
            return self.send(**before.failure) if before.failure is not None else None
        if before is not None:
            before.ray.end()
        scratch = self.scratch_for(key) if before is None else before.ray.scratch
        spec = from_fields(RaySpec, command["ray"]) if key else self.spec.ray
        assert spec is not None

        def on_event(event: Event) -> None:
            if event["event"] == Report.FAILED:
                cluster.failure = self._failure(command, event["error"], ray.log_tails())
                self.send(**cluster.failure)
            elif event["event"] == Report.RETRY:
                self.log(event["message"])

        ray = RayNode(self.loop, self.spec, spec, key, self.machine, scratch, command["nodes"], on_event, self.environ)
        self._clusters[key] = cluster = _NodeCluster(attempt, ray)
        ray.start(command["gcs"])

    def _measure(self, nonce: str, job_ids: Optional[List[str]]) -> None:
        """Measure the usage of a payload on this node, without Ray clusters that belong to other payloads.

        `job_ids` are the payload's known Ray jobs, if payloads share the Ray cluster; None for a Ray cluster of its own.
        """
        sampler = self._samplers.get(nonce)
        if sampler is None:
            self._samplers[nonce] = sampler = self._sampler(nonce, job_ids is not None)
            if self._strays is not None:
                self._strays.begin(nonce)
        if sampler.jobs is not None:
            sampler.jobs.job_ids.update(job_ids or ())

    def _sampler(self, nonce: str, shared: bool) -> UsageSampler:
        own = self._clusters.get(nonce) or self._clusters.get("")

        def other_pids() -> List[int]:
            return [pid for key, cluster in self._clusters.items() if key not in ("", nonce) for pid in _pids(cluster)]

        def own_pids() -> List[int]:
            return [] if own is None else _pids(own)

        ray_temp_dir = None if own is None else own.ray.scratch.ray_temp_dir
        jobs = RayJobs(logs_of(own.ray.scratch.ray_temp_dir), lambda: own.ray.pid) if shared and own is not None else None
        return UsageSampler(self.loop, self._gpus, ray_temp_dir, other_pids, own_pids if self.simulated else None, jobs)


def _pids(cluster: _NodeCluster) -> List[int]:
    return [cluster.ray.pid] if cluster.ray.pid is not None else []
