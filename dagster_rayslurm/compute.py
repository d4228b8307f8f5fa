"""`ComputeResource`, the resource that assets use to run payloads.

The first call of `run()` imports the code that runs payloads, so that loading definitions stays fast.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import dagster as dg
from dagster_pipes import PipesExtras

from .config import ExecutionMode
from .interface import CompletedRun, ComputeConfig, Context, Payloads, RunArguments
from .launchers import Launcher
from .slurm.config import HetComponent, SlurmQueueConfig
from .unknown_names import explain_arguments


class ComputeResource(ComputeConfig, dg.PipesClient):
    """Runs payloads on this machine or in Slurm jobs, with a Ray cluster for each payload whose launcher starts one."""

    @contextmanager
    def _resolve_and_update_nested_resources(self, context: dg.InitResourceContext) -> Iterator[Any]:
        """Called when Dagster resolves nested resources; leaves `slurm` unresolved in local mode.

        Variables that only the Slurm cluster needs may then be unset. A Dagster version that does not call this method
        resolves them in local mode too.
        """
        mode = (context.resource_config or {}).get("mode", self.mode)
        if mode == ExecutionMode.LOCAL:
            yield self
        else:
            with super()._resolve_and_update_nested_resources(context) as resolved:
                yield resolved

    def get_resource_definition(self) -> Any:
        """Called when Dagster loads the definitions; refuses a resource that no run can use."""
        from .validation import check_definition

        check_definition(self)
        return super().get_resource_definition()

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:  # noqa: ARG002
        """Called when a step starts; begins to log in to the edge node while Dagster prepares the step."""
        if self.slurm is not None and self.mode != ExecutionMode.LOCAL:
            from .ssh.pool import connect_early

            connect_early(self.slurm.ssh)

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        """Called when a step ends; ends the sessions with scope "run" of its Dagster run, whose process may live on."""
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
        """Run a payload and wait until it ends; its output and Pipes messages stream into Dagster meanwhile.

        Example:
            ```python
            @dg.asset
            def features(context: dg.AssetExecutionContext, compute: ComputeResource):
                return compute.run(context=context, payload_path="features.py").get_materialize_result()


            defs = dg.Definitions(assets=[features], resources={"compute": ComputeResource(mode="local")})
            ```

        Args:
            context: the context of the asset, asset check or op.
            payload_path: a Python script, even with spaces in its path, or a script with arguments (`train.py --epochs 3`);
                otherwise a command, split like a shell does (`python -m pkg.mod`) but run without a shell; a list is used
                unchanged. `python` means the environment's Python. With topology "separate" one payload for all
                components, or a mapping by component id.
            launcher: if it has the class of `default_launcher`, its fields override those there; otherwise it replaces
                `default_launcher`. With topology "separate" each component has its own launcher.
            queue: a `SlurmQueueConfig` or a dictionary; its fields override those of the Slurm resource's queue. Local mode
                does not use it.
            extra_env: variables for the payload and its Ray workers.
            secret_env: variables for the payload's driver process only.
            extras: Pipes extras, `pipes.extras` in the payload.
            extra_files: files or directories that appear in the payload's working directory.
            outputs: patterns of files in the payload's working directory to copy to this machine.
            components: replace all of the resource's components.
            uses_pipes: False for a payload that does not open Dagster Pipes; then its exit code alone decides. With
                topology "separate" also a mapping by component id.

        Returns:
            The payload's results.

        Raises:
            RunFailure: the run did not succeed; its `kind` says what went wrong.
        """
        from .run_call import run

        arguments = RunArguments(
            payload_path, launcher, queue, components, uses_pipes, extra_env, secret_env, extra_files, outputs
        )
        return run(self, context, arguments, extras)

    def cleanup_cluster(self, cluster_id: str) -> bool:
        """End a warm Ray cluster and everything that runs on it; on Slurm, end its job or session.

        Args:
            cluster_id: from `CompletedRun.cluster_id` or the metadata "Ray cluster ID".

        Returns:
            Whether a Ray cluster with this id existed.

        Raises:
            RunFailure: the Ray cluster or Slurm does not answer.
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
        """The batch script that `run` would submit, for a person to read; starts nothing and contacts no cluster.

        Args:
            payload_path: as for `run`.
            launcher: as for `run`.
            queue: as for `run`.
            components: as for `run`.

        Returns:
            The batch script; words in capitals stand for values that are known only at submission. In local mode, the
            command that starts the runtime and the record that it reads first.

        Raises:
            RunFailure: an argument cannot be used.
        """
        from .run_call import example

        return example(self, RunArguments(payload_path, launcher, queue, components))
