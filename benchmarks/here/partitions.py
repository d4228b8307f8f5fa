"""`partitions`: ten thousand partitions of one run through a warm session, each with its own materialization."""

from collections import Counter

import dagster as dg

from dagster_rayslurm import ComputeResource, RayLauncher

from ..figures import Figure, Options, Sample
from ..steps import PAYLOADS, base_dir, in_step, instance, timed

# No annotations from the future here: Dagster wants the type of `context` itself, not its name.

_COUNT, _QUICK_COUNT = 10_000, 200
_WRITTEN = 1000  # Materializations that are written by hand; the time for all of them is extrapolated.
_BAR = 0.015  # Seconds for each partition.
_PAYLOAD = PAYLOADS / "partition.py"
_HELLO = PAYLOADS / "hello.py"


def partitions(options: Options) -> Figure:
    """Seconds until all partitions are materialized, beside those that Dagster takes to write as many materializations."""
    count = _QUICK_COUNT if options.quick else _COUNT
    keys = [f"part-{number:05}" for number in range(count)]
    definition = dg.StaticPartitionsDefinition(keys)
    tags = {"dagster/asset_partition_range_start": keys[0], "dagster/asset_partition_range_end": keys[-1]}
    ours: list[float] = []
    by_hand: list[float] = []

    @dg.asset(partitions_def=definition, backfill_policy=dg.BackfillPolicy.single_run())
    def trivial(context: dg.AssetExecutionContext, compute: ComputeResource) -> dg.MaterializeResult:
        seconds, run = timed(lambda: compute.run_partitions(context, _PAYLOAD))
        ours.append(seconds)
        return run.get_materialize_result()

    def write(context: dg.AssetExecutionContext, compute: ComputeResource) -> None:  # noqa: ARG001
        def each() -> None:
            for key in keys[:_WRITTEN]:
                context.log_event(dg.AssetMaterialization("written", partition=key, metadata={"key": key}))

        by_hand.append(timed(each)[0] * count / min(count, _WRITTEN))

    def warm(context: dg.AssetExecutionContext, compute: ComputeResource) -> str:
        return compute.run(context=context, payload_path=_HELLO).cluster_id

    launcher = RayLauncher(dashboard=False, object_store_memory_gb=0.25)
    with base_dir() as base:
        compute = ComputeResource(local_base=base, default_launcher=launcher, enable_cluster_reuse=True)
        with instance() as dagster:
            in_step(compute, dagster, write)
        with instance() as dagster:
            cluster = in_step(compute, dagster, warm)
            try:
                console = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
                dg.materialize([trivial], resources={"compute": compute}, instance=dagster, tags=tags, run_config=console)
            finally:
                compute.cleanup_cluster(cluster)
            found = Counter(_materialized(dagster))
    lost, doubled = sum(found[key] == 0 for key in keys), sum(found[key] > 1 for key in keys)
    each = Sample.of("for each partition", [seconds / count for seconds in ours])
    return Figure(
        name=f"partitions, {count:,} in a session",
        by_hand=Sample.of("writing as many materializations", by_hand),
        ours=Sample.of("run_partitions()", ours),
        result=each,
        bar=_BAR,
        problem=f"{lost} partitions are lost and {doubled} doubled" if lost or doubled else None,
    )


def _materialized(dagster: dg.DagsterInstance) -> list[str]:
    """The partition of each materialization in the event log."""
    keys: list[str] = []
    cursor, more = None, True
    while more:
        page = dagster.fetch_materializations(dg.AssetKey("trivial"), limit=1000, cursor=cursor)
        keys += [str(record.partition_key) for record in page.records]
        cursor, more = page.cursor, page.has_more
    return keys
