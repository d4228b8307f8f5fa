"""Partitions as elements of job arrays, on the fake Slurm: chunks, verdicts, limits, cancellation, and a killed Dagster."""

import collections
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_rayslurm import BashLauncher, ComputeResource, SlurmResource
from dagster_rayslurm.backends import array
from dagster_rayslurm.backends.listing import list_here
from dagster_rayslurm.edge import elements
from dagster_rayslurm.runtime.protocol.record import encode
from dagster_rayslurm.slurm import accounting
from dagster_rayslurm.ssh.base import ConnectionFailed

from ..conftest import pipes_script, wait_until
from ..fake_slurm import FakeSlurm
from ..local.test_partitions import KEYS, Scene
from .test_partitions import Service

pytestmark = pytest.mark.timeout(180)

SCORE = pipes_script("""
import os, pathlib, sys, time
home = pathlib.Path({home!r})
key = pipes.partition_key
with open(home / "ran", "a") as file:
    file.write(key + "\\n")
assert os.environ["RAYSLURM_PARTITION_KEY"] == key
print("hello from", key)
pipes.log.info("scoring")
tries = (home / "ran").read_text().splitlines().count(key)
if key == "part 03" and tries == 1:
    raise ValueError("bad data in " + key)
pipes.report_asset_materialization(metadata={{"element": os.environ["SLURM_ARRAY_TASK_ID"]}})
""")
FIRST_SIX = KEYS[:6]


def tags(keys: list[str]) -> dict[str, str]:
    return {"dagster/asset_partition_range_start": keys[0], "dagster/asset_partition_range_end": keys[-1]}


@pytest.fixture
def compute(tmp_path: Path, fake_slurm: FakeSlurm) -> ComputeResource:
    return ComputeResource(
        mode="slurm",
        slurm=SlurmResource(remote_base=str(tmp_path / "base"), poll_interval=1),
        default_launcher=BashLauncher(grace_period=1),
        local_base=str(tmp_path / "base"),
    )


@pytest.fixture
def scene(compute: ComputeResource) -> Scene:
    return Scene(compute)


def ran(home: Path) -> "collections.Counter[str]":
    path = home / "ran"
    return collections.Counter(path.read_text().splitlines() if path.exists() else ())


def test_failed_partitions_are_named_and_a_retry_runs_only_these(
    scene: Scene, script: Callable[..., Path], tmp_path: Path, fake_slurm: FakeSlurm, capfd: pytest.CaptureFixture[str]
) -> None:
    payload = str(script(SCORE.format(home=str(tmp_path))))
    result = scene.run(payload, retries=1, tags=tags(FIRST_SIX), max_concurrent=2, allocation="each")
    assert result.success, scene.failures
    [first] = scene.failures
    assert first.kind == "payload"
    assert "5 of 6 partitions are materialized, 1 failed: 'part 03' (the payload raised ValueError: bad" in str(first.description)
    assert ran(tmp_path) == {key: 1 + (key == "part 03") for key in FIRST_SIX}
    found = scene.materializations()
    assert sorted(found) == FIRST_SIX and {len(each) for each in found.values()} == {1}
    assert found["part 05"][0]["element"] == "5" and found["part 05"][0]["Slurm job ID"] == "1_5"
    assert found["part 05"][0]["Elapsed (s)"] > 0 and found["part 05"][0]["Peak memory (MiB)"] > 1
    shown, log = capfd.readouterr().out, scene.logged()
    for key in FIRST_SIX:
        assert shown.count(f"hello from {key}\n") == shown.count(f"---- partition {key}: ") == 1 + (key == "part 03")
        assert f"[{key}] scoring" in log
    assert "did not receive any messages" not in log
    assert [call[-1] for call in fake_slurm.calls("sbatch")] == ["job.sh"] * 2
    assert not list((tmp_path / "base" / "runs").glob("*array*")) and sorted(scene.materializations("below")) == FIRST_SIX
    [kept] = list_here(str(tmp_path / "base"))
    assert kept.run_id == result.run_id and "scores" in kept.words
    assert (kept.state, kept.says) == ("ended", "5 of 6 partitions are materialized")


