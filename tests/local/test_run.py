"""`run()` in local mode, for every kind of Dagster step."""

import io
import os
import sys
import time
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_rayslurm import (
    BashLauncher,
    ComputeResource,
    Launcher,
    RunFailure,
    SlurmQueueConfig,
    SlurmResource,
    SSHConnectionResource,
)
from dagster_rayslurm.backends.listing import list_here, named

from ..conftest import pipes_script, run_asset

RESULT = pipes_script("pipes.report_asset_materialization(metadata={'rows': 7}, data_version='v1')")


def test_an_asset_gets_its_result_and_the_runs_metadata(compute: ComputeResource, script: Any, base: Path) -> None:
    ran = run_asset(compute, script(RESULT))
    metadata = ran.metadata
    assert metadata["rows"] == 7
    assert metadata["Execution mode"] == "local" and metadata["Elapsed (s)"] > 0 and metadata["Peak memory (MiB)"] > 1
    assert {"Node", "CPU time (s)", "CPU efficiency (%)"} <= set(metadata)
    run = ran.completed[0]
    assert run.job_id is None and run.cluster_id.startswith("local-") and run.outputs == []
    assert list((base / "runs").iterdir()) == []  # keep_run_dirs="failed"


def test_multi_assets_and_custom_messages(compute: ComputeResource, script: Any) -> None:
    payload = script(
        pipes_script("""
        for key in ("one", "two"):
            pipes.report_asset_materialization(asset_key=key, metadata={"name": key})
        pipes.report_custom_message({"loss": [0.5, 0.25]})
        """)
    )
    messages = []

    @dg.multi_asset(specs=[dg.AssetSpec("one"), dg.AssetSpec("two")])
    def both(context: dg.AssetExecutionContext, compute: ComputeResource):  # type: ignore[no-untyped-def]
        run = compute.run(context=context, payload_path=payload)
        messages.extend(run.get_custom_messages())
        return run.get_results()

    result = dg.materialize([both], resources={"compute": compute})
    assert {m.asset_key.to_user_string() for m in result.asset_materializations_for_node("both")} == {"one", "two"}
    assert messages == [{"loss": [0.5, 0.25]}]


def test_rayslurm_finds_a_run_by_its_dagster_run_and_its_step(compute: ComputeResource, script: Any, base: Path) -> None:
    @dg.asset(name="score")
    def fails(context: dg.AssetExecutionContext, compute: ComputeResource) -> Any:
        return compute.run(context=context, payload_path=script("exit(3)"), uses_pipes=False)

    result = dg.materialize([fails], resources={"compute": compute}, raise_on_error=False)
    [entry] = list_here(str(base))
    assert entry.state == "ended" and all(named(word, [entry]) == [entry] for word in (result.run_id, "score"))


def test_several_calls_in_one_step(compute: ComputeResource, script: Any) -> None:
    payload = script(
        pipes_script(
            "pipes.report_asset_materialization(asset_key=pipes.extras['key'], metadata={'pid': __import__('os').getpid()})"
        )
    )

    @dg.multi_asset(specs=[dg.AssetSpec("one"), dg.AssetSpec("two")])
    def both(context: dg.AssetExecutionContext, compute: ComputeResource):  # type: ignore[no-untyped-def]
        for key in ("one", "two"):
            run = compute.run(context=context, payload_path=payload, extras={"key": key})
            yield from run.get_results(implicit_materializations=False)

    result = dg.materialize([both], resources={"compute": compute})
    pids = [m.metadata["pid"].value for m in result.asset_materializations_for_node("both")]
    assert len(set(pids)) == 2


def test_asset_checks_beside_and_inside_an_asset(compute: ComputeResource, script: Any) -> None:
    check = script(pipes_script("pipes.report_asset_check('fresh', passed=True, asset_key='a', metadata={'age': 1})"), "c.py")
    both = script(
        pipes_script("""
        pipes.report_asset_materialization()
        pipes.report_asset_check("inside", passed=False, severity="WARN")
        """)
    )

    @dg.asset(check_specs=[dg.AssetCheckSpec("inside", asset="a")])
    def a(context: dg.AssetExecutionContext, compute: ComputeResource):  # type: ignore[no-untyped-def]
        return compute.run(context=context, payload_path=both).get_materialize_result()

    @dg.asset_check(asset=a)
    def fresh(context: dg.AssetCheckExecutionContext, compute: ComputeResource) -> dg.AssetCheckResult:
        return compute.run(context=context, payload_path=check).get_asset_check_result()

    job = dg.Definitions(assets=[a], asset_checks=[fresh], resources={"compute": compute}).resolve_implicit_global_asset_job_def()
    evaluations = {e.check_name: e for e in job.execute_in_process().get_asset_check_evaluations()}
    assert evaluations["fresh"].passed and evaluations["fresh"].metadata["age"].value == 1
    assert "Elapsed (s)" in evaluations["fresh"].metadata
    assert not evaluations["inside"].passed


