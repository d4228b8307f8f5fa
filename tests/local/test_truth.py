"""The truth about the end: what happened, in words that help, and nothing reported as success that was none."""

import logging
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_rayslurm import BashLauncher, ComputeResource

from ..conftest import Ran, pipes_script, run_asset, small_disk

REPORT = "pipes.report_asset_materialization()\n"

CASES = {
    "exit code": ("print('last words'); raise SystemExit(3)", "payload", "the payload ended with exit code 3"),
    "signal": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "payload", "killed by signal 11 (SIGSEGV)"),
    "killed": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "payload", "runs out (see `dmesg`)"),
    "exception": (
        pipes_script("raise ValueError('no such column')"),
        "payload",
        "raised ValueError: no such column (payload.py:4)",
    ),
    "sys.exit(3) in pipes": (pipes_script(REPORT + "import sys; sys.exit(3)"), "payload", "ended with exit code 3"),
    "never opens": ("print('fine')", "pipes", "never opened Dagster Pipes"),
    "never closes": (pipes_script(REPORT + "import os; os._exit(0)"), "pipes", "without closing Dagster Pipes"),
    "a forked child closes": (
        pipes_script("import os, sys\nif os.fork() == 0: sys.exit(0)\nos.wait()\n" + REPORT + "os._exit(0)"),
        "pipes",
        "without closing Dagster Pipes",
    ),
    "no module": (
        "import no_such_module_at_all",
        "payload",
        "raised ModuleNotFoundError: No module named 'no_such_module_at_all' (payload.py:1); install it in the environment of /",
    ),
    "bad message": (
        pipes_script("pipes._message_channel.write_message({'__dagster_pipes_version': '0.1', 'method': 'dance', 'params': {}})"),
        "pipes",
        "refused a Pipes message",
    ),
    "exception but exit 0": (
        "try:\n" + textwrap.indent(pipes_script("raise KeyError('k')").strip(), "    ") + "\nexcept KeyError: pass\n",
        "payload",
        "raised KeyError",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_payload_that_fails_says_how(case: str, compute: ComputeResource, script: Any, base: Path) -> None:
    text, kind, says = CASES[case]
    failure = run_asset(compute, script(text)).failure
    assert failure.kind == kind and says in (failure.description or "")
    assert failure.metadata["Failure kind"].value == kind
    run_dir = Path(failure.metadata["Run directory"].value)
    assert run_dir.parent == base / "runs" and (run_dir / "journal.jsonl").exists()


def test_a_script_that_is_missing_says_so(compute: ComputeResource) -> None:
    failure = run_asset(compute, "python no_such_script.py --x").failure
    assert failure.kind == "payload" and "exit code 2" in (failure.description or "")
    assert "no_such_script.py" in failure.metadata["Last output"].value
    assert "its standard error ends with: " in (failure.description or "") and "can't open file" in (failure.description or "")


def test_the_last_output_is_in_the_failure(compute: ComputeResource, script: Any) -> None:
    failure = run_asset(compute, script("import sys; print('a clue', file=sys.stderr); sys.exit(1)")).failure
    assert "a clue" in failure.metadata["Last output"].value and failure.metadata["Exit code"].value == 1


def test_sys_exit_0_in_pipes_is_success(compute: ComputeResource, script: Any) -> None:
    """Every click or typer main does it."""
    assert run_asset(compute, script(pipes_script(REPORT + "import sys; sys.exit(0)"))).completed


def test_a_payload_may_be_declared_not_to_use_pipes(compute: ComputeResource, script: Any) -> None:
    assert run_asset(compute, script("print('fine')"), uses_pipes=False).completed
    assert run_asset(compute, script("raise SystemExit(4)"), uses_pipes=False).failure.kind == "payload"


@pytest.mark.parametrize(
    ("payload", "uses_pipes"),
    [
        (["python", "-c", "print(1)"], False),
        (["python", "-c", "exit(3)"], True),
        (["/no/such/command"], True),
        (["python", "-c", "from dagster_pipes import open_dagster_pipes as o; o(); import os; os._exit(4)"], True),
    ],
)
def test_no_warning_of_missing_messages_without_pipes(
    payload: list[str], uses_pipes: bool, compute: ComputeResource, capfd: Any
) -> None:
    run_asset(compute, payload, uses_pipes=uses_pipes)
    said = capfd.readouterr().err
    assert "STEP_" in said and "[pipes] did not receive" not in said


def test_messages_may_be_declared_optional(base: Path, script: Any, capfd: Any) -> None:
    relaxed = ComputeResource(local_base=str(base), default_launcher=BashLauncher(), require_messages=False)
    assert run_asset(relaxed, script("print('fine')")).completed
    assert "[pipes] did not receive any messages" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("payload", "arguments", "says"),
    [
        ("no/such/script.py", {}, "payload_path: there is no file 'no/such/script.py'"),
        (Path("/no/such"), {}, "payload_path: there is no file '/no/such'"),
        ("train.py", {}, "payload_path: there is no file 'train.py'"),
        ("", {}, "payload_path: it is empty"),
        ([], {}, "payload_path: it is empty"),
        ("python 'x", {}, "cannot be split into words"),
        ("python\0", {}, "NUL"),
        (["python", "a\0b"], {}, "NUL"),
        ("python -V", {"extra_env": {"RAY_ADDRESS": "x"}}, "extra_env: RAY_ADDRESS is reserved"),
        ("python -V", {"extra_env": {"A": "a\0"}}, "extra_env['A']: the value contains a NUL"),
        ("python -V", {"extra_env": {"A": "1"}, "secret_env": {"A": "2"}}, "secret_env: A is in extra_env too"),
        ("python -V", {"secret_env": {"A": dg.EnvVar("RS_NOT_SET")}}, "RS_NOT_SET is not set"),
        ("python -V", {"extra_files": ["/no/such/file"]}, "extra_files: there is no file '/no/such/file'"),
        ("python -V", {"extra_files": "abc"}, "extra_files: write a list"),
        ("python -V", {"outputs": ["../x"]}, "outputs: '../x' leaves the payload's directory"),
        ("python -V", {"outputs": "*.png"}, "outputs: write a list"),
        ("python -V", {"launcher": BashLauncher(working_dir="/no/such/dir")}, "working_dir: there is no directory"),
        ("python -V", {"launcher": "ray"}, "launcher: 'ray' is not a launcher"),
        ("python -V", {"extras": {"a": object()}}, "extras: they go to the payload as JSON: Object of type object is not"),
    ],
)
def test_bad_input_is_one_sentence_before_anything_starts(
    payload: Any, arguments: dict[str, Any], says: str, compute: ComputeResource, base: Path
) -> None:
    failure = run_asset(compute, payload, **arguments).failure
    assert failure.kind == "configuration" and says in (failure.description or "")
    assert "\n" not in (failure.description or "") and not failure.allow_retries
    assert not (base / "runs").exists()


