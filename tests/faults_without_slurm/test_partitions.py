"""Partitions whose Dagster process and head node are killed: each is materialized once, and only those that ran run again.

Each attempt is a whole run in a process of its own, on the fake Slurm.
"""

import collections
import contextlib
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from ..conftest import PLAIN_INSTANCE, pipes_script, wait_until
from ..fake_slurm import FakeSlurm

pytestmark = pytest.mark.timeout(120)

COUNT = 50
DEFINITIONS = """
    import sys
    import dagster as dg
    from dagster_rayslurm import *

    KEYS = [f"p{{number:02}}" for number in range({count})]

    @dg.asset(partitions_def=dg.StaticPartitionsDefinition(KEYS), backfill_policy=dg.BackfillPolicy.single_run())
    def scores(context: dg.AssetExecutionContext, compute: ComputeResource):
        return compute.run_partitions(context, "payload.py", max_concurrent=2, **{arguments}).get_materialize_result()

    compute = {compute}
    job = dg.define_asset_job("job", "scores", executor_def=dg.in_process_executor)
    defs = dg.Definitions([scores], jobs=[job], resources={{"compute": compute}})

    def made():
        return defs.resolve_job_def("job")

    if __name__ == "__main__":
        import definitions
        with dg.DagsterInstance.get() as instance:
            again = sys.argv[1:]
            how = {{"reexecution_options": dg.ReexecutionOptions.from_failure(again[0], instance)}} if again else {{}}
            tags = {{"dagster/asset_partition_range_start": KEYS[0], "dagster/asset_partition_range_end": KEYS[-1]}}
            tags |= {{"dagster/is_resume_retry": "true"}} if again else {{}}
            result = dg.execute_job(dg.reconstructable(definitions.made), instance=instance, tags=tags, **how)
        sys.exit(0 if result.success else 1)
"""
SESSION = """ComputeResource(
        mode="slurm-session", slurm=SlurmResource(remote_base={base!r}, poll_interval=1),
        default_launcher=BashLauncher(grace_period=1), local_base={base!r}, session=SessionConfig(idle_timeout=2),
    )"""
PAYLOAD = pipes_script("""
    import os, pathlib, time
    home = pathlib.Path({home!r})
    for key in pathlib.Path(os.environ["RAYSLURM_PARTITION_KEYS"]).read_text().splitlines():
        with open(home / "ran", "a") as file:
            file.write(key + "\\n")
        until = time.monotonic() + 60
        while int(key[1:]) >= int((home / "below").read_text() or 0) and time.monotonic() < until:
            time.sleep(0.02)
    pipes.report_asset_materialization(metadata={{"job": os.environ["SLURM_JOB_ID"]}})
""")
"""Payload of partitions that wait until their number is below the one in a file."""


class Service:
    """A Dagster instance in a directory; each attempt at the run is a process.

    `compute` is Python for the resource, `shared` a directory that payloads see, and `arguments` are further ones of the call.
    """

    asset = dg.AssetKey("scores")

    def __init__(self, home: Path, compute: str, shared: str = "", count: int = COUNT, **arguments: object) -> None:
        self.home, self.count = home, count
        (home / "payload.py").write_text(PAYLOAD.format(home=shared or str(home)))
        fields = {"compute": compute, "count": count, "arguments": repr(arguments)}
        (home / "definitions.py").write_text(textwrap.dedent(DEFINITIONS).format(**fields))
        (home / "dagster.yaml").write_text(PLAIN_INSTANCE)
        self.dagster = dg.DagsterInstance.from_config(str(home))
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *again: str) -> "subprocess.Popen[bytes]":
        env = {**os.environ, "DAGSTER_HOME": str(self.home), "PYTHONPATH": f"{self.home}:{os.getcwd()}"}
        with open(self.home / "log", "ab") as log:
            command = [sys.executable, "definitions.py", *again]
            self.processes.append(
                subprocess.Popen(command, env=env, cwd=self.home, stdout=log, stderr=log, start_new_session=True)
            )
        return self.processes[-1]

    def kill(self) -> None:
        """Kill the process of the newest attempt, with all of Dagster's below it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.processes[-1].pid, signal.SIGKILL)
        self.processes[-1].wait()

    def signal(self, process: "subprocess.Popen[bytes]", signum: int) -> None:
        """Send a signal to the process of an attempt, with all of Dagster's below it."""
        os.killpg(process.pid, signum)

    def let(self, number: str) -> None:
        """Let the partitions below a number end."""
        (self.home / "new").write_text(number)
        (self.home / "new").rename(self.home / "below")

    def failed(self) -> str:
        """The id of the newest run, which has failed; a killed one is marked so, as Dagster's monitoring does."""
        run = self.dagster.get_runs()[0]
        if run.status == dg.DagsterRunStatus.STARTED:
            self.dagster.report_run_failed(run)
        return run.run_id

    def materialized(self) -> list[str]:
        """The keys of all materializations so far."""
        records = self.dagster.fetch_materializations(self.asset, limit=10 * self.count).records
        return sorted(str(each.partition_key) for each in records)

    def ran(self) -> "collections.Counter[str]":
        """How often the payload of each partition has begun."""
        path = self.home / "ran"
        return collections.Counter(path.read_text().split() if path.exists() else ())

    @property
    def log(self) -> str:
        return (self.home / "log").read_text()


