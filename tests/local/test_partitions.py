"""`run_partitions` in local mode: one payload for each partition of a run, with verdicts and failures by key."""

import collections
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_rayslurm import BashLauncher, ComputeResource, HetComponent, RunFailure, SlurmQueueConfig

from ..conftest import pipes_script

KEYS = [f"part {number:02}" for number in range(20)]
STATIC = dg.StaticPartitionsDefinition(KEYS)
SINGLE_RUN = dg.BackfillPolicy.single_run()
WHOLE_RANGE = {"dagster/asset_partition_range_start": KEYS[0], "dagster/asset_partition_range_end": KEYS[-1]}
FIRST_SIX = {**WHOLE_RANGE, "dagster/asset_partition_range_end": KEYS[5]}

SCORE = pipes_script("""
import os, pathlib, sys
here = pathlib.Path(__file__).parent
key, tries = pipes.partition_key, here / ("tries " + pipes.partition_key)
with open(tries, "a") as file:
    file.write("x")
print("hello from", key, __name__, len(sys.argv))
pipes.log.info("scoring")
if key in ("part 03", "part 17") and tries.stat().st_size == 1 or key == "part 10":
    raise ValueError("bad data in " + key)
pipes.report_asset_materialization(metadata={"key": key}, data_version="version of " + key)
""")


class Scene:
    """Runs an asset with partitions, and an asset downstream of it, in a Dagster instance of its own."""

    def __init__(self, compute: ComputeResource) -> None:
        self.compute = compute
        self.instance = dg.DagsterInstance.ephemeral()
        self.failures: list[RunFailure] = []

    def run(
        self,
        payload: Any,
        partitions: dg.PartitionsDefinition[str] | None = STATIC,
        tags: dict[str, str] = WHOLE_RANGE,
        retries: int = 0,
        **arguments: Any,
    ) -> dg.ExecuteInProcessResult:
        policy = dg.RetryPolicy(max_retries=retries) if retries else None

        @dg.asset(partitions_def=partitions, backfill_policy=SINGLE_RUN, retry_policy=policy)
        def scores(context: dg.AssetExecutionContext, compute: ComputeResource) -> Any:
            try:
                return compute.run_partitions(context, payload, **arguments).get_materialize_result()
            except RunFailure as failure:
                self.failures.append(failure)
                raise

        @dg.asset(partitions_def=partitions, backfill_policy=SINGLE_RUN, deps=[scores])
        def below() -> None: ...

        resources = {"compute": self.compute}
        return dg.materialize([scores, below], resources=resources, instance=self.instance, tags=tags, raise_on_error=False)

    def materializations(self, asset: str = "scores") -> dict[str, list[dict[str, Any]]]:
        """The metadata and tags of all materializations of an asset, by partition."""
        found = collections.defaultdict(list)
        for each in self.instance.fetch_materializations(dg.AssetKey(asset), limit=1000).records:
            made = each.asset_materialization
            assert made is not None
            found[str(each.partition_key)].append({"tags": made.tags, **{key: it.value for key, it in made.metadata.items()}})
        return found

    @property
    def failed(self) -> Any:
        """Why partitions failed, by key, in the metadata of the last failure."""
        return self.failures[-1].metadata["Failed partitions"].value

    def logged(self) -> str:
        run = self.instance.get_runs()[0]
        return "\n".join(entry.user_message for entry in self.instance.all_logs(run.run_id))


@pytest.fixture
def scene(compute: ComputeResource) -> Scene:
    return Scene(compute)