@pytest.mark.parametrize("mode", ["slurm", "slurm-session", "slurm-hetjob"])
def test_slurm_modes_refuse_with_a_sentence(mode: str, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dagster_rayslurm import SlurmResource

    monkeypatch.setenv("RS_MODE", mode)  # What is known when definitions load is refused then.
    without = ComputeResource(mode=dg.EnvVar("RS_MODE"), local_base=str(base))
    assert "set slurm=SlurmResource" in (run_asset(without, "python -V").failure.description or "")
    given = ComputeResource(mode=dg.EnvVar("RS_MODE"), slurm=SlurmResource(remote_base=str(base)), local_base=str(base))
    failure = run_asset(given, "python -V", uses_pipes=False, launcher=BashLauncher()).failure
    if mode != "slurm-hetjob":
        assert failure.kind == "submission" and "sbatch is not found on this machine" in (failure.description or "")
    else:
        assert failure.kind == "configuration" and "list at least one HetComponent" in (failure.description or "")


def test_an_environment_that_is_not_there(base: Path, tmp_path: Path) -> None:
    compute = ComputeResource(local_base=str(base), pre_deployed_env_path=str(tmp_path))
    failure = run_asset(compute, "python -V").failure
    assert failure.kind == "configuration" and "neither bin/python nor activate.sh" in (failure.description or "")


def test_a_command_that_is_not_there(compute: ComputeResource) -> None:
    failure = run_asset(compute, "no-such-command-here --x").failure
    said = failure.description or ""
    assert (
        failure.kind == "payload"
        and "'no-such-command-here' cannot be started: No such file or directory; the PATH there" in said
    )


def test_a_script_whose_interpreter_is_not_there(compute: ComputeResource, script: Any) -> None:
    tool = script("#!/no/such/interpreter\n")
    tool.chmod(0o755)
    assert "the file is there, but not the interpreter" in (run_asset(compute, [str(tool)]).failure.description or "")


def test_a_base_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    compute = ComputeResource(local_base=str(tmp_path / "file"), default_launcher=BashLauncher())
    failure = run_asset(compute, "python -V").failure
    assert failure.kind == "record" and "Not a directory" in (failure.description or "")


def test_a_pre_deployed_environment_is_used(base: Path, tmp_path: Path, capfd: Any) -> None:
    """A prefix with bin/python, and a directory with an activate.sh whose path has odd characters."""
    prefix = tmp_path / "prefix"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(prefix)], check=True)
    compute = ComputeResource(local_base=str(base), pre_deployed_env_path=str(prefix), default_launcher=BashLauncher())
    run_asset(compute, ["python", "-c", "import sys; print('PREFIX', sys.prefix)"], uses_pipes=False)
    assert f"PREFIX {prefix}" in capfd.readouterr().out
    odd = tmp_path / "it's; $HOME"
    odd.mkdir()
    (odd / "activate.sh").write_text(f'export MODULES="loaded \'x\'"; export PATH="{prefix}/bin:$PATH"\n')
    compute = ComputeResource(local_base=str(base), pre_deployed_env_path=str(odd), default_launcher=BashLauncher())
    run_asset(compute, ["python", "-c", "import os; print('MODULES', os.environ['MODULES'])"], uses_pipes=False)
    assert "MODULES loaded 'x'" in capfd.readouterr().out