def test_ops(compute: ComputeResource, script: Any) -> None:
    payload = script(pipes_script("pipes.report_custom_message(pipes.extras)"))

    @dg.op
    def work(context: dg.OpExecutionContext, compute: ComputeResource) -> Any:
        return compute.run(context=context, payload_path=payload, extras={"x": 1}).get_custom_messages()[0]

    @dg.job(resource_defs={"compute": compute})
    def work_job() -> None:
        work()

    assert work_job.execute_in_process().output_for_node("work") == {"x": 1}


PARTITION = pipes_script("""
    window, keys = pipes.partition_time_window, pipes.partition_key_range
    pipes.report_asset_materialization(metadata={
        "key": pipes.partition_key if keys["start"] == keys["end"] else "-",
        "first": keys["start"], "last": keys["end"], "since": window["start"] if window else "-",
    })
""")


def test_partitions_reach_the_payload(compute: ComputeResource, script: Any) -> None:
    payload = script(PARTITION)

    @dg.asset(partitions_def=dg.StaticPartitionsDefinition(["a", "ü/b"]))
    def static(context: dg.AssetExecutionContext, compute: ComputeResource) -> Any:
        return compute.run(context=context, payload_path=payload).get_materialize_result()

    @dg.asset(partitions_def=dg.DailyPartitionsDefinition("2024-01-01"), backfill_policy=dg.BackfillPolicy.single_run())
    def daily(context: dg.AssetExecutionContext, compute: ComputeResource) -> Any:
        return compute.run(context=context, payload_path=payload).get_materialize_result()

    one = dg.materialize([static], resources={"compute": compute}, partition_key="ü/b")
    assert one.asset_materializations_for_node("static")[0].metadata["key"].value == "ü/b"
    tags = {"dagster/asset_partition_range_start": "2024-01-02", "dagster/asset_partition_range_end": "2024-01-04"}
    many = dg.materialize([daily], resources={"compute": compute}, tags=tags)
    metadata = many.asset_materializations_for_node("daily")[0].metadata
    assert (metadata["first"].value, metadata["last"].value) == ("2024-01-02", "2024-01-04")
    assert metadata["since"].value.startswith("2024-01-02T00:00") and metadata["key"].value == "-"


@pytest.mark.parametrize(
    "command",
    ["python -c 'import sys; print(sys.argv)' a 'b c'", ["python", "-c", "import sys; print(sys.argv)", "a", "b c"]],
)
def test_commands_are_split_as_a_shell_would(compute: ComputeResource, command: Any, capfd: Any) -> None:
    run_asset(compute, command, uses_pipes=False)
    assert "['-c', 'a', 'b c']" in capfd.readouterr().out


def test_a_script_may_have_any_name(compute: ComputeResource, script: Any) -> None:
    payload = script(RESULT, 'odd dir/it\'s $HOME; "quoted" ä☃\n.py')
    assert run_asset(compute, payload).metadata["rows"] == 7
    assert run_asset(compute, str(payload)).metadata["rows"] == 7


def test_working_dir_extra_files_and_outputs(compute: ComputeResource, tmp_path: Path, base: Path) -> None:
    source = tmp_path / "project"
    (source / "study").mkdir(parents=True)
    (source / "study" / "__init__.py").write_text("")
    (source / "study" / "train.py").write_text(
        "import os\nprint(open('numbers.csv').read())\nos.makedirs('plots')\n"
        "open('plots/ä b.png', 'wb').write(b'PNG')\nopen('model.bin', 'wb').write(b'0' * 3_000_000)\n"
    )
    extra = tmp_path / "numbers.csv"
    extra.write_text("1,2")
    small = ComputeResource(local_base=str(base), max_outputs_mb=1)
    ran = run_asset(
        small,
        "python -m study.train",
        launcher=BashLauncher(working_dir=str(source)),
        extra_files=[extra],
        outputs=["**/*.png", "model.bin"],
        uses_pipes=False,
    )
    outputs = ran.completed[0].outputs
    assert [path.name for path in outputs] == ["ä b.png"] and outputs[0].read_bytes() == b"PNG"
    assert base in outputs[0].parents
    assert "model.bin (3000000 bytes)" in ran.metadata["Outputs left out"]
    assert sorted(path.name for path in source.iterdir()) == ["study"]  # Nothing was written into the sources.


