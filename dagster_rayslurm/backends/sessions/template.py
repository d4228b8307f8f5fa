"""Which session a payload goes to, what that is made of, and what its job is. Pure."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...archive import runtime_name
from ...components import Component, arrange, component_specs, ray_across, request_for, settle
from ...config import SessionConfig, time_limit_seconds
from ...environments import Environment, Interpreter
from ...environments.resolve import path_on_cluster
from ...launchers import Launcher, RayLauncher
from ...modes import check_session
from ...overrides import merge_queue, session_queue
from ...plan import Plan
from ...runtime.node.ports import control_ports
from ...runtime.node.resources import Footprint
from ...runtime.payload.environment import shared_variables
from ...runtime.protocol.spec import PROTOCOL_VERSION, RaySpec, RuntimeSpec
from ...slurm.config import HetComponent, SlurmQueueConfig, SlurmResource, split_signal
from ...slurm.request import JobRequest, job_comment, job_name, make_request
from ...slurm.script import render_script
from .matching import Capacity, Requirements, head_wanted, make_offer, misfit


@dataclass(frozen=True)
class SessionTemplate:
    """What makes one session another one than the next.

    Attributes:
        ray: the cluster of its launcher; None if that has none.
        footprint: what its launcher needs of each node.
        queue: what its allocation is asked for; that of the first component if it has some.
        components: the components of its allocation, in the job's order; none where all nodes are alike.
    """

    ray: RaySpec | None
    footprint: Footprint
    queue: SlurmQueueConfig
    components: tuple[Component, ...] = ()

    def request(self, name: str = "rayslurm", comment: str = "") -> JobRequest:
        """What Slurm is asked for.

        Raises:
            ValueError: the queue and the launcher contradict each other.
        """
        if self.components:
            request = request_for(self.components, job_name=name, comment=comment)
        else:
            request = make_request(self.queue, self.footprint, job_name=name, comment=comment)
        # Requests are put to a session while it lives; one that began anew would know nothing of those it had accepted.
        others = tuple(dataclasses.replace(part, requeue=False) for part in request.others)
        return dataclasses.replace(request, requeue=False, others=others)

    def offer(self, reuse: bool) -> Capacity:
        """What it has for each payload."""
        return make_offer(self.ray, reuse, self.queue, self.request(), self.components)


@dataclass(frozen=True)
class SessionSetup:
    """How a resource uses sessions, and what one run wants otherwise.

    Args:
        slurm: the cluster, whose queue is what sessions ask it for, but for what `session` says otherwise.
        own_queue: what this run changes in the queue of sessions; None for nothing.
        environment: the Python environment there.
        session: how sessions are shared.
        launcher: the launcher that sessions are made for.
        reuse: whether the Ray cluster stays warm, too.
        components: what sessions ask the cluster for instead of `queue`, where that is one heterogeneous job.
        own_components: what this run would ask it for; None for what sessions do.
        own_launcher: the launcher of this run; None for that of sessions.
    """

    slurm: SlurmResource
    own_queue: SlurmQueueConfig | None
    environment: Environment
    session: SessionConfig
    launcher: Launcher
    reuse: bool
    components: tuple[HetComponent, ...] = ()
    own_components: tuple[HetComponent, ...] | None = None
    own_launcher: Launcher | None = None

    @property
    def name(self) -> str:
        """What the session is called."""
        return self.session.name or "default"

    @cached_property
    def usual(self) -> SessionTemplate:
        """The session that payloads get which wish for nothing else.

        Raises:
            ValueError: its components contradict each other, or the session's configuration.
        """
        limit = self.session.time_limit
        if self.components:
            check_session(self.session, self.components)
            return _of_components(self.launcher, self.components, _component_of(self.launcher), limit)
        queue = session_queue(self.slurm.queue, self.session)
        return SessionTemplate(self.launcher.ray_spec(), self.launcher.footprint(), queue)

    def own(self, plan: Plan) -> SessionTemplate:
        """The session that a payload gets which does not fit the usual one; it lives no shorter than that."""
        if self.own_components:
            limits = [_of_components(self._launcher, self.own_components, self._head).queue.time_limit]
            with suppress(ValueError):  # What it takes the place of need not be one.
                limits.append(self.usual.queue.time_limit)
            return _of_components(self._launcher, self.own_components, self._head, _longest(*limits))
        usual = self.usual.queue.time_limit
        if components := self._asked:
            return _of_components(self._launcher, components, self._head, usual)
        queue = self._queue
        queue = merge_queue(queue, SlurmQueueConfig(time_limit=_longest(queue.time_limit, usual)))
        return SessionTemplate(plan.ray, plan.footprint, queue)

    def wish(self, plan: Plan) -> Requirements:
        """What a payload wishes for."""
        if components := self._asked:
            own = self.own_components is not None
            # Without a word on its own time limit it may take as long as the session lives.
            kind = _of_components(self._launcher, components, self._head, None if own else self.usual.queue.time_limit)
            head = head_wanted(self._launcher, self.own_components)
            return Requirements(plan.ray, plan.footprint, time_limited=own, components=kind.components, head=head)
        limited = self.own_queue is not None and "time_limit" in self.own_queue.model_fields_set
        return Requirements(plan.ray, plan.footprint, self._queue, time_limited=limited)

    def misfit(self, plan: Plan) -> str | None:
        """What a payload wishes for and the usual session does not have; None if it fits.

        Raises:
            ValueError: the usual session cannot be, and the run brings no components in place of those.
        """
        wish = self.wish(plan)
        try:
            offer = self.usual.offer(self.reuse)
        except ValueError as error:
            if not self.own_components or self.session.num_nodes is not None:
                raise
            return f"there is no session for all payloads: {error}"
        return misfit(wish, offer)

    @property
    def _queue(self) -> SlurmQueueConfig:
        """What this run would ask the cluster for, if its nodes are all alike."""
        return merge_queue(self.usual.queue, self.own_queue)

    @property
    def _asked(self) -> tuple[HetComponent, ...]:
        """The components that this run would ask for; none where its nodes would be all alike."""
        return self.components if self.own_components is None else self.own_components

    @property
    def _launcher(self) -> Launcher:
        """The launcher of this run."""
        return self.own_launcher or self.launcher

    @property
    def _head(self) -> str | None:
        """The component in which this run would have the head: where sessions have it, unless the run says otherwise."""
        usual = _component_of(self.launcher) if self.own_components is None else None
        return _component_of(self._launcher) or usual

    def key(self, kind: SessionTemplate, run_id: str, base: str, data_dir: str, apart: bool) -> str:
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
                "components": _as_json(kind.components),
                "site": self.slurm.site,
            }
            what |= {"concurrent": config.max_concurrent_payloads, "idle": config.idle_timeout, "yields": config.yield_when_idle}
        text = json.dumps(what, sort_keys=True)
        return f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def asked(self, plan: Plan, run_id: str, base: str, data_dir: str) -> bytes:
        """What a payload asks for, as a text: a retry that asks for the same has the same.

        Args:
            plan: the payload.
            run_id: the Dagster run.
            base: the base directory on the cluster.
            data_dir: the directory that payloads share.
        """
        wish, apart = self.wish(plan), self.misfit(plan) is not None
        kind = self.own(plan) if apart else self.usual
        what = {
            "session": self.key(kind, run_id, base, data_dir, apart),
            "ray": None if wish.ray is None else dataclasses.asdict(wish.ray),
            "footprint": wish.footprint,
            "queue": None if wish.queue is None else wish.queue.model_dump(mode="json"),
            "time_limited": wish.time_limited,
            "components": _as_json(wish.components),
            "head": wish.head,
        }
        return json.dumps(what, sort_keys=True).encode()

    def spec(self, cluster_id: str, kind: SessionTemplate, request: JobRequest, plan: Plan) -> RuntimeSpec:
        """The start record of a session's runtime."""
        signal_name, before = split_signal(kind.queue.signal_before_timeout)
        components = component_specs(request)
        return RuntimeSpec(
            cluster_id,
            kind.ray if self.reuse else None,
            idle_timeout=self.session.idle_timeout,
            yield_when_idle=self.session.yield_when_idle,
            max_concurrent_payloads=self.session.max_concurrent_payloads,
            control_key=secrets.token_hex(32),
            control_ports=control_ports(kind.ray.port_range if kind.ray is not None else None),
            # What is asked of a component's nodes stands with the component.
            asked_cpus=None if components else request.cpus_per_node,
            asked_gpus=None if components else request.gpus_per_node,
            components=components,
            warn_before_limit=before,
            warn_signal=signal_name,
            worker_env=shared_variables(plan.payload),
            preload=self.launcher.preload if isinstance(self.launcher, RayLauncher) else [],
        )