def test_a_disk_that_fills_up_loses_output_but_not_the_truth(tmp_path: Path, script: Any) -> None:
    with small_disk(tmp_path / "small", "2m") as small:
        _fill_it(ComputeResource(local_base=str(small), default_launcher=BashLauncher()), script)


def _fill_it(compute: ComputeResource, script: Any) -> None:
    chatty = script(
        pipes_script("for n in range(40000): print('line', n, 'x' * 50)\npipes.report_asset_materialization()"), "a.py"
    )
    ran = run_asset(compute, chatty)
    assert ran.metadata["Output not recorded (characters)"] > 500_000
    reporting = script(pipes_script("for n in range(5000): pipes.log.info('message %d %s' % (n, 'x' * 200))"), "b.py")
    failure = run_asset(compute, reporting).failure
    assert failure.kind == "record" and "No space left on device" in (failure.description or "")


def warnings_of(ran: Ran, instance: dg.DagsterInstance) -> list[str]:
    """What Dagster's event log has for this run at level WARNING."""
    entries = instance.all_logs(ran.result.run_id)
    return [entry.user_message for entry in entries if entry.level == logging.WARNING and not entry.is_dagster_event]


@pytest.mark.parametrize("keep", ["none", "failed"])
def test_an_output_that_cannot_be_copied_is_a_failure_that_loses_nothing(keep: str, tmp_path: Path, script: Any) -> None:
    """The disk fills while outputs are copied: small ones are brought back, the large one stays where it was made."""
    with small_disk(tmp_path / "disk", "4m") as disk:
        compute = ComputeResource(local_base=str(disk), default_launcher=BashLauncher(), keep_run_dirs=keep)
        payload = script("""
            import os
            free = os.statvfs(".").f_bavail * os.statvfs(".").f_bsize
            open("large", "wb").write(os.urandom(free * 6 // 10))
            open("small", "w").write("x")
        """)
        failure = run_asset(compute, payload, uses_pipes=False, outputs=["*"]).failure
        sentence = failure.description or ""
        assert failure.kind == "record" and "large: No space left on device" in sentence, sentence
        assert failure.metadata["Outputs left out"].value.strip() == "large: No space left on device"
        run_dir = Path(str(failure.metadata["Run directory"].value))
        assert (run_dir / "work" / "large").stat().st_size > 1_000_000
        brought_back = list((disk / "outputs").glob("*/*"))
        assert [path.name for path in brought_back] == ["small"] and str(brought_back[0].parent) in sentence


