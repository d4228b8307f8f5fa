"""Runs that are submitted and left: one job for each key, followed by a handle in any process, and reported by a sensor once."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner

from dagster_rayslurm import (
    BashLauncher,
    ComputeResource,
    RunFailure,
    RunHandle,
    SlurmResource,
    build_completion_sensor,
    retry_policy_for,
)
from dagster_rayslurm.cli import main
from dagster_rayslurm.edge import submissions
from dagster_rayslurm.execution import submitted
from dagster_rayslurm.execution.submitted import submit_once
from dagster_rayslurm.slurm.shared_queue import QueueSnapshot
from dagster_rayslurm.ssh.local import LocalConnection

from ..conftest import pipes_script, wait_until
from ..fake_slurm import FakeSlurm

pytestmark = pytest.mark.timeout(120)
VERSION = "dagster/data_version"
REPORTS = pipes_script("pipes.report_asset_materialization(metadata={'rows': 3}); open('model.txt', 'w').write('x')")


def resource(tmp_path: Path, **fields: Any) -> ComputeResource:
    slurm = SlurmResource(remote_base=str(tmp_path / "there"), poll_interval=1)
    plain = {"slurm": slurm, "default_launcher": BashLauncher(grace_period=1), "local_base": str(tmp_path / "here")}
    return ComputeResource(**{"mode": "slurm", **plain, **fields})


def reattach(compute: ComputeResource, handle: RunHandle) -> dg.ExecuteInProcessResult:
    @dg.asset
    def model(context: dg.AssetExecutionContext, compute: ComputeResource) -> Any:
        run = compute.reattach(handle, context=context)
        assert [path.read_text() for path in run.outputs] == ["x"] and run.job_id == handle.job_id
        return run.get_materialize_result()

    return dg.materialize([model], resources={"compute": compute}, raise_on_error=False)


def ended(fake_slurm: FakeSlurm) -> Any:
    return wait_until(lambda: fake_slurm.jobs() and not fake_slurm.jobs("PENDING", "RUNNING", "COMPLETING"))


def test_a_submitted_run_is_followed_by_its_handle_before_and_after_its_end(
    fake_slurm: FakeSlurm, tmp_path: Path, script: Any
) -> None:
    fake_slurm.set(starts=False)
    compute = resource(tmp_path)
    handle = compute.submit(payload_path=script(REPORTS), asset_key="model", outputs=["model.txt"])
    assert fake_slurm.state(int(handle.job_id)) == "PENDING"
    handle = RunHandle.from_json(handle.to_json())
    releasing = threading.Timer(1.0, fake_slurm.release, [int(handle.job_id)])
    releasing.start()
    result = reattach(compute, handle)
    releasing.join()
    assert result.success and result.asset_materializations_for_node("model")[0].metadata["rows"].value == 3
    again = reattach(resource(tmp_path, keep_run_dirs="none"), handle)
    assert again.success and again.asset_materializations_for_node("model")[0].metadata["rows"].value == 3
    assert len(fake_slurm.jobs()) == 1


@pytest.mark.parametrize("last", ["2026-01-01", "2026-01-02"])
def test_the_payload_of_a_step_has_the_partitions_of_the_step(
    last: str, fake_slurm: FakeSlurm, tmp_path: Path, script: Any
) -> None:
    payload = script(
        pipes_script("""
        keys, window = pipes.partition_key_range, pipes.partition_time_window
        seen = [keys["start"], keys["end"], window["start"][:10], window["end"][:10]]
        pipes.report_asset_materialization(metadata={"seen": seen})
    """)
    )

    @dg.asset(
        partitions_def=dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-04"),
        backfill_policy=dg.BackfillPolicy.single_run(),
    )
    def model(context: dg.AssetExecutionContext, compute: ComputeResource) -> Any:
        handle = compute.submit(context=context, payload_path=payload)
        return compute.reattach(handle, context=context).get_materialize_result()

    names = "dagster/asset_partition_range_start", "dagster/asset_partition_range_end"
    single = last == "2026-01-01"
    tags = {"dagster/partition": last} if single else dict(zip(names, ("2026-01-01", last), strict=True))
    result = dg.materialize([model], resources={"compute": resource(tmp_path)}, tags=tags)
    [made, *_] = result.asset_materializations_for_node("model")
    assert made.metadata["seen"].value == ["2026-01-01", last, "2026-01-01", "2026-01-02" if single else "2026-01-03"]


@pytest.mark.parametrize(("kind", "attempts"), [("submission", 3), ("allocation", 1)])
def test_the_retry_policy_holds_for_submit_and_reattach(
    kind: str, attempts: int, fake_slurm: FakeSlurm, tmp_path: Path, script: Any
) -> None:
    gone = RunHandle(run="0123abcd-model-0123456789ab", job_id="7", job_name="rayslurm-model-0123456789ab", cluster_id="slurm-1")
    tries: list[str] = []

    @dg.op(retry_policy=retry_policy_for(kind, max_retries=2))
    def submits(context: dg.OpExecutionContext, compute: ComputeResource) -> None:
        tries.append("submit")
        compute.submit(context=context, payload_path=script("pass"))

    @dg.op(retry_policy=retry_policy_for(kind, max_retries=2))
    def follows(context: dg.OpExecutionContext, compute: ComputeResource) -> None:
        tries.append("reattach")
        compute.reattach(gone, context=context)

    @dg.job
    def job() -> None:
        submits()
        follows()

    fake_slurm.fault("sbatch", "sbatch: error: Batch job submission failed: Invalid qos specification", times=-1)
    assert not job.execute_in_process(resources={"compute": resource(tmp_path)}, raise_on_error=False).success
    assert (tries.count("submit"), tries.count("reattach")) == (attempts, 1)


def test_reattach_says_that_the_run_is_gone_or_failed(fake_slurm: FakeSlurm, tmp_path: Path, script: Any) -> None:
    compute = resource(tmp_path)
    failed = compute.submit(payload_path=script("raise SystemExit(3)"), asset_key="model", uses_pipes=False)

    def failure(handle: RunHandle) -> RunFailure:
        failures: list[RunFailure] = []

        @dg.asset
        def model(context: dg.AssetExecutionContext, compute: ComputeResource) -> None:
            try:
                compute.reattach(handle, context=context)
            except RunFailure as error:
                failures.append(error)
                raise

        dg.materialize([model], resources={"compute": compute}, raise_on_error=False)
        return failures[0]

    assert failure(failed).kind == "payload"
    gone = failure(RunHandle("none-none-0123456789ab"))
    assert gone.kind == "record" and "the run directory of the handle is gone" in str(gone.description)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"run": "../../etc-0123456789ab"}', '{"run": 3}'])
def test_other_texts_are_no_handles(text: str) -> None:
    with pytest.raises(ValueError, match=r"^handle: "):
        RunHandle.from_json(text)


def test_names_with_separators_stay_in_one_directory(fake_slurm: FakeSlurm, tmp_path: Path, script: Any) -> None:
    fake_slurm.set(starts=False)
    handle = resource(tmp_path).submit(payload_path=script(""), asset_key=["a/..", "b"], key="../x")
    assert "/" not in handle.run and (tmp_path / "there" / "runs" / handle.run / "handle.json").exists()


SUBMIT = """
import pathlib, sys
from tests.faults_without_slurm.test_submitted_runs import resource
here = pathlib.Path(sys.argv[1])
print(resource(here).submit(payload_path=here / "payload.py", asset_key="model", key="2026-11-01").to_json())
"""


def test_five_processes_with_one_key_submit_one_job(fake_slurm: FakeSlurm, tmp_path: Path, script: Any) -> None:
    fake_slurm.set(starts=False)
    script("")
    command = [sys.executable, "-c", SUBMIT, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(5)]
    handles = [RunHandle.from_json(each.communicate(timeout=90)[0]) for each in processes]
    assert fake_slurm.jobs() == [1] and {(each.run, each.job_id) for each in handles} == {(handles[0].run, "1")}
    assert resource(tmp_path).submit(payload_path=tmp_path / "payload.py", key="2026-11-02").job_id == "2"


@pytest.mark.parametrize("with_job", [False, True])
def test_the_claim_of_a_dead_process_is_taken_over_after_its_job_was_looked_for(
    with_job: bool, fake_slurm: FakeSlurm, tmp_path: Path
) -> None:
    fake_slurm.set(starts=False)
    directory, log = str(tmp_path / "claims"), logging.getLogger("test")
    dead = RunHandle("r-s-000000000000", job_name="rayslurm-s-000000000000", key="k")
    gone = subprocess.Popen(["true"])
    gone.wait()
    text = json.dumps({"handle": dead.to_json(), "process": [os.uname().nodename, gone.pid]})
    assert submissions.claim(directory, 0, text)[:2] == (1, "undecided")
    if with_job:
        fake_slurm.job(7, name=dead.job_name, state="PENDING")
    own = RunHandle("r-s-111111111111", job_name="rayslurm-s-111111111111", key="k")
    found = submit_once(LocalConnection(), directory, str(tmp_path / "runs"), own, lambda: own, log)
    assert (found.run, found.job_id) == ((dead.run, "7") if with_job else (own.run, ""))
    assert fake_slurm.jobs("CANCELLED") == []


def test_a_failed_submission_gives_its_claim_up(fake_slurm: FakeSlurm, tmp_path: Path, script: Any) -> None:
    compute, payload = resource(tmp_path), script("")
    with pytest.raises(RunFailure, match="nowhere"):
        compute.submit(payload_path=payload, key="k", queue={"partition": "nowhere"})
    assert compute.submit(payload_path=payload, key="k").job_id == "1"
    assert len(list((tmp_path / "there" / "runs").iterdir())) == 1


@pytest.mark.parametrize("mode", ["local", "slurm-session"])
def test_modes_without_a_job_for_each_payload_refuse(mode: str, tmp_path: Path, script: Any) -> None:
    with pytest.raises(RunFailure, match="submit\\(\\) needs a Slurm job for each payload"):
        resource(tmp_path, mode=mode).submit(payload_path=script(""))


# ---- The sensor


def tick(sensor: dg.SensorDefinition, instance: dg.DagsterInstance, cursor: str | None = None) -> Any:
    context = dg.build_sensor_context(instance=instance, cursor=cursor)
    result = sensor(context)
    return (result, context.cursor) if isinstance(result, dg.SkipReason) else (result, result.cursor)


def test_each_end_is_reported_once(fake_slurm: FakeSlurm, tmp_path: Path, script: Any) -> None:
    """A success is a materialization with what the payload reported, a failure an observation; a second sensor reports none."""
    compute = resource(tmp_path)
    good = compute.submit(payload_path=script(REPORTS), asset_key="model", partition_key="monday")
    bad = compute.submit(payload_path=script("raise SystemExit(3)", "bad.py"), asset_key="other", uses_pipes=False)
    assert ended(fake_slurm)
    sensor, second = build_completion_sensor(compute), build_completion_sensor(compute, name="second")
    with dg.DagsterInstance.ephemeral() as instance:
        squeues = len(fake_slurm.calls("squeue"))
        result, cursor = tick(sensor, instance)
        assert len(fake_slurm.calls("squeue")) == squeues + 1
        events = {event.asset_key.to_user_string(): event for event in result.asset_events}
        assert isinstance(events["model"], dg.AssetMaterialization) and events["model"].partition == "monday"
        assert events["model"].metadata["rows"].value == 3 and events["model"].metadata["Run"].value == good.run
        assert isinstance(events["other"], dg.AssetObservation) and "exit code 3" in str(events["other"].description)
        assert set(json.loads(cursor)) == {good.run, bad.run}
        assert isinstance(tick(sensor, instance, cursor)[0], dg.SkipReason)
        assert isinstance(tick(second, instance)[0], dg.SkipReason)
        # The daemon died after it had stored the events, and before the cursor.
        instance.report_runless_asset_event(events["model"])
        assert [event.asset_key.to_user_string() for event in tick(sensor, instance)[0].asset_events] == ["other"]


SEVERAL = pipes_script("""
    pipes.report_asset_materialization(metadata={"rows": 3}, data_version="v1")
    pipes.report_asset_check("not_empty", passed=False, severity="WARN", metadata={"empty": 1})
    params = {"asset_key": "group/second", "data_version": "v2", "metadata": {"rows": {"raw_value": 4, "type": "int"}}}
    pipes._write_message("report_asset_materialization", params)
