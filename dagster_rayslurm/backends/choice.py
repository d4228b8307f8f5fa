"""Which backend serves a call, made of the resource's configuration: the one place that knows all of them."""

from __future__ import annotations

from dataclasses import dataclass

from .. import modes
from ..components import Component, component_specs, ray_across, request_for, spanning_components
from ..config import SessionConfig
from ..environments import Environment, resolve_environment
from ..launchers import Launcher
from ..overrides import merge_queue
from ..plan import Plan
from ..runtime.spec import ComponentSpec, RaySpec
from ..slurm.config import SlurmQueueConfig, SlurmResource
from ..slurm.hetjob import HetComponent
from .base import Attempt, Attempts, Backend, Plans
from .batch import BatchBackend
from .local import LocalBackend
from .rundir import Layout
from .sessions.backend import SessionBackend
from .sessions.fit import head_wanted
from .sessions.setup import SessionSetup
from .together import LocalTogether
from .together_batch import BatchTogether


@dataclass(frozen=True)
class Setting:
    """What a resource says of all calls.

    Attributes:
        mode: how payloads run.
        layout: where things are on this machine.
        slurm: the cluster; None for local mode alone.
        environment: the Python environment of payloads.
        simulate: whether local mode simulates CPUs and GPUs that this machine lacks.
        launcher: of payloads that bring none; the cluster that stays warm is its.
        components: of calls that bring none.
        session: how a warm session is shared.
        reuse: whether Ray clusters stay warm.
        queue_timeout: seconds after which a job that still waits is given up; None waits for ever.
        start_timeout: seconds in which a runtime must write something.
        patience: seconds for which a run can be out of reach.
    """

    mode: str
    layout: Layout
    slurm: SlurmResource | None
    environment: Environment
    simulate: bool
    launcher: Launcher
    components: tuple[HetComponent, ...]
    session: SessionConfig
    reuse: bool
    queue_timeout: float | None
    start_timeout: float
    patience: float


@dataclass(frozen=True)
class Call:
    """What counts for one call, every `EnvVar` resolved, and all of it possible in the resource's mode.

    Attributes:
        launcher: the resource's, with what the call changes.
        queue: what the call changes in the resource's; None for nothing.
        parts: the components that count, in the job's order; none where all nodes are alike.
        components: its own; None for the resource's.
    """

    launcher: Launcher
    queue: SlurmQueueConfig | None
    parts: tuple[Component, ...]
    components: tuple[HetComponent, ...] | None


def backend_for(setting: Setting, call: Call) -> Backend[Plan, Attempt]:
    """What runs the one payload of a call.

    Raises:
        ValueError: the environment cannot be used, or the components of a warm cluster contradict each other.
    """
    if setting.slurm is None or setting.mode == modes.LOCAL:
        offered, asked = _warm(setting, call) if setting.reuse else (None, [])
        return LocalBackend(
            setting.layout,
            resolve_environment(setting.environment),
            setting.session if setting.reuse else None,
            offered,
            asked,
            head_wanted(call.launcher, call.components),
            setting.simulate,
        )
    if setting.mode == modes.SESSION:
        setup = SessionSetup(
            slurm=setting.slurm,
            own_queue=call.queue,
            environment=setting.environment,
            session=setting.session,
            launcher=setting.launcher,
            reuse=setting.reuse,
            components=setting.components,
            own_components=call.components,
            own_launcher=call.launcher,
        )
        return SessionBackend(setup, setting.queue_timeout, setting.start_timeout, setting.patience, setting.layout)
    return _batch(setting, setting.slurm, call)


def together_for(setting: Setting, call: Call) -> Backend[Plans, Attempts]:
    """What runs the payloads of a call, one for each component.

    Raises:
        ValueError: the environment cannot be used.
    """
    if setting.slurm is None or setting.mode == modes.LOCAL:
        return LocalTogether(setting.layout, resolve_environment(setting.environment), call.parts, setting.simulate)
    return BatchTogether(_batch(setting, setting.slurm, call), call.parts)


def _batch(setting: Setting, slurm: SlurmResource, call: Call) -> BatchBackend:
    queue = merge_queue(slurm.queue, call.queue)
    return BatchBackend(slurm, queue, setting.environment, setting.queue_timeout, setting.patience, call.parts)


def _warm(setting: Setting, call: Call) -> tuple[RaySpec | None, list[ComponentSpec]]:
    """The cluster that stays warm for all payloads, and what is asked for each component of it.

    Raises:
        ValueError: there can be none, and the call brings no components in place of those.
    """
    try:
        usual = spanning_components(setting.launcher, setting.components)
        ray = ray_across(setting.launcher, usual)
        return ray, component_specs(request_for(usual, job_name="rayslurm", comment="")) if usual else []
    except ValueError:
        if call.components is None:
            raise
        return None, []
