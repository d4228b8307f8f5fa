"""`ComputeResource`, the resource that assets use to run payloads. The first run imports the modules that run payloads."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, ParamSpec, TypeVar, Union

import dagster as dg
from dagster._core.libraries import DagsterLibraryRegistry
from dagster_pipes import PipesExtras

from . import __version__
from .compute_fields import ComputeFields, Context, Payload, Payloads
from .config import ExecutionMode, has_variables
from .environments import Environment, PreDeployedEnvironment, path_on_cluster
from .failures import CompletedRun
from .fields import explain
from .handle import RunHandle
from .launchers import Launcher
from .slurm.config import HetComponent, SlurmQueueConfig

DagsterLibraryRegistry.register("dagster-rayslurm", __version__, is_dagster_package=False)

# Bundles of resources, by placement strategy or with the strategy PACK.
Requires = Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Mapping[str, Any]]]

# The contexts with which `submit()` may be called.
SubmitContext = Union[Context, dg.SensorEvaluationContext, dg.ScheduleEvaluationContext]

P = ParamSpec("P")
R = TypeVar("R")


def _explain_arguments(method: Callable[P, R]) -> Callable[P, R]:
    """Returns the method, whose `TypeError` for an unknown argument now says which argument to use instead."""
    known = [name for name in inspect.signature(method).parameters if name != "self"]

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                raise TypeError(explain(f"{method.__name__}()", name, known, "argument"))
        return method(*args, **kwargs)

    return call


class ComputeResource(ComputeFields, dg.PipesClient):
    """Runs payloads on this machine or in Slurm jobs, with a Ray cluster for each payload whose launcher starts one."""

    @contextmanager
    def _resolve_and_update_nested_resources(self, context: dg.InitResourceContext) -> Iterator[Any]:
        """Yields the resource after Dagster has resolved the resources in its fields.

        In local mode, yields the resource unchanged, because environment variables for Slurm may be unset there.
        """
        mode = (context.resource_config or {}).get("mode", self.mode)
        if mode == ExecutionMode.LOCAL:
            yield self
        else:
            with super()._resolve_and_update_nested_resources(context) as resolved:
                yield resolved

    def get_resource_definition(self) -> Any:
        """Returns Dagster's definition of the resource; raises `ValueError` for an unusable resource or invalid asset settings.

        Dagster calls this method when definitions load.
        """
        from .settings import check_loading

        _check_definition(self)
        check_loading(self, type(self.default_launcher))
        return super().get_resource_definition()

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:  # noqa: ARG002
        """Begin to log in to the edge node, outside local mode; Dagster calls this method before it runs a step."""
        if self.slurm is not None and self.mode != ExecutionMode.LOCAL:
            from .ssh.pool import connect_early

            connect_early(self.slurm.ssh)

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        """End sessions with scope "run" if the Dagster run has ended; called at the end of each process of the run."""
        if self.session.scope == "run" and (self.enable_cluster_reuse or self.mode == ExecutionMode.SLURM_SESSION):
            from .run_call import end_run

            end_run(self, context)

    @_explain_arguments
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
        environment: Environment | None = None,
        requires: Requires | None = None,
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
                otherwise a command, split into words as by a shell (`python -m pkg.mod`) but run without one; a list is used
                unchanged. `python` means the environment's Python. With topology "separate" one payload for all
                components, or a mapping by component id.
            launcher: if it has the class of `default_launcher`, its fields override those there; otherwise it replaces
                `default_launcher`. With topology "separate" each component has its own launcher.
            queue: a `SlurmQueueConfig` or a dictionary; its fields override those of the Slurm resource's queue. The tag
                `dagster-rayslurm/config` of a run overrides both. Local mode uses no queue.
            extra_env: variables for the payload and its Ray workers.
            secret_env: variables for the payload's driver process only.
            extras: Pipes extras, which the payload finds in `pipes.extras`.
            extra_files: files or directories that appear in the payload's working directory.
            outputs: patterns of files in the payload's working directory to copy to this machine.
            components: components that replace all of the resource's components.
            environment: an environment that replaces the resource's. Local mode ignores one that is sent to a cluster.
            requires: a list of bundles that tasks or a placement group need of the Ray cluster at the same time, as in
                `[{"GPU": 1}] * 8`; the run is refused before submission if its nodes could never hold them. A dictionary has
                such lists by Ray's placement strategy, `{"STRICT_SPREAD": […]}`; `labels` in a bundle is its label selector.
            uses_pipes: False for a payload that does not open Dagster Pipes; then its exit code alone decides. With
                topology "separate" also a mapping by component id.

        Returns:
            The result of the run, with the Dagster results that the payload reported.

        Raises:
            RunFailure: the run did not succeed; its `kind` says which part failed.
        """
        from .run_call import run

        arguments: dict[str, Any] = {"payload_path": payload_path, "launcher": launcher, "queue": queue, "components": components}
        arguments |= {"extra_env": extra_env, "secret_env": secret_env, "extra_files": extra_files, "outputs": outputs}
        arguments |= {"environment": environment, "requires": requires}
        return run(self, context, extras, uses_pipes=uses_pipes, **arguments)

    @_explain_arguments
    async def run_async(
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
        environment: Environment | None = None,
        requires: Requires | None = None,
    ) -> CompletedRun:
        """Run a payload as `run` does, and await its end, so that many payloads wait and run at once in one event loop.

        All calls in this process share one connection to the cluster, one look at Slurm's queue, and one thread that follows the
        payloads. If the task is cancelled, its job ends as after an interrupt of `run`; a second cancellation leaves the payload
        no grace period. A retry continues the payloads of the attempt before in the order of the calls.

        Example:
            ```python
            @dg.asset
            async def features(context: dg.AssetExecutionContext, compute: ComputeResource):
                return (await compute.run_async(context=context, payload_path="features.py")).get_materialize_result()
            ```

        Dagster's own executors run one step at a time in a process, so that one step has to await several payloads itself, by
        `asyncio.gather`. With the executor of the package `dagster-async-executor`, many steps await theirs at once.

        The arguments, the result and the exceptions are those of `run`.
        """
        from .run_call import run_async

        arguments: dict[str, Any] = {"payload_path": payload_path, "launcher": launcher, "queue": queue, "components": components}
        arguments |= {"extra_env": extra_env, "secret_env": secret_env, "extra_files": extra_files, "outputs": outputs}
        arguments |= {"environment": environment, "requires": requires}
        return await run_async(self, context, extras, uses_pipes=uses_pipes, **arguments)

    @_explain_arguments
    def run_partitions(
        self,
        context: Context,
        payload_path: Payload,
        *,
        max_concurrent: int | None = None,
        allocation: Literal["shared", "each"] = "shared",
        launcher: Launcher | None = None,
        queue: SlurmQueueConfig | Mapping[str, Any] | None = None,
        extra_env: Mapping[str, str] | None = None,
        secret_env: Mapping[str, str] | None = None,
        extras: PipesExtras | None = None,
        extra_files: Sequence[str | os.PathLike[str]] | None = None,
        uses_pipes: bool = True,
        environment: Environment | None = None,
        requires: Requires | None = None,
    ) -> CompletedRun:
        """Run a payload once for each partition of this run, in one job or session, and wait until all partitions have ended.

        With `allocation="each"` each partition has an allocation of its own instead, as an element of a Slurm job array.

        The asset needs a backfill policy by which one run has several partitions. Each partition has a process of its own, with
        the partition's key in `pipes.partition_key`, and is materialized as soon as that process has succeeded. When all have
        ended, the step fails if a partition failed. A retry, or the run's re-execution from failure, runs only the partitions
        that are not materialized yet.

        Example:
            ```python
            @dg.asset(
                partitions_def=dg.StaticPartitionsDefinition([f"part-{number:05}" for number in range(10_000)]),
                backfill_policy=dg.BackfillPolicy.single_run(),
            )
            def scores(context: dg.AssetExecutionContext, compute: ComputeResource):
                return compute.run_partitions(context, "score.py", max_concurrent=16).get_materialize_result()
            ```

        Args:
            context: the context of an asset with partitions.
            payload_path: as for `run`. A script or module of Python starts fastest, because its processes are forked.
            max_concurrent: how many partitions run at the same time; None for the number of CPUs that Slurm granted to the
                job, or to the payload in a session, on the first node of the allocation, where they run. With
                `allocation="each"` None lets Slurm decide.
            allocation: "shared" for one allocation and one Ray cluster for all partitions; "each" for one for each partition, of
                the size in `queue` and `launcher`, which needs mode "slurm".
            uses_pipes: False for a payload that does not open Dagster Pipes; such a payload finds the partition's key in the
                environment variable RAYSLURM_PARTITION_KEY.

        The other arguments are those of `run`.

        Returns:
            The result for the asset to return, by `get_materialize_result()`.

        Raises:
            RunFailure: partitions failed, or the run did not succeed; the sentence counts the partitions, and names the first
                that failed.
        """
        from .run_call import run

        arguments: dict[str, Any] = {"payload_path": payload_path, "launcher": launcher, "queue": queue, "extra_env": extra_env}
        arguments |= {"secret_env": secret_env, "extra_files": extra_files, "environment": environment, "requires": requires}
        arguments["allocation"] = allocation
        options = {"max_concurrent": max_concurrent, "by_partition": True}
        return run(self, context, extras, uses_pipes=uses_pipes, **options, **arguments)

    @_explain_arguments
    def submit(
        self,
        *,
        payload_path: Payload,
        context: SubmitContext | None = None,
        asset_key: dg.AssetKey | str | Sequence[str] | None = None,
        partition_key: str | None = None,
        key: str | None = None,
        launcher: Launcher | None = None,
        queue: SlurmQueueConfig | Mapping[str, Any] | None = None,
        extra_env: Mapping[str, str] | None = None,
        secret_env: Mapping[str, str] | None = None,
        extras: PipesExtras | None = None,
        extra_files: Sequence[str | os.PathLike[str]] | None = None,
        outputs: Sequence[str] | None = None,
        components: Sequence[HetComponent] | None = None,
        uses_pipes: bool = True,
        environment: Environment | None = None,
        requires: Requires | None = None,
    ) -> RunHandle:
        """Submit a payload's Slurm job and return at once, so that no process of Dagster has to last as long as the job.

        `build_completion_sensor` reports the end of the job, and `reattach` follows it. For the modes slurm and slurm-hetjob.

        Example:
            ```python
            @dg.schedule(cron_schedule="0 2 * * *", target=dg.AssetSelection.all())
            def nightly(context: dg.ScheduleEvaluationContext, compute: ComputeResource):
                day = context.scheduled_execution_time.date().isoformat()
                compute.submit(context=context, payload_path="train.py", asset_key="model", key=f"model {day}")
                return dg.SkipReason(f"submitted the job of {day}")
            ```

        Args:
            context: the context of an asset, op, sensor or schedule, for the log; None for Python's.
            asset_key: the asset that the payload makes; by default the one asset of the step.
            partition_key: the partition of the asset; by default that of the step.
            key: a text that stands for this work. Of all calls with one key, by any process, one submits a job, and the others
                return the same handle, until retention_days after the submission.

        The other arguments are those of `run`. The run directory and the outputs are kept until `reattach` has fetched them.

        Raises:
            RunFailure: the job cannot be submitted.
        """
        from .run_call import submit_and_leave

        arguments: dict[str, Any] = {"payload_path": payload_path, "launcher": launcher, "queue": queue, "components": components}
        arguments |= {"extra_env": extra_env, "secret_env": secret_env, "extra_files": extra_files, "outputs": outputs}
        arguments |= {"environment": environment, "requires": requires, "uses_pipes": uses_pipes}
        return submit_and_leave(self, context, asset_key, partition_key, key, extras, **arguments)

    def reattach(self, handle: RunHandle | None = None, *, context: Context) -> CompletedRun:
        """Follow a run that `submit` has submitted to its end, as `run` does; also in another process, and once it has ended.

        Args:
            handle: the handle that `submit` returned; by default the one in the tags of this Dagster run, which a sensor of
                `build_completion_sensor` has requested.
            context: the context of the asset, op or check.

        Returns:
            The result of the run, with the Dagster results that the payload reported, and its output files.

        Raises:
            RunFailure: the run did not succeed, or its run directory is gone.
        """
        from .run_call import reattach

        return reattach(self, context, handle)

    def cleanup_cluster(self, cluster_id: str) -> bool:
        """End a warm Ray cluster and everything that runs on it; on Slurm, end its job or session.

        The id of a cluster is `CompletedRun.cluster_id`, and the metadata "Ray cluster ID". Returns whether there was a cluster
        with this id. Raises `RunFailure` if the Ray cluster or Slurm does not answer.
        """
        from .run_call import end_cluster

        return end_cluster(self, cluster_id)

    @_explain_arguments
    def job_script(
        self,
        *,
        payload_path: Payloads,
        launcher: Launcher | None = None,
        queue: SlurmQueueConfig | Mapping[str, Any] | None = None,
        components: Sequence[HetComponent] | None = None,
    ) -> str:
        """Returns the batch script that `run` would submit, for a person to read; starts nothing and contacts no cluster.

        Words in capitals stand for values that are known only at submission. In local mode, the text is the command that starts
        the runtime and the description of the payload, which the runtime reads first. The arguments are those of `run`; raises
        `RunFailure` if one is invalid.
        """
        from .run_call import example

        return example(self, payload_path=payload_path, launcher=launcher, queue=queue, components=components)


def _check_definition(resource: ComputeResource) -> None:
    """Raise `ValueError` for a resource that no run can use; fields with an `EnvVar` are checked when a run starts."""
    from .plan import check_session, check_slurm_mode, session_queue
    from .slurm.request import check_queue

    mode, slurm, session = resource.mode, resource.slurm, resource.session
    if mode == ExecutionMode.LOCAL:
        return  # Local mode ignores the fields that only a Slurm cluster needs.
    queues = [each.queue for each in resource.components]
    if slurm is not None and not queues:
        by_session = mode == ExecutionMode.SLURM_SESSION and not has_variables((slurm.queue, session))
        queues = [session_queue(slurm.queue, session) if by_session else slurm.queue]
    for queue in queues:
        if not has_variables(queue):
            check_queue(queue)
    if has_variables(mode):
        return
    check_slurm_mode(mode, slurm, resource.components)
    if mode == ExecutionMode.SLURM_SESSION and not has_variables(session):
        check_session(session, resource.components)
    path, environment = resource.pre_deployed_env_path, resource.environment
    if slurm is not None and not has_variables(environment if path is None else path):
        path_on_cluster(environment if path is None else PreDeployedEnvironment(path=path), over_ssh=slurm.ssh is not None)