def test_more_partitions_than_an_array_may_have(
    scene: Scene, script: Callable[..., Path], tmp_path: Path, fake_slurm: FakeSlurm
) -> None:
    fake_slurm.set(max_array_size=4)
    payload = str(script(SCORE.format(home=str(tmp_path)).replace("tries == 1", "False")))
    assert scene.run(payload, tags=tags(KEYS[:10]), max_concurrent=3, allocation="each").success, scene.failures
    assert sorted(scene.materializations()) == KEYS[:10] and set(ran(tmp_path).values()) == {1}
    assert len(fake_slurm.calls("sbatch")) == 3


def test_a_cluster_that_allows_no_arrays(scene: Scene, script: Callable[..., Path], fake_slurm: FakeSlurm) -> None:
    fake_slurm.set(max_array_size=0)
    assert not scene.run(str(script("pass")), tags=tags(KEYS[:2]), allocation="each").success
    [failure] = scene.failures
    assert failure.kind == "submission" and 'use allocation="shared"' in (failure.description or ""), failure.description


def test_fewer_jobs_than_partitions_may_be_submitted(
    scene: Scene, script: Callable[..., Path], tmp_path: Path, fake_slurm: FakeSlurm
) -> None:
    fake_slurm.set(max_submit=3)
    payload = str(script(SCORE.format(home=str(tmp_path)).replace("tries == 1", "False")))
    assert scene.run(payload, tags=tags(KEYS[:8]), allocation="each").success, scene.failures
    assert sorted(scene.materializations()) == KEYS[:8] and set(ran(tmp_path).values()) == {1}


def test_an_array_that_may_have_been_submitted_is_gone_before_its_partitions_are_submitted_again(
    scene: Scene, script: Callable[..., Path], tmp_path: Path, fake_slurm: FakeSlurm
) -> None:
    """The answer to the second submission is lost, and the queue is silent for a while."""
    fake_slurm.set(max_array_size=4, starts=False)
    fake_slurm.fault("sbatch", code=None)
    fake_slurm.fault("sbatch", "slurm_load_jobs error: Socket timed out on send/recv operation", works=True)
    fake_slurm.fault("squeue", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)", times=-1)
    payload = str(script(SCORE.format(home=str(tmp_path)).replace("tries == 1", "False")))

    def recover() -> None:
        assert wait_until(lambda: len(fake_slurm.calls("scancel")) >= 2 or len(fake_slurm.calls("sbatch")) > 2, 60)
        fake_slurm.heal()
        assert wait_until(lambda: len(fake_slurm.calls("sbatch")) > 2 and len(fake_slurm.jobs("PENDING")) == len(KEYS[:8]), 60)
        for job_id in fake_slurm.jobs("PENDING"):
            fake_slurm.release(job_id)

    thread = threading.Thread(target=recover)
    thread.start()
    result = scene.run(payload, tags=tags(KEYS[:8]), allocation="each")
    thread.join()
    assert result.success, scene.failures
    assert ran(tmp_path) == dict.fromkeys(KEYS[:8], 1) and sorted(scene.materializations()) == KEYS[:8]
    assert "may have been submitted" in scene.logged()


CHUNK = pipes_script("""
import os, pathlib
home = pathlib.Path({home!r})
keys = pathlib.Path(os.environ["RAYSLURM_PARTITION_KEYS"]).read_text().splitlines()
assert pipes.partition_key_range == {{"start": keys[0], "end": keys[-1]}}
with open(home / "ran", "a") as file:
    file.write(keys[0] + "\\n")
for key in keys:
    if key == "part 05" and len((home / "ran").read_text().splitlines()) <= 3:
        raise ValueError("bad data in " + key)
    pipes.report_custom_message({{"partition": key}})
""")


