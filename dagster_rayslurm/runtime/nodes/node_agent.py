"""The node agent: starts, measures and ends Ray on one worker node, as the head's runtime commands."""

from __future__ import annotations

import os
import traceback
from typing import Any, Dict, List, Mapping, Optional

from ..node.network import node_address
from ..node.ray_jobs import RayJobs
from ..node.resources import NodeResources
from ..node.usage import GpuMonitor, UsageSampler
from ..process.loop import Loop
from ..process.processes import StrayProcesses
from ..process.scratch import Scratch
from ..protocol.end import ClusterError, EndReason
from ..protocol.messages import NodeCommand, NodeEvent
from ..protocol.spec import RaySpec, RuntimeSpec, from_fields, node_spec
from ..ray.cluster_dir import clean_up_cluster
from ..ray.prestart import logs_of
from ..ray.start import RayListener, RayStart

Command = Dict[str, Any]
"""A message of the head with a `NodeCommand` as `op`."""


class AgentOwner:
    """What a node agent needs of the runtime or simulated node that it belongs to: scratch directories, messages, a log."""

    def scratch_for(self, cluster_key: str) -> Scratch:
        """A scratch directory for a Ray cluster; the key is "" for the runtime's own cluster, else the payload's nonce.

        Raises:
            OSError: no directory can be made.
        """
        raise NotImplementedError

    def send(self, **message: Any) -> None:
        """Send a message to the head."""
        raise NotImplementedError

    def log(self, text: str) -> None:
        """Write a line to the node's log; if the node fails, the head shows the last lines of that log."""
        raise NotImplementedError


class _NodeCluster(RayListener):
    """This node's part of one Ray cluster: its Ray processes and their scratch directory.

    Attributes:
        attempt: the number from the command to start Ray; a higher one means to start it again.
        guarded: whether Ray workers may be killed to keep the node's memory below its limit.
    """

    def __init__(self, agent: NodeAgent, command: Command, attempt: int, scratch: Scratch, guarded: bool) -> None:
        self.attempt = attempt
        self.scratch = scratch
        self.guarded = guarded
        self.failure: Optional[ClusterError] = None
        """Why Ray did not start on this node, or ended; None if it did neither."""
        self.ray: RayStart
        self._agent = agent
        self._command = command

    def on_failed(self, error: ClusterError) -> None:
        self.failure = error
        self._agent.owner.log(str(error))
        self._agent.report_failure(self._command, error, self.ray.log_tails())

    def on_phase(self, phase: str, message: str) -> None:
        del phase
        self._agent.owner.log(message)


