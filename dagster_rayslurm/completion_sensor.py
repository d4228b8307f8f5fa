"""`build_completion_sensor`: a Dagster sensor that reports the ends of runs which `ComputeResource.submit` has submitted."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as Late
from typing import Any

import dagster as dg

from .compute import ComputeResource
from .handle import TAG, RunHandle

_LOOK_TIMEOUT = 30.0  # Seconds for one look at the cluster; Dagster ends a tick after 60.
_METADATA = "Run"  # Metadata key of the run's name in each event; a repeated tick finds the events of the run by this name.
_LATEST = 100  # Number of an asset's latest events of each kind among which a repeated tick looks for the events of a run.


def build_completion_sensor(
    compute: ComputeResource,
    *,
    name: str = "rayslurm_completion",
    job: Any = None,
    asset_selection: Any = None,
    minimum_interval_seconds: int = 60,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
) -> dg.SensorDefinition:
    """Returns a sensor that reports the end of each run that `ComputeResource.submit` has submitted; each end is reported once.

    Each tick lists all submitted runs and Slurm's queue with one remote call. What the sensor does for a run that has ended
    depends on `job` and `asset_selection`:

    - If both are None, the sensor stores an event of the run's asset. For a success this is an `AssetMaterialization` with the
      metadata that the payload reported, for a failure an `AssetObservation` with a sentence about the failure. Output files are
      not copied.
    - If one of them is given, the sensor requests a Dagster run, for a success and a failure alike. The `RunHandle` of the
      submitted run is in a tag of the Dagster run, where `reattach` finds the handle. Write the asset so that it returns
      `compute.reattach(context=context).get_materialize_result()`; this call also copies output files.

    If the cluster does not answer within 30 seconds, the tick is skipped, and the skip reason names the cluster.

    Example:
        ```python
        compute = ComputeResource(mode="slurm", slurm=SlurmResource(remote_base="/scratch/me/rayslurm"))
        defs = dg.Definitions(resources={"compute": compute}, sensors=[build_completion_sensor(compute)])
        ```

    Args:
        compute: the resource with which the runs are submitted; each tick reads the values of the resource's `EnvVar` fields.
        name: the name of the sensor. If several sensors look at one base directory, only one sensor reports each end.
        job: the Dagster job to run for each run that has ended.
        asset_selection: the assets to materialize for each run that has ended, as keys or a selection.
        minimum_interval_seconds: the shortest time between two ticks, in seconds.
        default_status: whether the sensor runs before somebody turns the sensor on or off in Dagster.
    """
    look = _Look(compute, name)

    @dg.sensor(
        name=name,
        job=job,
        asset_selection=asset_selection,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description="Reports the ends of runs that were submitted to Slurm.",
    )
    def completion(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        known = json.loads(context.cursor) if context.cursor else []
        try:
            ended, still_there, waiting = look.result(known)
        except Late:
            return dg.SkipReason(f"{look.place} has not answered for {_LOOK_TIMEOUT:g} s; the next tick looks again")
        except (OSError, ValueError, dg.Failure) as error:
            sentence = getattr(error, "description", None) or str(error)
            return dg.SkipReason(f"the submitted runs cannot be looked at: {sentence}")
        cursor = json.dumps([*still_there, *(each.handle.run for each in ended)])
        for each in ended:
            if each.verdict.kind is not None:
                context.log.error(f"[rayslurm] {each.handle.run} failed: {each.verdict.sentence}")
        if not ended:
            context.update_cursor(cursor)
            return dg.SkipReason(f"{waiting} submitted runs have not ended" if waiting else "no submitted run has ended")
        if job is not None or asset_selection is not None:
            requests = [_request(each.handle) for each in ended]
            return dg.SensorResult(run_requests=requests, cursor=cursor)
        events = [_event(each) for each in ended if each.handle.asset_key and not _is_reported(context, each.handle)]
        return dg.SensorResult(asset_events=events, cursor=cursor)

    return completion


class _Look:
    """Calls `operations.look` for a sensor in threads, so that a tick of the sensor can stop waiting for the cluster.

    At most one thread runs at a time: while a call hangs, no further call begins.
    """

    def __init__(self, compute: ComputeResource, sensor: str) -> None:
        self._compute, self._sensor = compute, sensor
        self._pending: Future[Any] | None = None
        self.place = "the cluster"

    def result(self, known: list[str]) -> Any:
        """Call `operations.look` in a thread, wait for the thread, and return the result or raise the exception.

        If no tick has got the result of an earlier thread yet, the method starts no thread, and returns the earlier thread's
        result. `known` has the names of the runs that the sensor has reported before. Raises TimeoutError after `_LOOK_TIMEOUT`
        seconds; the thread then goes on.
        """
        if self._pending is None:
            self._pending = Future()
            threading.Thread(target=self._run, args=(self._pending, known), name="rayslurm-look", daemon=True).start()
        pending = self._pending
        if not wait([pending], _LOOK_TIMEOUT).done:
            raise Late
        self._pending = None
        return pending.result()

    def _run(self, future: Future[Any], known: list[str]) -> None:
        from .operations import look

        try:
            result = look(self._compute, known, self._sensor, self._at)
        except BaseException as error:  # noqa: BLE001 - the tick gets it
            future.set_exception(error)
        else:
            future.set_result(result)

    def _at(self, place: str) -> None:
        self.place = place


def _request(handle: RunHandle) -> dg.RunRequest:
    """Returns the request for a Dagster run that follows the submitted run of `handle`.

    The run key is the name of the submitted run, so that Dagster starts only one Dagster run for the submitted run.
    """
    return dg.RunRequest(run_key=handle.run, partition_key=handle.partition_key, tags={TAG: handle.to_json()})


def _event(each: Any) -> dg.AssetMaterialization | dg.AssetObservation:
    key, partition = dg.AssetKey.from_user_string(each.handle.asset_key), each.handle.partition_key
    if each.verdict.kind is None:
        return dg.AssetMaterialization(key, description="submitted run succeeded", metadata=each.metadata, partition=partition)
    metadata = {"Failure kind": each.verdict.kind.value, "Failure": each.verdict.sentence, **each.metadata}
    return dg.AssetObservation(key, description=each.verdict.sentence, metadata=metadata, partition=partition)


def _is_reported(context: dg.SensorEvaluationContext, handle: RunHandle) -> bool:
    """Returns whether an event in Dagster's event log already reports the end of the submitted run of `handle`.

    The function reads the latest `_LATEST` materializations and the latest `_LATEST` observations of the run's asset. Dagster's
    daemon may have stored such an event in an earlier tick, and died before it stored the sensor's cursor.
    """
    key = dg.AssetKey.from_user_string(handle.asset_key or "")
    found = [*context.instance.fetch_materializations(key, limit=_LATEST).records]
    found += context.instance.fetch_observations(key, limit=_LATEST).records
    events = [each.asset_materialization or each.event_log_entry.asset_observation for each in found]
    return any(event is not None and getattr(event.metadata.get(_METADATA), "value", None) == handle.run for event in events)
