"""The results of a step's partitions: find the missing partitions, judge each chunk that has ended, and materialize partitions.

A chunk is one partition, or several that share a process (`run_partitions(chunk=…)`). A partition that has succeeded is
materialized at once, and counts even if other partitions fail.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import dagster as dg
from dagster_pipes import PipesContextData

from ..backends.ownership import UNCONTESTED, Ownership
from ..compute_fields import ComputeFields
from ..errors import FailureKind
from ..failures import CompletedRun, RunFailure
from ..follow import Evidence
from ..follow.forward import RecordPipes, has_time_windows
from ..outcome.verdict import SUCCESS, Verdict, judge, with_hint
from ..plan import Plan
from ..runtime.payload.partition_runner import METHOD, PARTITIONS, Chunk, span_of
from .reattach import retried_runs

try:
    # A step's output with this metadata has no materialization of its own (Dagster 1.13: `_core/execution/plan/execute_step.py`).
    # Without it, Dagster would materialize the run's whole range of partitions once more.
    from dagster._core.definitions.source_asset import SYSTEM_METADATA_KEY_SOURCE_ASSET_OBSERVATION

    NO_MATERIALIZATION = SYSTEM_METADATA_KEY_SOURCE_ASSET_OBSERVATION
except ImportError:
    NO_MATERIALIZATION = ""

_PAGE = 1000  # Most records of Dagster's event log in one query.
_NAMED = 3  # Failed partitions that the sentence of a failure names, with their reasons.
_LOGGED = 20  # Failed partitions for which the Dagster log gets a line.
_LISTED = 500  # Failed partitions in the metadata of a failure.
_RETRY = 5.0  # Seconds between two looks at the owner of the payload over a lost connection.
_MIB = 2**20

_DATA_VERSION = "dagster/data_version"  # Tag of a materialization.


@dataclass(frozen=True)
class PartitionOptions:
    """The arguments of `run_partitions` that say how the partitions run; `run` has no such arguments."""

    max_concurrent: int | None = None  # Most chunks that run at the same time; None for the default of the allocation.
    chunk: int = 1  # Most partitions of one chunk.


@dataclass
class PartitionResults:
    """The partitions of a step: which are materialized, and which failed and why.

    The object is also the handler of the payload's Pipes messages: it judges each chunk of partitions that ends, and materializes
    the partitions that succeeded.
    """

    context: dg.OpExecutionContext
    # Dagster's key of each partition, by the text of the key. If partitions have several dimensions, Dagster's key is a
    # `MultiPartitionKey`, which also has the key of each dimension.
    keys: Mapping[str, str]
    done: set[str]  # Partitions that are materialized.
    uses_pipes: bool  # Whether the payload opens Dagster Pipes.
    require_messages: bool  # Whether a payload that uses Pipes fails if it does not open and close Pipes.
    failed: dict[str, Verdict] = field(default_factory=dict)  # Why partitions failed.
    told: set[str] = field(default_factory=set)  # Failed partitions that an earlier attempt has logged.
    handler: Any = None  # Dagster's handler, for the Pipes messages that do not report the end of a chunk.
    # Returns this attempt's claim to own the payload. Only the attempt that owns the payload materializes partitions.
    owner: Callable[[], Ownership] = lambda: UNCONTESTED
    chunk: int = 1  # Most partitions of one chunk.
    loss_timeout: float = 86400.0  # Seconds for which the cluster may be out of reach.
    _pipes: Any = None
    _unknown_since: float | None = None  # Since when the owner is not known, by the monotonic clock.

    @property
    def asset_key(self) -> dg.AssetKey:
        """The key of the asset to which the partitions belong."""
        return next(iter(self.context.selected_asset_keys))

    @property
    def missing(self) -> list[str]:
        """The partitions that are not materialized, in the order of the run."""
        return [key for key in self.keys if key not in self.done]

    def attach(self, pipes: RecordPipes, owner: Callable[[], Ownership]) -> tuple[PipesContextData, Any]:
        """Prepare this object to handle the Pipes messages of a payload; returns the payload's Pipes context, and this object.

        `pipes` is Dagster's side of the Pipes session of the run. The returned Pipes context names the partitions that the
        payload must compute. To find these partitions, the method asks Dagster once more which partitions are materialized.
        Before the call, the caller must make sure that no earlier attempt materializes partitions any more. `owner` returns this
        attempt's claim to own the payload.
        """
        self.handler, self._pipes, self.owner = pipes.handler, pipes, owner
        self.done |= materialized(self.context) & set(self.keys)
        chunks = self._chunks()
        what = f"{len(self.missing):,} partitions" + (f" in {len(chunks):,} chunks" if self.chunk > 1 else "")
        self.context.log.info(f"[rayslurm] {what} run; {self.counted()}")
        return {**pipes.pipes_context, PARTITIONS: chunks}, self  # type: ignore[misc]

    def handle_message(self, message: Any) -> None:
        """Judge the chunk whose end the Pipes message `message` reports; pass any other Pipes message of the payload to Dagster.

        The end of a chunk is ignored if the run does not have its partitions, or if they are already materialized. Raises an
        exception of any type if the message is malformed.
        """
        if message["method"] != METHOD:
            self.handler.handle_message(message)
            return
        found = message["params"]
        if not self._undone(found["keys"]):
            return  # A payload that a retry has taken over tells again what is materialized already.
        evidence = Evidence(end=found["end"])
        evidence.last_output.extend((stream, text) for stream, text in found["output"])
        self.conclude(found["keys"], evidence, found["messages"], found["usage"])

    def _undone(self, keys: Sequence[str]) -> list[str]:
        return [key for key in keys if key in self.keys and key not in self.done]

    def conclude(
        self,
        keys: Sequence[str],
        evidence: Evidence,
        messages: Sequence[str],
        usage: Mapping[str, Any],
        own: Mapping[str, Any] = MappingProxyType({}),
    ) -> Verdict:
        """Judge a chunk that has ended, and return the verdict.

        The method materializes all partitions of a chunk that succeeded. Of a failed chunk, it materializes the partitions that
        the chunk's process has reported as made; the other partitions fail. If this attempt does not own the payload, nothing is
        materialized. Logs why a partition failed, for the first `_LOGGED` failed partitions.

        Args:
            keys: The keys of the chunk's partitions.
            evidence: What the chunk's record shows.
            messages: The chunk's Pipes messages, as lines of JSON.
            usage: The chunk's usage, with the keys "cpu_seconds" and "peak_memory" (in bytes).
            own: Further metadata of the materializations.
        """
        undone = self._undone(keys)
        results = self._results(keys, messages, evidence, told=self.told.issuperset(undone))
        verdict = with_hint(judge(evidence, self.uses_pipes, self.require_messages), evidence)
        for key in undone:
            if verdict.kind is None or results.get(key):
                if self._may_write():
                    all_results = [*results.get(None, ()), *results.get(key, ())]
                    self._materialize(key, all_results, evidence.end or {}, usage, own)
                continue
            self.failed[key] = verdict
            if len(self.failed) <= _LOGGED and key not in self.told:
                more = "; further failures are not logged one by one" if len(self.failed) == _LOGGED else ""
                self.context.log.error(f"[rayslurm] partition {key!r} failed: {verdict.sentence}{more}")
        return verdict

    def _may_write(self) -> bool:
        """Returns whether this attempt owns the payload, and so may materialize partitions.

        If the cluster does not answer, the method blocks, and asks again every few seconds. After `loss_timeout` seconds without
        an answer, it returns False.
        """
        while True:
            try:
                holds = self.owner().holds()
                self._unknown_since = None
                return holds
            except OSError as error:
                now = time.monotonic()
                if self._unknown_since is None:
                    self._unknown_since = now
                    waits = "no partition is materialized before the cluster says whether another attempt has taken over"
                    self.context.log.warning(f"[rayslurm] {waits}: {error}")
                if now - self._unknown_since > self.loss_timeout:
                    return False
                time.sleep(_RETRY)

    def _results(
        self, keys: Sequence[str], lines: Sequence[str], evidence: Evidence, told: bool
    ) -> dict[str | None, list[dg.MaterializeResult]]:
        """Handle the Pipes messages of a chunk; returns the materializations that the messages report, by partition key.

        The key None has those materializations that are for all partitions of the chunk. `lines` are the messages as JSON. The
        facts in the messages are added to `evidence`. Log messages and custom messages go to Dagster. A malformed message sets
        `evidence.message_error`. `told` says whether an earlier attempt has already logged that the partitions failed. If `told`
        is True, nothing goes to Dagster, and the result is empty.
        """
        reported = defaultdict[str | None, Any](lambda: dg.PipesMessageHandler(self.context, self._pipes))
        for line in lines:
            try:
                message = json.loads(line)
                method, params = message["method"], message.get("params") or {}
                evidence.add_message(method, params)
                if told:
                    continue
                if method == "log":
                    self.handler.handle_message(
                        {**message, "params": {**params, "message": f"[{span_of(keys)}] {params['message']}"}}
                    )
                elif method == "report_asset_check":
                    raise ValueError("a partition cannot report an asset check")
                elif method == "report_asset_materialization":
                    reported[None].handle_message(message)
                elif (key := self._reported_key(method, params, keys)) is not None:
                    reported[key].handle_message(self._as_materialization(params["payload"]))
                elif method not in ("opened", "closed"):
                    self.handler.handle_message(message)
            except Exception as error:  # noqa: BLE001 - users' messages may be malformed in any way, and Dagster raises anything
                evidence.message_error = evidence.message_error or f"{type(error).__name__}: {error}"
        results = {
            key: [each for each in handler.get_reported_results() if isinstance(each, dg.MaterializeResult)]
            for key, handler in reported.items()
        }
        for each in results.get(None, ()):
            if each.asset_key != self.asset_key:
                evidence.message_error = f"it reports asset {each.asset_key.to_user_string() if each.asset_key else None!r}"
        return results

    def _reported_key(self, method: str, params: Mapping[str, Any], keys: Sequence[str]) -> str | None:
        """Returns the key of the partition that a Pipes message of a chunk reports as made; None for any other message.

        A process reports a partition by a custom message. `method` and `params` are the two parts of the message, and `keys` are
        the keys of the chunk's partitions. Raises ValueError if the reported partition is not in `keys`. If each chunk has a
        single partition, the result is always None.
        """
        payload = params.get("payload")
        if (
            max(self.chunk, len(keys)) == 1
            or method != "report_custom_message"
            or not isinstance(payload, dict)
            or "partition" not in payload
        ):
            return None
        if payload["partition"] not in keys:
            what = f"it reports partition {payload['partition']!r}, which is not in its chunk"
            raise ValueError(f"{what}; report only those in the file RAYSLURM_PARTITION_KEYS")
        return str(payload["partition"])

    def _as_materialization(self, payload: Mapping[str, Any]) -> Any:
        """Returns a Pipes message that reports a materialization.

        `payload` describes the materialization: it is the value that a process passed to `pipes.report_custom_message`.
        """
        metadata = {name: {"raw_value": value, "type": "__infer__"} for name, value in (payload.get("metadata") or {}).items()}
        asset, version = self.asset_key.to_escaped_user_string(), payload.get("data_version")
        params = {"asset_key": asset, "metadata": metadata, "data_version": version}
        return {"method": "report_asset_materialization", "params": params}

    def _materialize(
        self,
        key: str,
        results: Sequence[dg.MaterializeResult],
        end: Mapping[str, Any],
        usage: Mapping[str, Any],
        own: Mapping[str, Any],
    ) -> None:
        metadata = {name: value for each in results for name, value in (each.metadata or {}).items()}
        metadata.update(own)
        if end.get("started_at"):
            metadata["Elapsed (s)"] = round(end["ended_at"] - end["started_at"], 2)
        metadata["CPU time (s)"] = round(usage["cpu_seconds"], 2)
        metadata["Peak memory (MiB)"] = round(usage["peak_memory"] / _MIB, 1)
        versions = [each.data_version.value for each in results if each.data_version is not None]
        tags = {_DATA_VERSION: versions[-1]} if versions else None
        # Written at once, and not yielded at the end of the step: a killed Dagster process must lose nothing.
        self.context.log_event(dg.AssetMaterialization(self.asset_key, partition=self.keys[key], metadata=metadata, tags=tags))
        self.done.add(key)
        self.failed.pop(key, None)

    def _chunks(self) -> list[Chunk]:
        """Returns the missing partitions in chunks of partitions that follow each other directly.

        The method divides all partitions of the run into chunks, so that the borders are the same in a retry. It then leaves out
        the partitions that are materialized. If such a partition was in the middle of a chunk, the chunk becomes two chunks.
        """
        chunks, follows = list[Chunk](), False
        for place, key in enumerate(self.keys):
            if key not in self.done:
                if not follows or place % self.chunk == 0:
                    chunks.append({})
                chunks[-1][key] = self._window(key)
            follows = key not in self.done
        return chunks

    def _window(self, key: str) -> dict[str, str] | None:
        """Returns the ISO times `start` and `end` of the partition `key`; None if the asset's partitions have no time windows."""
        definition: Any = self.context.assets_def.partitions_def
        if not has_time_windows(definition):
            return None
        window = definition.time_window_for_partition_key(self.keys[key])
        return {"start": window.start.isoformat(), "end": window.end.isoformat()}

    # ---- What users are told

    def metadata(self) -> dict[str, Any]:
        """Returns the Dagster metadata of the step's output: the number of partitions, and a mark.

        The mark tells Dagster not to materialize the partitions once more when the step ends.
        """
        return {"Partitions": len(self.keys), NO_MATERIALIZATION: True}

    def counted(self) -> str:
        """Returns the beginning of a sentence: "3 of 5 partitions are materialized"."""
        return f"{len(self.done):,} of {len(self.keys):,} partitions are materialized"

    def verdict(self) -> Verdict:
        """Returns the verdict on a payload that has ended: success if all partitions are materialized, otherwise a failure."""
        return Verdict(FailureKind.PAYLOAD, self.sentence()) if self.missing else SUCCESS

    def sentence(self) -> str:
        """Returns a sentence that describes a failure: how many partitions failed or did not end, and why the first failed."""
        failed = [f"{key!r} ({each.sentence})" for key, each in list(self.failed.items())[:_NAMED]]
        more = f" and {len(self.failed) - _NAMED:,} more" if len(self.failed) > _NAMED else ""
        lost = len(self.missing) - len(self.failed)
        what = [f"{len(self.failed):,} failed: {', '.join(failed)}{more}"] if failed else []
        what += [f"{lost:,} did not end"] if lost else []
        return f"{self.counted()}, {' and '.join(what)}; re-execute the run from failure to run only those that are missing"

    def failures_metadata(self) -> dict[str, Any]:
        """Returns Dagster metadata of a failure: the numbers of all, of materialized and of failed partitions, and the reasons.

        The reasons are sentences by partition key, for at most `_LISTED` failed partitions.
        """
        counts = {"Partitions": len(self.keys), "Partitions materialized": len(self.done), "Partitions failed": len(self.failed)}
        listed = {key: each.sentence for key, each in list(self.failed.items())[:_LISTED]}
        return {**counts, **({"Failed partitions": dg.MetadataValue.json(listed)} if listed else {})}

    def counted_failure(self, failure: RunFailure, own: Mapping[str, Any] = MappingProxyType({})) -> RunFailure:
        """Returns a copy of `failure` that also says how many partitions are materialized. `own` is further metadata."""
        sentence = str(failure.description)
        if sentence != self.sentence():
            sentence = f"{self.counted()}, then: {sentence}"
        metadata = {**failure.metadata, **own, **self.failures_metadata()}
        return RunFailure(failure.kind, sentence, metadata, failure.allow_retries, failure.unhealthy)


