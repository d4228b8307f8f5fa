"""The heart of the runtime: payloads wait for the cluster, run, end; the cluster serves them and ends last.

A runtime for one payload and a session that stays warm are the same thing here: they differ in who hands payloads
over (`control`) and in when there is nothing left to wait for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from dataclasses import replace
from typing import Any, Callable, Dict, List, Optional

from . import PROTOCOL_VERSION, machine, processes, scratch, siblings
from .admission import Closing, Misfit, capacities_of, claims_of, misfit
from .allocation import Allocation, head_address
from .cluster import RayCluster
from .cluster_error import ClusterError
from .clusters import LOST_GRACE, Clusters
from .footprint import asks_for_gpus, footprint_error, runtime_footprint
from .installed import Mark, ray_mark
from .intake import load_spec, read_text, take_secrets
from .leftovers import Leftovers
from .loop import Loop, Timer
from .nodes import named, nodes_expected
from .payload import End, Payload, Setting, defect
from .queueing import Claims
from .record import PAYLOAD, RunRecord, node_log, tail_lines
from .roster import Roster
from .spec import PayloadSpec, RaySpec, RuntimeSpec, SpecError, from_json
from .team import Member, Others, Team
from .templates import Templates

__all__ = ["Closing", "Misfit", "Supervisor", "load_spec"]

_SAME_SIGNAL = 1.0
"""Seconds within which another signal is the same one: Slurm sends it to the keeper too, which passes it on."""

_FRESH_INTERVAL = 600.0
"""Seconds between two marks that run directories are in use; old ones are swept after days."""

_LAST_WORD = 0.5
"""Seconds that a runtime which takes no more payloads outlasts the last one, so that whoever asks learns why."""

_LAST_REASON = 5.0
"""Seconds that a session which failed before it served anybody stays, so that those who wait for it learn why."""

_END_PATIENCE = 5.0
"""Seconds at this runtime's own end in which an `end` that could not be written is tried again."""

_LATECOMERS = 15.0
"""Seconds that this runtime outlasts its work for nodes whose runtimes have not come yet; signals reach them without it."""

_LATE_INTERVAL = 5.0
"""Seconds between two looks at whether the time still suffices for those who wait."""

_PROPER = ("cancel", "terminated", "timeout")
"""Reasons for which a session may end that has served nobody."""

