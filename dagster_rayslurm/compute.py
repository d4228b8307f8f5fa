"""The front door: one resource, one `run()`, for every way to run a payload."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Optional, Union

import dagster as dg
from dagster_pipes import PipesExtras
from pydantic import ConfigDict, Field

from .backends import local_session
from .backends.base import Backend
from .backends.batch import BatchBackend, cancel_cluster, example_script
from .backends.local import LocalBackend
from .backends.process import runtime_command
from .backends.run_end import run_ended
from .backends.rundir import Layout
from .backends.session import SessionBackend, end_session
from .backends.session_setup import SessionSetup, example_session_script
from .config import (
    ExecutionMode,
    SessionConfig,
    at_least,
    check_environment,
    choice,
    plain_text,
    resolve_variables,
)
from .connections.shared import connect_early
from .environments import Environment, InheritedEnvironment, PreDeployedEnvironment, resolve_environment
from .errors import RunFailure
from .execution import CompletedRun, Policy, execute, start_errors
from .fit import misfit
from .launchers import BashLauncher, Launcher, RayLauncher
from .plan import Plan, make_plan
from .runtime.spec import RuntimeSpec, to_json
from .slurm.config import SlurmQueueConfig, SlurmResource
from .slurm.hetjob import HetComponent

_AVAILABLE = (ExecutionMode.LOCAL.value, ExecutionMode.SLURM.value, ExecutionMode.SLURM_SESSION.value)
_ON_SLURM = _AVAILABLE[1:]

Payload = Union[str, "os.PathLike[str]", Sequence[str]]
Context = Union[dg.AssetExecutionContext, dg.OpExecutionContext, dg.AssetCheckExecutionContext]


class ComputeResource(dg.ConfigurableResource, dg.PipesClient):
    """Runs payloads on this machine or in Slurm jobs, with a Ray cluster around them if the launcher says so.

    Example:
        ```python
        import dagster as dg
        from dagster_rayslurm import ComputeResource


        @dg.asset
        def features(context: dg.AssetExecutionContext, compute: ComputeResource):
            return compute.run(context=context, payload_path="features.py").get_materialize_result()


        defs = dg.Definitions(assets=[features], resources={"compute": ComputeResource(mode="local")})
        ```
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Annotated[str, choice(*(mode.value for mode in ExecutionMode))] = Field(
        default="local", description='How payloads run: "local", "slurm", "slurm-session" or "slurm-hetjob".'
    )
    slurm: Optional[SlurmResource] = Field(default=None, description="The Slurm cluster; needed by every mode but local.")
    default_launcher: Union[RayLauncher, BashLauncher] = Field(
        default=RayLauncher(), discriminator="kind", description="Launcher of payloads that name none."
    )
    session: SessionConfig = Field(
        default=SessionConfig(), description="The warm session that is shared, with enable_cluster_reuse or slurm-session."
    )
    components: list[HetComponent] = Field(default=[], description="Components of the heterogeneous job (slurm-hetjob).")
    enable_cluster_reuse: bool = Field(
        default=False,
        description="Keep the Ray cluster warm between payloads; it ends itself after session.idle_timeout. In mode slurm each "
        "payload has a job of its own all the same.",
    )
    environment: Union[InheritedEnvironment, PreDeployedEnvironment] = Field(
        default=InheritedEnvironment(), discriminator="kind", description="The Python environment of payloads."
    )
    pre_deployed_env_path: Annotated[Optional[str], plain_text] = Field(
        default=None, description="Short for a pre-deployed environment: a conda prefix, a venv, or a directory with activate.sh."
    )
    auto_detect_platform: bool = Field(
        default=True, description="Ask the cluster for its CPU architecture instead of assuming this one's."
    )
    data_dir: Annotated[Optional[str], plain_text] = Field(
        default=None,
        description="Directory that every payload finds in RAYSLURM_DATA_DIR; None for `data` below the base directory.",
    )
    local_base: Annotated[str, plain_text] = Field(
        default="~/.dagster_rayslurm", description="Base directory on this machine: run directories of the local mode, outputs."
    )
    require_messages: bool = Field(default=True, description="Fail a Pipes payload that never opened or never closed Pipes.")
    keep_run_dirs: Annotated[str, choice("all", "failed", "none")] = Field(
        default="failed", description='Which run directories stay for a look: "all", "failed" or "none".'
    )
    retention_days: Annotated[int, at_least(1, "days")] = Field(
        default=14, description="Days after which kept run directories and outputs go."
    )
    connection_loss_timeout: Annotated[int, at_least(0, "seconds")] = Field(
        default=86400, description="Seconds that a run may be out of reach before it has failed."
    )
    runtime_start_timeout: Annotated[int, at_least(1, "seconds")] = Field(
        default=600,
        description="Seconds until a runtime that was started (in Slurm: whose job runs) has failed if it wrote nothing.",
    )
    queue_timeout: Annotated[Optional[int], at_least(1, "seconds")] = Field(
        default=None, description="Seconds in Slurm's queue after which a run has failed; None waits for ever."
    )
    max_stdio_mb: Annotated[int, at_least(1, "MiB")] = Field(
        default=1024, description="MiB of payload output that are recorded; the rest is counted and dropped."
    )
    max_outputs_mb: Annotated[int, at_least(0, "MiB")] = Field(
        default=100, description="MiB of files that `outputs=` brings back."
    )

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:  # noqa: ARG002
        """Begin to log in to the cluster, while Dagster prepares the step."""
        if self.slurm is not None and self.mode in _ON_SLURM:
            connect_early(self.slurm.ssh)

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        """End the sessions of a run that is over, though its process may go on."""
        if context.run is not None:
            run_ended(context.run.run_id)

    def run(  # type: ignore[override]
        self,
        *,
        context: Context,
        payload_path: Payload,
        launcher: Launcher | None = None,
        queue: SlurmQueueConfig | None = None,
        extra_env: Mapping[str, str] | None = None,
        secret_env: Mapping[str, str] | None = None,
        extras: PipesExtras | None = None,
        extra_files: Sequence[str | os.PathLike[str]] | None = None,
        outputs: Sequence[str] | None = None,
        components: Sequence[HetComponent] | None = None,
        uses_pipes: bool = True,
    ) -> CompletedRun:
        """Run a payload and wait for it, with its output and Pipes messages streaming into Dagster.

        Args:
            context: the context of the asset, asset check or op.
            payload_path: an existing file is a Python script, whatever characters its path has; otherwise a command,
                split as a shell would (`python -m pkg.mod --epochs 3`); a list is taken as it is. `python` means the
                environment's Python.
            launcher: instead of `default_launcher`, as a whole.
            queue: instead of the Slurm resource's queue, as a whole; local mode has no use for it.
            extra_env: variables for the payload and its Ray workers.
            secret_env: variables for the payload's driver process alone.
            extras: Pipes extras, `pipes.extras` in the payload.
            extra_files: files or directories that appear in the payload's working directory.
            outputs: patterns of files of the payload's working directory that are brought back.
            components: instead of the resource's components (slurm-hetjob).
            uses_pipes: False for a payload that does not open Dagster Pipes; its exit code alone decides.

        Returns:
            The payload's results, once it succeeded.

        Raises:
            RunFailure: a `dg.Failure` whose `kind` says what went wrong.
        """
        with _configuration_errors():
            self._check_mode(self._launcher(launcher), components)
            # Nothing asks Slurm for it in local mode, but a mistake shows there, too.
            queue = queue if queue is None else resolve_variables(queue, "queue")
            plan = self._plan(
                payload_path,
                self._launcher(launcher),
                nonce=secrets.token_hex(6),
                env=check_environment(extra_env, "extra_env"),
                secret_env=check_environment(secret_env, "secret_env"),
                extra_files=extra_files,
                outputs=outputs,
                uses_pipes=uses_pipes,
            )
            backend = self._backend(queue)
            backend.check(plan)
        policy = Policy(
            self.mode,
            self.require_messages,
            self.keep_run_dirs,
            self.retention_days,
            self.connection_loss_timeout,
            self.runtime_start_timeout,
            self._layout,
        )
        # Asset and check contexts wrap the one that open_pipes_session takes for all of them.
        op_context = context if isinstance(context, dg.OpExecutionContext) else context.op_execution_context
        return execute(op_context, plan, backend, policy, extras)

    def cleanup_cluster(self, cluster_id: str) -> bool:
        """End a warm Ray cluster, on Slurm the job or the session of a cluster, and everything that runs on it.

        Args:
            cluster_id: as `CompletedRun.cluster_id` or the metadata "Ray cluster ID" give it.

        Returns:
            Whether there was such a cluster.

        Raises:
            RunFailure: it does not answer.
        """
        with _configuration_errors(), start_errors():
            if self.slurm is not None and self.mode in _ON_SLURM:
                # It may well be called outside of a run, where Dagster has resolved no variables.
                slurm = resolve_variables(self.slurm, "slurm")
                return end_session(slurm, cluster_id) or cancel_cluster(slurm, cluster_id)
            return local_session.stop(self._layout, cluster_id)

    def job_script(
        self, *, payload_path: Payload, launcher: Launcher | None = None, queue: SlurmQueueConfig | None = None
    ) -> str:
        """What would be started for a payload, for a person to read; nothing is started, and no cluster is contacted.

        Args:
            payload_path: as for `run`.
            launcher: as for `run`.
            queue: as for `run`.

        Returns:
            The batch script, with words in capitals for what is known only when it is submitted. In local mode the
            command that starts the runtime, and its start record.

        Raises:
            RunFailure: an argument cannot be used.
        """
        with _configuration_errors():
            # It may well be called outside of a run, where Dagster has resolved no variables.
            return resolve_variables(self, type(self).__name__)._job_script(payload_path, launcher, queue)

    def _job_script(self, payload_path: Payload, launcher: Launcher | None, queue: SlurmQueueConfig | None) -> str:
        self._check_mode(self._launcher(launcher), None)
        plan = self._plan(payload_path, self._launcher(launcher), nonce="NONCE")
        if self.slurm is not None and self.mode == ExecutionMode.SLURM.value:
            return example_script(plan, self._queue(queue), self.slurm)
        if self.mode == ExecutionMode.SLURM_SESSION.value:
            setup = self._session_setup(queue)
            fits = misfit(setup.wish(plan), setup.usual.offer(setup.reuse)) is None
            return example_session_script(setup, setup.usual if fits else setup.own(plan))
        interpreter = resolve_environment(self._environment)
        run_dir = str(self._layout.runs / "RUN_DIR")
        command = runtime_command(self._layout, interpreter, "run", run_dir)
        spec = RuntimeSpec("local-NONCE", plan.ray)
        return (
            f"{shlex.join(command)}\n\n# {run_dir}/runtime.json\n{to_json(spec)}\n\n"
            f"# {run_dir}/payload.json\n{to_json(plan.payload)}\n"
        )

    @property
    def _layout(self) -> Layout:
        return Layout(Path(os.path.abspath(os.path.expanduser(self.local_base))))

    @property
    def _data_dir(self) -> str | None:
        """The directory that payloads share; as it was given if it is on a cluster."""
        if self.mode != ExecutionMode.LOCAL.value:
            return self.data_dir
        return os.path.abspath(os.path.expanduser(self.data_dir)) if self.data_dir else str(self._layout.data)

    @property
    def _environment(self) -> Environment:
        if self.pre_deployed_env_path is None:
            return self.environment
        if isinstance(self.environment, PreDeployedEnvironment):
            raise ValueError("pre_deployed_env_path: environment is given too; give one of them")
        return PreDeployedEnvironment(path=self.pre_deployed_env_path)

    def _launcher(self, launcher: Launcher | None) -> Launcher:
        if launcher is None:
            return self.default_launcher
        if not isinstance(launcher, Launcher):
            raise ValueError(f"launcher: {launcher!r} is not a launcher; pass a RayLauncher, a BashLauncher or your own")
        return resolve_variables(launcher, "launcher")

    def _plan(
        self,
        payload_path: Payload,
        launcher: Launcher,
        *,
        nonce: str,
        env: Mapping[str, str] = MappingProxyType({}),
        secret_env: Mapping[str, str] = MappingProxyType({}),
        extra_files: Sequence[str | os.PathLike[str]] | None = None,
        outputs: Sequence[str] | None = None,
        uses_pipes: bool = True,
    ) -> Plan:
        return make_plan(
            payload_path=payload_path,
            launcher=launcher,
            nonce=nonce,
            env=env,
            data_dir=self._data_dir,
            secret_env=secret_env,
            extra_files=extra_files,
            outputs=outputs,
            max_output_bytes=self.max_outputs_mb * 2**20,
            max_stdio_bytes=self.max_stdio_mb * 2**20,
            uses_pipes=uses_pipes,
        )

    def _queue(self, queue: SlurmQueueConfig | None) -> SlurmQueueConfig:
        assert self.slurm is not None
        return self.slurm.queue if queue is None else resolve_variables(queue, "queue")

    def _backend(self, queue: SlurmQueueConfig | None) -> Backend:
        if self.slurm is not None and self.mode == ExecutionMode.SLURM.value:
            return BatchBackend(self.slurm, self._queue(queue), self._environment, self.queue_timeout)
        if self.mode == ExecutionMode.SLURM_SESSION.value:
            return SessionBackend(
                self._session_setup(queue),
                self.queue_timeout,
                self.runtime_start_timeout,
                self.connection_loss_timeout,
                self._layout,
            )
        session = self.session if self.enable_cluster_reuse else None
        return LocalBackend(self._layout, resolve_environment(self._environment), session, self.default_launcher.ray_spec())

    def _session_setup(self, queue: SlurmQueueConfig | None) -> SessionSetup:
        assert self.slurm is not None
        return SessionSetup(
            slurm=self.slurm,
            queue=self.slurm.queue,
            own_queue=queue if queue is None else resolve_variables(queue, "queue"),
            environment=self._environment,
            session=self.session,
            launcher=self.default_launcher,
            reuse=self.enable_cluster_reuse,
        )

    def _check_mode(self, launcher: Launcher, components: Sequence[HetComponent] | None) -> None:
        """Refuse what this mode cannot do, before anything starts."""
        if self.mode != ExecutionMode.LOCAL.value and self.slurm is None:
            raise ValueError(f"slurm: mode {self.mode!r} needs a Slurm cluster; set slurm=SlurmResource(…)")
        if self.mode not in _AVAILABLE:
            raise ValueError(f"mode: {self.mode!r} is not available in this version; use {' or '.join(map(repr, _AVAILABLE))}")
        style = launcher.launch_style if isinstance(launcher, RayLauncher) else "builtin"
        if style != "builtin" and self.mode == ExecutionMode.LOCAL.value:
            raise ValueError(f"launcher.launch_style: {style!r} needs the nodes of a Slurm allocation; use 'builtin'")
        own = self.components if self.mode in _ON_SLURM else None
        if components or own or (isinstance(launcher, RayLauncher) and launcher.component_id is not None):
            raise ValueError(f"components: mode {self.mode!r} has none; remove components and component_id")


@contextmanager
def _configuration_errors() -> Iterator[None]:
    """Turn what is wrong with the request into one failure, before anything starts."""
    try:
        yield
    except ValueError as error:
        raise RunFailure("configuration", str(error)) from None
