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
        "id": ray.ObjectRef.from_random().hex(),
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
            found += [child] if any(word.endswith("/preload/python.py") for word in child.cmdline()) else []
    return found


def test_payloads_of_a_warm_cluster_begin_with_their_modules_imported(warm: ComputeResource, script: Any, capfd: Any) -> None:
    """One cluster for all of it, as its start takes most of the time."""
    payload = script(DRIVER)
    variables_and_figures_are_each_payloads_own(warm, payload)
    two_at_once_of_which_one_fails(warm, payload)
    last_lines_of_workers_are_kept(warm, script(PRINTS, "prints.py"), capfd)
    modules_that_cannot_be_imported_are_told(warm, payload, capfd)
    a_preload_process_that_dies_is_replaced(warm, payload)


def variables_and_figures_are_each_payloads_own(warm: ComputeResource, payload: Path) -> None:
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
    for what in ("pid", "random", "job", "id"):
        assert len({run.metadata[what] for run in runs}) == 3, what
    assert len({run.metadata["parent"] for run in runs}) == 1
    assert runs[2].metadata["CPU time (s)"] > 0.02

    # A payload that asks for what the preload process has not got runs as ever.
    other = run_asset(warm, payload, extra_env={"OMP_NUM_THREADS": "1"})
    assert other.metadata["preloaded"] is False and other.metadata["total"] == 5


def a_preload_process_that_dies_is_replaced(warm: ComputeResource, payload: Path) -> None:
    ran = run_asset(warm, payload)
    for process in preload_processes_of(ran):
        process.kill()
    assert wait_until(lambda: not preload_processes_of(ran))
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


def two_at_once_of_which_one_fails(warm: ComputeResource, good: Path) -> None:
    bad = good.with_name("bad.py")
    bad.write_text(good.read_text() + "\nraise ValueError('of its own')\n")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda payload: run_asset(warm, payload), [good, bad]))
    assert runs[0].metadata["preloaded"] is True and runs[0].metadata["total"] == 5
    assert isinstance(runs[1].failure, RunFailure) and "raised ValueError: of its own (bad.py:" in str(runs[1].failure)


def last_lines_of_workers_are_kept(warm: ComputeResource, payload: Path, capfd: Any) -> None:
    """Ray's own exit handler waits for the last lines of workers, half a second; it is only left out where there are none."""
    for _ in range(3):
        capfd.readouterr()
        run_asset(warm, payload)
        said = capfd.readouterr()
        assert {n for n in range(20) if f"worker line {n}\n" in said.out + said.err} == set(range(20))


def modules_that_cannot_be_imported_are_told(warm: ComputeResource, payload: Path, capfd: Any) -> None:
    ran = run_asset(warm, payload, launcher=small_ray(num_cpus_per_node=2, preload=["no_such_module_"]))
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