class NodeAgent:
    """Carries out the head's commands on one node: starts, measures and ends Ray, for one or several Ray clusters.

    Args:
        loop: the event loop.
        spec: the runtime's start record, the same as the head's.
        machine: the node's resources.
        owner: the runtime or simulated node that this agent belongs to.
        environ: environment variables for Ray's daemons on this node; a variable with the value None must not be set.
        simulated: whether this is a simulated node, which shares the machine and the runtime with others. Then usage counts only
            the processes of this node's Ray, and the runtime itself looks for stray processes.
    """

    def __init__(
        self,
        loop: Loop,
        spec: RuntimeSpec,
        machine: NodeResources,
        owner: AgentOwner,
        environ: Optional[Mapping[str, Optional[str]]] = None,
        simulated: bool = False,
    ) -> None:
        self.owner = owner
        self._loop = loop
        self._spec = spec
        self._machine = machine
        self._environ = environ or {}
        self._simulated = simulated
        self._gpus = GpuMonitor(loop)
        self._clusters: Dict[str, _NodeCluster] = {}
        self._samplers: Dict[str, UsageSampler] = {}
        self._strays = None if simulated else StrayProcesses(loop)

    @property
    def pids(self) -> List[int]:
        """Process ids of Ray's root processes on this node, one for each Ray cluster."""
        return [cluster.ray.pid for cluster in self._clusters.values() if cluster.ray.pid is not None]

    @property
    def guarded(self) -> List[int]:
        """Process ids of those root processes below which Ray workers may be killed when the node's memory is nearly full."""
        return [each.ray.pid for each in self._clusters.values() if each.guarded and each.ray.pid is not None]

    def handle(self, command: Command) -> None:
        """Carry out a command of the head; unknown commands are ignored."""
        op = command.get("op")
        if op == NodeCommand.START_RAY:
            try:
                self._start_ray(command)
            except Exception as error:
                traceback.print_exc()
                message = "node %s: %s: %s" % (self._machine.name, type(error).__name__, error)
                self.report_failure(command, ClusterError(EndReason.CLUSTER_START, message), {})
        elif op == NodeCommand.RAY_READY:
            cluster = self._clusters.get(command.get("cluster", ""))
            if cluster is not None and command["attempt"] == cluster.attempt:
                cluster.ray.ready = True
        elif op == NodeCommand.END_RAY:
            ended = self._clusters.pop(command["cluster"], None)
            if ended is not None:
                ended.ray.end()
                clean_up_cluster(self._loop, ended.scratch, command["cluster"])
            self.owner.send(event=NodeEvent.RAY_ENDED, cluster=command["cluster"])
        elif op == NodeCommand.MEASURE:
            if self._strays is not None and command["id"] not in self._samplers:
                self._strays.begin(command["id"])
            self._measure(command["id"], command.get("jobs"))
        elif op == NodeCommand.REPORT:
            sampler = self._samplers.pop(command["id"], None)
            usage = None if sampler is None else sampler.stop()
            self.owner.send(event=NodeEvent.USAGE, id=command["id"], usage=usage)
            if self._strays is not None:
                self._strays.end(command["id"])

    def end(self) -> None:
        """End Ray at once on this node, for all Ray clusters."""
        for cluster in self._clusters.values():
            cluster.ray.end()

    def report_failure(self, command: Command, error: ClusterError, tails: Mapping[str, str]) -> None:
        """Tell the head that Ray did not start on this node, or ended.

        Args:
            command: the command to start Ray that led to it.
            error: why Ray failed.
            tails: the last lines of Ray's logs, by the name of the log.
        """
        named = {"cluster": command["cluster"]} if command.get("cluster") else {}
        self.owner.send(
            event=NodeEvent.RAY_FAILED,
            attempt=command.get("attempt"),
            reason=error.reason,
            message=str(error),
            tails=dict(tails),
            **named,
        )

    def _measure(self, nonce: str, job_ids: Optional[List[str]]) -> None:
        """Measure the usage of a payload on this node, without Ray clusters that belong to other payloads.

        Args:
            nonce: identifies the payload.
            job_ids: the payload's known Ray jobs, if payloads share the Ray cluster; None for a Ray cluster of its own.
        """
        running = self._samplers.get(nonce)
        if running is not None:
            if running.jobs is not None:
                running.jobs.job_ids.update(job_ids or ())
            return
        own = self._clusters.get(nonce) or self._clusters.get("")

        def other_pids() -> List[int]:
            others = [cluster.ray.pid for key, cluster in self._clusters.items() if key and key != nonce]
            return [pid for pid in others if pid is not None]

        def own_pids() -> List[int]:
            return [own.ray.pid] if own is not None and own.ray.pid is not None else []

        jobs = None
        if job_ids is not None and own is not None:
            jobs = RayJobs(logs_of(own.scratch.ray_temp_dir), lambda: own.ray.pid)
            jobs.job_ids.update(job_ids)
        ray_temp_dir = None if own is None else own.scratch.ray_temp_dir
        roots = own_pids if self._simulated else None
        self._samplers[nonce] = UsageSampler(self._loop, self._gpus, ray_temp_dir, other_pids, roots, jobs)

    def _start_ray(self, command: Command) -> None:
        """Start Ray on this node, or start it again if the head had to take another port.

        After a reconnection the head repeats the command; Ray is running then, and nothing happens.
        """
        key, attempt = str(command.get("cluster", "")), int(command["attempt"])
        before = self._clusters.get(key)
        if before is not None and before.attempt == attempt:
            if before.failure is not None:  # The head may have missed the event while the connection was lost.
                self.report_failure(command, before.failure, before.ray.log_tails())
            return
        if before is not None:
            before.ray.end()
            os.unlink(before.ray.token_path)
            scratch = before.scratch
        else:
            try:
                scratch = self.owner.scratch_for(key)
            except OSError as error:
                failure = ClusterError(EndReason.CLUSTER_START, "node %s: %s" % (self._machine.name, error))
                self.owner.log(str(failure))
                return self.report_failure(command, failure, {})
        cluster_spec = from_fields(RaySpec, command["ray"]) if key else self._spec.ray
        assert cluster_spec is not None
        spec = node_spec(cluster_spec, self._machine.component)
        cluster = _NodeCluster(self, command, attempt, scratch, cluster_spec.memory_guard)
        cluster.ray = RayStart(
            self._loop, self._spec, spec, key, self._machine, scratch, int(command["nodes"]), cluster, self._environ
        )
        self._clusters[key] = cluster
        try:
            cluster.ray.start(node_address(spec, command["gcs"]), command["gcs"])
        except ClusterError as error:
            cluster.on_failed(error)
