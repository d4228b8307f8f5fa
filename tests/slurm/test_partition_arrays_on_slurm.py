"""Partitions as elements of job arrays on a real Slurm: verdicts, limits of site and account, a Ray cluster for each."""

from __future__ import annotations

import collections
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import ComputeResource

from ..conftest import pipes_script, small_ray, wait_until
from ..faults_without_slurm.test_partition_arrays import tags
from ..faults_without_slurm.test_partitions import Service
from ..local.test_partitions import KEYS, Scene
from .fixtures import Site

pytestmark = pytest.mark.timeout(300)

Make = Callable[..., ComputeResource]
SMALL = {"mem": "200M", "cpus_per_node": 1}
SCORE = pipes_script("""
import fcntl, os, pathlib, time
data = pathlib.Path(os.environ["RAYSLURM_DATA_DIR"])
key = pipes.partition_key
with open(data / "ran", "a") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    file.write(key + " begins\\n")
tries = (data / "ran").read_text().count(key + " begins")
print("hello from", key)
if key == "part 03" and tries == 1:
    raise ValueError("bad data in " + key)
if key == "part 07" and tries == 1:
    hoard = b"x" * 2**30
time.sleep(1)
with open(data / "ran", "a") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    file.write(key + " ends\\n")
pipes.report_asset_materialization(metadata={"element": os.environ["SLURM_ARRAY_TASK_ID"]})
""")


def begun(site: Site) -> collections.Counter[str]:
    """How often the payload of each partition has begun."""
    return collections.Counter(line.removesuffix(" begins") for line in site.lines("ran") if line.endswith(" begins"))


def test_twelve_partitions_of_which_two_fail(
    slurm_compute: Make, script: Any, site: Site, capfd: pytest.CaptureFixture[str]
) -> None:
    """One array, at most three at a time; the retry is an array of the two that are missing."""
    site.killed = True  # Slurm kills all processes of the job that takes too much memory, also the keeper.
    scene = Scene(slurm_compute(SMALL))
    arguments: dict[str, Any] = {"max_concurrent": 3, "allocation": "each"}
    assert scene.run(str(script(SCORE)), tags=tags(KEYS[:12]), retries=1, **arguments).success, scene.failures
    [failure] = scene.failures
    assert failure.kind == "payload" and "10 of 12 partitions are materialized, 2 failed: " in str(failure.description)
    assert sorted(scene.failed) == ["part 03", "part 07"]
    assert scene.failed["part 03"].startswith("the payload raised ValueError: bad data in part 03")
    assert scene.failed["part 07"].startswith("OUT_OF_MEMORY: Slurm job "), scene.failed
    found = scene.materializations()
    assert sorted(found) == KEYS[:12] and {len(each) for each in found.values()} == {1}
    assert begun(site) == {key: 1 + (key in ("part 03", "part 07")) for key in KEYS[:12]}
    running, most = 0, 0
    for line in site.lines("ran"):
        running += 1 if line.endswith(" begins") else -1
        most = max(most, running)
    assert most <= 3 + 2  # Two never say that they end.
    shown = capfd.readouterr().out
    assert all(shown.count(f"hello from {key}\n") == 1 + (key in ("part 03", "part 07")) for key in KEYS[:12])
    arrays = {each[0]["Slurm job ID"].partition("_")[0] for each in found.values()}
    assert len(arrays) == 2


def test_a_ray_cluster_for_each_partition(slurm_compute: Make, script: Any, site: Site) -> None:
    payload = pipes_script("""
        import os, ray
        ray.init()

        @ray.remote
        def key():
            return os.environ["RAYSLURM_PARTITION_KEY"]

        assert ray.get(key.remote()) == pipes.partition_key
        pipes.report_asset_materialization(metadata={"cluster": ray.get_runtime_context().gcs_address})
    """)
    scene = Scene(slurm_compute({"cpus_per_node": 1, "mem": "1200M"}, default_launcher=small_ray()))
    assert scene.run(str(script(payload)), tags=tags(KEYS[:3]), max_concurrent=2, allocation="each").success, scene.failures
    found = scene.materializations()
    assert sorted(found) == KEYS[:3] and len({each[0]["Slurm job ID"] for each in found.values()}) == 3


