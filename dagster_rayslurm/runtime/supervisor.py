"""The heart of the runtime: payloads wait for the cluster, run, end; the cluster serves them and ends last.

A runtime for one payload and a session that stays warm are the same thing here: they differ in who hands payloads
over (`control`) and in when there is nothing left to wait for.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import signal
import sys
import time
import traceback
from typing import Any, Deque, Dict, List, Optional

from . import PROTOCOL_VERSION, machine, processes, scratch
from .allocation import Allocation
from .channel import derive
from .cluster import RayCluster, head_address
from .footprint import footprint_error, runtime_footprint
from .loop import Loop, Timer
from .payload import End, Payload
from .ray_start import ClusterError
from .record import PAYLOAD, RUNTIME, SECRETS, RunRecord, node_log, tail_lines
from .spec import PayloadSpec, RuntimeSpec, SpecError, from_json
from .team import Member, Team

_LOST_GRACE = 1.0
"""Seconds a payload gets after its cluster is lost: `ray.init` would hang for 40 s and more (Ray 2.60)."""

_SAME_SIGNAL = 1.0
"""Seconds within which another signal is the same one: Slurm sends it to the keeper too, which passes it on."""

_FRESH_INTERVAL = 600.0
"""Seconds between two marks that run directories are in use; old ones are swept after days."""


class Closing(Exception):
    """The runtime takes no more payloads; the caller starts another one."""


class Supervisor:
    """Runs payloads, on one Ray cluster if the spec has one.

    Args:
        loop: where everything happens.
        spec: the cluster and the runtime's own life.
        private: scratch directory of this runtime.
        allocation: the Slurm step whose first node this is; None elsewhere.
        log_dir: directory of the logs of an allocation's nodes.
    """

    def __init__(
        self,
        loop: Loop,
        spec: RuntimeSpec,
        private: scratch.Scratch,
        allocation: Optional[Allocation] = None,
        log_dir: str = "",
    ) -> None:
        self.loop = loop
        self.spec = spec
        self.machine = machine.detect(with_gpus=spec.ray is not None or bool(spec.asked_gpus))
        self.cluster: Optional[RayCluster] = None
        self.exit_code = 0
        """What the last payload's end makes of this process's own, so that Slurm's books tell the same."""
        self._allocation = allocation
        self._team: Optional[Team] = None
        self._closed_at = 0.0
        self._scratch = private
        self._waiting: Deque[Payload] = collections.deque()
        self._running: List[Payload] = []
        self._served = 0
        self._closing = False
        self._idle: Optional[Timer] = None
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
                lambda place: os.path.join(log_dir, node_log(place)),
                self._hear,
            )
        if spec.ray is not None:
            self.cluster = RayCluster(
                loop,
                spec.ray,
                runtime_footprint(spec),
                self.machine,
                private,
                os.urandom(32).hex() if spec.control_key is None else derive(spec.control_key, "ray-token"),
                self._pump,
                self._cluster_failed,
                self._tell,
            )

    def run(self) -> None:
        """React until there is nothing left to do, then end everything that was started here."""
        try:
            if self.cluster is not None:
                address = head_address(self._allocation) if self._allocation is not None else None
                self.cluster.start(self._team, address)
            else:
                problem = footprint_error(runtime_footprint(self.spec), self.machine)
                if problem:
                    self.close(End("allocation", problem))
            self._settle()
            self.loop.run()
        except BaseException as error:
            # A defect here must not leave anybody waiting for an `end` that nobody writes.
            self._abort(error)
            raise
        finally:
            if self.cluster is not None:
                self.cluster.stop()
            if self._team is not None:
                self._team.dismiss()
            processes.kill_descendants(os.getpid(), collect=self.loop.reap)
            self._scratch.remove()
            if self._team is not None:
                self._team.wait_gone()

    def submit(self, run_dir: str, environ: Optional[Dict[str, str]] = None) -> Payload:
        """Take over the payload of a run directory.

        Args:
            run_dir: the run directory.
            environ: what the payload's environment is made from; None for the runtime's own.

        Raises:
            Closing: this runtime is about to end.
            SpecError: the run directory's start record cannot be used.
            OSError: the run directory cannot be read or written.
        """
        if self._closing:
            raise Closing
        spec = from_json(PayloadSpec, _read(os.path.join(run_dir, PAYLOAD)))
        attempt = self._allocation.restarts if self._allocation is not None else 0
        record = RunRecord(run_dir, spec.max_stdio_bytes, attempt)
        secrets = _take_secrets(run_dir, keep=self.spec.requeue)
        payload = Payload(self.loop, run_dir, spec, secrets, record, environ or dict(os.environ))
        payload.on_ended.append(lambda: self._ended(payload))
        self._served += 1
        self._waiting.append(payload)
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
        if self.cluster is not None and self.cluster.ready:
            payload.phase("cluster-ready", "the warm Ray cluster %s is up" % self.spec.cluster_id)
        elif self.cluster is not None:
            payload.phase("cluster-start", "starting the Ray cluster %s on %s" % (self.spec.cluster_id, self._where()))
        self._pump()
        return payload

    def close(self, end: End, grace: Optional[float] = None) -> None:
        """Take no more payloads, end those that are here and then the runtime."""
        if not self._closing:
            self._closing, self._closed_at = True, self.loop.now()
        for payload in [*self._waiting, *self._running]:
            payload.end_early(end, grace)
        self._settle()

    def describe(self) -> Dict[str, Any]:
        """What a session tells who asks."""
        return {
            "cluster_id": self.spec.cluster_id,
            "protocol": PROTOCOL_VERSION,
            "pid": os.getpid(),
            "ready": self.cluster is None or self.cluster.ready,
            "closing": self._closing,
            "running": len(self._running),
            "waiting": len(self._waiting),
            "served": self._served,
        }

    def _pump(self) -> None:
        """Start what may start now, in the order of arrival."""
        if self.cluster is not None and not self.cluster.ready:
            return
        while self._waiting and len(self._running) < self.spec.max_concurrent_payloads and not self._closing:
            payload = self._waiting.popleft()
            if not payload.ended:  # One that was cancelled in the queue is on its way out.
                self._running.append(payload)
                self._start(payload)
        for place, payload in enumerate(list(self._waiting), 1):
            if payload.place != place:
                payload.place = place
                payload.phase("queued", "place %d in the queue of the Ray cluster %s" % (place, self.spec.cluster_id))

    def _start(self, payload: Payload) -> None:
        messages = self._scratch.join("messages-%s.jsonl" % payload.spec.nonce)
        payload.context = {
            "hostname": self.machine.hostname,
            "num_cpus": self.machine.num_cpus,
            "warm": self._served > 1,
        }
        if self._allocation is not None:
            payload.context["allocation"] = self._allocation.facts()
        if self.cluster is None:
            return payload.start({}, messages, team=self._team)
        payload.context.update(self.cluster.facts())
        payload.start(self.cluster.environment, messages, self._scratch.ray_temp_dir, self._team)

    def _ended(self, payload: Payload) -> None:
        self.exit_code = payload.exit_code
        if self.spec.requeue and not payload.terminated:
            _take_secrets(payload.run_dir, keep=False)  # No other attempt will need them.
        for where in (self._running, self._waiting):
            if payload in where:
                where.remove(payload)
        if not self._running:
            # With nothing running, an orphan is something that a payload left behind with another environment.
            processes.kill_orphans(keep=self.loop.children())
        self._pump()
        self._settle()

    def _settle(self) -> None:
        """With nothing to run: end, or wait for `idle_timeout`."""
        if self._waiting or self._running:
            return
        if self._closing or (self.spec.idle_timeout is None and self._served):
            return self.loop.stop()
        if self.spec.idle_timeout is not None:
            if self._idle is not None:
                self._idle.cancel()
            self._idle = self.loop.call_later(self.spec.idle_timeout, lambda: self.close(End("cancel")))

    def _hear(self, member: Member, message: Dict[str, Any]) -> None:
        if self.cluster is not None:
            self.cluster.take(member, message)

    def _where(self) -> str:
        """The nodes, in words."""
        if self._allocation is None:
            return self.machine.hostname
        nodes = self._allocation.nodes
        return nodes[0] if len(nodes) == 1 else "%d nodes: %s" % (len(nodes), ", ".join(nodes[:8] + ["…"] * (len(nodes) > 8)))

    def _cluster_failed(self, error: ClusterError) -> None:
        assert self.cluster is not None
        if self._closing:
            return  # It is going down with all else, as when Slurm signals every process of the job.
        for name, text in self.cluster.log_tails().items():
            for payload in [*self._waiting, *self._running]:
                payload.keep_tail(name, text)
        self.close(End(error.reason, str(error)), grace=_LOST_GRACE)

    def _keep_fresh(self) -> None:
        for payload in [*self._waiting, *self._running]:
            payload.keep_fresh()
        self.loop.call_later(_FRESH_INTERVAL, self._keep_fresh)

    def _tell(self, phase: str, message: str) -> None:
        for payload in [*self._waiting, *self._running]:
            payload.phase(phase, message)

    def _interrupted(self, signum: int) -> None:
        again = self._closing and self.loop.now() - self._closed_at > _SAME_SIGNAL
        name = signal.Signals(signum).name
        self.close(End("terminated", "the runtime received %s" % name), grace=0 if again else None)

    def _abort(self, error: BaseException) -> None:
        self._closing = True
        said = " ".join(str(error).split())  # One line; where it happened is in the tail.
        end = End("runtime", type(error).__name__ + (": " + said if said else ""))
        for payload in [*self._waiting, *self._running]:
            with contextlib.suppress(Exception):  # What failed may be this very record.
                payload.keep_tail("runtime traceback", tail_lines(traceback.format_exc()))
            payload.abandon(end)


def _take_secrets(run_dir: str, keep: bool) -> Dict[str, str]:
    """Read the secret variables and, unless another attempt may need them, remove their file."""
    path = os.path.join(run_dir, SECRETS)
    try:
        secrets = json.loads(_read(path))
        if not keep:
            os.unlink(path)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise SpecError("%s is not JSON" % path) from error
    return {str(name): str(value) for name, value in secrets.items()}


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def load_spec(directory: str) -> RuntimeSpec:
    """The runtime's own start record.

    Raises:
        SystemExit: it cannot be used; the message goes to the runtime's log.
    """
    try:
        return from_json(RuntimeSpec, _read(os.path.join(directory, RUNTIME)))
    except (OSError, SpecError) as error:
        sys.exit("rayslurm runtime: %s: %s" % (directory, error))