def _of_components(
    launcher: Launcher, components: tuple[HetComponent, ...], head: str | None, time_limit: str | None = None
) -> SessionTemplate:
    """A session of components.

    Args:
        launcher: the launcher that it is made for.
        components: in any order.
        head: the component of the head; None for the one that is marked, or the first.
        time_limit: of its job; None for what the components say.

    Raises:
        ValueError: they contradict each other, or the launcher.
    """
    arranged = arrange(components, head)
    if time_limit is not None:
        limited = [SlurmQueueConfig(**{**each.queue.model_dump(), "time_limit": time_limit}) for each in arranged]
        arranged = tuple(dataclasses.replace(each, queue=queue) for each, queue in zip(arranged, limited, strict=True))
    settled = settle(launcher, arranged)
    return SessionTemplate(ray_across(launcher, settled), launcher.footprint(), settled[0].queue, settled)


def _as_json(components: tuple[Component, ...]) -> list[Any]:
    """What tells components from others, for a file or a fingerprint."""
    return [
        [each.component_id, each.queue.model_dump(mode="json"), each.launcher.footprint(), each.payload_wants]
        for each in components
    ]


def _component_of(launcher: Launcher) -> str | None:
    """The component in which a launcher would have the payload; None if it does not say."""
    return launcher.component_id if isinstance(launcher, RayLauncher) else None


def _longest(*limits: str) -> str:
    return max(limits, key=lambda text: time_limit_seconds(text) or float("inf"))


def session_script(request: JobRequest, interpreter: Interpreter, runtime: str, directory: str, slurm: SlurmResource) -> str:
    """The batch script that starts a session's runtime on all nodes."""
    return render_script(request, interpreter.start("-I", runtime, "session", directory), directory, slurm.site)


def example_session_script(setup: SessionSetup, kind: SessionTemplate) -> str:
    """The batch script of a session, with words in capitals for what is known only when it is submitted."""
    request = kind.request(job_name(f"session-{setup.name}", "NONCE"), job_comment("RUN", "STEP", None))
    base = setup.slurm.remote_base
    directory = f"{base}/sessions/{setup.name}-FINGERPRINT/GENERATION"
    return session_script(request, Interpreter("ENVIRONMENT/bin/python"), f"{base}/runtime/RUNTIME.pyz", directory, setup.slurm)