@pytest.fixture
def service(tmp_path: Path, fake_slurm: FakeSlurm, request: pytest.FixtureRequest) -> Iterator[Service]:
    """A Dagster instance whose partitions run in a session; the parameter is their number."""
    made = Service(tmp_path, SESSION.format(base=str(tmp_path / "base")), count=getattr(request, "param", COUNT))
    yield made
    made.kill()
    made.dagster.dispose()


def asked(slurm: FakeSlurm) -> int:
    """How often Slurm's programs were called so far."""
    return sum(len(slurm.calls(program)) for program in ("sbatch", "squeue", "scancel", "sacct", "scontrol", "srun"))


@pytest.mark.parametrize(
    "lost", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["the job goes on", "the job is lost"]
)
def test_a_slow_process_that_was_taken_for_dead_materializes_nothing_more(
    lost: bool, service: Service, fake_slurm: FakeSlurm
) -> None:
    service.let("12")
    slow = service.start()
    assert wait_until(lambda: len(service.materialized()) == 12 or slow.poll() is not None, 60), service.log
    service.signal(slow, signal.SIGSTOP)
    service.let("30")
    assert wait_until(lambda: sum(service.ran().values()) >= 30, 60), service.ran()  # The slow process will find their ends.
    if lost:
        fake_slurm.end(1, "NODE_FAIL")
    again = service.start(service.failed())
    assert wait_until(lambda: len(service.materialized()) >= 28 or again.poll() is not None, 60), service.log
    service.signal(slow, signal.SIGCONT)
    assert slow.wait(60) == 1
    service.let("50")
    if lost:
        assert again.wait(60) == 1
        again = service.start(service.failed())
    assert again.wait(60) == 0, service.log
    assert service.materialized() == [f"p{number:02}" for number in range(COUNT)]
    assert "because this attempt was taken for dead" in service.log


@pytest.mark.parametrize("service", [60], indirect=True)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.thorough), pytest.param(3, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("killed", ["dagster", pytest.param("head node", marks=pytest.mark.thorough)])
def test_a_kill_at_any_moment_loses_and_repeats_no_materialized_partition(
    killed: str, seed: int, service: Service, fake_slurm: FakeSlurm
) -> None:
    moment = random.Random(seed).randrange(1, 56)
    service.let("58")  # The last two wait, so that the kill comes before the end.
    first = service.start()
    assert wait_until(lambda: sum(service.ran().values()) >= moment or first.poll() is not None, 60), service.log
    if killed == "dagster":
        service.kill()
    else:
        fake_slurm.end(1, "NODE_FAIL")
        assert first.wait(60) == 1
    run, done, before = service.failed(), service.materialized(), service.ran()
    service.let("60")
    assert service.start(run).wait(60) == 0, service.log
    keys, ran = [f"p{number:02}" for number in range(60)], service.ran()
    assert service.materialized() == keys and sorted(ran) == keys
    assert {key: ran[key] for key in done} == dict.fromkeys(done, 1)
    if killed == "dagster":  # Its payload goes on, so nothing runs twice.
        assert set(ran.values()) == {1}
    else:
        assert all(ran[key] == 1 + (key in before) for key in keys if key not in done), (before, ran)


def test_dagster_and_the_head_node_are_killed(service: Service, fake_slurm: FakeSlurm) -> None:
    service.let("12")
    killed = service.start()
    assert wait_until(lambda: len(service.materialized()) >= 5 or killed.poll() is not None, 60), service.log
    service.kill()
    again = service.start(service.failed())
    assert wait_until(lambda: "reattached to" in service.log and len(service.materialized()) == 12, 60), service.log
    service.let("25")
    assert wait_until(lambda: len(service.materialized()) == 25 or again.poll() is not None, 60), service.log
    begun = {f"p{number:02}": 1 for number in range(27)}  # The two last ones wait.
    assert wait_until(lambda: service.ran() == begun), service.ran()
    fake_slurm.end(1, "NODE_FAIL")
    assert again.wait(60) == 1
    assert "25 of 50 partitions are materialized, then: " in service.log
    service.let("50")
    before = asked(fake_slurm)
    assert service.start(service.failed()).wait(60) == 0, service.log
    assert asked(fake_slurm) - before <= 10
    keys = [f"p{number:02}" for number in range(COUNT)]
    assert service.materialized() == keys
    assert service.ran() == {key: 2 if key in ("p25", "p26") else 1 for key in keys}


def test_after_a_requeue_only_partitions_without_a_recorded_end_run_again(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    compute = SESSION.replace("slurm-session", "slurm").replace(", session=SessionConfig(idle_timeout=2),", ",")
    service = Service(tmp_path, compute.format(base=str(tmp_path / "base")), count=20, queue={"requeue": True})
    service.let("8")
    running = service.start()
    try:
        begun = {f"p{number:02}": 1 for number in range(10)}  # The two last ones wait.
        assert wait_until(lambda: len(service.materialized()) == 8 or running.poll() is not None, 60), service.log
        assert wait_until(lambda: service.ran() == begun), service.ran()
        fake_slurm.end(1, "REQUEUED")
        assert wait_until(lambda: service.ran()["p09"] == service.ran()["p08"] == 2), service.ran()
        service.let("20")
        assert running.wait(60) == 0, service.log
    finally:
        service.kill()
        service.dagster.dispose()
    keys = [f"p{number:02}" for number in range(20)]
    assert service.materialized() == keys
    assert service.ran() == {key: 2 if key in ("p08", "p09") else 1 for key in keys}
