"""Payloads that are awaited: many in one event loop, one thread follows them, and a cancelled task leaves no job."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_rayslurm import BashLauncher, ComputeResource, RunFailure, SlurmResource

from ..conftest import pipes_script, wait_until
from ..fake_slurm import FakeSlurm

pytestmark = pytest.mark.timeout(120)

UNTIL_GO = """
import pathlib, sys, time
here = pathlib.Path(sys.argv[1])
(here / f"up-{sys.argv[2]}").touch()
while not (here / "go").exists():
    time.sleep(0.02)
"""

DEFINITIONS = """
    import asyncio, sys
    import dagster as dg
    from dagster_rayslurm import BashLauncher, ComputeResource, SlurmResource

    def asset(number):
        @dg.asset(name=f"asset_{{number}}")
        async def one(context: dg.AssetExecutionContext, compute: ComputeResource):
            run = await compute.run_async(context=context, payload_path=f"payload.py {{number}}")
            return run.get_materialize_result()
        return one

    @dg.asset
    async def several(context: dg.AssetExecutionContext, compute: ComputeResource):
        runs = [compute.run_async(context=context, payload_path=f"payload.py {{n}}") for n in range({count})]
        said = [each.get_custom_messages()[0] for each in await asyncio.gather(*runs)]
        return dg.MaterializeResult(metadata={{"said": said}})

    assets = [asset(number) for number in range({count})]
    compute = ComputeResource(
        mode="slurm", slurm=SlurmResource(remote_base={base!r}, poll_interval=1), default_launcher=BashLauncher(grace_period=1),
        local_base={base!r},
    )
    jobs = [dg.define_asset_job("job", "several")]
    try:
        from dagster_async_executor import async_executor
        jobs.append(dg.define_asset_job("all", assets, executor_def=async_executor))
    except ImportError:
        pass
    defs = dg.Definitions([several, *assets], jobs=jobs, resources={{"compute": compute}})

    def job():
        return defs.resolve_job_def("job")

    def all():
        return defs.resolve_job_def("all")

    if __name__ == "__main__":
        import definitions
        with dg.DagsterInstance.get() as instance:
            name, *again = sys.argv[1:]
            how = {{"reexecution_options": dg.ReexecutionOptions.from_failure(again[0], instance)}} if again else {{}}
            tags = {{"dagster/is_resume_retry": "true"}} if again else {{}}
            job = dg.reconstructable(getattr(definitions, name))
            result = dg.execute_job(job, instance=instance, tags=tags, **how)
        sys.exit(0 if result.success else 1)