def test_a_launcher_of_ones_own(compute: ComputeResource, script: Any) -> None:
    class Nice(Launcher):
        def command(self, argv: list[str]) -> list[str]:
            return ["nice", "-n", "5", argv[0], *argv[1:]]

    payload = script(pipes_script("pipes.report_asset_materialization(metadata={'nice': __import__('os').nice(0)})"))
    assert run_asset(compute, payload, launcher=Nice()).metadata["nice"] == os.nice(0) + 5


def test_environment_and_data_dir(compute: ComputeResource, script: Any, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RS_TEST_SECRET", "s3cret-value")
    payload = script(
        pipes_script("""
        import os
        assert os.environ["TOKEN"] == "s3cret-value"
        assert os.environ["ODD"] == "a\\nb $HOME 'x' ä"
        run_dir = os.environ["RAYSLURM_RUN_DIR"]
        for folder, _, names in os.walk(run_dir):
            for name in names:
                assert b"s3cret-value" not in open(os.path.join(folder, name), "rb").read(), name
        mode = lambda path: oct(os.stat(path).st_mode & 0o777)
        pipes.report_asset_materialization(metadata={
            "data": os.environ["RAYSLURM_DATA_DIR"], "dir": mode(run_dir), "file": mode(run_dir + "/payload.json")})
        """)
    )
    ran = run_asset(
        compute,
        payload,
        extra_env={"ODD": "a\nb $HOME 'x' ä"},
        secret_env={"TOKEN": dg.EnvVar("RS_TEST_SECRET")},
    )
    assert ran.metadata["data"] == str(base / "data") and (base / "data").is_dir()
    assert (ran.metadata["dir"], ran.metadata["file"]) == ("0o700", "0o600")


def test_output_is_live_and_complete(compute: ComputeResource, script: Any, capfd: Any) -> None:
    """Lines appear while the payload runs; halves of characters, odd bytes and huge lines arrive whole."""
    payload = script(
        pipes_script("""
        import os, sys, time
        print("early", flush=True)
        os.write(1, "schön".encode()[:4]); time.sleep(0.3); os.write(1, "schön".encode()[4:] + b"\\n")
        os.write(1, b"bad \\xff byte\\n")
        print("x" * 5_000_000)
        print("to stderr", file=sys.stderr)
        pipes.log.warning("early was seen at %f" % time.time())
        """)
    )
    run_asset(compute, payload)
    out, err = capfd.readouterr()
    assert "early\nschön\nbad \ufffd byte\n" in out and "x" * 5_000_000 + "\n" in out and "to stderr" in err


def test_compute_logs_and_events(compute: ComputeResource, script: Any, tmp_path: Path) -> None:
    payload = script(
        pipes_script("print('a line of output')\npipes.log.info('a pipes log line')\npipes.report_asset_materialization()")
    )
    with dg.instance_for_test(temp_dir=str(tmp_path)) as instance:
        ran = run_asset(compute, payload, instance=instance)
        run_id = ran.result.run_id
        messages = [entry.user_message for entry in instance.all_logs(run_id)]
        assert "a pipes log line" in messages
        assert any(message.startswith("[rayslurm] running: payload started") for message in messages)
        keys = instance.compute_log_manager.get_log_keys_for_log_key_prefix([run_id], io_type="out")  # type: ignore[arg-type]
        assert any("a line of output" in path.read_text() for path in Path(instance.storage_directory()).rglob("*.out")), keys


def test_output_in_a_locale_without_utf8(compute: ComputeResource, script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ascii_out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", ascii_out)
    run_asset(compute, script(pipes_script("print('schön')\npipes.report_asset_materialization()")))
    ascii_out.flush()
    assert b"sch\\xf6n" in ascii_out.buffer.getvalue()  # type: ignore[attr-defined]


def test_output_beyond_the_limit_is_counted(base: Path, script: Any) -> None:
    compute = ComputeResource(local_base=str(base), default_launcher=BashLauncher(), max_stdio_mb=1)
    ran = run_asset(compute, script(pipes_script("print('x' * 3_000_000)\npipes.report_asset_materialization()")))
    assert 1_500_000 < ran.metadata["Output not recorded (characters)"] <= 3_000_001


def test_gpus_are_sampled_where_nvidia_smi_answers(
    compute: ComputeResource, script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bin" / "nvidia-smi"
    fake.parent.mkdir()
    fake.write_text(
        '#!/bin/sh\ncase "$1" in *index*) echo "0, GPU-a, 70, 2048"; echo "1, GPU-b, 30, 1024";; *) echo A; echo B;; esac\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(fake.parent), prepend=os.pathsep)
    metadata = run_asset(
        compute, script(pipes_script("import time; time.sleep(1); pipes.report_asset_materialization()"))
    ).metadata
    assert metadata["GPU utilization mean (%)"] == 50 and metadata["GPU utilization max (%)"] == 70
    assert metadata["GPU memory max (MiB)"] == 3072


def test_two_runs_at_once_do_not_meet(compute: ComputeResource, script: Any) -> None:
    payload = script(
        pipes_script("import time, os; time.sleep(0.5); pipes.report_asset_materialization(metadata={'cwd': os.getcwd()})")
    )

    def make(name: str) -> dg.AssetsDefinition:
        @dg.asset(name=name)
        def one(context: dg.AssetExecutionContext, compute: ComputeResource) -> Any:
            return compute.run(context=context, payload_path=payload).get_materialize_result()

        return one

    import threading

    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(dg.materialize([make(f"a{n}")], resources={"compute": compute})))
        for n in range(3)
    ]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3 and all(result.success for result in results) and time.monotonic() - started < 30
    cwds = {event.materialization.metadata["cwd"].value for r in results for event in r.get_asset_materialization_events()}
    assert len(cwds) == 3


def test_run_directories_are_kept_and_swept(
    compute: ComputeResource, script: Any, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dagster_rayslurm.execution import files as module

    keeping = ComputeResource(local_base=str(base), default_launcher=BashLauncher(), keep_run_dirs="all", retention_days=1)
    run_asset(keeping, script(RESULT))
    kept = list((base / "runs").iterdir())
    assert len(kept) == 1
    for path in (*kept[0].iterdir(), kept[0]):
        os.utime(path, (time.time() - 2 * 86400,) * 2)
    monkeypatch.setattr(module, "_last_sweep", {})
    run_asset(keeping, script(RESULT))
    assert len(list((base / "runs").iterdir())) == 1 and not kept[0].exists()


def test_job_script_shows_what_would_be_started(compute: ComputeResource, script: Any) -> None:
    text = compute.job_script(payload_path=script(RESULT))
    assert "-I" in text and "payload.json" in text and "payload.py" in text


def for_both(base: Path, **fields: Any) -> ComputeResource:
    """A resource for a cluster and a laptop, with variables that only the cluster needs."""
    ssh = SSHConnectionResource(host=dg.EnvVar("RS_UNSET_HOST"))
    queue = SlurmQueueConfig(account=dg.EnvVar("RS_UNSET_ACCOUNT"))
    fields = {"mode": dg.EnvVar("RS_MODE"), "pre_deployed_env_path": "/not/here", **fields}
    return ComputeResource(
        slurm=SlurmResource(ssh=ssh, queue=queue), local_base=str(base), default_launcher=BashLauncher(), **fields
    )


def test_local_mode_needs_nothing_of_the_cluster(
    base: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RS_MODE", "local")
    ran = run_asset(for_both(base), ["python", "-c", "import dagster_rayslurm"], uses_pipes=False)
    assert ran.completed
    said = [line for line in capfd.readouterr().err.splitlines() if "local mode does not use" in line]
    assert len(said) == 1 and "slurm and pre_deployed_env_path='/not/here', which is not on this machine" in said[0], said
    assert "python" in for_both(base).job_script(payload_path=["python"])
    assert not for_both(base).cleanup_cluster("local-none")


def test_a_cluster_needs_its_variables(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RS_MODE", "slurm")
    with pytest.raises(RunFailure, match="RS_UNSET_"):
        for_both(base).job_script(payload_path=["true"])


def test_an_environment_that_is_here_is_used_in_local_mode(base: Path, tmp_path: Path) -> None:
    (failure,) = run_asset(for_both(base, mode="local", pre_deployed_env_path=str(tmp_path)), ["true"]).failures
    assert "has neither bin/python nor activate.sh" in (failure.description or "")
