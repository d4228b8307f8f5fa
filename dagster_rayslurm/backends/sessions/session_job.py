"""Which session a payload gets, and what that session's job is made of: directory, start record and batch script. Pure."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from ...archive import runtime_name
from ...components import arrange, merge_launchers, ray_across
from ...config import SessionConfig, time_limit_seconds
from ...environments import Environment, path_on_cluster
from ...launchers import Launcher, RayLauncher
from ...plan import Plan, check_session, merge, session_queue
from ...runtime.protocol.spec import PROTOCOL_VERSION, RuntimeSpec
from ...slurm.config import HetComponent, SlurmQueueConfig, SlurmResource
from ...slurm.request import JobRequest, job_comment, job_name
from ..batch import example_script, runtime_spec
from .matching import Choice, Requirements, Target, misfit, required_head, session_key


@dataclass(frozen=True)
class SessionSetup:
    """How a `ComputeResource` uses sessions, and what one run overrides.

    Attributes:
        own_queue: what this run changes in the queue configuration of sessions; None for nothing.
        launcher: the launcher for which sessions are created.
        reuse: whether the Ray cluster stays warm between payloads.
        components: the components of a session's job, instead of the cluster's queue; empty where all nodes are alike.
        own_components: the components of this run; None for those of sessions.
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
        """The name of the session, without its fingerprint."""
        return self.session.name or "default"

    @cached_property
    def default(self) -> Requirements:
        """What the default session is created with; raises ValueError if its components contradict each other or `session`."""
        if not self.components:
            queue = session_queue(self.slurm.queue, self.session)
            return Requirements(self.launcher.ray_spec(), self.launcher.footprint(), queue)
        check_session(self.session, self.components)
        parts = merge_launchers(self.launcher, arrange(self.components, _component_of(self.launcher)))
        ray = ray_across(self.launcher, parts)
        required = Requirements(ray, self.launcher.footprint(), parts[0].queue, parts)
        return required.with_time_limit(self.session.time_limit) if self.session.time_limit is not None else required

    def required(self, plan: Plan) -> Requirements:
        """What this run's payload requires of a session."""
        own = self.own_components is not None
        components = self.components if self.own_components is None else self.own_components
        if not components:
            queue = merge(self.default.queue, self.own_queue)
            limited = self.own_queue is not None and "time_limit" in self.own_queue.model_fields_set
            return Requirements(plan.ray, plan.footprint, queue, time_limited=limited)
        launcher = self.own_launcher or self.launcher
        # The head stays where sessions have it, unless the run brings components or names one.
        head = _component_of(launcher) or (None if own else _component_of(self.launcher))
        parts = merge_launchers(launcher, arrange(components, head))
        wanted_head = required_head(launcher, self.own_components)
        required = Requirements(plan.ray, plan.footprint, parts[0].queue, parts, time_limited=own, head=wanted_head)
        return required if own else required.with_time_limit(self.default.queue.time_limit)

    def own(self, plan: Plan) -> Requirements:
        """What a separate session is created with, for a payload that does not fit; it lives as long as the default one."""
        required = self.required(plan)
        limits = [required.queue.time_limit]
        with suppress(ValueError):  # The session's components may contradict each other where the run brings its own.
            limits.append(self.default.queue.time_limit)
        return required.with_time_limit(max(limits, key=lambda text: time_limit_seconds(text) or float("inf")))

    def misfit(self, plan: Plan) -> str | None:
        """Why the payload does not fit the default session, which the resource's own configuration describes; None if it fits.

        Raises ValueError if that session is impossible, and the run does not replace its components by its own.
        """
        required = self.required(plan)
        try:
            capacity = self.default.capacity(self.reuse)
        except ValueError as error:
            if not self.own_components or self.session.num_nodes is not None:
                raise
            return f"there is no session for all payloads: {error}"
        return misfit(required, capacity)

    def choice(self, plan: Plan, run_id: str, base: str, data_dir: str) -> Choice:
        """Which session the payload gets.

        Args:
            base: the base directory on the cluster.
            data_dir: the directory that payloads share.
        """
        what = {
            "base": base,
            "runtime": [PROTOCOL_VERSION, runtime_name()],
            "environment": path_on_cluster(self.environment, over_ssh=self.slurm.ssh is not None),
            "data_dir": data_dir,
            "reuse": self.reuse,
        }

        def target(created_with: Requirements, apart: bool) -> Target:
            more = {"site": self.slurm.site} if self.session.name is None or apart else {}
            key = session_key(self.session, run_id, {**what, **more}, created_with, apart)
            return Target(key, created_with, created_with.capacity(self.reuse))

        return Choice(
            self.required(plan),
            self.misfit(plan),
            lambda: target(self.default, False),
            lambda: target(self.own(plan), True),
            self.session.on_misfit == "error",
        )

    def runtime_spec(self, cluster_id: str, required: Requirements, request: JobRequest, plan: Plan) -> RuntimeSpec:
        """What the runtime of a session reads when it starts."""
        return replace(
            runtime_spec(cluster_id, replace(plan, ray=required.ray), request, required.queue),
            ray=required.ray if self.reuse else None,
            idle_timeout=self.session.idle_timeout,
            yield_when_idle=self.session.yield_when_idle,
            max_concurrent_payloads=self.session.max_concurrent_payloads,
            preload=self.launcher.preload if isinstance(self.launcher, RayLauncher) else [],
        )

    def example_script(self, plan: Plan) -> str:
        """The batch script of the payload's session, with words in capitals in place of what is known only at submission."""
        required = self.default if self.misfit(plan) is None else self.own(plan)
        request = required.job_request(job_name(f"session-{self.name}", "NONCE"), job_comment("RUN", "STEP", None))
        return example_script(request, self.slurm, "session", f"sessions/{self.name}-FINGERPRINT/GENERATION")


def _component_of(launcher: Launcher) -> str | None:
    return launcher.component_id if isinstance(launcher, RayLauncher) else None