""")


def test_each_result_of_a_success_is_an_event_once(fake_slurm: FakeSlurm, tmp_path: Path, script: Any) -> None:
    compute = resource(tmp_path)
    handle = compute.submit(payload_path=script(SEVERAL), asset_key="model", partition_key="monday")
    assert ended(fake_slurm)
    sensor = build_completion_sensor(compute)
    with dg.DagsterInstance.ephemeral() as instance:
        [model, second, check] = tick(sensor, instance)[0].asset_events
        assert isinstance(model, dg.AssetMaterialization) and isinstance(second, dg.AssetMaterialization)
        assert (model.asset_key.path, model.metadata["rows"].value, model.tags) == (["model"], 3, {VERSION: "v1"})
        assert (second.asset_key.path, second.metadata["rows"].value, second.tags) == (["group", "second"], 4, {VERSION: "v2"})
        assert (model.partition, second.partition, second.metadata["Run"].value) == ("monday", "monday", handle.run)
        assert isinstance(check, dg.AssetCheckEvaluation) and check.asset_key.path == ["model"]
        assert (check.check_name, check.passed, check.severity.value) == ("not_empty", False, "WARN")
        assert check.metadata["empty"].value == 1
        # The daemon died after it had stored some of the events, and before the cursor.
        instance.report_runless_asset_event(model)
        assert tick(sensor, instance)[0].asset_events == [second, check]
        instance.report_runless_asset_event(check)
        assert tick(sensor, instance)[0].asset_events == [second]


def test_a_result_that_dagster_refuses_fails_the_run(fake_slurm: FakeSlurm, tmp_path: Path, script: Any) -> None:
    params = {"asset_key": "model", "check_name": "c", "passed": "maybe", "severity": "WARN", "metadata": None}
    text = pipes_script(f"pipes._write_message('report_asset_check', {params!r})")
    compute = resource(tmp_path)
    compute.submit(payload_path=script(text), asset_key="model")
    assert ended(fake_slurm)
    with dg.DagsterInstance.ephemeral() as instance:
        [event] = tick(build_completion_sensor(compute), instance)[0].asset_events
    assert isinstance(event, dg.AssetObservation) and event.metadata["Failure kind"].value == "pipes"


def test_a_run_is_requested_that_follows_the_handle(fake_slurm: FakeSlurm, tmp_path: Path, script: Any) -> None:
    compute = resource(tmp_path)
    handle = compute.submit(payload_path=script(REPORTS), asset_key="model", outputs=["model.txt"])
    assert ended(fake_slurm)

    @dg.asset
    def model(context: dg.AssetExecutionContext, compute: ComputeResource) -> Any:
        return compute.reattach(context=context).get_materialize_result()

    sensor = build_completion_sensor(compute, asset_selection=[model])
    with dg.DagsterInstance.ephemeral() as instance:
        [request] = tick(sensor, instance)[0].run_requests
        assert request.run_key == handle.run
        result = dg.materialize([model], resources={"compute": compute}, tags=request.tags, instance=instance)
    assert result.success and result.asset_materializations_for_node("model")[0].metadata["rows"].value == 3
    assert [path.name for path in (tmp_path / "here" / "outputs").rglob("*.txt")] == ["model.txt"]


def test_a_pending_job_is_waited_for_and_a_cancelled_one_leaves_no_secret(
    fake_slurm: FakeSlurm, tmp_path: Path, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submitted, "_LATE_END", 0.0)
    fake_slurm.set(starts=False)
    compute = resource(tmp_path)
    handle = compute.submit(payload_path=script(""), asset_key="model", secret_env={"TOKEN": "s3cret"})
    secret = tmp_path / "there" / "runs" / handle.run / "secrets.json"
    sensor = build_completion_sensor(compute)
    with dg.DagsterInstance.ephemeral() as instance:
        skipped, cursor = tick(sensor, instance)
        assert skipped.skip_message == "1 submitted runs have not ended" and secret.exists()
        fake_slurm.end(int(handle.job_id), "CANCELLED")
        [event] = tick(sensor, instance, cursor)[0].asset_events
    assert isinstance(event, dg.AssetObservation) and "was cancelled" in str(event.description) and not secret.exists()


def test_a_record_that_lags_behind_slurm_is_waited_for(
    fake_slurm: FakeSlurm, tmp_path: Path, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm calls the job over before the shared file system shows the `end`; without one, the wait has a limit."""
    compute = resource(tmp_path)
    handle = compute.submit(payload_path=script(REPORTS), asset_key="model")
    assert ended(fake_slurm)
    journal = tmp_path / "there" / "runs" / handle.run / "journal.jsonl"
    whole = journal.read_bytes()
    sensor = build_completion_sensor(compute)
    with dg.DagsterInstance.ephemeral() as instance:
        journal.write_bytes(whole[: whole.rindex(b'"end"') - 20])
        assert tick(sensor, instance)[0].skip_message == "1 submitted runs have not ended"
        journal.write_bytes(whole)
        [event] = tick(sensor, instance)[0].asset_events
        assert isinstance(event, dg.AssetMaterialization) and event.metadata["rows"].value == 3
    # Without an end, the wait has a limit.
    lost = compute.submit(payload_path=script(REPORTS, "lost.py"), asset_key="lost")
    assert ended(fake_slurm)
    journal = tmp_path / "there" / "runs" / lost.run / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-300])
    monkeypatch.setattr(submitted, "_LATE_END", 0.0)
    with dg.DagsterInstance.ephemeral() as instance:
        events = {event.asset_key.to_user_string(): event for event in tick(sensor, instance)[0].asset_events}
        assert isinstance(events["lost"], dg.AssetObservation)