"""


class Project:
    """A Dagster instance in a directory, and definitions whose payloads report their first argument."""

    def __init__(self, home: Path, count: int) -> None:
        self.home = home
        said = "import sys; pipes.report_custom_message(sys.argv[1])"
        (home / "payload.py").write_text(pipes_script(f"{said}; pipes.report_asset_materialization()"))
        (home / "definitions.py").write_text(textwrap.dedent(DEFINITIONS).format(base=str(home / "base"), count=count))
        (home / "dagster.yaml").write_text("telemetry: {enabled: false}\n")

    def start(self, *words: str) -> "subprocess.Popen[bytes]":
        """Execute a job in a process of its own, or re-execute a run of it from failure."""
        env = {**os.environ, "DAGSTER_HOME": str(self.home), "PYTHONPATH": f"{self.home}:{os.getcwd()}"}
        with open(self.home / "log", "ab") as log:
            command = [sys.executable, "definitions.py", *words]
            return subprocess.Popen(command, env=env, cwd=self.home, stdout=log, stderr=log, start_new_session=True)

    @property
    def log(self) -> str:
        return (self.home / "log").read_text()

    def instance(self) -> dg.DagsterInstance:
        return dg.DagsterInstance.from_config(str(self.home))


def resource(tmp_path: Path, **fields: Any) -> ComputeResource:
    slurm = SlurmResource(remote_base=str(tmp_path / "there"), poll_interval=1)
    plain = {"slurm": slurm, "default_launcher": BashLauncher(grace_period=1), "local_base": str(tmp_path / "here")}
    return ComputeResource(mode="slurm", **{**plain, **fields})


def materialize(body: Callable[[Any], Awaitable[Any]], compute: ComputeResource) -> dg.ExecuteInProcessResult:
    """Materialize an asset that calls `body` with a function that starts `run_async` for a payload."""

    @dg.asset
    async def several(context: dg.AssetExecutionContext, compute: ComputeResource) -> dg.MaterializeResult[None]:
        await body(lambda payload, **options: compute.run_async(context=context, payload_path=payload, **options))
        return dg.MaterializeResult()

    return dg.materialize([several], resources={"compute": compute}, raise_on_error=False)


def hub_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "rayslurm-this machine"]


def test_many_payloads_wait_in_one_thread_and_return_what_each_reported(
    fake_slurm: FakeSlurm, tmp_path: Path, script: Any
) -> None:
    fake_slurm.set(starts=False)
    payload = script(pipes_script("import sys; pipes.report_custom_message(sys.argv[1])"))
    said: list[Any] = []
    threads: list[list[str]] = []

    async def body(run: Any) -> None:
        runs = asyncio.gather(*(run(["python", str(payload), str(number)]) for number in range(12)))
        assert await asyncio.to_thread(wait_until, lambda: len(fake_slurm.jobs("PENDING")) == 12, 60)
        threads.append(hub_threads())
        for job in fake_slurm.jobs():
            fake_slurm.release(job)
        said.extend(message for each in await runs for message in each.get_custom_messages())

    assert materialize(body, resource(tmp_path)).success
    assert said == [str(number) for number in range(12)]
    assert threads == [["rayslurm-this machine"]]
    assert wait_until(lambda: not hub_threads())


def test_a_cancelled_task_ends_its_job_and_no_other(fake_slurm: FakeSlurm, tmp_path: Path, script: Any) -> None:
    payload = script(UNTIL_GO)
    ends: list[Any] = []

    async def body(run: Any) -> None:
        words = ["python", str(payload), str(tmp_path)]
        tasks = [asyncio.create_task(run([*words, name], uses_pipes=False)) for name in ("one", "two")]
        up = lambda: all((tmp_path / f"up-{name}").exists() for name in ("one", "two"))  # noqa: E731
        assert await asyncio.to_thread(wait_until, up, 60)
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        ends.append((tasks[0].cancelled(), sorted(map(fake_slurm.state, fake_slurm.jobs()))))
        (tmp_path / "go").touch()
        await tasks[1]

    assert materialize(body, resource(tmp_path)).success
    assert ends[0][0] and "RUNNING" in ends[0][1] and ends[0][1] != ["RUNNING", "RUNNING"]


def test_a_pending_job_of_a_cancelled_task_is_cancelled(fake_slurm: FakeSlurm, tmp_path: Path, script: Any) -> None:
    fake_slurm.set(starts=False)
    payload = script("")
    secret: list[Path] = []

    async def body(run: Any) -> None:
        task = asyncio.create_task(run(str(payload), secret_env={"TOKEN": "s3cret"}))
        assert await asyncio.to_thread(wait_until, lambda: fake_slurm.jobs("PENDING"), 60)
        secret.extend((tmp_path / "there").rglob("secrets.json"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert materialize(body, resource(tmp_path, keep_run_dirs="all")).success
    assert [fake_slurm.state(job) for job in fake_slurm.jobs()] == ["CANCELLED"]
    assert len(secret) == 1 and not secret[0].exists()


def test_a_second_cancellation_leaves_no_grace_period(fake_slurm: FakeSlurm, tmp_path: Path, script: Any) -> None:
    payload = script(f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{UNTIL_GO}")

    async def body(run: Any) -> None:
        task = asyncio.create_task(run(["python", str(payload), str(tmp_path), "one"]))
        assert await asyncio.to_thread(wait_until, (tmp_path / "up-one").exists, 60)
        task.cancel()
        await asyncio.sleep(0.5)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.shield(task), 60)

    compute = resource(tmp_path, default_launcher=BashLauncher(grace_period=600))
    assert materialize(body, compute).success
    assert not fake_slurm.jobs("RUNNING", "PENDING")


def test_a_failure_is_raised_where_it_is_awaited(fake_slurm: FakeSlurm, tmp_path: Path, script: Any) -> None:
    payload = script("import sys; sys.exit(int(sys.argv[1]))")
    kinds: list[Any] = []

    async def body(run: Any) -> None:
        runs = [run(["python", str(payload), code], uses_pipes=False) for code in ("0", "3")]
        kinds.extend(await asyncio.gather(*runs, return_exceptions=True))
        with pytest.raises(RunFailure, match="nowhere"):
            await run(str(payload), queue={"partition": "nowhere"})

    assert materialize(body, resource(tmp_path)).success
    assert kinds[0].job_id and kinds[1].kind == "payload" and "exit code 3" in kinds[1].description


def test_local_mode_can_be_awaited(compute: ComputeResource, script: Any) -> None:
    payload = script(pipes_script("pipes.report_custom_message(1)"))
    said: list[Any] = []

    async def body(run: Any) -> None:
        said.extend(each.get_custom_messages() for each in await asyncio.gather(run(str(payload)), run(str(payload))))

    assert materialize(body, compute).success and said == [(1,), (1,)]


def test_steps_of_the_asynchronous_executor_wait_at_once(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    """The jobs of all steps wait at the same time, in one process; other executors need a process for each."""
    pytest.importorskip("dagster_async_executor", reason="the package dagster-async-executor is not installed")
    fake_slurm.set(starts=False)
    project = Project(tmp_path, count=5)
    process = project.start("all")
    assert wait_until(lambda: len(fake_slurm.jobs("PENDING")) == 5 or process.poll() is not None, 60), project.log
    for each in fake_slurm.jobs():
        fake_slurm.release(each)
    assert process.wait(60) == 0, project.log
    with project.instance() as instance:
        assert all(instance.get_latest_materialization_event(dg.AssetKey(f"asset_{number}")) for number in range(5))


@pytest.mark.thorough
def test_ctrl_c_ends_the_jobs_of_the_asynchronous_executor(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    pytest.importorskip("dagster_async_executor", reason="the package dagster-async-executor is not installed")
    fake_slurm.set(starts=False)
    project = Project(tmp_path, count=3)
    process = project.start("all")
    assert wait_until(lambda: project.log.count("] submitted Slurm job") == 3 or process.poll() is not None, 60), project.log
    process.send_signal(signal.SIGINT)
    assert process.wait(60) != 0
    assert [fake_slurm.state(job) for job in fake_slurm.jobs()] == ["CANCELLED"] * 3, project.log


def test_after_a_kill_each_payload_is_found_again(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    """No job is submitted twice, and each call gets the result of its own payload."""
    fake_slurm.set(starts=False)
    project = Project(tmp_path, count=10)
    process = project.start("job")
    assert wait_until(lambda: project.log.count("] submitted Slurm job") == 10 or process.poll() is not None, 60), project.log
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with project.instance() as instance:
        [run] = instance.get_runs()
        instance.report_run_failed(run)
    retry = project.start("job", run.run_id)
    assert wait_until(lambda: project.log.count("] reattached to Slurm job") == 10 or retry.poll() is not None, 60), project.log
    for each in fake_slurm.jobs():
        fake_slurm.release(each)
    assert retry.wait(60) == 0 and len(fake_slurm.jobs()) == 10, project.log
    with project.instance() as instance:
        [found] = instance.fetch_materializations(dg.AssetKey("several"), limit=9).records
        assert found.asset_materialization is not None
        assert found.asset_materialization.metadata["said"].value == [str(number) for number in range(10)]