def test_outputs_that_are_not_there_or_too_large_are_warnings(base: Path, script: Any) -> None:
    compute = ComputeResource(local_base=str(base), default_launcher=BashLauncher(), max_outputs_mb=1, max_stdio_mb=1)
    payload = script("open('large', 'wb').write(bytes(2**21)); open('small', 'w').write('x'); print('x' * 2**21)")
    with dg.DagsterInstance.ephemeral() as instance:
        ran = run_asset(compute, payload, instance=instance, uses_pipes=False, outputs=["*.png", "large", "small"])
        (stdio,) = (each for each in warnings_of(ran, instance) if "characters of output were not recorded" in each)
        (outputs,) = (each for each in warnings_of(ran, instance) if "outputs left out" in each)
        (kept,) = (each for each in warnings_of(ran, instance) if "keeps the files that were left out for 14 days" in each)
    assert [path.name for path in ran.completed[0].outputs] == ["small"]
    assert "max_stdio_mb" in stdio and "'*.png'" in outputs and "large (2097152 bytes)" in outputs
    assert [path.stat().st_size for path in base.glob("runs/*/work/large") if str(path.parents[1]) in kept] == [2**21]


def test_leftover_processes_of_a_payload_are_ended(compute: ComputeResource, script: Any) -> None:
    """A daemon in a session of its own, holding the payload's output; `nothing_is_left` proves its end."""
    payload = script(
        pipes_script("""
        import subprocess
        subprocess.Popen(["setsid", "sh", "-c", "trap '' TERM HUP; sleep 300 & sleep 300"])
        pipes.report_asset_materialization()
        """)
    )
    assert run_asset(compute, payload).completed


def test_a_killed_runtime_is_reported_and_leaves_nothing(compute: ComputeResource, script: Any) -> None:
    payload = script(
        """
        import os, signal, subprocess, time
        subprocess.Popen(["setsid", "sleep", "300"])
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
        """
    )
    failure = run_asset(compute, payload).failure
    assert failure.kind == "runtime" and "signal 9 (SIGKILL)" in (failure.description or "")
    assert failure.allow_retries


def test_a_run_without_an_end_record_has_its_usage(compute: ComputeResource, script: Any) -> None:
    payload = script(
        """
        import json, os, signal, time
        held = bytearray(200 * 2**20)

        def told():
            with open(os.path.join(os.environ["RAYSLURM_RUN_DIR"], "journal.jsonl")) as journal:
                records = [json.loads(line) for line in journal if line.endswith("}\\n")]
            return [record["usage"] for record in records if record["type"] == "usage"]

        while not any(usage["peak_memory"] > 200 * 2**20 for usage in told()):
            time.sleep(0.1)
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
        """
    )
    failure = run_asset(compute, payload).failure
    assert failure.kind == "runtime" and float(failure.metadata["Peak memory (MiB)"].value) > 200
    assert failure.metadata["Elapsed (s)"].value > 0 and "Node" in failure.metadata


def test_a_killed_keeper_still_gives_a_verdict(compute: ComputeResource, script: Any) -> None:
    """The kernel tells the runtime, which ends the payload; whether its `end` or the keeper's is seen first is open."""
    payload = script(
        """
        import os, signal, time
        runtime = os.getppid()
        keeper = int(open(f"/proc/{runtime}/stat").read().rpartition(")")[2].split()[1])
        os.kill(keeper, signal.SIGKILL)
        time.sleep(60)
        """
    )
    failure = run_asset(compute, payload).failure
    assert failure.kind in ("cancelled", "runtime") and "SIG" in (failure.description or "")