def test_a_job_that_goes_on_is_waited_for_anew_when_it_is_over_again(
    fake_slurm: FakeSlurm, tmp_path: Path, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(submitted, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time, sleep=time.sleep))
    fake_slurm.set(starts=False)
    compute = resource(tmp_path)
    job_id = int(compute.submit(payload_path=script(""), asset_key="model").job_id)
    sensor = build_completion_sensor(compute)
    with dg.DagsterInstance.ephemeral() as instance:
        for state in ("NODE_FAIL", "PENDING", "NODE_FAIL"):
            fake_slurm.job(job_id, state=state)
            assert tick(sensor, instance)[0].skip_message == "1 submitted runs have not ended", state
            now[0] += 100.0
        [event] = tick(sensor, instance)[0].asset_events
    assert isinstance(event, dg.AssetObservation)


def test_a_slow_sbatch_is_no_lost_submission(fake_slurm: FakeSlurm, tmp_path: Path, script: Any) -> None:
    """The directory of a run is there before sbatch answers, which may take ten minutes."""
    compute = resource(tmp_path)
    handle = compute.submit(payload_path=script(REPORTS), asset_key="model")
    assert ended(fake_slurm)
    listed = {"handle": handle.to_json(), "job_id": "", "age": 500.0}
    queue = QueueSnapshot(0.0, ())
    assert submitted.ended_handle(listed, queue) is None
    assert submitted.ended_handle({**listed, "age": 1000.0}, queue) == replace(handle, job_id="")


