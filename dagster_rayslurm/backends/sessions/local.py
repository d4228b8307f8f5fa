"""Warm sessions on this machine, where a runtime process takes the place of the Slurm job.

The sessions of each host have a registry of their own below the base directory, because the base directory may be on a shared
file system.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from dagster_pipes import PipesContextData

from ...archive import runtime_name
from ...config import SessionConfig
from ...edge.sessions import CREATOR, JOB_ID, MANIFEST
from ...errors import FailureKind, StartError
from ...follow import Cadence, Evidence
from ...plan import Plan
from ...runtime.payload.environment import shared_variables
from ...runtime.protocol.messages import Operation
from ...runtime.protocol.record import LOCK, RUNTIME, SESSION
from ...runtime.protocol.rpc import AnswerLost
from ...runtime.protocol.spec import PROTOCOL_VERSION, ComponentSpec, RaySpec, RuntimeSpec, to_json
from ...ssh.local import LocalConnection
from ..base import Register, RunningPayload, Step, delayed_interrupts
from ..layout import Layout
from ..local import LocalBackend, reap_later, runtime_command, start_process
from .acquire import Allocation, LocalProcess, Site
from .backend import start_in_session
from .here import is_alive, list_sessions, sessions_base
from .matching import Capacity, Choice, Requirements, Target, misfit, session_key
from .payload import SessionPayload
from .registry import Generation, LiveSession, SessionManifest, SessionRegistry, list_generations
from .request import Unreachable, grace_period, send_request

_START_TIMEOUT = 60.0  # Seconds in which a session that was started announces itself.
# Seconds beyond the grace period of its payloads in which a session ends after a stop request, with its Ray cluster.
_END_MARGIN = 120.0


@dataclass(frozen=True, kw_only=True)
class LocalSessionBackend(LocalBackend):
    """Runs payloads with Ray in warm sessions on this machine. A payload without Ray gets a runtime of its own."""

    session: SessionConfig
    offered: RaySpec | None = None  # Settings of the warm Ray cluster; if None, a session gets those of its first payload.
    components: Sequence[ComponentSpec] = ()  # Components of the warm cluster; empty if all nodes are alike.
    head: str | None = None  # The component in which the payload must run; None for the one with the head of the Ray cluster.

    def start(self, plan: Plan, run_dir: str, context: PipesContextData, step: Step, register: Register) -> RunningPayload:
        if plan.ray is None:
            return super().start(plan, run_dir, context, step, register)
        ray = self.on_this_machine(plan.ray, plan.components)
        plan = replace(plan, ray=ray)
        # If the session has an activated environment, the payload gets that one; otherwise it gets this process's variables,
        # as a payload without a session does.
        environ = dict(os.environ) if self.interpreter.activate is None else None
        self.connection.make_dir(run_dir)
        lock = open(os.path.join(run_dir, LOCK), "wb")
        fcntl.flock(lock, fcntl.LOCK_EX)
        site = LocalSite(
            connection=self.connection,
            base=sessions_base(self.layout),
            plan=plan,
            run_dir=run_dir,
            context=context,
            step=step,
            register=register,
            start_timeout=_START_TIMEOUT,
            patience=0.0,
            members={"lock": lock.name, "environ": environ},
            backend=self,
            lock=lock,
        )
        return start_in_session(site, self._choice(plan, ray, step.run_id))

    def _choice(self, plan: Plan, ray: RaySpec, run_id: str) -> Choice:
        shared = ray if self.offered is None else self.on_this_machine(self.offered, self.components)
        problem = misfit(Requirements(ray, (), head=self.head), Capacity(shared, True))
        what = {"interpreter": self.interpreter.start(), "runtime": [PROTOCOL_VERSION, runtime_name()]}

        def target(cluster: RaySpec, apart: bool) -> Target:
            created_with = Requirements(cluster, ())
            return Target(session_key(self.session, run_id, what, created_with, apart), created_with)

        required, own = Requirements(ray, plan.footprint, head=self.head), target(ray, True)
        return Choice(required, problem, own if problem else target(shared, False), own, self.session.on_misfit == "error")

    def sweep(self, retention_days: float) -> None:
        oldest = time.time() - retention_days * 86400
        for each in list_generations(self.connection, sessions_base(self.layout)):
            with contextlib.suppress(OSError):
                if os.stat(each.directory).st_mtime < oldest and not is_alive(each.job_id, each.directory):
                    shutil.rmtree(each.directory, ignore_errors=True)


@dataclass(kw_only=True, eq=False)
class LocalSite(Site):
    """This machine, on which a step looks for sessions; each session is a process. See `Site` for the methods."""

    noun = "process"
    end_command = "kill"
    cadence = Cadence(busy=0.02, idle=0.2, waiting=0.2)

    backend: LocalSessionBackend
    lock: BinaryIO  # The session ends the payload when this process no longer holds this lock.

    def create(self, registry: SessionRegistry, target: Target, number: int, hold: Callable[[Allocation], None]) -> bool:
        backend, ray, directory = self.backend, target.created_with.ray, registry.generation_dir(number)
        assert ray is not None
        spec = RuntimeSpec(
            cluster_id=f"local-{secrets.token_hex(4)}",
            ray=ray,
            control_key=secrets.token_hex(32),
            worker_env=shared_variables(self.plan.payload),
            preload=self.plan.payload.preload,
            components=[ComponentSpec(node.component_id) for node in ray.components],
            **backend.session.for_runtime(),
        )
        manifest = SessionManifest(number, Capacity(ray, True), ())
        files = {RUNTIME: to_json(spec).encode(), MANIFEST: manifest.to_json(), SESSION: b"", CREATOR: b"process\n"}
        command = runtime_command(backend.layout, backend.interpreter, "serve", directory)
        self.connection.make_dir(registry.directory)
        with delayed_interrupts():
            try:
                os.mkdir(directory, 0o700)
            except FileExistsError:
                return False
            try:
                for name, content in files.items():
                    self.connection.write(os.path.join(directory, name), content)
                process = start_process(command, directory, subprocess.DEVNULL)
                reap_later(process)
                hold(LocalProcess(str(process.pid), directory))
                self.connection.write(os.path.join(directory, JOB_ID), str(process.pid).encode())
            except OSError:
                registry.abandon(number)
                raise
        return True

    def watch(self, target: Target, newest: Generation) -> LocalProcess:  # noqa: ARG002
        return LocalProcess(str(newest.job_id), newest.directory)

    def is_alive(self, job_id: str, directory: str) -> bool:
        return is_alive(int(job_id), directory)

    def send(self, session: LiveSession, request: Mapping[str, Any]) -> dict[str, Any]:
        return send_request(self.connection, session, request)

    def running(self, session: LiveSession, reused: bool) -> LocalSessionPayload:  # noqa: ARG002
        return LocalSessionPayload(self, session, LocalProcess(session.announcement.job_id, session.directory))


class LocalSessionPayload(SessionPayload):
    """A payload in a session on this machine.

    The constructor's `site` holds a lock on a file in the payload's run directory. The session ends the payload when `release`
    gives up the lock, or when this process ends.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.job_id = None

    def metadata(self, evidence: Evidence) -> Mapping[str, Any]:  # noqa: ARG002
        return {}

    def release(self, evidence: Evidence) -> None:  # noqa: ARG002
        assert isinstance(self.site, LocalSite)
        self.site.lock.close()


def end_session(generation: Generation) -> None:
    """Ask a session on this machine to end with its payloads, and wait until the session's process is gone.

    Raises StartError if the process still lives `_END_MARGIN` seconds after the grace period of its payloads.
    """
    answer: Mapping[str, Any] = {}
    with contextlib.suppress(Unreachable, AnswerLost):
        answer = send_request(LocalConnection(), generation, {"op": Operation.STOP})
    deadline = time.monotonic() + grace_period(answer) + _END_MARGIN
    while is_alive(generation.job_id, generation.directory):
        if time.monotonic() > deadline:
            sentence = f"the session {generation.key} was asked to end and goes on; run `kill {generation.job_id}`"
            raise StartError(FailureKind.RUNTIME, sentence)
        time.sleep(0.05)


def stop(layout: Layout, cluster_id: str) -> bool:
    """End the session of the Ray cluster `cluster_id` on this machine, with its payloads, and wait for the end.

    Returns False if there is no such session. Raises StartError if the session does not end.
    """
    own = [each for each in list_sessions(layout) if each.announcement and each.announcement.cluster_id == cluster_id]
    for each in own:
        end_session(each)
    return bool(own)
