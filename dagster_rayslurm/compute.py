"""The front door: one resource, one `run()`, for every way to run a payload.

What runs them is imported by the first call: whoever loads definitions only to show or to launch them need not wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Optional, Union

import dagster as dg
from dagster_pipes import PipesExtras
from pydantic import Field

from . import modes
from .completed import CompletedRun
from .config import SessionConfig, StrictResource, at_least, choice, plain_text
from .environments import InheritedEnvironment, PreDeployedEnvironment
from .environments.config import prefix
from .launchers import BashLauncher, Launcher, RayLauncher
from .slurm.config import HetComponent, SlurmQueueConfig, SlurmResource
from .unknown_names import explain_arguments

Payload = Union[str, "os.PathLike[str]", Sequence[str]]
Payloads = Union[Payload, Mapping[str, Payload]]
Context = Union[dg.AssetExecutionContext, dg.OpExecutionContext, dg.AssetCheckExecutionContext]


class ComputeResource(StrictResource, dg.PipesClient):
    """Runs payloads on this machine or in Slurm jobs, with a Ray cluster around each if its launcher says so."""

    mode: Annotated[str, choice(*modes.MODES)] = Field(
        default="local", description='How payloads run: "local", "slurm", "slurm-session" or "slurm-hetjob".'
    )
    slurm: Optional[SlurmResource] = Field(
        default=None, description="The Slurm cluster. Local mode ignores it, all other modes need it."
    )
    default_launcher: Union[RayLauncher, BashLauncher] = Field(
        default=RayLauncher(), discriminator="kind", description="Launcher of payloads that name none."
    )
    session: SessionConfig = Field(
        default=SessionConfig(), description="The warm session that is shared, with enable_cluster_reuse or slurm-session."
    )
    components: list[HetComponent] = Field(
        default=[],
        description="Components of the heterogeneous job, which needs them, or of the session; local mode simulates them, a Ray "
        "node for each.",
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
        default=InheritedEnvironment(),
        discriminator="kind",
        description="The Python environment of payloads; over SSH it has to be a pre-deployed one.",
    )
    pre_deployed_env_path: Annotated[Optional[str], prefix] = Field(
        default=None,
        description="Short for a pre-deployed environment: a conda prefix, a venv, or a directory with activate.sh. Local mode "
        "ignores one that is not on this machine.",
    )
    auto_detect_platform: bool = Field(default=True, description="Accepted and ignored: no environment is packed.")
    data_dir: Annotated[Optional[str], plain_text] = Field(
        default=None,
        description="Directory, where payloads run, that each of them finds in RAYSLURM_DATA_DIR; None for `data` below the base "
        "directory there.",
    )
    local_resources: Annotated[str, choice("simulate", "strict")] = Field(
        default="simulate",
        description='What local mode does when a launcher asks for more CPUs or GPUs than this machine has: "simulate" has Ray '
        'count them and says so in the log, "strict" refuses. Memory is never simulated.',
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

    @contextmanager
    def _resolve_and_update_nested_resources(self, context: dg.InitResourceContext) -> Iterator[Any]:
        """Leave `slurm` as it is in local mode, so that no variable has to be set that only the cluster needs.

        Dagster resolves nested resources here. If another version has no such method, it resolves them in local mode too.
        """
        mode = (context.resource_config or {}).get("mode", self.mode)
        if mode == modes.LOCAL:
            yield self
        else:
            with super()._resolve_and_update_nested_resources(context) as resolved:
                yield resolved

    def get_resource_definition(self) -> Any:
        """Refuse what no run can use as soon as Dagster loads the resource."""
        from .definition import check_definition

        check_definition(self)
        return super().get_resource_definition()

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:  # noqa: ARG002
        """Begin to log in to the cluster, while Dagster prepares the step."""
        if self.slurm is not None and self.mode in modes.ON_SLURM:
            from .ssh.pool import connect_early

            connect_early(self.slurm.ssh)

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        """End the sessions of a run that is over, though its process may go on."""
        if context.run is not None:
            from .backends.sessions.run_scope import run_ended

            run_ended(context.run.run_id)

    @explain_arguments
    def run(  # type: ignore[override]
        self,
        *,
        context: Context,
        payload_path: Payloads,
        launcher: Launcher | None = None,
        queue: SlurmQueueConfig | Mapping[str, Any] | None = None,
        extra_env: Mapping[str, str] | None = None,
        secret_env: Mapping[str, str] | None = None,
        extras: PipesExtras | None = None,
        extra_files: Sequence[str | os.PathLike[str]] | None = None,
        outputs: Sequence[str] | None = None,
        components: Sequence[HetComponent] | None = None,
        uses_pipes: bool | Mapping[str, bool] = True,
    ) -> CompletedRun:
        """Run a payload and wait for it, with its output and Pipes messages streaming into Dagster.

        Example:
            ```python
            @dg.asset
            def features(context: dg.AssetExecutionContext, compute: ComputeResource):
                return compute.run(context=context, payload_path="features.py").get_materialize_result()


            defs = dg.Definitions(assets=[features], resources={"compute": ComputeResource(mode="local")})
            ```

        Args:
            context: the context of the asset, asset check or op.
            payload_path: an existing file is a Python script, whatever characters its path has, and may be followed by
                arguments (`train.py --epochs 3`); otherwise a command, split as a shell would (`python -m pkg.mod`) but run
                without one; a list is taken as it is. `python` means the environment's Python. With topology "separate" a
                mapping of component ids to such payloads, or one for all.
            launcher: of the kind of `default_launcher`, its fields replace those there; of another kind, it replaces
                `default_launcher`. With topology "separate" each component has its own launcher.
            queue: its fields replace those of the Slurm resource's queue, and the others stay; a `SlurmQueueConfig` or a
                dictionary. Local mode does not use it.
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
        from .run_call import RunArguments, run

        asked = RunArguments(payload_path, launcher, queue, components, uses_pipes, extra_env, secret_env, extra_files, outputs)
        return run(self, context, asked, extras)

    def cleanup_cluster(self, cluster_id: str) -> bool:
        """End a warm Ray cluster, on Slurm the job or the session of a cluster, and everything that runs on it.

        Args:
            cluster_id: as `CompletedRun.cluster_id` or the metadata "Ray cluster ID" give it.

        Returns:
            Whether there was such a cluster.

        Raises:
            RunFailure: it does not answer.
        """
        from .run_call import end_cluster

        return end_cluster(self, cluster_id)

    @explain_arguments
    def job_script(
        self,
        *,
        payload_path: Payloads,
        launcher: Launcher | None = None,
        queue: SlurmQueueConfig | Mapping[str, Any] | None = None,
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
        from .run_call import RunArguments, example

        return example(self, RunArguments(payload_path, launcher, queue, components))
