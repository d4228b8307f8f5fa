"""The front door: one resource, one `run()`, for every way to run a payload."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Optional, Union

import dagster as dg
from dagster_pipes import PipesExtras
from pydantic import ConfigDict, Field

from . import modes
from .backends.batch import cancel_cluster
from .backends.choice import Call, Setting, backend_for, together_for
from .backends.rundir import Layout
from .backends.sessions import local as local_session
from .backends.sessions.backend import end_session
from .backends.sessions.run_end import run_ended
from .components import arrange
from .config import SessionConfig, at_least, check_environment, choice, plain_text, resolve_variables
from .connections.shared import connect_early
from .environments import Environment, InheritedEnvironment, PreDeployedEnvironment
from .errors import RunFailure, one_sentence
from .execution import CompletedRun, Policy, execute, execute_together, start_errors
from .launchers import BashLauncher, Launcher, RayLauncher
from .plan import Plan, make_plan
from .slurm.config import SlurmQueueConfig, SlurmResource
from .slurm.hetjob import HetComponent

Payload = Union[str, "os.PathLike[str]", Sequence[str]]
Payloads = Union[Payload, Mapping[str, Payload]]
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

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    mode: Annotated[str, choice(*modes.MODES)] = Field(
        default="local", description='How payloads run: "local", "slurm", "slurm-session" or "slurm-hetjob".'
    )
    slurm: Optional[SlurmResource] = Field(default=None, description="The Slurm cluster; needed by every mode but local.")
    default_launcher: Union[RayLauncher, BashLauncher] = Field(
        default=RayLauncher(), discriminator="kind", description="Launcher of payloads that name none."
    )
    session: SessionConfig = Field(
        default=SessionConfig(), description="The warm session that is shared, with enable_cluster_reuse or slurm-session."
    )
    components: list[HetComponent] = Field(
        default=[], description="Components of the heterogeneous job or session; local mode simulates them, a Ray node for each."
    )
    topology: Annotated[str, choice(*modes.TOPOLOGIES)] = Field(
        default=modes.SPANNING,
        description='"spanning" for one Ray cluster across all components, or "separate" for a cluster and a payload per '
        "component (slurm-hetjob, and local, which simulates it).",
    )
    enable_cluster_reuse: bool = Field(
        default=False,
        description="Keep the Ray cluster warm between payloads; it ends itself after session.idle_timeout. In the modes slurm "
        "and slurm-hetjob each payload has a job of its own all the same.",
    )
    environment: Union[InheritedEnvironment, PreDeployedEnvironment] = Field(
        default=InheritedEnvironment(), discriminator="kind", description="The Python environment of payloads."
    )
    pre_deployed_env_path: Annotated[Optional[str], plain_text] = Field(
        default=None, description="Short for a pre-deployed environment: a conda prefix, a venv, or a directory with activate.sh."
    )
    auto_detect_platform: bool = Field(
        default=True, description="Without effect: payloads run in an environment that is there already, none is packed for them."
    )
    data_dir: Annotated[Optional[str], plain_text] = Field(
        default=None,
        description="Directory, where payloads run, that each of them finds in RAYSLURM_DATA_DIR; None for `data` below the base "
        "directory there.",
    )
    local_base: Annotated[str, plain_text] = Field(
        default="~/.dagster_rayslurm", description="Base directory on this machine: run directories of the local mode, outputs."
    )
    require_messages: bool = Field(default=True, description="Fail a Pipes payload that never opened or never closed Pipes.")
    keep_run_dirs: Annotated[str, choice("all", "failed", "none")] = Field(
        default="failed", description='Which run directories stay for a look: "all", those of "failed" runs, or "none".'
    )
    retention_days: Annotated[int, at_least(1, "days")] = Field(
        default=14,
        description="Days after which kept run directories and outputs go, and what nobody has used of sessions and sent files.",
    )
    connection_loss_timeout: Annotated[int, at_least(0, "seconds")] = Field(
        default=86400, description="Seconds that a run may be out of reach before it has failed."
    )
    runtime_start_timeout: Annotated[int, at_least(1, "seconds")] = Field(
        default=600,
        description="Seconds until a runtime that was started (in Slurm: whose job runs) has failed if it wrote nothing.",
    )
    queue_timeout: Annotated[Optional[int], at_least(1, "seconds")] = Field(
        default=None,
        description="Seconds in Slurm's queue after which a run has failed and its job is cancelled; None for no limit.",
    )
    max_stdio_mb: Annotated[int, at_least(1, "MiB")] = Field(
        default=1024, description="MiB of payload output that are recorded; the rest is counted and dropped."
    )
    max_outputs_mb: Annotated[int, at_least(0, "MiB")] = Field(
        default=100, description="MiB of files that `outputs=` brings back; the largest ones are left out, and named."
    )

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:  # noqa: ARG002
        """Begin to log in to the cluster, while Dagster prepares the step."""
        if self.slurm is not None and self.mode in modes.ON_SLURM:
            connect_early(self.slurm.ssh)

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        """End the sessions of a run that is over, though its process may go on."""
        if context.run is not None:
            run_ended(context.run.run_id)

    def run(  # type: ignore[override]
        self,
        *,
        context: Context,
        payload_path: Payloads,
        launcher: Launcher | None = None,
        queue: SlurmQueueConfig | None = None,
        extra_env: Mapping[str, str] | None = None,
        secret_env: Mapping[str, str] | None = None,
        extras: PipesExtras | None = None,
        extra_files: Sequence[str | os.PathLike[str]] | None = None,
        outputs: Sequence[str] | None = None,
        components: Sequence[HetComponent] | None = None,
        uses_pipes: bool | Mapping[str, bool] = True,
    ) -> CompletedRun:
        """Run a payload and wait for it, with its output and Pipes messages streaming into Dagster.

        Args:
            context: the context of the asset, asset check or op.
            payload_path: an existing file is a Python script, whatever characters its path has; otherwise a command,
                split as a shell would (`python -m pkg.mod --epochs 3`); a list is taken as it is. `python` means the
                environment's Python. With topology "separate" a mapping of component ids to such payloads, or one for all.
            launcher: instead of `default_launcher`, as a whole; with topology "separate" each component has its own.
            queue: instead of the Slurm resource's queue, as a whole; local mode has no use for it.
            extra_env: variables for the payload and its Ray workers.
            secret_env: variables for the payload's driver process alone.
            extras: Pipes extras, `pipes.extras` in the payload.
            extra_files: files or directories that appear in the payload's working directory.
            outputs: patterns of files of the payload's working directory that are brought back.
            components: instead of the resource's components, all of them.
            uses_pipes: False for a payload that does not open Dagster Pipes; its exit code alone decides. With topology
                "separate" a mapping of component ids, too.

        Returns:
            The payload's results, once it succeeded.

        Raises:
            RunFailure: a `dg.Failure` whose `kind` says what went wrong.
        """
        with _configuration_errors():
            call = self._call(payload_path, launcher, queue, components)
            make = partial(
                self._make_plan,
                nonce=secrets.token_hex(6),
                env=check_environment(extra_env, "extra_env"),
                secret_env=check_environment(secret_env, "secret_env"),
                extra_files=extra_files,
                outputs=outputs,
            )
            start, _ = self._prepared(make, call, payload_path, uses_pipes)
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
        return start(op_context, policy=policy, extras=extras)

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
            if self.slurm is not None and self.mode in modes.ON_SLURM:
                # It may well be called outside of a run, where Dagster has resolved no variables.
                slurm = resolve_variables(self.slurm, "slurm")
                return end_session(slurm, cluster_id) or cancel_cluster(slurm, cluster_id)
            return local_session.stop(self._layout, cluster_id)

    def job_script(
        self,
        *,
        payload_path: Payloads,
        launcher: Launcher | None = None,
        queue: SlurmQueueConfig | None = None,
        components: Sequence[HetComponent] | None = None,
    ) -> str:
        """What would be started for a payload, for a person to read; nothing is started, and no cluster is contacted.

        Args:
            payload_path: as for `run`.
            launcher: as for `run`.
            queue: as for `run`.
            components: as for `run`.

        Returns:
            The batch script, with words in capitals for what is known only when it is submitted. In local mode the
            command that starts the runtime, and its start record.

        Raises:
            RunFailure: an argument cannot be used.
        """
        with _configuration_errors():
            # It may well be called outside of a run, where Dagster has resolved no variables.
            resolved = resolve_variables(self, type(self).__name__)
            call = resolved._call(payload_path, launcher, queue, components)
            _, example = resolved._prepared(partial(resolved._make_plan, nonce="NONCE"), call, payload_path)
            return example()

    def _prepared(
        self, make: Callable[..., Plan], call: Call, payload_path: Any, uses_pipes: Any = True
    ) -> tuple[Callable[..., CompletedRun], Callable[[], str]]:
        """What runs a call, and what shows it, once it is known that it can be run.

        Raises:
            ValueError: it cannot; the sentence names the field.
        """
        if self.topology == modes.SEPARATE:
            payloads = modes.one_for_each(payload_path, call.parts, "payload_path")
            pipes = modes.one_for_each(uses_pipes, call.parts, "uses_pipes", default=True)
            launchers = {each.component_id: each.launcher for each in call.parts}
            plans = {
                name: make(payload_path=payloads[name], launcher=own, uses_pipes=pipes[name]) for name, own in launchers.items()
            }
            together = together_for(self._setting, call)
            together.check(plans)
            return partial(execute_together, plans=plans, backend=together), partial(together.example, plans)
        one = modes.for_one(uses_pipes, "uses_pipes")
        plan = make(payload_path=payload_path, launcher=call.launcher, components=call.parts, uses_pipes=one)
        backend = backend_for(self._setting, call)
        backend.check(plan)
        return partial(execute, plan=plan, backend=backend), partial(backend.example, plan)

    @property
    def _setting(self) -> Setting:
        return Setting(
            mode=self.mode,
            layout=self._layout,
            slurm=self.slurm,
            environment=self._environment,
            launcher=self.default_launcher,
            components=tuple(self.components),
            session=self.session,
            reuse=self.enable_cluster_reuse,
            queue_timeout=self.queue_timeout,
            start_timeout=self.runtime_start_timeout,
            patience=self.connection_loss_timeout,
        )

    @property
    def _layout(self) -> Layout:
        return Layout(Path(os.path.abspath(os.path.expanduser(self.local_base))))

    @property
    def _data_dir(self) -> str | None:
        """The directory that payloads share; as it was given if it is on a cluster."""
        if self.mode != modes.LOCAL:
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

    def _call(
        self,
        payload_path: Payloads,
        launcher: Launcher | None,
        queue: SlurmQueueConfig | None,
        components: Sequence[HetComponent] | None,
    ) -> Call:
        """What counts for a call, once the mode can do all that is asked for."""
        # Nothing asks Slurm for it in local mode, but a mistake shows there, too.
        queue = queue if queue is None else resolve_variables(queue, "queue")
        chosen = modes.chosen_components(components, self.components)
        settled = self._launcher(launcher)
        modes.check_mode(
            modes.Wanted(
                mode=self.mode,
                topology=self.topology,
                on_slurm=self.slurm is not None,
                launcher=settled,
                own_launcher=launcher is not None,
                own_queue=queue is not None,
                reuse=self.enable_cluster_reuse,
                components=chosen,
                payload=payload_path,
            )
        )
        separate = self.topology == modes.SEPARATE
        parts = arrange(chosen) if separate else modes.spanning_components(settled, chosen)
        return Call(settled, queue, parts, None if components is None else chosen)

    @property
    def _make_plan(self) -> Callable[..., Plan]:
        """As `make_plan`, with what the resource says of all plans."""
        return partial(
            make_plan,
            data_dir=self._data_dir,
            max_output_bytes=self.max_outputs_mb * 2**20,
            max_stdio_bytes=self.max_stdio_mb * 2**20,
        )


@contextmanager
def _configuration_errors() -> Iterator[None]:
    """Turn what is wrong with the request into one failure, before anything starts."""
    try:
        yield
    except ValueError as error:
        raise RunFailure("configuration", one_sentence(error)) from None
