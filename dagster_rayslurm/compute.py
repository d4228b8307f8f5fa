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

# A list of bundles of resources (strategy PACK), or a mapping from placement strategies to such lists.
Requires = Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Mapping[str, Any]]]

# The contexts with which `submit()` may be called.
SubmitContext = Union[Context, dg.SensorEvaluationContext, dg.ScheduleEvaluationContext]

P = ParamSpec("P")
R = TypeVar("R")


def _explain_arguments(method: Callable[P, R]) -> Callable[P, R]:
    """Returns a function that calls `method`, and whose `TypeError` for an unknown argument says what to use instead."""
    known = [name for name in inspect.signature(method).parameters if name != "self"]

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                raise TypeError(explain(f"{method.__name__}()", name, known, "argument"))
        return method(*args, **kwargs)

    return call


class ComputeResource(ComputeFields, dg.PipesClient):
    """Dagster resource that runs payloads (the user's scripts or commands) on this machine or in Slurm jobs.

    If the launcher of a payload is a `RayLauncher`, the payload also gets a Ray cluster.
    """

    @contextmanager
    def _resolve_and_update_nested_resources(self, context: dg.InitResourceContext) -> Iterator[Any]:
        """Context manager that yields this resource with its nested resources, such as `slurm`, resolved by Dagster.

        In local mode, it yields this resource unchanged, because the environment variables that `slurm` needs may be unset there.
        """
        mode = (context.resource_config or {}).get("mode", self.mode)
        if mode == ExecutionMode.LOCAL:
            yield self
        else:
            with super()._resolve_and_update_nested_resources(context) as resolved:
                yield resolved

    def get_resource_definition(self) -> Any:
        """Returns Dagster's definition of the resource. Dagster calls this method when definitions load.

        Raises `ValueError` if no run can use the resource, or if assets that need the resource have invalid settings.
        """
        from .settings import check_loading

        _check_definition(self)
        check_loading(self, type(self.default_launcher))
        return super().get_resource_definition()

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:  # noqa: ARG002
        """Begin to log in to the edge node in a background thread, and return at once. In local mode, do nothing.

        Dagster calls this method before a step runs. If the login fails, no error is raised here; the first use of the connection
        raises the error.
        """
        if self.slurm is not None and self.mode != ExecutionMode.LOCAL:
            from .ssh.pool import connect_early

            connect_early(self.slurm.ssh)

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        """End the sessions with scope "run" of the Dagster run, if all steps of the Dagster run have ended.

        Dagster calls this method at the end of each process of the Dagster run.
        """
        if self.session.scope == "run" and (self.enable_cluster_reuse or self.mode == ExecutionMode.SLURM_SESSION):
            from .operations import end_run

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
        """Run a payload, and wait until the payload has ended; output and Pipes messages of the payload stream into Dagster.

        Example:
            ```python
            @dg.asset
            def features(context: dg.AssetExecutionContext, compute: ComputeResource):
                return compute.run(context=context, payload_path="features.py").get_materialize_result()


            defs = dg.Definitions(assets=[features], resources={"compute": ComputeResource(mode="local")})
            ```

        Args:
            context: the context of the asset, asset check or op.
            payload_path: the payload, in one of three forms: the path of a Python script, which may contain spaces; a command
                line (`train.py --epochs 3`, `python -m pkg.mod`), which is split into words like in a shell, but run without a
                shell; or a list of words, which is used unchanged. `python` as the first word means the environment's Python.
                With topology "separate", one payload for all components, or a mapping from component ids to payloads.
            launcher: a launcher whose fields override the fields of `default_launcher`. A launcher of another class than
                `default_launcher` replaces `default_launcher`. Not allowed with topology "separate", where each component has its
                own launcher.
            queue: a `SlurmQueueConfig`, or a dictionary with fields of `SlurmQueueConfig`. The fields override the fields of the
                queue in the Slurm resource. The tag `dagster-rayslurm/config` of a Dagster run overrides `queue`. Local mode uses
                no queue.
            extra_env: variables for the payload and its Ray workers.
            secret_env: variables for the payload's driver process only.
            extras: Pipes extras, which the payload finds in `pipes.extras`.
            extra_files: files or directories that appear in the payload's working directory.
            outputs: patterns of files in the payload's working directory to copy to this machine.
            components: components that replace all of the resource's components.
            environment: an environment that replaces the environment of the resource. Local mode ignores an environment that is
                sent to a cluster.
            requires: a list of bundles of resources that tasks or a placement group need at the same time, as in
                `[{"GPU": 1}] * 8`. The run is refused before submission if the nodes of the Ray cluster could never hold the
                bundles. A dictionary has a list of bundles for each of Ray's placement strategies, as in
                `{"STRICT_SPREAD": […]}`. The key `labels` of a bundle has the bundle's label selector.
            uses_pipes: False for a payload that does not open Dagster Pipes; then the payload's exit code alone decides whether
                the run has succeeded. With topology "separate", also a mapping from component ids to True or False.

        Returns:
            The result of the run, with the Dagster results that the payload reported.

        Raises:
            RunFailure: the run did not succeed; the attribute `kind` of the failure says which part of the run failed.
        """
        from .operations import run

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
        """Run a payload as `run` does, and await the end of the payload.

        Many payloads can wait and run at once in one event loop. All calls in this process share one connection to the cluster,
        one query of Slurm's queue, and one thread that follows the payloads. If the task that awaits the payload is cancelled,
        the payload and the payload's job end as after an interrupt of `run`; a second cancellation ends the payload without a
        grace period. A retry of the step continues the payloads of the earlier attempt: the first call of the retry continues the
        payload of the first call of the earlier attempt, the second call the payload of the second call, and so on.

        Example:
            ```python
            @dg.asset
            async def features(context: dg.AssetExecutionContext, compute: ComputeResource):
                return (await compute.run_async(context=context, payload_path="features.py")).get_materialize_result()
            ```

        Dagster's own executors run one step at a time in a process. With these executors, a step with several payloads awaits the
        payloads by `asyncio.gather`. With the executor of the package `dagster-async-executor`, many steps of one process await
        payloads at once.

        The arguments, the result and the exceptions are the same as for `run`.
        """
        from .operations import run_async

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
        chunk: int = 1,
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
        """Run a payload once for each partition or chunk of partitions of the Dagster run, and wait until all have ended.

        All partitions share one job or session. With `allocation="each"`, each partition has an allocation of its own, as an
        element of a Slurm job array.

        The asset needs a backfill policy with which one Dagster run has several partitions. Each partition runs in a process of
        its own, which finds the partition's key in `pipes.partition_key`. A partition is materialized as soon as the partition's
        process has succeeded. When all partitions have ended, the step fails if a partition failed. A retry of the step, or a
        re-execution of the Dagster run from failure, runs only the partitions that are not materialized yet.

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
            payload_path: the same as for `run`. A Python script or module starts fastest, because the processes are forked.
            max_concurrent: the largest number of partitions that run at the same time. All partitions run on the first node of
                the allocation; None stands for the number of CPUs that Slurm granted on this node to the job, or to the payload
                in a session. With `allocation="each"`, None means no limit. A chunk counts as one partition.
            chunk: the largest number of partitions that share a call of the payload. With more than 1, the environment variable
                RAYSLURM_PARTITION_KEYS has the path of a file that lists the keys of the chunk, one a line. A chunk of more than
                one partition has no `pipes.partition_key`. The payload reports that a partition is done by
                `pipes.report_custom_message({"partition": key, "metadata": {…}})`. If the payload succeeds, all partitions of the
                chunk are materialized. If the payload fails, only the reported partitions are materialized.
            allocation: "shared" for one allocation and one Ray cluster that all partitions share; "each" for an allocation and a
                Ray cluster per partition, of the size in `queue` and `launcher`. "each" needs mode "slurm".
            uses_pipes: False for a payload that does not open Dagster Pipes; such a payload finds the partition's key in the
                environment variable RAYSLURM_PARTITION_KEY.

        The other arguments are the same as for `run`.

        Returns:
            The result of the run; the asset returns `get_materialize_result()` of this result.

        Raises:
            RunFailure: partitions failed, or the run did not succeed. The message says how many partitions are materialized and
                how many failed, and names the first failed partitions.
        """
        from .execution.partition_results import PartitionOptions
        from .operations import run_partitions

        arguments: dict[str, Any] = {"payload_path": payload_path, "launcher": launcher, "queue": queue, "extra_env": extra_env}
        arguments |= {"secret_env": secret_env, "extra_files": extra_files, "environment": environment, "requires": requires}
        arguments |= {"allocation": allocation, "uses_pipes": uses_pipes}
        return run_partitions(self, context, extras, PartitionOptions(max_concurrent, chunk), **arguments)

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
        """Submit the Slurm job of a payload, and return the handle of the submitted run without waiting for the job.

        No process of Dagster has to last as long as the job. A sensor from `build_completion_sensor` reports the end of the run,
        and `reattach` follows the run to the end. Needs mode slurm or slurm-hetjob, and topology "spanning".

        Example:
            ```python
            @dg.schedule(cron_schedule="0 2 * * *", target=dg.AssetSelection.all())
            def nightly(context: dg.ScheduleEvaluationContext, compute: ComputeResource):
                day = context.scheduled_execution_time.date().isoformat()
                compute.submit(context=context, payload_path="train.py", asset_key="model", key=f"model {day}")
                return dg.SkipReason(f"submitted the job of {day}")
            ```

        Args:
            context: the context of an asset, op, sensor or schedule, whose log gets the messages. Without a context, Python's
                logger `rayslurm` gets the messages.
            asset_key: the asset that the payload makes; by default the asset of the step, if the step has exactly one asset.
            partition_key: the partition of the asset; by default the partition of the step.
            key: a text that stands for the work, such as a date. Among all calls with the same key, in any process, only one call
                submits a job; the other calls return the handle of the submitted run. The key is forgotten `retention_days` after
                the submission.

        The other arguments are the same as for `run`. The run directory is kept until `reattach` has fetched the outputs.

        Raises:
            RunFailure: the job cannot be submitted.
        """
        from .operations import submit_and_leave

        arguments: dict[str, Any] = {"payload_path": payload_path, "launcher": launcher, "queue": queue, "components": components}
        arguments |= {"extra_env": extra_env, "secret_env": secret_env, "extra_files": extra_files, "outputs": outputs}
        arguments |= {"environment": environment, "requires": requires, "uses_pipes": uses_pipes}
        return submit_and_leave(self, context, asset_key, partition_key, key, extras, **arguments)

    def reattach(self, handle: RunHandle | None = None, *, context: Context) -> CompletedRun:
        """Follow a run that was submitted by `submit` until the run has ended, as `run` does.

        The run may have been submitted by another process, and may have ended already.

        Args:
            handle: the handle that `submit` returned; by default the handle in the tags of the Dagster run. A Dagster run has
                this tag if a sensor from `build_completion_sensor` requested the Dagster run.
            context: the context of the asset, op or check.

        Returns:
            The result of the run, with the output files, and with the Dagster results that the payload reported.

        Raises:
            RunFailure: the run did not succeed, the run directory is gone, or there is no handle.
        """
        from .operations import reattach

        return reattach(self, context, handle)

    def cleanup_cluster(self, cluster_id: str) -> bool:
        """End a Ray cluster, all payloads that run on it, and the Slurm job or session (warm allocation) that contains it.

        The id of a Ray cluster is in `CompletedRun.cluster_id`, and in the metadata "Ray cluster ID". Returns False if no Ray
        cluster with this id is found. Raises `RunFailure` if the job or session does not end, or if Slurm does not answer.
        """
        from .operations import end_cluster

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

        Words in capitals stand for values that are known only at submission. In local mode, the text has the command that starts
        the runtime, and the content of the files that the runtime reads first. The arguments are the same as for `run`. Raises
        `RunFailure` if an argument is invalid.
        """
        from .operations import example

        return example(self, payload_path=payload_path, launcher=launcher, queue=queue, components=components)


def _check_definition(resource: ComputeResource) -> None:
    """Raise `ValueError` if no run in a Slurm mode could use the resource, for example because a field is missing.

    A resource in local mode, and fields with an unresolved `EnvVar`, are not checked.
    """
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
