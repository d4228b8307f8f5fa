"""`build_completion_sensor`: a Dagster sensor that reports the ends of runs which `ComputeResource.submit` has submitted."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as Late
from typing import TYPE_CHECKING, Any

import dagster as dg

from .compute import ComputeResource
from .handle import TAG, RunHandle

if TYPE_CHECKING:
    from .execution.submitted import EndedRun

Event = dg.AssetMaterialization | dg.AssetObservation | dg.AssetCheckEvaluation

_LOOK_TIMEOUT = 30.0  # Seconds for one look at the cluster; Dagster ends a tick after 60.
_DATA_VERSION = "dagster/data_version"  # Tag of a materialization.
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

    - If both are None, the sensor stores events. For a success, it stores an `AssetMaterialization` of the run's asset and of
      each further asset that the payload reported, with the reported metadata and data version, and an `AssetCheckEvaluation` for
      each reported asset check. For a failure, it stores an `AssetObservation` of the run's asset with a sentence about the
      failure. Output files are not copied.
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
        events = [event for each in ended if each.handle.asset_key for event in _events(each)]
        events = [event for event in events if not _is_reported(context, event)]
        return dg.SensorResult(asset_events=events, cursor=cursor)

    return completion


class _Look:
    """Finds the submitted runs that have ended, in a thread, so that a tick of the sensor can stop waiting for the cluster.

    The thread calls `operations.look`. At most one thread runs at a time: while a call hangs, no further call begins.
    """

    def __init__(self, compute: ComputeResource, sensor: str) -> None:
        self._compute, self._sensor = compute, sensor
        self._pending: Future[Any] | None = None
        self.place = "the cluster"

    def result(self, known: list[str]) -> Any:
        """Returns what `operations.look` finds: the submitted runs that have ended; raises its exception if it fails.

        `known` has the names of the runs that the sensor has reported before; they are left out. The search runs in a thread. If
        it takes longer than `_LOOK_TIMEOUT` seconds, the method raises `concurrent.futures.TimeoutError`, and the thread goes on:
        the next call waits for this thread, and returns its result, which belongs to the earlier `known`.
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


def _events(each: EndedRun) -> list[Event]:
    """Returns the Dagster events of a submitted run that has ended.

    A failed run gives one observation. A successful run gives a materialization of the handle's asset and of each further asset
    that the payload reported, and an evaluation of each asset check that the payload reported. The evaluations have no partition,
    because the sensor does not know whether the checks are partitioned.
    """
    key, partition = dg.AssetKey.from_user_string(each.handle.asset_key or ""), each.handle.partition_key
    reported: dict[dg.AssetKey, dict[str, Any]] = {key: {}}
    versions: dict[dg.AssetKey, str] = {}
    checks: list[Event] = []
    for result in each.results:
        asset, metadata = result.asset_key or key, dict(result.metadata or {})
        if isinstance(result, dg.AssetCheckResult):
            evaluation = dg.AssetCheckEvaluation(
                asset, result.check_name or "", result.passed, {**metadata, **each.metadata}, severity=result.severity
            )
            checks.append(evaluation)
            continue
        reported.setdefault(asset, {}).update(metadata)
        if result.data_version is not None:
            versions[asset] = result.data_version.value
    if each.verdict.kind is not None:
        why = {"Failure kind": each.verdict.kind.value, "Failure": each.verdict.sentence}
        metadata = {**why, **reported[key], **each.metadata}
        return [dg.AssetObservation(key, description=each.verdict.sentence, metadata=metadata, partition=partition)]
    materializations = [
        dg.AssetMaterialization(
            asset,
            description="submitted run succeeded",
            metadata={**metadata, **each.metadata},
            partition=partition,
            tags={_DATA_VERSION: versions[asset]} if asset in versions else None,
        )
        for asset, metadata in reported.items()
    ]
    return [*materializations, *checks]


def _is_reported(context: dg.SensorEvaluationContext, event: Event) -> bool:
    """Returns whether Dagster's event log has an event like `event`: of the same kind, asset or asset check, and submitted run.

    Dagster's daemon may have stored such an event in an earlier tick, and died before it stored the sensor's cursor. The function
    reads the latest `_LATEST` events of this kind of the asset or asset check.
    """
    found: Any
    if isinstance(event, dg.AssetMaterialization):
        records = context.instance.fetch_materializations(event.asset_key, limit=_LATEST).records
        found = [each.asset_materialization for each in records]
    elif isinstance(event, dg.AssetObservation):
        records = context.instance.fetch_observations(event.asset_key, limit=_LATEST).records
        found = [each.event_log_entry.asset_observation for each in records]
    else:
        storage = context.instance.event_log_storage
        history = storage.get_asset_check_execution_history(event.asset_check_key, limit=_LATEST)
        found = [each.event and each.event.asset_check_evaluation for each in history]
    run = event.metadata[_METADATA].value
    return any(each is not None and getattr(each.metadata.get(_METADATA), "value", None) == run for each in found)