_RAY_CHANGED = "the environment's Ray has changed"


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
        here: Optional[machine.Machine] = None,
    ) -> None:
        self.loop = loop
        here = machine.detect(with_gpus=asks_for_gpus(spec)) if here is None else here
        self._stage = None
        if allocation is not None:
            here = replace(here, component=allocation.component_of(0))
        elif spec.components:
            self._stage = siblings.stage(loop, spec, here, private, self._hear)
            spec, here = self._stage.spec, self._stage.roles[0].machine
        self.spec = spec
        self.machine = here
        self.exit_code = 0
        """What the last payload's end makes of this process's own, so that Slurm's books tell the same."""
        self.failed: Optional[str] = None
        """Why a session that has served nobody could not."""
        self.time_left: Optional[Callable[[], Optional[float]]] = None
        """Tells the seconds that the allocation has left, None for no limit."""
        self.gate: Callable[[Payload], bool] = lambda _: True
        """Asked whether a payload may start whose cluster is up."""
        self.leave: Callable[[], None] = loop.stop
        """Called when the last payload has ended and no other is to come."""
        self.on_signal_at_rest: Callable[[int], None] = lambda _: loop.stop()
        """Called with a signal that comes when there is no payload to end."""
        self.on_lost_at_rest: Callable[[str], None] = lambda _: None
        """Called with why the warm cluster is lost when there is no payload to be told."""
        self._allocation = allocation
        self._team: Optional[Others] = self._stage.team if self._stage is not None else None
        self._closed_at = 0.0
        self._unwritten: List[Payload] = []
        """Those whose `end` could not be written yet."""
        self._scratch = private
        self._roster = Roster(spec, self._claims, loop.now)
        self._closing: Optional[str] = None
        """Why payloads that are here are being ended."""
        self._draining: Optional[str] = None
        """Why no more payloads are taken."""
        self._late: Optional[Timer] = None
        self._signalled = False
        self._idle: Optional[Timer] = None
        self._idle_since = loop.now()
        self._ray_mark: Optional[Mark] = None
        if spec.idle_timeout is not None:
            with contextlib.suppress(OSError):
                self._ray_mark = ray_mark()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.on_signal(signum, self._interrupted)
        loop.call_later(_FRESH_INTERVAL, self._keep_fresh)
        if allocation is not None and len(allocation.nodes) > 1:
            assert spec.control_key is not None
            self._team = Team(
                loop,
                spec.control_key,
                spec.control_ports,
                allocation.nodes,
                lambda place: os.path.join(log_dir, node_log(allocation.first + place)),
                self._hear,
                allocation.component_of,
            )
        self.clusters = Clusters(
            loop,
            spec,
            self.machine,
            private,
            self._team,
            head_address(allocation) if allocation is not None else siblings.ADDRESS if self._stage is not None else None,
            self._pump,
            self._cluster_failed,
            self._tell,
            self._node_lost,
            self._stage.roles[0].environ if self._stage is not None else {},
        )
        self._templates = Templates(loop, private.join("preload")) if spec.idle_timeout is not None else None
        self._leftovers = Leftovers(loop, lambda: self.cluster)

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
        return self._closing or self._draining

    def run(self) -> None:
        """React until there is nothing left to do, then end everything that was started here."""
        try:
            self.clusters.start()
            if self._templates is not None:
                self._templates.warm(self.spec.preload, self.cluster.environment if self.cluster is not None else None)
            if self.cluster is None:
                problem = footprint_error(runtime_footprint(self.spec, self.machine.component), self.machine)
                if problem:
                    self.close(End("allocation", problem))
            self._settle()
            self.loop.run()
        except BaseException as error:
            # A defect here must not leave anybody waiting for an `end` that nobody writes.
            self._abort(error)
            raise
        finally:
            self.clusters.stop()
            if self._templates is not None:
                self._templates.close()
            if self._team is not None:
                self._team.dismiss()
            processes.kill_descendants(os.getpid(), collect=self.loop.reap)
            self._write_ends()
            self._scratch.remove()
            if self._team is not None:
                self._team.wait_gone(0.0 if self._signalled else _LATECOMERS)

    def _write_ends(self) -> None:
        """Write what could not be written so far; nobody writes it later."""
        deadline = self.loop.now() + _END_PATIENCE
        left = [payload for payload in {*self._unwritten, *self._roster} if payload.ended]
        while True:
            left = [payload for payload in left if not payload.write_end()]
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
        if self.closing is None and self._ray_has_changed():
            self.drain(_RAY_CHANGED)
        if self.closing is not None:
            raise Closing(self.closing)
        spec = from_json(PayloadSpec, read_text(os.path.join(run_dir, PAYLOAD)))
        problem = misfit(spec, self._machines())
        if problem:
            raise Misfit(problem)
        late = self._roster.refusal(spec, self._seconds_left())
        if late:
            raise Closing(late)  # For this payload alone: others may take less time.
        attempt = self._allocation.restarts if self._allocation is not None else 0
        record = RunRecord(run_dir, spec.max_stdio_bytes, attempt)
        try:
            secrets = take_secrets(run_dir, keep=self.spec.requeue)
        except BaseException:
            record.withdraw()
            raise
        environ = environ or dict(os.environ)
        if self._stage is not None:
            environ = self._stage.head_environ(environ)
        payload = Payload(self.loop, run_dir, spec, secrets, record, environ)
        payload.templates = self._templates
        payload.on_ended.append(lambda: self._ended(payload))
        self._roster.add(payload)
        if self._idle is not None:
            self._idle.cancel()
        payload.start_record(
            {
                "type": "start",
                "nonce": spec.nonce,
                "attempt": attempt,
                "protocol": PROTOCOL_VERSION,
                "at": time.time(),
                "cluster_id": self.spec.cluster_id,
                "hostname": self.machine.hostname,
                "pid": os.getpid(),
                "python": sys.version.split()[0],
                "allocation": self._allocation.facts() if self._allocation is not None else None,
            }
        )
        if self.cluster is not None and spec.uses_ray and self.cluster.ready:
            payload.phase("cluster-ready", "the warm Ray cluster %s is up" % self.spec.cluster_id)
        elif self.clusters.waits(spec):
            where = self._where(self.spec.ray)
            payload.phase("cluster-start", "starting the Ray cluster %s on %s" % (self.spec.cluster_id, where))
        for remark in self._stage.remarks(spec.uses_ray) if self._stage is not None else []:
            payload.phase("cluster-start", remark)
        for leak in self._leftovers.found:
            payload.phase("leaks", "left in the Ray cluster by payloads before: " + leak)
        self._pump()
        return payload

    def close(self, end: End, grace: Optional[float] = None, queued: Optional[End] = None) -> None:
        """Take no more payloads, end those that are here and then the runtime.

        Args:
            end: how they end.
            grace: seconds between SIGTERM and SIGKILL; None for what each payload asks for.
            queued: how those end that never started; None for the same.
        """
        if self._closing is None:
            self._closing, self._closed_at = end.message or "it ends", self.loop.now()
            if self.spec.idle_timeout is not None and not self.served and end.reason not in _PROPER:
                self.failed = self._closing
        if end.reason == "timeout" and queued is None:
            queued = End("returned", "%s before the payload's turn came" % end.message)
        for payload in self._roster.waiting:
            payload.end_early(queued or end, grace)
        for payload in list(self._roster.running):
            payload.end_early(end, grace)
        self._settle()

    def drain(self, why: str) -> None:
        """Take no more payloads, let those finish that are here, and then end.

        Args:
            why: what whoever comes with another payload is told.
        """
        if self.closing is None:
            self._draining = why
            self._tell("drain", "the runtime takes no more payloads: " + why)
            self._settle()

    def describe(self) -> Dict[str, Any]:
        """What a session tells who asks."""
        cluster = self.cluster.facts() if self.cluster is not None else {}
        name = self._allocation.nodes[0] if self._allocation is not None else self.machine.hostname
        component = self.machine.component
        own = {"name": name, "cpus": self.machine.num_cpus, "gpus": self.machine.num_gpus, "here": True, "component": component}
        return {
            "cluster_id": self.spec.cluster_id,
            "protocol": PROTOCOL_VERSION,
            "pid": os.getpid(),
            "ready": self.cluster is None or self.cluster.ready,
            "closing": self._closing is not None,
            "draining": self.closing,
            "running": len(self._roster.running),
            "waiting": len(self._roster.waiting),
            "payloads": self._roster.facts(each for each in self._unwritten if not each.record.ended),
            "served": self._roster.served,
            "idle": None if len(self._roster) else round(self.loop.now() - self._idle_since, 1),
            "nodes": [own, *(self._team.facts() if self._team is not None else [])],
            "ray_version": cluster.get("ray_version"),
            "address": cluster.get("ray_address"),
            "dashboard_url": cluster.get("dashboard_url"),
            "leaks": self._leftovers.found,
            "time_left": self._seconds_left(),
        }

    def _machines(self) -> List[machine.Machine]:
        """What the nodes grant that have come so far."""
        members = self._team.members.values() if self._team is not None else []
        return [self.machine, *(machine.from_facts(member.machine) for member in members if member.joined)]

    def _seconds_left(self) -> Optional[float]:
        return self.time_left() if self.time_left is not None else None

    def _ray_has_changed(self) -> bool:
        try:
            return self._ray_mark is not None and ray_mark(self._ray_mark) != self._ray_mark
        except OSError:
            return False  # Its file system is away for a moment; a payload that cannot do without it will tell.

    def _claims(self, payload: Payload) -> Claims:
        fresh = self.clusters.is_fresh(payload.spec)
        return claims_of(payload.spec, fresh, self._capacities(), self.machine.component)

    def _capacities(self) -> Claims:
        return capacities_of(self._machines())

    def look_again(self) -> None:
        """Start what may start now that the gate has opened."""
        self._pump()

    def _pump(self) -> None:
        """Start what may start now, in turn."""
        self._return_the_late()
        while self._closing is None:
            payload = self._roster.next(self._capacities(), self._may_start)
            if payload is None:
                break
            if payload.spec.uses_ray and self._ray_has_changed():
                payload.end_early(End("returned", "the session gives the payload back unstarted: " + _RAY_CHANGED))
            if not payload.ended:  # One that was cancelled in the queue is on its way out.
                self._begin(payload)
        for place, payload in enumerate(self._roster.waiting, 1):
            if payload.place != place and self._may_start(payload):
                payload.place = place
                payload.phase("queued", "place %d in the queue of the Ray cluster %s" % (place, self.spec.cluster_id))

    def _may_start(self, payload: Payload) -> bool:
        return not self.clusters.waits(payload.spec) and self.gate(payload)

    def _return_the_late(self) -> None:
        """Give those back that cannot end in time any more: they never started, and run elsewhere."""
        left = self._seconds_left()
        if self._late is not None:
            self._late.cancel()
        for payload, why in self._roster.late(left):
            payload.end_early(End("returned", "the session gives the payload back unstarted: " + why))
        if left is not None and self._roster.waiting:
            self._late = self.loop.call_later(_LATE_INTERVAL, self._pump)

    def _begin(self, payload: Payload) -> None:
        """Start a payload, once the cluster is there that serves it."""
        if self.clusters.is_fresh(payload.spec):
            payload.phase("cluster-start", "starting a Ray cluster of the payload's own on %s" % self._where(payload.spec.ray))
        payload.safely(
            lambda: self.clusters.serve(payload, lambda cluster: payload.safely(lambda: self._start(payload, cluster)))
        )

    def _start(self, payload: Payload, cluster: Optional[RayCluster]) -> None:
        messages = self._scratch.join("messages-%s.jsonl" % payload.spec.nonce)
        payload.context = {
            "hostname": self.machine.hostname,
            "num_cpus": self.machine.num_cpus,
            "warm": self._roster.served > 1 and not self.clusters.is_fresh(payload.spec),
        }
        if self._allocation is not None:
            payload.context["allocation"] = self._allocation.facts()
        for other in self._roster.running:
            if other is not payload and other.pid is not None:
                other.companions.add(payload.spec.nonce)
                payload.companions.add(other.spec.nonce)
        if cluster is None:  # Nothing of it is on the other nodes.
            return payload.start(Setting(messages, others=lambda: self._others(payload)))
        payload.context.update(cluster.facts())
        payload.start(
            Setting(
                messages,
                ray_env=cluster.environment,
                worker_env=self.spec.worker_env,
                spill_dir=cluster.ray_temp_dir,
                team=self._team,
                others=lambda: self._others(payload),
                audit=None if cluster is not self.cluster else self._leftovers.of(payload.spec.nonce),
            )
        )

    def _others(self, payload: Payload) -> List[int]:
        """The processes that, with all below them, are not this payload's."""
        drivers = [pid for other in self._roster.running if other is not payload for pid in other.pids]
        templates = self._templates.pids() if self._templates is not None else []
        return drivers + templates + self.clusters.others(payload)

    def _ended(self, payload: Payload) -> None:
        self.exit_code = payload.exit_code
        if not payload.record.ended:
            self._unwritten = [each for each in self._unwritten if not each.record.ended] + [payload]
        if self.spec.requeue and not payload.terminated and self.spec.meeting is None:
            with contextlib.suppress(OSError, SpecError):
                take_secrets(payload.run_dir, keep=False)  # No other attempt will need them.
        self._roster.remove(payload)
        self.clusters.release(payload)
        if not self._roster.running:
            # With nothing running, an orphan is something that a payload left behind with another environment.
            processes.kill_orphans(keep=self.loop.children())
            self._leftovers.look_when_idle(lambda: not self._roster.running)
        self._pump()
        if not self._roster.running and self.closing is None:
            self.clusters.prestart()  # Not while others run, whose CPU they would take.
        self._settle()

    def _settle(self) -> None:
        """With nothing to run: end, or wait for `idle_timeout`."""
        if len(self._roster):
            return
        if self.failed is not None and self._allocation is not None:
            self.loop.call_later(_LAST_REASON, self.loop.stop)
            return
        if self._closing is not None or (self.spec.idle_timeout is None and self._roster.served):
            return self.leave()
        if self._draining is not None:
            self.loop.call_later(_LAST_WORD if self.served else _LAST_REASON, self.loop.stop)
            return
        if self.spec.idle_timeout is not None:
            if self._idle is not None:
                self._idle.cancel()
            self._idle_since = self.loop.now()
            idle = End("cancel", "it was idle for %g s" % self.spec.idle_timeout)
            self._idle = self.loop.call_later(self.spec.idle_timeout, lambda: self.close(idle))

    def _hear(self, member: Member, message: Dict[str, Any]) -> None:
        self.clusters.take(member, message)
        if message.get("event") == "lost":
            member.await_back(self.loop, lambda: self._node_lost(member.title))

    def _node_lost(self, name: str) -> None:
        """Payloads go on without it; a session that is whole takes those that come."""
        if self.spec.idle_timeout is not None:
            self.drain("node %s is lost" % name)

    def _where(self, ray: Optional[RaySpec]) -> str:
        """The nodes of a cluster, in words."""
        name = self.machine.hostname if self._allocation is None else self._allocation.nodes[0]
        others = self._team.members.values() if self._team is not None else []
        nodes = [named(name, self.machine.component), *(member.title for member in others)]
        if ray is not None:
            nodes = nodes[: nodes_expected(ray, len(nodes))]
        return nodes[0] if len(nodes) == 1 else "%d nodes: %s" % (len(nodes), ", ".join(nodes[:8] + ["…"] * (len(nodes) > 8)))

    def _cluster_failed(self, error: ClusterError) -> None:
        assert self.cluster is not None
        if self._closing is not None:
            return  # It is going down with all else, as when Slurm signals every process of the job.
        for name, text in self.cluster.log_tails().items():
            for payload in self.payloads:
                payload.keep_tail(name, text)
            if not self.served:  # Nobody has a record; whoever waits for the session looks at this node's log.
                print("rayslurm: the end of %s:\n%s" % (name, tail_lines(text)), file=sys.stderr)
        if not len(self._roster):
            self.on_lost_at_rest(str(error))
        queued = End(error.reason, "the payload never started: " + str(error)) if self.cluster.ready else None
        self.close(End(error.reason, str(error)), LOST_GRACE, queued)

    def _keep_fresh(self) -> None:
        for payload in self.payloads:
            payload.keep_fresh()
        self.loop.call_later(_FRESH_INTERVAL, self._keep_fresh)

    def _tell(self, phase: str, message: str) -> None:
        for payload in self.payloads:
            payload.phase(phase, message)

    def _interrupted(self, signum: int) -> None:
        self._signalled = True
        again = self._closing is not None and self.loop.now() - self._closed_at > _SAME_SIGNAL
        name = signal.Signals(signum).name
        if self._team is not None:
            self._team.order(self._team.members, op="ending")  # Those that were signalled, too, stay until all is over.
        self.close(End("terminated", "the runtime received %s" % name), grace=0 if again else None)
        if not len(self._roster):
            self.on_signal_at_rest(signum)

    def _abort(self, error: BaseException) -> None:
        end = defect(error)
        self._closing = "it has a defect: %s" % end.message
        for payload in self.payloads:
            with contextlib.suppress(Exception):  # What failed may be this very record.
                payload.keep_tail("runtime traceback", tail_lines(traceback.format_exc()))
            payload.abandon(end)