def results_so_far(context: dg.OpExecutionContext, plan: Plan, resource: ComputeFields, chunk: int) -> PartitionResults:
    """Returns a new `PartitionResults` for a step.

    The field `done` of the result has the partitions that earlier attempts at this step have materialized. If there are any, the
    function logs their number. `chunk` is the largest number of partitions that share a process.
    """
    keys, done = {str(key): key for key in context.partition_keys}, materialized(context)
    if found := done & set(keys):
        context.log.info(f"[rayslurm] {len(found):,} of {len(keys):,} partitions were materialized by earlier attempts")
    loss_timeout = resource.connection_loss_timeout
    return PartitionResults(
        context, keys, done & set(keys), plan.uses_pipes, resource.require_messages, chunk=chunk, loss_timeout=loss_timeout
    )


def nothing_missing(context: dg.OpExecutionContext, results: PartitionResults, extras: Any) -> CompletedRun:
    """Returns the result for the user's asset if all partitions are materialized already. No payload runs.

    `results` has the partitions. `extras` are the Pipes extras.
    """
    with RecordPipes(context).session(extras, uses_pipes=False) as session:
        return CompletedRun(session, results.metadata(), "", None, [])


def materialized(context: dg.OpExecutionContext) -> set[str]:
    """Returns the keys, as text, of the partitions that this Dagster run, or a run that it retries, has materialized.

    Materializations by any other run do not count, because a user who runs a partition again wants a new materialization.
    """
    runs = [run.run_id for run in retried_runs(context)]
    first = context.instance.get_run_record_by_id(runs[0])
    begun = first.start_time if first else None
    wanted = dg.AssetRecordsFilter(asset_key=next(iter(context.selected_asset_keys)), after_timestamp=begun)
    keys, cursor, more = set(), None, True
    while more:
        page = context.instance.fetch_materializations(wanted, limit=_PAGE, cursor=cursor, ascending=True)
        keys |= {str(each.partition_key) for each in page.records if each.run_id in runs}
        cursor, more = page.cursor, page.has_more
    return keys
