"""Local mode with components that run a payload each: started together, ended together, one result."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.errors import DagsterExecutionInterruptedError

from dagster_rayslurm import BashLauncher, ComputeResource, HetComponent, RunFailure, SlurmQueueConfig

from ..conftest import pipes_script, run_asset, small_ray

OK = pipes_script("pass")
TELL = pipes_script(
    """
    import json, os
    pipes.report_asset_materialization(metadata={
        os.environ["RAYSLURM_COMPONENT"]: {"raw_value": json.loads(os.environ["RAYSLURM_COMPONENTS"]), "type": "json"},
        "both": "same", "pid": os.getpid(),
    })
    """
)


def part(component_id: str, launcher: Any = None, **queue: Any) -> HetComponent:
    launcher = BashLauncher(grace_period=2) if launcher is None else launcher
    return HetComponent(component_id=component_id, queue=SlurmQueueConfig(**queue), launcher=launcher)


@pytest.fixture
def separate(base: Path) -> Callable[..., ComputeResource]:
    def make(*components: HetComponent, **fields: Any) -> ComputeResource:
        chosen = list(components) or [part("cpu"), part("gpu")]
        return ComputeResource(local_base=str(base), topology="separate", components=chosen, **fields)

    return make


def rows_of(metadata: dict[str, Any]) -> dict[str, Any]:
    """The table of the components, by their names."""
    return {record.data["component"]: record.data for record in metadata["Components"].records}


def test_payloads_know_each_other_and_make_one_result(separate: Any, script: Any, base: Path, capsys: Any) -> None:
    gpu = pipes_script(
        """
        import json, os
        print("from gpu")
        pipes.report_asset_materialization(metadata={"gpu": 1, "both": "same", "pid": os.getpid()}, data_version="7")
        pipes.report_custom_message({"from": os.environ["RAYSLURM_COMPONENT"]})
        pipes.log.info("a line of the log")
        """
    )
    ran = run_asset(separate(), {"gpu": script(gpu, "gpu.py"), "cpu": script(TELL, "cpu.py")})
    metadata = ran.metadata
    places = metadata["cpu"]
    assert set(places) == {"cpu", "gpu"} and set(places["cpu"]) == {"host", "address", "ray_address", "nodes"}
    assert places["cpu"]["ray_address"] is None and places["gpu"]["address"] == "127.0.0.1"
    assert metadata["both"] == "same" and metadata["gpu"] == 1 and metadata["pid (cpu)"] != metadata["pid (gpu)"]
    assert list(rows_of(metadata)) == ["cpu", "gpu"]
    assert metadata["Execution mode"] == "local" and metadata["Elapsed (s)"] > 0
    tags = ran.result.asset_materializations_for_node("asset_under_test")[0].tags or {}
    assert tags["dagster/data_version"] == "7"
    assert list(ran.completed[0].get_custom_messages()) == [{"from": "gpu"}]
    assert "[gpu] from gpu\n" in capsys.readouterr().out
    assert list((base / "runs").iterdir()) == []


def test_one_payload_for_all_and_outputs_by_component(separate: Any, script: Any, base: Path) -> None:
    payload = script(pipes_script('import os; open("name.txt", "w").write(os.environ["RAYSLURM_COMPONENT"])'))
    run = run_asset(separate(part("a"), part("b"), part("c")), payload, outputs=["*.txt"], secret_env={"KEY": "k"}).completed[0]
    assert [(path.parent.name, path.read_text()) for path in run.outputs] == [("a", "a"), ("b", "b"), ("c", "c")]
    assert run.outputs[0].parent.parent.parent == base / "outputs"


def test_whole_lines_whatever_the_pace(separate: Any, script: Any, capsys: Any) -> None:
    text = """
    import os, sys, time
    for n in range(50):
        sys.stdout.write("begin "); sys.stdout.flush(); time.sleep(0.01); sys.stdout.write("%d end\\n" % n); sys.stdout.flush()
    """
    run_asset(separate(), script(text), uses_pipes=False)
    lines = capsys.readouterr().out.splitlines()
    for component in ("cpu", "gpu"):
        mine = [line for line in lines if line.startswith(f"[{component}] begin")]
        assert mine == [f"[{component}] begin {n} end" for n in range(50)]


def test_a_payload_that_ends_long_before_the_others(separate: Any, script: Any) -> None:
    slow = script(pipes_script("import time; time.sleep(2); pipes.report_asset_materialization(metadata={'slow': 1})"), "slow.py")
    assert run_asset(separate(), {"cpu": script(OK), "gpu": slow}).metadata["slow"] == 1
    assert run_asset(separate(), {"gpu": script(OK), "cpu": slow}).metadata["slow"] == 1


@pytest.mark.parametrize(("bad", "good"), [("cpu", "gpu"), ("gpu", "cpu")])
def test_the_first_failure_ends_the_others(separate: Any, script: Any, base: Path, bad: str, good: str) -> None:
    endless = script("import time; print('on', flush=True); time.sleep(600)", "endless.py")
    failing = script("import time, sys; time.sleep(0.5); sys.exit(3)", "failing.py")
    failure = run_asset(separate(), {bad: failing, good: endless}, uses_pipes=False).failure
    assert failure.kind == "payload"
    assert failure.description == (
        f"component {bad!r}: the payload ended with exit code 3; component {good!r} was ended because of that"
    )
    assert failure.metadata[f"Exit code ({bad})"].value == 3 and f"Exit code ({good})" not in failure.metadata
    kept = Path(failure.metadata["Run directory"].value)
    journal = (kept / "components" / good / "journal.jsonl").read_text()
    assert "other-component" in journal and "exit code 3" in journal


def test_every_failure_is_named(separate: Any, script: Any) -> None:
    """Which one is the first is open: each of them is a failure of its own, or was ended because of another one."""
    payload = script("import sys; sys.exit(3)")
    failure = run_asset(separate(part("a"), part("bb"), part("ccc")), payload, uses_pipes=False).failure
    assert failure.kind == "payload" and "the payload ended with exit code 3" in failure.description
    assert all(repr(component) in failure.description for component in ("a", "bb", "ccc"))


def test_components_that_fail_together_are_each_named(separate: Any, script: Any) -> None:
    raising = script(pipes_script("raise ValueError('torn')"), "raising.py")
    silent = script("import time; time.sleep(0.2)", "silent.py")
    failure = run_asset(separate(), {"cpu": silent, "gpu": script(OK)}).failure
    assert failure.kind == "pipes" and "component 'cpu'" in failure.description and "'gpu'" not in failure.description
    run_asset(separate(), {"cpu": silent, "gpu": script(OK)}, uses_pipes={"cpu": False})
    failure = run_asset(separate(), {"cpu": raising, "gpu": script(OK)}).failure
    assert failure.kind == "payload" and "component 'cpu': the payload raised ValueError" in failure.description


def test_a_data_version_each_is_refused(separate: Any, script: Any) -> None:
    payload = script(pipes_script("import os; pipes.report_asset_materialization(data_version=os.environ['RAYSLURM_COMPONENT'])"))
    failure = run_asset(separate(), payload).failure
    assert failure.kind == "pipes" and "'cpu' in component 'cpu' and 'gpu' in component 'gpu'" in failure.description


@pytest.mark.parametrize("failing", [None, "cpu", "gpu"])
def test_a_check_that_all_report_becomes_one(separate: Any, script: Any, failing: str | None) -> None:
    text = f"""
    import os
    passed = os.environ["RAYSLURM_COMPONENT"] != {failing!r}
    pipes.report_asset_check("good", passed=passed, severity="WARN", metadata={{"pid": os.getpid(), "both": 1}})
    pipes.report_asset_materialization(metadata={{"both": 1}})
    """

    @dg.asset(check_specs=[dg.AssetCheckSpec("good", asset="checked")])
    def checked(context: dg.AssetExecutionContext, compute: ComputeResource) -> dg.MaterializeResult:
        return compute.run(context=context, payload_path=script(pipes_script(text))).get_materialize_result()

    result = dg.materialize([checked], resources={"compute": separate()})
    (evaluation,) = result.get_asset_check_evaluations()
    assert result.success and evaluation.passed == (failing is None) and evaluation.severity == dg.AssetCheckSeverity.WARN
    metadata = {key: value.value for key, value in evaluation.metadata.items()}
    assert metadata["both"] == 1 and metadata["pid (cpu)"] != metadata["pid (gpu)"]
    assert len(result.asset_materializations_for_node("checked")) == 1


@pytest.mark.parametrize("topology", ["whole", "separate"])
def test_a_closed_message_without_params_closes_pipes(topology: str, separate: Any, script: Any, base: Path) -> None:
    """As a client of Pipes in another language may write it."""
    brief = """
    write = pipes._message_channel.write_message
    def without_params(message):
        write({key: value for key, value in message.items() if key != "params" or message["method"] != "closed"})
    pipes._message_channel.write_message = without_params
    """
    whole = ComputeResource(local_base=str(base), default_launcher=BashLauncher())
    ran = run_asset(separate() if topology == "separate" else whole, script(pipes_script(brief)))
    assert ran.result.success and not ran.failures


def test_a_report_that_cannot_be_used_is_its_own_components_failure(separate: Any, script: Any, base: Path) -> None:
    """Whichever of them Dagster would have heard first."""
    wrong = """
    pipes._write_message("report_asset_materialization", {"asset_key": ["a"], "metadata": None, "data_version": None})
    """
    right = pipes_script("pipes.report_asset_materialization(metadata={'n': 1})")
    for bad, good in (("cpu", "gpu"), ("gpu", "cpu")):
        payloads = {bad: script(pipes_script(wrong), "wrong.py"), good: script(right, "right.py")}
        failure = run_asset(separate(keep_run_dirs="none"), payloads).failure
        assert failure.kind == "pipes" and f"component {bad!r}: the payload succeeded, but" in failure.description
        assert repr(good) not in failure.description and "asset_key" in failure.description
    assert list((base / "runs").iterdir()) == []


def test_one_of_several_that_reports_twice_is_refused(separate: Any, script: Any) -> None:
    again = """
    pipes.report_asset_materialization(metadata={"n": 1})
    # As another process of the payload would say it: Pipes itself counts those of one process alone.
    message = {"asset_key": pipes.asset_key, "metadata": None, "data_version": None}
    pipes._write_message("report_asset_materialization", message)
    """
    twice = script(pipes_script(again), "twice.py")
    once = script(pipes_script("pipes.report_asset_materialization(metadata={'n': 3})"), "once.py")
    failure = run_asset(separate(), {"cpu": twice, "gpu": once}).failure
    assert failure.kind == "pipes" and "component 'cpu' reports asset 'asset_under_test' twice" in failure.description


@pytest.mark.parametrize("victim", ["cpu", pytest.param("gpu", marks=pytest.mark.thorough)])
def test_a_runtime_that_is_killed_is_a_failure_of_its_component(separate: Any, script: Any, base: Path, victim: str) -> None:
    """The others' payloads end, too, whichever of the runtimes was the host."""
    text = f"""
    import json, os, signal, time, pathlib
    if os.environ["RAYSLURM_COMPONENT"] == {victim!r}:
        status = json.loads((pathlib.Path(os.environ["RAYSLURM_RUN_DIR"]) / "status.json").read_text())
        os.kill(status["runtime_pid"], signal.SIGKILL)
    time.sleep(600)
    """
    failure = run_asset(separate(), script(text), uses_pipes=False).failure
    other = "gpu" if victim == "cpu" else "cpu"
    assert failure.kind == "runtime" and f"component {victim!r}: the runtime ended" in failure.description
    assert failure.description.endswith(f"component {other!r} was ended because of that")


