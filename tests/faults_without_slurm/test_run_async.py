"""Payloads that are awaited: many in one event loop, one thread follows them, and a cancelled task leaves no job."""

import asyncio
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
    assert wait_until(lambda: not hub_threads(), 5)


def test_a_cancelled_task_ends_its_job_and_no_other(fake_slurm: FakeSlurm, tmp_path: Path, script: Any) -> None:
    payload = script(UNTIL_GO)
    ends: list[Any] = []

    async def body(run: Any) -> None:
        tasks = [asyncio.create_task(run(["python", str(payload), str(tmp_path), name])) for name in ("one", "two")]
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

    assert materialize(body, compute).success and said == [[1], [1]]


def test_steps_of_the_asynchronous_executor_wait_at_once(fake_slurm: FakeSlurm, tmp_path: Path, script: Any) -> None:
    """The jobs of all steps wait at the same time, which the other executors do not do in one process."""
    executor = pytest.importorskip("dagster_async_executor", reason="the package dagster-async-executor is not installed")
    fake_slurm.set(starts=False)
    payload = script(pipes_script("pipes.report_asset_materialization(metadata={'rows': 3})"))

    def asset(number: int) -> dg.AssetsDefinition:
        @dg.asset(name=f"asset_{number}")
        async def one(context: dg.AssetExecutionContext, compute: ComputeResource) -> Any:
            return (await compute.run_async(context=context, payload_path=payload)).get_materialize_result()

        return one

    assets = [asset(number) for number in range(5)]
    job = dg.define_asset_job("all", assets, executor_def=executor.async_executor)
    definitions = dg.Definitions(assets, jobs=[job], resources={"compute": resource(tmp_path)})

    def release() -> None:
        assert wait_until(lambda: len(fake_slurm.jobs("PENDING")) == len(assets), 60)
        for each in fake_slurm.jobs():
            fake_slurm.release(each)

    releasing = threading.Thread(target=release)
    releasing.start()
    with dg.DagsterInstance.ephemeral() as instance:
        run = definitions.resolve_job_def("all")
        result = dg.execute_job(dg.reconstructable(lambda: run), instance) if False else run.execute_in_process(instance=instance)
    releasing.join()
    found = [each.metadata["rows"].value for name in range(5) for each in result.asset_materializations_for_node(f"asset_{name}")]
    assert result.success and found == [3] * 5