def test_each_element_runs_a_chunk(
    scene: Scene, script: Callable[..., Path], tmp_path: Path, fake_slurm: FakeSlurm, capfd: pytest.CaptureFixture[str]
) -> None:
    payload = str(script(CHUNK.format(home=str(tmp_path))))
    result = scene.run(payload, retries=1, tags=tags(KEYS[:8]), max_concurrent=1, chunk=3, allocation="each")
    assert result.success, scene.failures
    [failure] = scene.failures
    assert "7 of 8 partitions are materialized, 1 failed: 'part 05' (the payload raised ValueError: bad" in str(
        failure.description
    )
    assert (tmp_path / "ran").read_text().splitlines() == ["part 00", "part 03", "part 06", "part 05"]
    found = scene.materializations()
    assert sorted(found) == KEYS[:8] and {len(each) for each in found.values()} == {1}
    assert [found[key][0]["Slurm job ID"] for key in KEYS[3:7]] == ["1_1", "1_1", "4_0", "1_2"]
    assert "---- partitions part 03 to part 05: exit code 1, " in capfd.readouterr().err
    assert len(fake_slurm.calls("sbatch")) == 2


WAITS = """
import os, pathlib, time
home = pathlib.Path({home!r})
(home / ("up " + os.environ["RAYSLURM_PARTITION_KEY"])).touch()
while not (home / "go").exists():
    time.sleep(0.05)
"""