def test_cancelling_reaches_all(separate: Any, script: Any, base: Path) -> None:
    text = """
    import os, pathlib, signal, time
    def end(*_):
        (pathlib.Path(os.environ["MARKS"]) / os.environ["RAYSLURM_COMPONENT"]).write_text("ended")
        raise SystemExit(1)
    signal.signal(signal.SIGTERM, end)
    (pathlib.Path(os.environ["MARKS"]) / ("on-" + os.environ["RAYSLURM_COMPONENT"])).write_text("")
    if os.environ["RAYSLURM_COMPONENT"] == "cpu":
        while not (pathlib.Path(os.environ["MARKS"]) / "on-gpu").exists():
            time.sleep(0.05)
        os.kill(int(os.environ["DAGSTER_PID"]), signal.SIGINT)
    time.sleep(600)
    """
    env = {"DAGSTER_PID": str(os.getpid()), "MARKS": str(base.parent)}

    @dg.asset
    def endless(context: dg.AssetExecutionContext, compute: ComputeResource) -> Any:
        return compute.run(context=context, payload_path=script(text), uses_pipes=False, extra_env=env)

    with pytest.raises((KeyboardInterrupt, DagsterExecutionInterruptedError)):
        dg.materialize([endless], resources={"compute": separate(keep_run_dirs="none")})
    assert {name for name in os.listdir(base.parent) if not name.startswith("on-")} >= {"cpu", "gpu"}
    assert list((base / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("payload", "fields", "words"),
    [
        ({"cpu": "true", "tpu": "true"}, {}, ["payload_path", "no component 'tpu'", "'cpu', 'gpu'"]),
        ({"cpu": "true"}, {}, ["payload_path", "none for component 'gpu'"]),
        ("true", {"launcher": BashLauncher()}, ["launcher", "component"]),
        ("true", {"queue": SlurmQueueConfig()}, ["queue"]),
        ("true", {"uses_pipes": {"x": False}}, ["uses_pipes", "no component 'x'"]),
        ("true", {"uses_pipes": {"cpu": "garbage"}}, ["uses_pipes", "'garbage'"]),
        ("true", {"components": [part("cpu", extra_sbatch=["--job-name=x"])]}, ["component 'cpu'", "--job-name"]),
        ("true", {"components": [part("cpu", small_ray(min_nodes=2))]}, ["component 'cpu'", "min_nodes=2"]),
    ],
)
def test_what_is_refused(separate: Any, payload: Any, fields: Any, words: list[str]) -> None:
    failure = run_asset(separate(), payload, **fields).failure
    assert failure.kind == "configuration" and all(word in failure.description for word in words)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"default_launcher": BashLauncher()}, ["default_launcher", "each component has its own"]),
        ({"default_launcher": small_ray()}, ["default_launcher"]),
        ({"enable_cluster_reuse": True}, ["enable_cluster_reuse", "'spanning'"]),
    ],
)
def test_what_would_count_for_nothing_is_refused(separate: Any, fields: Any, words: list[str]) -> None:
    failure = run_asset(separate(**fields), "true").failure
    assert failure.kind == "configuration" and all(word in failure.description for word in words)


