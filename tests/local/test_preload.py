"""Payloads forked from a warm interpreter, through Dagster and with a real Ray cluster."""

import concurrent.futures
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dagster_rayslurm import ComputeResource, RayLauncher, RunFailure, SessionConfig

from ..conftest import end_sessions, pipes_script, run_asset, small_ray, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

DRIVER = "import sys\npreloaded = 'ray' in sys.modules\n" + pipes_script("""
    import os, random, ray
    ray.init()
    @ray.remote
    def square(value):
        return value * value, os.environ.get("WHO")
    done = ray.get([square.remote(value) for value in range(3)])
    pipes.report_asset_materialization(metadata={
        "preloaded": preloaded, "total": sum(value for value, _ in done), "who": sorted({str(who) for _, who in done}),
        "own": os.environ.get("WHO", ""), "pid": os.getpid(), "parent": os.getppid(), "random": random.random(),
        "job": ray.get_runtime_context().get_job_id(), "secret": os.environ.get("KEY", ""),
    })
""")


@pytest.fixture
def warm(base: Path) -> Iterator[ComputeResource]:
    """A warm cluster for two payloads at once, whose preload process has imported Ray."""
    compute = ComputeResource(
        local_base=str(base),
        enable_cluster_reuse=True,
        session=SessionConfig(max_concurrent_payloads=2, idle_timeout=60),
        default_launcher=small_ray(num_cpus_per_node=2, preload=["ray"]),
    )
    yield compute
    end_sessions(base)


def preload_processes_of(run: Any) -> list[psutil.Process]:
    """The preload processes of the session that ran a payload."""
    found = []
    for child in psutil.Process(run.metadata["parent"]).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # A zombie counts as one.
            found += [child] if child.cmdline()[:1] == ["rayslurm-preload"] else []
    return found


def test_payloads_begin_with_their_modules_imported(warm: ComputeResource, script: Any) -> None:
    payload = script(DRIVER)
    runs = [run_asset(warm, payload)]
    runs.append(run_asset(warm, payload, extra_env={"WHO": "a"}, secret_env={"KEY": "k"}))
    runs.append(run_asset(warm, payload))
    # The first may well have come before its preload process was ready.
    assert [run.metadata["preloaded"] for run in runs[1:]] == [True, True]
    assert [(run.metadata["total"], run.metadata["own"], run.metadata["secret"]) for run in runs] == [
        (5, "", ""),
        (5, "a", "k"),
        (5, "", ""),
    ]
    assert runs[1].metadata["who"] == ["a"] and runs[2].metadata["who"] == ["None"]
    for what in ("pid", "random", "job"):
        assert len({run.metadata[what] for run in runs}) == 3, what
    assert len({run.metadata["parent"] for run in runs}) == 1
    assert runs[2].metadata["CPU time (s)"] > 0.02

    # A payload that asks for what the preload process has not got runs as ever.
    other = run_asset(warm, payload, extra_env={"OMP_NUM_THREADS": "1"})
    assert other.metadata["preloaded"] is False and other.metadata["total"] == 5

    # Without its preload process a session starts another one.
    (process,) = preload_processes_of(runs[0])
    process.kill()
    assert wait_until(lambda: not preload_processes_of(runs[0]), 10)
    again = [run_asset(warm, payload) for _ in range(2)]
    assert again[1].metadata["preloaded"] is True


PRINTS = pipes_script("""
    import ray
    ray.init()
    @ray.remote
    def say(number):
        print("worker line", number)
    ray.get([say.remote(number) for number in range(20)])
""")


def test_two_at_once_and_one_that_fails_and_last_lines(warm: ComputeResource, script: Any, capfd: Any) -> None:
    good = script(DRIVER)
    bad = good.with_name("bad.py")
    bad.write_text(good.read_text() + "\nraise ValueError('of its own')\n")
    run_asset(warm, good)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda payload: run_asset(warm, payload), [good, bad]))
    assert runs[0].metadata["preloaded"] is True and runs[0].metadata["total"] == 5
    assert isinstance(runs[1].failure, RunFailure) and "raised ValueError: of its own (bad.py:" in str(runs[1].failure)

    # Ray's own exit handler waits for the last lines of workers, half a second; it is only left out where there are none.
    payload = script(PRINTS, "prints.py")
    for _ in range(3):
        capfd.readouterr()
        run_asset(warm, payload)
        said = capfd.readouterr()
        assert {n for n in range(20) if f"worker line {n}\n" in said.out + said.err} == set(range(20))


def test_modules_that_cannot_be_imported_are_told(warm: ComputeResource, script: Any, capfd: Any) -> None:
    launcher = small_ray(num_cpus_per_node=2, preload=["no_such_module_"])
    ran = run_asset(warm, script(DRIVER), launcher=launcher)
    assert ran.metadata["preloaded"] is False and ran.metadata["total"] == 5
    said = "a fresh interpreter, because no_such_module_ cannot be imported: ModuleNotFoundError"
    assert capfd.readouterr().err.count(said) == 1


@pytest.mark.parametrize("value", ["ray", [""], ["a b"], ["import"], ["a..b"], [1], ["-c"]])
def test_only_names_of_modules(value: Any) -> None:
    with pytest.raises(ValueError, match="preload"):
        RayLauncher(preload=value)


def test_names_of_modules() -> None:
    assert RayLauncher(preload=["ray", "torch.nn", "ray"]).preload == ["ray", "torch.nn"]
    assert RayLauncher().preload == []