@pytest.mark.parametrize("target", ["array", "element"])
def test_scancel_by_hand(target: str, scene: Scene, script: Callable[..., Path], tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    """That of an array ends it, and no further one follows; that of an element ends this one alone."""
    fake_slurm.set(max_array_size=4)
    payload = str(script(WAITS.format(home=str(tmp_path))))

    def cancel() -> None:
        assert wait_until(lambda: len(list(tmp_path.glob("up *"))) == 2, 60)
        fake_slurm.connection.run(["scancel", "1" if target == "array" else "1_1"])
        if target == "element":
            (tmp_path / "go").touch()

    thread = threading.Thread(target=cancel)
    thread.start()
    result = scene.run(payload, tags=tags(FIRST_SIX), max_concurrent=2, allocation="each", uses_pipes=False)
    thread.join()
    assert not result.success
    [failure] = scene.failures
    assert failure.kind == "cancelled", failure.description
    lost = FIRST_SIX if target == "array" else ["part 01"]
    assert sorted(scene.materializations()) == sorted(set(FIRST_SIX) - set(lost))
    named = FIRST_SIX[:4] if target == "array" else lost
    assert sorted(scene.failed) == named and all("was cancelled" in each for each in scene.failed.values()), scene.failed
    assert len(fake_slurm.calls("sbatch")) == (1 if target == "array" else 2)
    assert ("job array 1 was cancelled: " in str(failure.description)) is (target == "array")


def test_an_element_whose_runtime_is_killed(
    scene: Scene, script: Callable[..., Path], tmp_path: Path, fake_slurm: FakeSlurm
) -> None:
    payload = str(script(WAITS.format(home=str(tmp_path))))

    def kill() -> None:
        assert wait_until(lambda: len(list(tmp_path.glob("up *"))) == 3, 60)
        fake_slurm.end(2, "NODE_FAIL")
        fake_slurm.end(3, "TIMEOUT", "TimeLimit")
        assert wait_until(lambda: fake_slurm.state(3) == "TIMEOUT", 60)
        (tmp_path / "go").touch()

    thread = threading.Thread(target=kill)
    thread.start()
    result = scene.run(payload, tags=tags(KEYS[:3]), allocation="each", uses_pipes=False)
    thread.join()
    assert not result.success and sorted(scene.materializations()) == ["part 02"]
    assert scene.failed["part 00"].startswith("NODE_FAIL: Slurm job 1_0 on c1 is lost"), scene.failed
    assert scene.failed["part 01"].startswith("TIMEOUT: Slurm job 1_1 was ended at its time limit"), scene.failed
    assert scene.failures[0].kind == "allocation"


def test_the_arrays_are_cancelled_although_the_first_scancel_fails(
    compute: ComputeResource, script: Callable[..., Path], fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ConnectionFailed("the connection is lost")

    monkeypatch.setattr(array, "run_slurm", broken)
    fake_slurm.set(starts=False)
    fields = {name: getattr(compute, name) for name in ("mode", "slurm", "default_launcher", "local_base")}
    scene = Scene(ComputeResource(**fields, queue_timeout=1))
    assert not scene.run(str(script("pass")), tags=tags(KEYS[:4]), allocation="each").success
    assert scene.failures[0].kind == "allocation", scene.failures
    assert fake_slurm.jobs() and not fake_slurm.jobs("PENDING", "RUNNING", "COMPLETING")


def test_a_silent_sacct_delays_no_element(
    scene: Scene, script: Callable[..., Path], tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's queue says how the lost element ended, and the other element is materialized."""
    monkeypatch.setattr(accounting, "_TIMEOUT", 0.5)
    fake_slurm.fault("sacct", delay=5, times=-1)
    payload = str(script(WAITS.format(home=str(tmp_path))))

    def lose() -> None:
        assert wait_until(lambda: len(list(tmp_path.glob("up *"))) == 2, 60)
        fake_slurm.end(2, "NODE_FAIL")
        assert wait_until(lambda: fake_slurm.calls("sacct"), 60)
        (tmp_path / "go").touch()

    thread = threading.Thread(target=lose)
    thread.start()
    scene.run(payload, tags=tags(KEYS[:2]), allocation="each", uses_pipes=False)
    thread.join()
    assert sorted(scene.materializations()) == ["part 01"], scene.failures
    assert scene.failures[0].kind == "allocation" and scene.failed["part 00"].startswith("NODE_FAIL: Slurm job 1_0 on c1 is lost")


COMPUTE = """ComputeResource(
        mode="slurm", slurm=SlurmResource(remote_base={base!r}, poll_interval=1),
        default_launcher=BashLauncher(grace_period=1), local_base={base!r}, keep_run_dirs={keep!r},
    )"""


@pytest.fixture
def service(tmp_path: Path, fake_slurm: FakeSlurm, request: pytest.FixtureRequest) -> Iterator[Service]:
    """A Dagster instance with ten partitions; the parameter is `keep_run_dirs` of the resource, or arguments of the call."""
    param = getattr(request, "param", {})
    keep, arguments = ("failed", param) if isinstance(param, dict) else (param, {})
    compute = COMPUTE.format(base=str(tmp_path / "base"), keep=keep)
    made = Service(tmp_path, compute, count=10, allocation="each", secret_env={"PASSWORD": "not for others"}, **arguments)
    yield made
    made.kill()
    made.dagster.dispose()


@pytest.mark.thorough
@pytest.mark.parametrize(("service", "size"), [({}, 6), ({"chunk": 3}, 2)], indirect=["service"], ids=["partitions", "chunks"])
def test_dagster_is_killed(service: Service, size: int, fake_slurm: FakeSlurm) -> None:
    """The retry goes on with the array that runs, and submits the next one: each partition runs and is materialized once."""
    fake_slurm.set(max_array_size=size)
    service.let("3")
    killed = service.start()
    assert wait_until(lambda: len(service.materialized()) == 3 or killed.poll() is not None, 90), service.log
    service.kill()
    again = service.start(service.failed())
    assert wait_until(
        lambda: f"reattached to Slurm job array 1 of {size} elements" in service.log or again.poll() is not None, 90
    )
    service.let("10")
    assert again.wait(90) == 0, service.log
    keys = [f"p{number:02}" for number in range(10)]
    assert service.materialized() == keys and service.ran() == dict.fromkeys(keys, 1)
    assert len(fake_slurm.calls("sbatch")) == 2
    assert not [path for path in (service.home / "base" / "runs").iterdir() if path.is_dir()]


def test_dagster_is_killed_before_it_knows_the_array(service: Service, fake_slurm: FakeSlurm) -> None:
    """The retry finds the array by its name."""
    service.let("0")
    killed = service.start()
    assert wait_until(lambda: len(service.ran()) == 2 or killed.poll() is not None, 90), service.log
    service.kill()
    [job_id] = (service.home / "base" / "runs").glob("*/array-1/job_id")
    job_id.unlink()
    again = service.start(service.failed())
    assert wait_until(lambda: "reattached to Slurm job array 1 of 10 elements" in service.log or again.poll() is not None, 90)
    service.let("10")
    assert again.wait(90) == 0, service.log
    assert set(service.ran().values()) == {1} and len(service.materialized()) == 10
    assert len(fake_slurm.calls("sbatch")) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("service", ["all"], indirect=True)
def test_an_array_whose_partitions_cannot_be_read_is_cancelled_before_they_run_again(
    service: Service, fake_slurm: FakeSlurm
) -> None:
    service.let("0")
    killed = service.start()
    assert wait_until(lambda: len(service.ran()) == 2 or killed.poll() is not None, 90), service.log
    service.kill()
    runs = service.home / "base" / "runs"
    [context] = runs.glob("*/array-1/pipes_context.json")
    context.unlink()
    assert list(runs.glob("*/array-1/secrets.json"))
    again = service.start(service.failed())
    assert wait_until(lambda: len(fake_slurm.calls("sbatch")) == 2 or again.poll() is not None, 90), service.log
    assert not {1, 2, 3} & set(fake_slurm.jobs("PENDING", "RUNNING")), service.log
    service.let("10")
    assert again.wait(90) == 0, service.log
    assert len(service.materialized()) == 10 and max(service.ran().values()) == 2
    assert list(runs.glob("*/array-1")) and not list(runs.rglob("secrets.json"))


@pytest.mark.thorough
def test_dagster_is_cancelled(service: Service, fake_slurm: FakeSlurm) -> None:
    service.let("3")
    process = service.start()
    assert wait_until(lambda: len(service.materialized()) == 3 or process.poll() is not None, 90), service.log
    assert wait_until(lambda: len(service.ran()) == 5, 60)
    process.send_signal(signal.SIGTERM)
    assert process.wait(90) != 0
    assert not fake_slurm.jobs("PENDING", "RUNNING", "COMPLETING"), service.log
    assert len(service.materialized()) == 3 and len(service.ran()) == 5


@pytest.mark.thorough
def test_a_thousand_elements_need_few_calls(
    compute: ComputeResource, tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One upload, one `sbatch`, and reads of many records at a time. The elements are records that a thread writes."""
    count = 1000
    keys = [f"p{number:04}" for number in range(count)]
    fake_slurm.set(runs=False)
    reads: list[int] = []
    read = elements.ended

    def counted(*arguments: Any) -> Any:
        found = read(*arguments)
        reads.append(len(found[1]))
        return found

    monkeypatch.setattr(elements, "ended", counted)

    def write_records() -> None:
        [job_id] = wait_until(lambda: list((tmp_path / "base" / "runs").glob("*/array-1/job_id")), 60)
        array = job_id.parent
        nonce = json.loads((array / "payload.json").read_text())["nonce"]
        for number in range(count):
            own = {"nonce": f"{nonce}-{number}", "started_at": 1.0, "ended_at": 2.0, "stdio_bytes": 0, "usage": {}, "context": {}}
            end = {"type": "end", "reason": "exit", "message": None, "exit_code": 0, "signal": None, **own}
            (array / str(number)).mkdir()
            (array / str(number) / "journal.jsonl").write_bytes(encode({"type": "start", "at": 1.0}) + encode(end))
            (array / f"{number}.ended").touch()

    scene = Scene(compute)
    writer = threading.Thread(target=write_records)
    writer.start()
    began = time.monotonic()
    result = scene.run(["true"], dg.StaticPartitionsDefinition(keys), tags(keys), allocation="each", uses_pipes=False)
    print(f"{count} elements took {time.monotonic() - began:.1f} s and {len(reads)} reads")
    writer.join()
    assert result.success, scene.failures
    assert sorted(scene.materializations()) == keys and sum(reads) == count and max(reads) > 1
    assert len(fake_slurm.calls("sbatch")) == 1 and not fake_slurm.calls("sacct")
    fake_slurm.set(jobs={})  # To end them one by one would take long.