def test_a_mapping_needs_separate(compute: ComputeResource) -> None:
    assert run_asset(compute, {"a": "true"}).failure.kind == "configuration"
    assert run_asset(compute, "true", uses_pipes={"a": True}).failure.kind == "configuration"


def test_what_would_be_started_is_shown(separate: Any) -> None:
    shown = separate().job_script(payload_path={"cpu": "first --x", "gpu": "second"})
    assert "components/cpu" in shown and "components/gpu" in shown and '"second"' in shown
    with pytest.raises(RunFailure, match="none for component"):
        separate().job_script(payload_path={"cpu": "first"})


@pytest.mark.thorough
def test_a_ray_cluster_each(separate: Any, script: Any) -> None:
    """Two clusters with a token that they share; a driver reaches another component's by its address."""
    text = pipes_script(
        """
        import json, os, ray, time, pathlib
        own = os.environ["RAYSLURM_COMPONENT"]
        there = json.loads(os.environ["RAYSLURM_COMPONENTS"])
        assert there[own]["ray_address"] == os.environ["RAY_ADDRESS"]
        def resources(address):
            ray.init(address=address, log_to_driver=False)
            found = ray.cluster_resources()
            ray.shutdown()
            return {"CPU": found.get("CPU"), "GPU": found.get("GPU")}
        seen = {name: resources(place["ray_address"]) for name, place in there.items()}
        found = {"seen": seen, "addresses": len({place["ray_address"] for place in there.values()})}
        pipes.report_asset_materialization(metadata={own: {"raw_value": found, "type": "json"}})
        """
    )
    compute = separate(part("cpu", small_ray(num_cpus_per_node=1)), part("gpu", small_ray(num_cpus_per_node=2), gpus_per_node=3))
    ran = run_asset(compute, script(text))
    metadata = ran.metadata
    assert metadata["cpu"]["addresses"] == 2
    assert metadata["cpu"]["seen"] == metadata["gpu"]["seen"]
    assert metadata["gpu"]["seen"]["cpu"] == {"CPU": 1, "GPU": None} and metadata["gpu"]["seen"]["gpu"] == {"CPU": 2, "GPU": 3}
    assert metadata["Ray cluster ID (cpu)"] != metadata["Ray cluster ID (gpu)"] and "Ray version" in metadata
    rows = rows_of(metadata)
    assert rows["gpu"]["GPUs"] == 3 and rows["cpu"]["CPUs"] == 1 and rows["gpu"]["bring-up (s)"] > 0


def test_a_cluster_that_does_not_start_ends_the_others(separate: Any, script: Any) -> None:
    compute = separate(part("cpu"), part("gpu", small_ray(num_cpus_per_node=1, health_check="echo unwell; false")))
    failure = run_asset(compute, script("open('started', 'w')"), uses_pipes=False).failure
    assert failure.kind == "cluster-start" and "component 'gpu': the Ray cluster did not start" in failure.description
    assert failure.description.endswith("component 'cpu' was ended because of that")
    assert not list(Path(failure.metadata["Run directory"].value).glob("components/*/work/started"))
