"""Makes a step's Slurm job visible in Dagster as soon as the job exists, by tags of the run and an event of the step."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._core.events import EngineEventData

from ..errors import TROUBLES
from ..runtime.protocol.spec import RaySpec
from ..ssh.base import Connection
from ..ssh.local import LocalConnection

JOB_ID, CLUSTER = "dagster-rayslurm/job_id", "dagster-rayslurm/cluster"  # Keys of tags of a run.

# Whether an execution plan has several steps, by the plan's id, a hash of its content. A step may announce thousands of payloads.
_several_steps: dict[str, bool] = {}

NONE = "none"  # Value of the tags of a re-executed run whose step has no Slurm job yet.
# The steps of re-executed runs whose inherited tags are dropped, as pairs of run id and step key.
_dropped: set[tuple[str, str]] = set()

_TRIES = 5  # Tries to write tags that a step on another host overwrites at the same moment.


def announce(
    context: dg.OpExecutionContext,
    base: Path,
    job_id: str | None,
    cluster_id: str,
    ray: RaySpec | None,
    run_name: str,
    connection: Connection,
) -> None:
    """Show a payload's Slurm job in Dagster, by tags of the Dagster run and an event of the step.

    Does nothing for a payload without a Slurm job. If Dagster's storage raises an exception, the function logs a warning and
    returns.

    Args:
        context: The context of the step.
        base: The path of the base directory on this machine, for a lock file.
        job_id: The id of the Slurm job; None or "" without a Slurm job.
        cluster_id: The id of the payload's Ray cluster.
        ray: The settings of the Ray cluster; None if the event shall name no Ray cluster.
        run_name: The name of the run directory.
        connection: The connection to the cluster. The name of the cluster becomes a tag.
    """
    if not job_id:
        return
    place = socket.gethostname() if isinstance(connection, LocalConnection) else connection.place
    step = context.get_step_execution_context().step.key
    said: dict[str, Any] = {"Slurm job ID": job_id, "Slurm cluster": place}
    if ray is not None:
        said["Ray cluster ID"] = cluster_id
    if ray is not None and ray.dashboard:
        elsewhere = "if the terminal does not know the cluster, add --from MODULE:RESOURCE"
        said["Ray dashboard"] = f"rayslurm dashboard --wait {run_name} ({elsewhere})"
    said["Troubleshooting"] = dg.MetadataValue.url(f"{TROUBLES}#warnings-in-the-event-log")
    try:
        own = step if _has_several_steps(context.instance, context.run.execution_plan_snapshot_id) else None
        write_tags(context.instance, context.run_id, job_tags(job_id, place, own), base)
        message = f"[rayslurm] Slurm job {job_id} on {place} runs {step}"
        context.instance.report_engine_event(message, context.run, EngineEventData(said), step_key=step)
    except Exception as error:  # noqa: BLE001 - the storage may raise anything, and the payload runs
        context.log.warning(f"[rayslurm] the run has no tag for Slurm job {job_id}: {error}")


def drop_inherited_tags(context: dg.OpExecutionContext, base: Path) -> None:
    """Set the tags that a re-executed Dagster run has inherited from its parent run's Slurm job to `NONE`.

    Dagster copies all tags of the parent run to the new run. Without this function, a search for the parent's job would also find
    the new run. When the step has a job of its own, `announce` overwrites the tags. The function does nothing if this process has
    called it for the step before, or if Dagster's storage raises an exception. `base` is the path of the base directory on this
    machine, for a lock file.
    """
    step, run, instance = context.get_step_execution_context().step.key, context.run, context.instance
    if run.parent_run_id is None or (run.run_id, step) in _dropped:
        return
    _dropped.add((run.run_id, step))
    with contextlib.suppress(Exception):
        parent, now = instance.get_run_by_id(run.parent_run_id), instance.get_run_by_id(run.run_id)
        of_parent, of_run = (each.tags if each is not None else {} for each in (parent, now))
        names = job_tags("", "", step)
        if inherited := {name: NONE for name in names if name in of_run and of_run[name] == of_parent.get(name)}:
            write_tags(instance, run.run_id, inherited, base)


def _has_several_steps(instance: dg.DagsterInstance, plan_id: str | None) -> bool:
    """Returns whether the execution plan with the id `plan_id` has more than one step; False without an id."""
    if plan_id is None:
        return False
    if plan_id not in _several_steps:
        _several_steps[plan_id] = len(instance.get_execution_plan_snapshot(plan_id).step_keys_to_execute) > 1
    return _several_steps[plan_id]


def write_tags(instance: dg.DagsterInstance, run_id: str, tags: Mapping[str, str], base: Path) -> None:
    """Add `tags`, a result of `job_tags`, to a Dagster run, and make sure that the tag that names the step is not lost.

    Dagster reads all tags of a run, adds the new tags, and writes the result. Two steps that do so at the same time may therefore
    drop each other's tags. Steps on this machine take turns, by a lock on a file in the directory `base`. A step on another host
    does not see the lock. Therefore the function reads the run again, and repeats the write if the step's tag is missing, up to
    `_TRIES` writes in all.
    """
    # The common tags are those of the latest payload, so only the tags of a step must last.
    lasting = {key: value for key, value in tags.items() if key.startswith(f"{JOB_ID}.")}
    with _alone(base):
        for _ in range(_TRIES):
            instance.add_run_tags(run_id, {**tags})
            run = instance.get_run_by_id(run_id) if lasting else None
            if run is None or lasting.items() <= run.tags.items():
                return


@contextlib.contextmanager
def _alone(base: Path) -> Iterator[None]:
    """Context manager that lets only one thread or process of this machine into the block at a time; the others wait.

    It locks a file in the directory `base`. If the file cannot be opened or locked, the block runs without a lock.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            LocalConnection().make_dir(str(base))
            fd = os.open(base / "tags.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            stack.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield


def job_tags(job_id: str, place: str, step: str | None) -> dict[str, str]:
    """Returns the tags, by name, that a Dagster run gets for the Slurm job `job_id`; `place` is the name of the cluster.

    The tag `JOB_ID` has the id of the job, and the tag `CLUSTER` has the name of the cluster. The next job of the run overwrites
    both tags. `step` is the key of the job's step, or None if the run has a single step. Unless `step` is None, there is a third
    tag: its name contains the step's key, and its value is the id of the job. All copies of a mapped step share one such tag.
    """
    own = {} if step is None else {f"{JOB_ID}.{step.partition('[')[0]}": job_id}
    return {JOB_ID: job_id, CLUSTER: place, **own}