def test_a_cluster_that_does_not_answer_skips_the_tick(
    fake_slurm: FakeSlurm, tmp_path: Path, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dagster_rayslurm import completion_sensor

    fake_slurm.set(starts=False)
    compute = resource(tmp_path)
    compute.submit(payload_path=script(""), asset_key="model")
    sensor = build_completion_sensor(compute)
    fake_slurm.fault("squeue", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    with dg.DagsterInstance.ephemeral() as instance:
        assert "Unable to contact slurm controller" in tick(sensor, instance)[0].skip_message
        monkeypatch.setattr(completion_sensor, "_LOOK_TIMEOUT", 0.2)
        fake_slurm.fault("squeue", code=None, delay=3.0)
        assert [tick(sensor, instance)[0].skip_message for _ in range(3)] == [
            "this machine has not answered for 0.2 s; the next tick looks again"
        ] * 3
        monkeypatch.undo()
        assert "1 submitted runs have not ended" in tick(sensor, instance)[0].skip_message


def test_runs_that_nobody_has_fetched_outlast_the_retention(fake_slurm: FakeSlurm, tmp_path: Path, script: Any) -> None:
    from dagster_rayslurm.edge.base_directory import sweep

    handle = resource(tmp_path).submit(payload_path=script(REPORTS), asset_key="model", outputs=["model.txt"])
    assert ended(fake_slurm)
    run_dir = tmp_path / "there" / "runs" / handle.run
    for path in [*run_dir.rglob("*"), run_dir]:
        os.utime(path, (0, 0))
    assert sweep(str(tmp_path / "there"), 60.0, 0.0, None) == []
    (run_dir / "fetched").touch()
    os.utime(run_dir, (0, 0))
    assert f"runs/{handle.run}" in sweep(str(tmp_path / "there"), 60.0, 0.0, None)


def test_the_command_that_cancels_a_waiting_job_removes_its_secrets(
    fake_slurm: FakeSlurm, tmp_path: Path, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_slurm.set(starts=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rayslurm.toml").write_text(f"[clusters.here]\nslurm.remote_base = {str(tmp_path / 'there')!r}\n")
    handle = resource(tmp_path).submit(payload_path=script(""), secret_env={"TOKEN": "s3cret"})
    secret = tmp_path / "there" / "runs" / handle.run / "secrets.json"
    assert secret.exists()
    done = CliRunner().invoke(main, ["--cluster", "here", "cancel", handle.run])
    assert done.exit_code == 0, done.output
    assert fake_slurm.state(1) == "CANCELLED" and not secret.exists()
