"""The front door: one resource, one `run()`, for every way to run a payload."""

from __future__ import annotations

import os
import secrets
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Optional, Union

import dagster as dg
from dagster_pipes import PipesExtras
from pydantic import ConfigDict, Field

from .backends import local_session
from .backends.base import Attempt
from .backends.local import OwnRuntime, runtime_command
from .backends.rundir import Layout, sweep_old, write_run_dir, write_runtime_spec
from .config import (
    ExecutionMode,
    SessionConfig,
    at_least,
    check_environment,
    choice,
    plain_text,
    resolve_variables,
)
from .connections.local import LocalConnection
from .environments import Environment, InheritedEnvironment, PreDeployedEnvironment, resolve_environment
from .errors import RunFailure
from .follow import Cadence, Evidence, Follower
from .interrupts import deferred_interrupts
from .launchers import BashLauncher, Launcher, RayLauncher
from .metadata import failure_metadata, run_metadata
from .outcome import judge
from .pipes import RecordContextInjector, RecordReader
from .plan import Plan, make_plan, run_dir_name
from .runtime import machine
from .runtime.cluster import footprint_error
from .runtime.spec import RaySpec, RuntimeSpec, to_json
from .slurm.config import SlurmQueueConfig, SlurmResource
from .slurm.hetjob import HetComponent

_LOCAL_CADENCE = Cadence(busy=0.01, idle=0.1)
_CANCEL_MARGIN = 15.0
"""Seconds beyond the grace period that a cancelled run is followed: it still takes its record to the end."""
_SWEEP_INTERVAL = 3600.0
_last_sweep: dict[Path, float] = {}

Payload = Union[str, "os.PathLike[str]", Sequence[str]]
Context = Union[dg.AssetExecutionContext, dg.OpExecutionContext, dg.AssetCheckExecutionContext]


class CompletedRun(dg.PipesClientCompletedInvocation):
    """A payload that succeeded.

    `get_results()`, `get_materialize_result()`, `get_asset_check_result()` and `get_custom_messages()` give what it
    reported, each with the run's `metadata`.

    Attributes:
        cluster_id: name of the Ray cluster, for `ComputeResource.cleanup_cluster`.
        job_id: Slurm's job id; None in local mode.
        outputs: local paths of the files that `outputs=` asked for.
    """

    def __init__(
        self, session: Any, metadata: Mapping[str, Any], cluster_id: str, job_id: str | None, outputs: list[Path]
    ) -> None:
        super().__init__(session, metadata=metadata)
        self.cluster_id = cluster_id
        self.job_id = job_id
        self.outputs = outputs


