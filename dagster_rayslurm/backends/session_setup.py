"""Which session a payload goes to, what that is made of, and what its job is. Pure."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..archive import runtime_name
from ..config import SessionConfig, time_limit_seconds
from ..environments import Environment, Interpreter
from ..environments.resolve import path_on_cluster
from ..fit import Offer, Wish, make_offer
from ..launchers import Launcher, RayLauncher
from ..plan import Plan
from ..runtime import PROTOCOL_VERSION
from ..runtime.footprint import Footprint
from ..runtime.ports import control_ports
from ..runtime.spec import RaySpec, RuntimeSpec
from ..runtime.workspace import shared_variables
from ..slurm.config import SlurmQueueConfig, SlurmResource, split_signal
from ..slurm.request import JobRequest, job_comment, job_name, make_request
from ..slurm.script import render_script


@dataclass(frozen=True)
class Kind:
    """What makes one session another one than the next.

    Attributes:
        ray: the cluster of its launcher; None if that has none.
        footprint: what its launcher needs of each node.
        queue: what its allocation is asked for.
    """

    ray: RaySpec | None
    footprint: Footprint
    queue: SlurmQueueConfig

    def request(self, name: str = "rayslurm", comment: str = "") -> JobRequest:
        """What Slurm is asked for.

        Raises:
            ValueError: the queue and the launcher contradict each other.
        """
        request = make_request(self.queue, self.footprint, job_name=name, comment=comment)
        # Requests are put to a session while it lives; one that began anew would know nothing of those it had accepted.
        return dataclasses.replace(request, requeue=False)

    def offer(self, reuse: bool) -> Offer:
        """What it has for each payload."""
        return make_offer(self.ray, reuse, self.queue, self.request())


@dataclass(frozen=True)
class SessionSetup:
    """How a resource uses sessions, and what one run wants otherwise.

    Args:
        slurm: the cluster.
        queue: what sessions ask it for, but for what `session` says otherwise.
        own_queue: what this run would ask it for; None for what sessions do.
        environment: the Python environment there.
        session: how sessions are shared.
        launcher: the launcher that sessions are made for.
        reuse: whether the Ray cluster stays warm, too.
    """

    slurm: SlurmResource
    queue: SlurmQueueConfig
    own_queue: SlurmQueueConfig | None
    environment: Environment
    session: SessionConfig
    launcher: Launcher
    reuse: bool

    @property
    def name(self) -> str:
        """What the session is called."""
        return self.session.name or "default"

    @cached_property
    def usual(self) -> Kind:
        """The session that payloads get which wish for nothing else."""
        changes = {"num_nodes": self.session.num_nodes, "time_limit": self.session.time_limit}
        changed = {name: value for name, value in changes.items() if value is not None}
        queue = SlurmQueueConfig(**{**self.queue.model_dump(), **changed})
        return Kind(self.launcher.ray_spec(), self.launcher.footprint(), queue)

    def own(self, plan: Plan) -> Kind:
        """The session that a payload gets which does not fit the usual one; it lives no shorter than that."""
        usual = self.usual.queue
        if self.own_queue is None:
            return Kind(plan.ray, plan.footprint, usual)
        limits = (self.own_queue.time_limit, usual.time_limit)
        longest = max(limits, key=lambda text: time_limit_seconds(text) or float("inf"))
        queue = SlurmQueueConfig(**{**self.own_queue.model_dump(), "time_limit": longest})
        return Kind(plan.ray, plan.footprint, queue)

    def wish(self, plan: Plan) -> Wish:
        """What a payload wishes for."""
        own = self.own_queue
        return Wish(plan.ray, plan.footprint, self.usual.queue if own is None else own, time_limited=own is not None)

    def key(self, kind: Kind, run_id: str, base: str, data_dir: str, apart: bool) -> str:
        """The name of a session's directory: its own name, and a fingerprint of all that tells it from others.

        Args:
            kind: what it is made of.
            run_id: the Dagster run.
            base: the base directory on the cluster.
            data_dir: the directory that its payloads share.
            apart: whether it is one beside the one of that name, for what does not fit there.
        """
        config = self.session
        what: dict[str, Any] = {
            "base": base,
            "runtime": [PROTOCOL_VERSION, runtime_name()],
            "environment": path_on_cluster(self.environment, over_ssh=self.slurm.ssh is not None),
            "data_dir": data_dir,
            "reuse": self.reuse,
            "run": run_id if config.scope == "run" else None,
        }
        if config.name is None or apart:
            # How long to wait for a cluster says nothing about the cluster.
            ray = None if kind.ray is None else dataclasses.asdict(dataclasses.replace(kind.ray, startup_timeout=0.0))
            what |= {
                "ray": ray,
                "footprint": kind.footprint,
                "queue": kind.queue.model_dump(mode="json"),
                "site": self.slurm.site,
            }
            what |= {"concurrent": config.max_concurrent_payloads, "idle": config.idle_timeout}
        text = json.dumps(what, sort_keys=True)
        return f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def spec(self, cluster_id: str, kind: Kind, request: JobRequest, plan: Plan) -> RuntimeSpec:
        """The start record of a session's runtime."""
        signal_name, before = split_signal(kind.queue.signal_before_timeout)
        return RuntimeSpec(
            cluster_id,
            kind.ray if self.reuse else None,
            idle_timeout=self.session.idle_timeout,
            max_concurrent_payloads=self.session.max_concurrent_payloads,
            control_key=secrets.token_hex(32),
            control_ports=control_ports(kind.ray.port_range if kind.ray is not None else None),
            asked_cpus=request.cpus_per_node,
            asked_gpus=request.gpus_per_node,
            warn_before_limit=before,
            warn_signal=signal_name,
            worker_env=shared_variables(plan.payload),
            preload=self.launcher.preload if isinstance(self.launcher, RayLauncher) else [],
        )


def session_script(request: JobRequest, interpreter: Interpreter, runtime: str, directory: str, slurm: SlurmResource) -> str:
    """The batch script that starts a session's runtime on all nodes."""
    return render_script(request, interpreter.start("-I", runtime, "session", directory), directory, slurm.site)


def example_session_script(setup: SessionSetup, kind: Kind) -> str:
    """The batch script of a session, with words in capitals for what is known only when it is submitted."""
    request = kind.request(job_name(f"session-{setup.name}", "NONCE"), job_comment("RUN", "STEP", None))
    base = setup.slurm.remote_base
    directory = f"{base}/sessions/{setup.name}-FINGERPRINT/GENERATION"
    return session_script(request, Interpreter("ENVIRONMENT/bin/python"), f"{base}/runtime/RUNTIME.pyz", directory, setup.slurm)