def test_failed_partitions_are_named_and_a_retry_runs_only_these(
    scene: Scene, script: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = scene.run(str(script(SCORE)), retries=1, max_concurrent=3)
    assert not result.success
    first, second = scene.failures
    reasons = [f"'{key}' (the payload raised ValueError: bad data in {key} (payload.py:13))" for key in ("part 03", "part 10")]
    assert f"17 of 20 partitions are materialized, 3 failed: {reasons[0]}, {reasons[1]}, 'part 17'" in str(first.description)
    assert str(second.description).startswith(f"19 of 20 partitions are materialized, 1 failed: {reasons[1]}; re-execute")
    assert first.kind == "payload" and scene.failed == {"part 10": reasons[1][11:-1]}
    tries = {key: (tmp_path / f"tries {key}").read_text() for key in KEYS}
    assert tries == {key: "xx" if key in ("part 03", "part 10", "part 17") else "x" for key in KEYS}
    found = scene.materializations()
    assert sorted(found) == [key for key in KEYS if key != "part 10"] and {len(each) for each in found.values()} == {1}
    assert scene.materializations("below") == {}
    for key, [each] in found.items():
        assert each["key"] == key and each["tags"] == {"dagster/data_version": f"version of {key}"}
        assert each["Elapsed (s)"] > 0 and each["Peak memory (MiB)"] > 1
    shown, log = capfd.readouterr().out, scene.logged()
    for key in KEYS:
        code = 1 if key in ("part 03", "part 10", "part 17") else 0
        assert f"---- partition {key}: exit code {code}, " in shown and f"[{key}] scoring" in log
    section = shown[shown.index("---- partition part 05") :].splitlines()
    assert section[1] == "hello from part 05 __main__ 1" and section[2].startswith("---- partition")
    assert "[rayslurm] partition 'part 10' failed: the payload raised ValueError" in log


def test_each_partition_has_its_own_key_and_time_window_and_is_materialized_once(
    scene: Scene, script: Callable[..., Path]
) -> None:
    days = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-04")
    tags = {"dagster/asset_partition_range_start": "2026-01-01", "dagster/asset_partition_range_end": "2026-01-03"}
    body = "window = pipes.partition_time_window\npipes.report_asset_materialization(metadata={'window': str(window), "
    body += "'range': str(pipes.partition_key_range), 'extra': pipes.extras['x']})"
    result = scene.run(["python", "-u", "-c", pipes_script(body)], days, tags, extras={"x": 7})  # Not forked, because of `-u`.
    assert result.success, scene.failures
    found = scene.materializations()
    assert sorted(found) == ["2026-01-01", "2026-01-02", "2026-01-03"]
    for day, [each] in found.items():
        assert f"'start': '{day}T00:00:00+00:00'" in each["window"] and each["extra"] == 7
        assert f"'start': '{day}', 'end': '{day}'" in each["range"]
    assert sorted(scene.materializations("below")) == sorted(found)


def test_partitions_of_several_dimensions_have_the_time_window_of_one(
    scene: Scene, compute: ComputeResource, script: Callable[..., Path]
) -> None:
    days = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-03")
    partitions = dg.MultiPartitionsDefinition({"day": days, "region": dg.StaticPartitionsDefinition(["north", "south"])})
    first, last = "2026-01-01|north", "2026-01-02|south"
    tags = {"dagster/asset_partition_range_start": first, "dagster/asset_partition_range_end": last}
    payload = str(
        script(
            pipes_script("""
        window = pipes.partition_time_window
        pipes.report_asset_materialization(metadata={"window": window["start"][:10] + " " + window["end"][:10]})
    """)
        )
    )
    assert scene.run(payload, partitions, tags).success, scene.failures
    windows = {"2026-01-01": "2026-01-01 2026-01-02", "2026-01-02": "2026-01-02 2026-01-03"}
    expected = {f"{day}|{region}": window for day, window in windows.items() for region in ("north", "south")}
    assert {key: each["window"] for key, [each] in scene.materializations().items()} == expected

    @dg.asset(partitions_def=partitions, backfill_policy=SINGLE_RUN)
    def together(context: dg.AssetExecutionContext, compute: ComputeResource) -> Any:
        return compute.run(context=context, payload_path=payload, launcher=BashLauncher()).get_materialize_result()

    result = dg.materialize([together], resources={"compute": compute}, tags=tags)
    assert result.asset_materializations_for_node("together")[0].metadata["window"].value == "2026-01-01 2026-01-03"


CHUNK = pipes_script("""
import os, pathlib
here = pathlib.Path(__file__).parent
keys = pathlib.Path(os.environ["RAYSLURM_PARTITION_KEYS"]).read_text().splitlines()
assert pipes.partition_key_range == {"start": keys[0], "end": keys[-1]}, pipes.partition_key_range
assert os.environ.get("RAYSLURM_PARTITION_KEY") == (keys[0] if len(keys) == 1 else None)
with open(here / "calls", "a") as file:
    file.write(",".join(key[5:] for key in keys) + "\\n")
for key in keys:
    if key == "part 08" and len((here / "calls").read_text().splitlines()) <= 4:
        raise ValueError("bad data in " + key)
    report = {"partition": key, "metadata": {"square": int(key[5:]) ** 2}, "data_version": "version of " + key}
    pipes.report_custom_message(report)
pipes.log.info("scored")
pipes.report_asset_materialization(metadata={"first": keys[0]})
""")


def test_a_failed_chunk_keeps_the_partitions_that_it_has_reported(
    scene: Scene, script: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert scene.run(str(script(CHUNK)), retries=1, max_concurrent=1, chunk=6).success, scene.failures
    [failure] = scene.failures
    assert str(failure.description).startswith("16 of 20 partitions are materialized, 4 failed: 'part 08' (the payload raised")
    assert sorted(scene.failed) == KEYS[8:12]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == ["00,01,02,03,04,05", "06,07,08,09,10,11", "12,13,14,15,16,17", "18,19", "08,09,10,11"]
    found = scene.materializations()
    assert sorted(found) == KEYS and {len(each) for each in found.values()} == {1}
    for key, [each] in found.items():
        assert each["square"] == int(key[5:]) ** 2 and each["tags"] == {"dagster/data_version": f"version of {key}"}
    assert [found[key][0].get("first") for key in KEYS[5:9]] == ["part 00", None, None, "part 08"]
    assert "[part 18 to part 19] scored" in scene.logged() and "'partition':" not in scene.logged()
    assert "---- partitions part 06 to part 11: exit code 1, " in capfd.readouterr().err


def test_chunks_have_time_windows_and_go_over_no_materialized_partition(
    scene: Scene, script: Callable[..., Path], tmp_path: Path
) -> None:
    days = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-08")
    tags = {"dagster/asset_partition_range_start": "2026-01-01", "dagster/asset_partition_range_end": "2026-01-07"}
    payload = script(
        pipes_script("""
        import os, pathlib
        here, window = pathlib.Path(__file__).parent, pipes.partition_time_window
        first, last = (str(window[end])[8:10] for end in ("start", "end"))
        with open(here / "windows", "a") as file:
            file.write(f"{first}-{last} ")
        if len((here / "windows").read_text().split()) == 1:
            pipes.report_custom_message({"partition": "2026-01-03"})
            raise ValueError("bad data")
    """)
    )
    assert scene.run(str(payload), days, tags, retries=1, max_concurrent=1, chunk=5).success, scene.failures
    assert (tmp_path / "windows").read_text().split() == ["01-06", "06-08", "01-03", "04-06"]
    assert {len(each) for each in scene.materializations().values()} == {1}


def test_a_chunk_reports_only_its_own_partitions(scene: Scene, script: Callable[..., Path]) -> None:
    body = "first = pipes.partition_key_range['start']\n"
    body += "pipes.report_custom_message({'partition': 'part 00' if first == 'part 03' else first})"
    assert not scene.run(str(script(pipes_script(body))), tags=FIRST_SIX, chunk=3).success
    assert sorted(scene.materializations()) == KEYS[:3]
    assert scene.failed.keys() == set(KEYS[3:6]) and "partition 'part 00', which is not in its chunk" in scene.failed[KEYS[5]]


def test_a_partition_is_judged_as_a_payload(scene: Scene, script: Callable[..., Path]) -> None:
    payload = script("""
        import os, signal
        from dagster_pipes import open_dagster_pipes
        number = int(os.environ["RAYSLURM_PARTITION_KEY"][5:])
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 2:
            raise SystemExit(0)
        with open_dagster_pipes() as pipes:
            if number == 3:
                pipes._message_channel.write_message({"method": "report_asset_check", "params": {}})
            if number == 4:
                os._exit(5)
        """)
    assert not scene.run(str(payload), tags=FIRST_SIX).success
    said = scene.failed
    expected = {1: "killed by signal 9", 2: "never opened Dagster Pipes", 3: "cannot report an asset check", 4: "exit code 5"}
    assert list(said) and {key: expected[int(key[5:])] in why for key, why in said.items()} == dict.fromkeys(said, True)
    assert sorted(said) == KEYS[1:5] and sorted(scene.materializations()) == [KEYS[0], KEYS[5]]


def test_a_command_that_is_none_of_python_finds_its_key_in_a_variable(scene: Scene) -> None:
    command = ["sh", "-c", 'echo "key is $RAYSLURM_PARTITION_KEY" >&2; test "$RAYSLURM_PARTITION_KEY" != "part 04"']
    assert not scene.run(command, tags=FIRST_SIX, uses_pipes=False).success
    why = "the payload ended with exit code 1; its standard error ends with: key is part 04"
    assert scene.failed == {"part 04": why}


def test_a_lost_payload_keeps_what_has_succeeded(scene: Scene, script: Callable[..., Path]) -> None:
    body = """
    import os, signal, time
    if pipes.partition_key == "part 03":
        time.sleep(0.5)  # Until the messages before are copied.
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    """
    assert not scene.run(str(script(pipes_script(body))), tags=FIRST_SIX, max_concurrent=1).success
    assert str(scene.failures[0].description).startswith("3 of 6 partitions are materialized, then: the payload was killed by")
    assert sorted(scene.materializations()) == KEYS[:3]


@pytest.mark.parametrize(
    ("fields", "arguments", "said"),
    [
        ({}, {"partitions": None, "tags": {}}, "run_partitions: this run has no partitions"),
        ({}, {"max_concurrent": 0}, "max_concurrent: 0 is no number of partitions"),
        ({}, {"chunk": 0}, "chunk: 0 is no number of partitions"),
        ({}, {"max_concurrent": True}, "max_concurrent: True is no number of partitions"),
        ({}, {"allocation": "each"}, "allocation: 'each' makes job arrays, for which mode 'local' has none; use mode 'slurm'"),
        ({}, {"allocation": "own"}, "allocation: 'own' is neither 'shared' nor 'each'"),
        (
            {"topology": "separate", "components": [HetComponent(component_id="a", queue=SlurmQueueConfig())]},
            {},
            "topology: run_partitions",
        ),
    ],
)
def test_it_is_refused(fields: Any, arguments: Any, said: str, scene: Scene, base: Path) -> None:
    scene.compute = ComputeResource(local_base=str(base), default_launcher=BashLauncher(), **fields)
    if fields:
        scene.compute = ComputeResource(local_base=str(base), **fields)
    assert not scene.run("true", **arguments).success
    assert scene.failures[0].kind == "configuration" and str(scene.failures[0].description).startswith(said)
    assert not os.path.exists(base / "runs")


@pytest.mark.parametrize(("keep", "kept"), [("failed", True), ("none", False)])
def test_the_run_directory_is_kept_if_partitions_failed(
    keep: str, kept: bool, scene: Scene, base: Path, script: Callable[..., Path]
) -> None:
    scene.compute = ComputeResource(local_base=str(base), default_launcher=BashLauncher(), keep_run_dirs=keep)
    assert not scene.run(["sh", "-c", 'test "$RAYSLURM_PARTITION_KEY" != "part 04"'], tags=FIRST_SIX, uses_pipes=False).success
    [failure] = scene.failures
    assert str(failure.description).startswith("5 of 6 partitions are materialized, 1 failed")
    directories = [str(each) for each in (base / "runs").iterdir()]
    assert directories == ([failure.metadata["Run directory"].value] if kept else [])
    assert scene.run("true", tags={**WHOLE_RANGE, "dagster/asset_partition_range_end": KEYS[0]}, uses_pipes=False).success
    assert len(list((base / "runs").iterdir())) == len(directories)