@contextmanager
def submit_limit(site: Site, limit: int) -> Iterator[None]:
    """Inside the block, the user may have so many jobs submitted."""
    change = ["sacctmgr", "--immediate", "modify", "user", "dev", "set"]
    site.stack.exec("slurmctld", [*change, f"MaxSubmitJobs={limit}"])
    try:
        yield
    finally:
        site.stack.exec("slurmctld", [*change, "MaxSubmitJobs=-1"])


def test_two_steps_share_a_limit_on_submitted_jobs(slurm_compute: Make, script: Any, site: Site) -> None:
    if not site.stack.accounting:
        pytest.skip("the stack has no accounting, and so no limits")
    payload = str(script(pipes_script("pipes.report_asset_materialization()")))
    scenes = [Scene(slurm_compute(SMALL)) for _ in range(2)]
    results: list[Any] = []

    def run(scene: Scene) -> None:
        results.append(scene.run(payload, tags=tags(KEYS[:6]), allocation="each"))

    with submit_limit(site, 4):
        threads = [threading.Thread(target=run, args=(scene,)) for scene in scenes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(each.success for each in results), [scene.failures for scene in scenes]
    assert all(sorted(scene.materializations()) == KEYS[:6] for scene in scenes)


class OnStack(Service):
    """A Dagster instance of its own, whose payloads see a directory of the cluster; `arguments` are those of the call."""

    def __init__(self, home: Path, site: Site, mode: str = "slurm", count: int = 6, **arguments: Any) -> None:
        self.site, self.shared = site, f"{site.base}/shared"
        queue = {"partition": "compute", "time_limit": "00:05:00", **SMALL}
        slurm = (
            f"SlurmResource(ssh=SSHConnectionResource(**{site.ssh.model_dump()!r}), remote_base={site.base!r}, poll_interval=1, "
        )
        slurm += f"queue=SlurmQueueConfig(**{queue!r}))"
        fields = f"pre_deployed_env_path={site.env_path!r}, local_base={str(home / 'base')!r}, "
        fields += "session=SessionConfig(idle_timeout=10)"
        compute = f"ComputeResource(mode={mode!r}, slurm={slurm}, {fields}, default_launcher=BashLauncher(grace_period=3))"
        super().__init__(home, compute, self.shared, count=count, **arguments)

    def let(self, number: str) -> None:
        self.site.connection.make_dir(self.shared)
        self.site.connection.write(f"{self.shared}/below", number.encode())

    def ran(self) -> collections.Counter[str]:
        return collections.Counter(self.site.connection.read(f"{self.shared}/ran", 0, 1 << 20).decode().split())


@pytest.fixture
def service(tmp_path: Path, site: Site) -> Iterator[OnStack]:
    made = OnStack(tmp_path, site, allocation="each")
    yield made
    made.kill()
    made.dagster.dispose()


def test_dagster_is_killed_and_a_retry_finds_the_array(service: OnStack, site: Site) -> None:
    service.let("2")
    killed = service.start()
    assert wait_until(lambda: len(service.materialized()) == 2 or killed.poll() is not None, 100), service.log
    service.kill()
    again = service.start(service.failed())
    assert wait_until(lambda: "reattached to Slurm job array" in service.log or again.poll() is not None, 60), service.log
    service.let("6")
    assert again.wait(100) == 0, service.log
    keys = [f"p{number:02}" for number in range(6)]
    assert service.materialized() == keys and service.ran() == dict.fromkeys(keys, 1)
    assert site.sh('ls "$1/runs"', site.base).split() == []


def test_a_cancelled_run_ends_all_elements(service: OnStack, site: Site) -> None:
    service.let("1")
    process = service.start()
    assert wait_until(lambda: len(service.materialized()) == 1 or process.poll() is not None, 100), service.log
    process.send_signal(signal.SIGTERM)
    assert process.wait(100) != 0
    assert not site.jobs() and len(service.materialized()) == 1, service.log
