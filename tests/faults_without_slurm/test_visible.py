"""What Dagster shows of a Slurm job: tags by which runs are found, and an event with the way in. Whole runs on the fake Slurm."""

import base64
import re
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_rayslurm import BashLauncher, ComputeResource, SessionConfig, SlurmResource
from dagster_rayslurm.execution.announce import job_tags
from dagster_rayslurm.runtime.node import energy

from ..fake_slurm import FakeSlurm

pytestmark = pytest.mark.timeout(120)


def materialize(compute: ComputeResource, payload: str, names: list[str], instance: dg.DagsterInstance) -> Any:
    def of(name: str) -> dg.AssetsDefinition:
        @dg.asset(name=name)
        def asset(context: dg.AssetExecutionContext, compute: ComputeResource) -> Any:
            return compute.run(context=context, payload_path=payload, uses_pipes=False).get_materialize_result()

        return asset

    return dg.materialize([of(name) for name in names], resources={"compute": compute}, instance=instance)


@pytest.mark.parametrize("mode", ["slurm", "slurm-session"])
def test_runs_are_found_by_their_jobs(mode: str, fake_slurm: FakeSlurm, script: Any, tmp_path: Path) -> None:
    slurm = SlurmResource(remote_base=str(tmp_path / "base"), poll_interval=1)
    session = SessionConfig(idle_timeout=30)  # Until the second step, on a busy machine.
    compute = ComputeResource(mode=mode, slurm=slurm, default_launcher=BashLauncher(), session=session)
    with dg.instance_for_test() as instance:
        both = materialize(compute, script("import time; time.sleep(0.5)"), ["a", "b"], instance)
        jobs = ("1", "2") if mode == "slurm" else ("1", "1")
        assert both.success
        found = instance.get_runs(dg.RunsFilter(tags={"dagster-rayslurm/job_id": jobs[1]}))
        assert [run.run_id for run in found] == [both.run_id]
        tags = {key: value for key, value in instance.get_run_by_id(both.run_id).tags.items() if "rayslurm" in key}
        named = {f"dagster-rayslurm/job_id.{step}": job for step, job in zip("ab", jobs, strict=True)}
        host = tags.pop("dagster-rayslurm/cluster")
        assert tags == {"dagster-rayslurm/job_id": jobs[1], **named} and host
        for step, job in zip("ab", jobs, strict=True):
            by_step = instance.get_runs(dg.RunsFilter(tags={f"dagster-rayslurm/job_id.{step}": job}))
            assert [run.run_id for run in by_step] == [both.run_id]
        logged = [entry.dagster_event for entry in instance.all_logs(both.run_id) if entry.dagster_event]
        events = [each for each in logged if each.is_engine_event and (each.message or "").startswith("[rayslurm] Slurm job")]
        said = [(each.step_key, {key: value.value for key, value in each.engine_event_data.metadata.items()}) for each in events]
        assert all("troubleshooting.md#warnings" in facts.pop("Troubleshooting") for _, facts in said)
        assert said == [(step, {"Slurm job ID": job, "Slurm cluster": host}) for step, job in zip("ab", jobs, strict=True)]
        figures = both.asset_materializations_for_node("a")[0].metadata
        svg = base64.b64decode(str(figures["Timeline"].value).rpartition("base64,")[2][:-1]).decode()
        phases = {name: float(seconds) for name, seconds in re.findall(r">([^<>]+): ([\d.]+) s<", svg)}
        assert 0.5 <= phases["payload runs"] <= float(figures["Elapsed (s)"].value) + 0.5
        awaited = "Slurm" if mode == "slurm" else "a session"
        assert phases.get(f"waits for {awaited}", 0.0) == pytest.approx(float(figures["Queue wait (s)"].value), abs=0.06)


def test_a_storage_that_takes_no_tags_is_no_reason_to_fail(
    fake_slurm: FakeSlurm, script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("the database is locked")

    monkeypatch.setattr(dg.DagsterInstance, "add_run_tags", refuse)
    compute = ComputeResource(
        mode="slurm", slurm=SlurmResource(remote_base=str(tmp_path / "base"), poll_interval=1), default_launcher=BashLauncher()
    )
    with dg.instance_for_test() as instance:
        assert materialize(compute, script("pass"), ["a"], instance).success
    assert "the run has no tag for Slurm job 1: the database is locked" in capfd.readouterr().err


# Runs until the runtime, its parent, has handled Slurm's answer about the configuration.
UNTIL_TOLD = """
import os, pathlib, time
calls, deadline = pathlib.Path({calls!r}), time.monotonic() + 60
children = pathlib.Path("/proc/%d/task/%d/children" % (os.getppid(), os.getppid()))
while "config" not in calls.read_text() or len(children.read_text().split()) > 1:
    assert time.monotonic() < deadline
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("joules", "fails", "asked", "shown"),
    [
        (7_200_000, False, 1, 2.0),
        pytest.param(7_200_000, True, 1, None, marks=pytest.mark.thorough),
        pytest.param(0, False, 1, None, marks=pytest.mark.thorough),
        (None, False, 0, None),
    ],
)
def test_the_energy_of_a_job_is_shown_where_slurm_measures_it(
    joules: int | None, fails: bool, asked: int, shown: float | None, fake_slurm: FakeSlurm, script: Any, tmp_path: Path
) -> None:
    fake_slurm.set(energy=joules)
    if fails:
        fake_slurm.fault("sstat", "sstat: error: couldn't get steps for job 1.0")
    slurm = SlurmResource(remote_base=str(tmp_path / "base"), poll_interval=1)
    compute = ComputeResource(mode="slurm", slurm=slurm, default_launcher=BashLauncher())
    payload = script(UNTIL_TOLD.format(calls=str(fake_slurm.base / "calls")))
    with dg.instance_for_test() as instance:
        result = materialize(compute, payload, ["a"], instance)
        assert result.success
        metadata = result.asset_materializations_for_node("a")[0].metadata
    value = metadata.get("Energy (kWh)")
    assert (None if value is None else value.value) == shown and (value is None or isinstance(value, dg.FloatMetadataValue))
    assert fake_slurm.calls("scontrol").count(["show", "config"]) == 1
    assert [words[0] for words in fake_slurm.calls("sstat")] == ["--jobs=1.0"] * asked


@pytest.mark.thorough
def test_slurm_is_not_asked_for_the_energy_of_a_session(fake_slurm: FakeSlurm, script: Any, tmp_path: Path) -> None:
    fake_slurm.set(energy=7_200_000)
    slurm = SlurmResource(remote_base=str(tmp_path / "base"), poll_interval=1)
    compute = ComputeResource(
        mode="slurm-session", slurm=slurm, default_launcher=BashLauncher(), session=SessionConfig(idle_timeout=1)
    )
    with dg.instance_for_test() as instance:
        result = materialize(compute, script(f"import time; time.sleep({energy._DELAY + 0.5})"), ["a"], instance)
        assert result.success and "Energy (kWh)" not in result.asset_materializations_for_node("a")[0].metadata
    assert not fake_slurm.calls("sstat") and ["show", "config"] not in fake_slurm.calls("scontrol")


def test_only_a_run_with_several_steps_has_a_tag_for_each() -> None:
    common = {"dagster-rayslurm/job_id": "7", "dagster-rayslurm/cluster": "me@edge:22"}
    assert job_tags("7", "me@edge:22", None) == common
    assert job_tags("7", "me@edge:22", "a__b") == {**common, "dagster-rayslurm/job_id.a__b": "7"}
    assert job_tags("7", "me@edge:22", "op[key/1]") == {**common, "dagster-rayslurm/job_id.op": "7"}