class ComputeResource(dg.ConfigurableResource, dg.PipesClient):
    """Runs payloads on this machine or in a Slurm allocation, with a Ray cluster around them if the launcher says so.

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
        default=False, description="Keep the Ray cluster warm between payloads; it ends itself after session.idle_timeout."
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
    retention_days: Annotated[int, at_least(0, "days")] = Field(
        default=14, description="Days after which kept run directories and outputs go."
    )
    connection_loss_timeout: Annotated[int, at_least(0, "seconds")] = Field(
        default=86400, description="Seconds that a run may be out of reach before it has failed."
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
            self._check_mode(launcher, components)
            chosen = self._launcher(launcher)
            if queue is not None:
                resolve_variables(queue, "queue")  # Nothing asks Slurm for it in local mode, but a mistake shows here too.
            plan = make_plan(
                payload_path=payload_path,
                launcher=chosen,
                nonce=secrets.token_hex(6),
                env={
                    **check_environment(extra_env, "extra_env"),
                    "RAYSLURM_DATA_DIR": str(self._data_dir),
                },
                secret_env=check_environment(secret_env, "secret_env"),
                extra_files=extra_files,
                outputs=outputs,
                max_output_bytes=self.max_outputs_mb * 2**20,
                max_stdio_bytes=self.max_stdio_mb * 2**20,
                uses_pipes=uses_pipes,
            )
            _check_footprint(plan)
            interpreter = resolve_environment(self._environment)
        # Asset and check contexts wrap the one that open_pipes_session takes for all of them.
        op_context = context if isinstance(context, dg.OpExecutionContext) else context.op_execution_context
        step = op_context.get_step_execution_context().step.key
        run_dir = str(self._layout.runs / run_dir_name(op_context.run.run_id, step, plan.payload.nonce))
        reader, injector = RecordReader(), RecordContextInjector(op_context)
        with dg.open_pipes_session(op_context, injector, reader, extras) as session:
            attempt: Attempt | None = None
            try:
                with _start_errors():
                    self._data_dir.mkdir(parents=True, exist_ok=True)
                    self._sweep()
                    assert injector.context_data is not None
                    write_run_dir(LocalConnection(), run_dir, plan, injector.context_data)
                    if plan.ray is not None and self.enable_cluster_reuse:
                        attempt = local_session.submit(
                            self._layout, interpreter, plan.ray, self.session, op_context.run.run_id, run_dir
                        )
                    else:
                        cluster_id = f"local-{plan.payload.nonce}"
                        write_runtime_spec(LocalConnection(), run_dir, RuntimeSpec(cluster_id, plan.ray))
                        attempt = OwnRuntime(self._layout, interpreter, run_dir, cluster_id)
                follower = Follower(LocalConnection(), run_dir, plan.payload.nonce, reader.handler, context.log, _LOCAL_CADENCE)
                evidence = self._follow(follower, attempt, plan, context)
            except BaseException:
                self._clean_up(run_dir, failed=True)
                raise
            finally:
                if attempt is not None:
                    attempt.release()
            outputs_dir = self._layout.outputs / op_context.run.run_id / Path(run_dir).name
            metadata = self._conclude(evidence, plan, attempt, run_dir, outputs_dir)
        files = sorted(path for path in outputs_dir.rglob("*") if path.is_file())
        return CompletedRun(session, metadata, attempt.cluster_id, attempt.job_id, files)

    def cleanup_cluster(self, cluster_id: str) -> bool:
        """End a warm Ray cluster and everything that runs on it.

        Args:
            cluster_id: as `CompletedRun.cluster_id` or the metadata "Ray cluster ID" give it.

        Returns:
            Whether there was such a cluster.
        """
        return local_session.stop(self._layout, cluster_id)

    def job_script(self, *, payload_path: Payload, launcher: Launcher | None = None) -> str:
        """What would be started for a payload, for a person to read; nothing is started.

        Args:
            payload_path: as for `run`.
            launcher: as for `run`.

        Returns:
            In local mode the command that starts the runtime, and its start record.

        Raises:
            RunFailure: an argument cannot be used.
        """
        with _configuration_errors():
            self._check_mode(launcher, None)
            plan = make_plan(
                payload_path=payload_path,
                launcher=self._launcher(launcher),
                nonce="NONCE",
                env={"RAYSLURM_DATA_DIR": str(self._data_dir)},
                secret_env={},
                extra_files=None,
                outputs=None,
                max_output_bytes=self.max_outputs_mb * 2**20,
                max_stdio_bytes=self.max_stdio_mb * 2**20,
                uses_pipes=True,
            )
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
    def _data_dir(self) -> Path:
        return Path(os.path.abspath(os.path.expanduser(self.data_dir))) if self.data_dir else self._layout.data

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

    def _check_mode(self, launcher: Launcher | None, components: Sequence[HetComponent] | None) -> None:
        """Refuse what this mode cannot do, before anything starts."""
        if self.mode != ExecutionMode.LOCAL.value:
            if self.slurm is None:
                raise ValueError(f"slurm: mode {self.mode!r} needs a Slurm cluster; set slurm=SlurmResource(…)")
            raise ValueError(f"mode: {self.mode!r} is not available in this version; use mode='local'")
        chosen = self._launcher(launcher)
        if isinstance(chosen, RayLauncher):
            if chosen.launch_style != "builtin":
                raise ValueError(
                    f"launcher.launch_style: {chosen.launch_style!r} needs the nodes of a Slurm allocation; use 'builtin'"
                )
            if chosen.preload:
                raise ValueError("launcher.preload: it is not available in this version; remove it")
            if chosen.component_id is not None or components:
                raise ValueError("components: mode 'local' has none in this version; remove components and component_id")

    def _follow(self, follower: Follower, attempt: Attempt, plan: Plan, context: Context) -> Evidence:
        """Follow the run; when interrupted, end it, take what it still says, and let the interrupt go on."""
        try:
            return follower.follow(attempt.ended)
        except BaseException as error:
            with deferred_interrupts() as interrupted_again:
                follower.evidence.interrupted = True
                if isinstance(error, (KeyboardInterrupt, dg.DagsterExecutionInterruptedError)):
                    _mark_canceling(context)
                context.log.warning(f"[rayslurm] ending the payload: {type(error).__name__}")
                attempt.cancel()

                def ended() -> str | None:
                    if interrupted_again():
                        attempt.cancel(now=True)
                    return attempt.ended()

                follower.follow(ended, time.monotonic() + plan.payload.grace_period + _CANCEL_MARGIN)
                verdict = judge(follower.evidence, plan.uses_pipes, self.require_messages)
                context.log.info(f"[rayslurm] {verdict.sentence}")
            raise

    def _conclude(self, evidence: Evidence, plan: Plan, attempt: Attempt, run_dir: str, outputs_dir: Path) -> dict[str, Any]:
        """Judge the run, bring its outputs back and tidy up.

        Raises:
            RunFailure: the run did not succeed.
        """
        if evidence.end is None:
            evidence.runtime_log = attempt.runtime_log()
        verdict = judge(evidence, plan.uses_pipes, self.require_messages)
        metadata: dict[str, Any] = {}
        if evidence.end is not None:
            metadata = run_metadata(evidence.end, self.mode, attempt.cluster_id, attempt.job_id)
            for entry in evidence.end["outputs"]:
                source = os.path.join(run_dir, "outputs", entry["name"])
                LocalConnection().download(source, str(outputs_dir / entry["name"]))
        self._clean_up(run_dir, failed=verdict.kind is not None)
        if verdict.kind is not None:
            kept = self.keep_run_dirs != "none"
            raise RunFailure(verdict.kind, verdict.sentence, {**metadata, **failure_metadata(evidence, run_dir, kept)})
        return metadata

    def _clean_up(self, run_dir: str, failed: bool) -> None:
        if self.keep_run_dirs == "none" or (self.keep_run_dirs == "failed" and not failed):
            LocalConnection().remove(run_dir)

    def _sweep(self) -> None:
        """Remove what is older than `retention_days`, once an hour and process."""
        layout = self._layout
        now = time.monotonic()
        if now - _last_sweep.get(layout.base, -_SWEEP_INTERVAL) >= _SWEEP_INTERVAL:
            _last_sweep[layout.base] = now
            sweep_old([layout.runs, layout.outputs], self.retention_days)


def _mark_canceling(context: Context) -> None:
    """Let a run that Ctrl-C interrupts end as canceled, as the terminate button does.

    Dagster 1.13 calls it failed unless somebody marked it beforehand. A run that Dagster will resume is left alone.
    """
    run = context.instance.get_run_by_id(context.run.run_id)
    if run is not None and run.status == dg.DagsterRunStatus.STARTED and not context.instance.run_will_resume(run.run_id):
        context.instance.report_run_canceling(run)


def _check_footprint(plan: Plan) -> None:
    """Refuse more than this machine has.

    Raises:
        ValueError: naming the field.
    """
    here = machine.detect()
    cpus, gpus = plan.footprint
    wanted = plan.ray or RaySpec(num_cpus=None if cpus is None else int(cpus), num_gpus=None if gpus is None else int(gpus))
    problem = footprint_error(wanted, here)
    if problem:
        raise ValueError(problem if plan.ray else problem.replace("RayLauncher", "BashLauncher").replace("_per_node", ""))


@contextmanager
def _configuration_errors() -> Iterator[None]:
    """Turn what is wrong with the request into one failure, before anything starts."""
    try:
        yield
    except ValueError as error:
        raise RunFailure("configuration", str(error)) from None


@contextmanager
def _start_errors() -> Iterator[None]:
    """Turn what keeps a runtime from starting into one failure."""
    try:
        yield
    except local_session.SessionError as error:
        raise RunFailure("cluster-start", str(error)) from None
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise RunFailure("record", f"the run cannot be started: {error.strerror}{where}") from error
