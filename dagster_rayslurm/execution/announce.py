"""Makes a step's Slurm job visible in Dagster as soon as there is one: by tags of the run, and by an event of the step."""

from __future__ import annotations

import socket

import dagster as dg
from dagster._core.events import EngineEventData

from ..backends.base import RunningPayload
from ..plan import Plan
from ..ssh.base import Connection
from ..ssh.local import LocalConnection

JOB_ID, CLUSTER = "dagster-rayslurm/job_id", "dagster-rayslurm/cluster"  # Keys of tags of a run.


def announce(context: dg.OpExecutionContext, running: RunningPayload, plan: Plan, run_name: str, connection: Connection) -> None:
    """Write a payload's Slurm job to Dagster: tags of the run, and an event of the step. Does nothing without a Slurm job.

    `run_name` is the name of the run directory. An error of Dagster's storage becomes a warning in the log.
    """
    if running.job_id is None:
        return
    place = socket.gethostname() if isinstance(connection, LocalConnection) else connection.place
    step = context.get_step_execution_context().step.key
    said: dict[str, str] = {"Slurm job ID": running.job_id, "Slurm cluster": place, "Ray cluster ID": running.cluster_id}
    if plan.ray is None:
        del said["Ray cluster ID"]
    elif plan.ray.dashboard:
        said["Ray dashboard"] = f"rayslurm dashboard --wait {run_name}"
    try:
        plan_id = context.run.execution_plan_snapshot_id
        steps = context.instance.get_execution_plan_snapshot(plan_id).step_keys_to_execute if plan_id else []
        context.instance.add_run_tags(context.run_id, job_tags(running.job_id, place, step if len(steps) > 1 else None))
        message = f"[rayslurm] Slurm job {running.job_id} on {place} runs {step}"
        context.instance.report_engine_event(message, context.run, EngineEventData(said), step_key=step)
    except Exception as error:  # noqa: BLE001 - the storage may raise anything, and the payload runs
        context.log.warning(f"[rayslurm] the run has no tag for Slurm job {running.job_id}: {error}")


def job_tags(job_id: str, place: str, step: str | None) -> dict[str, str]:
    """Returns the tags of a run for a Slurm job on a cluster; `step` is None for a run with a single step. Pure.

    A run has one value for each tag, so in a run with several steps the common tag has the job of the latest step, and each step
    has a tag of its own. The copies of a mapped step share one tag.
    """
    own = {} if step is None else {f"{JOB_ID}.{step.partition('[')[0]}": job_id}
    return {JOB_ID: job_id, CLUSTER: place, **own}
