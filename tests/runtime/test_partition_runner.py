"""The program that runs a payload's partitions, started as the runtime starts it, without Dagster and the runtime."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from dagster_pipes import encode_param

from dagster_rayslurm.runtime.payload import partition_runner

from ..conftest import pipes_script, wait_until


def start(path: Path, keys: list[str], command: list[str], limit: int = 2, **more: str) -> "subprocess.Popen[str]":
    """The runner's process for some partitions, in a run directory at `path`."""
    context: dict[str, Any] = {
        "asset_keys": ["a"],
        "code_version_by_asset_key": {"a": None},
        "provenance_by_asset_key": {"a": None},
    }
    context |= {"run_id": "run", "job_name": "job", "retry_number": 0, "extras": {}, "partitions": [{key: None} for key in keys]}
    (path / "pipes_context.json").write_text(json.dumps(context))
    (path / "messages").touch()
    messages = encode_param({"path": str(path / "messages")})
    env = {**os.environ, "RAYSLURM_RUN_DIR": str(path), "DAGSTER_PIPES_MESSAGES": messages, "HOME": str(path), **more}
    argv = [sys.executable, partition_runner.__file__, str(limit), *command]
    return subprocess.Popen(argv, cwd=path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def messages(path: Path) -> list[Any]:
    return [json.loads(line) for line in (path / "messages").read_text().splitlines()]


def test_no_more_partitions_run_at_a_time_than_the_limit(tmp_path: Path, script: Callable[..., Path]) -> None:
    payload = script(
        pipes_script(f"""
        import os, time
        os.mkdir({str(tmp_path)!r} + "/runs " + pipes.partition_key)
        until = time.monotonic() + (20 if pipes.partition_key < "k3" else 0.05)  # The first three meet.
        there = lambda: [name for name in os.listdir({str(tmp_path)!r}) if "runs " in name]
        while time.monotonic() < until and len(at_once := there()) < 3:
            time.sleep(0.01)
            at_once = [name for name in os.listdir({str(tmp_path)!r}) if name.startswith("runs ")]
        os.rmdir({str(tmp_path)!r} + "/runs " + pipes.partition_key)
        pipes.report_custom_message(len(at_once))
    """)
    )
    runner = start(tmp_path, [f"k{number}" for number in range(9)], ["python", str(payload)], limit=3)
    out, err = runner.communicate(timeout=30)
    assert (runner.returncode, out, err) == (0, "", "")
    first, *told, last = messages(tmp_path)
    assert (first["method"], last["method"]) == ("opened", "closed") and len({each["params"]["keys"][0] for each in told}) == 9
    counts = [json.loads(line) for each in told for line in each["params"]["messages"] if "custom" in line]
    assert max(each["params"]["payload"] for each in counts) == 3
    assert sorted(each.name for each in tmp_path.iterdir()) == ["messages", "payload.py", "pipes_context.json"]


def test_at_sigterm_no_partition_starts_and_those_that_run_may_end(tmp_path: Path, script: Callable[..., Path]) -> None:
    payload = script(f"""
        import os, pathlib, signal, time
        key = os.environ["RAYSLURM_PARTITION_KEY"]
        if key == "b":
            signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        pathlib.Path({str(tmp_path)!r}, "begun " + key).touch()
        time.sleep(60)
    """)
    runner = start(tmp_path, ["a", "b", "c"], ["python", str(payload)])
    assert wait_until(lambda: len(list(tmp_path.glob("begun *"))) == 2, 30)
    runner.send_signal(signal.SIGTERM)
    runner.communicate(timeout=30)
    assert runner.returncode == 143
    assert [each["params"].get("keys") for each in messages(tmp_path)] == [
        None,
        ["b"],
        None,
    ]  # `a` was ended, and has not failed.
    assert not (tmp_path / "begun c").exists()


def test_a_command_that_cannot_be_started_has_a_sentence(tmp_path: Path) -> None:
    runner = start(tmp_path, ["a"], ["no-such-program"])
    _, err = runner.communicate(timeout=30)
    assert runner.returncode == 0 and "the command 'no-such-program' cannot be started: No such file or directory" in err
    _, told, _ = messages(tmp_path)
    assert told["params"]["end"]["exit_code"] == 127 and "no-such-program" in dict(told["params"]["output"])["stderr"]


def test_at_sigterm_nothing_of_the_running_partitions_is_left(tmp_path: Path) -> None:
    """A partition's own children get the signal, too; those that ignore it are killed once the partition has ended."""
    child = "trap '' TERM; touch child; echo $$ > pid; while :; do sleep 1; done"
    asked = "trap 'touch asked; exit 0' TERM; touch other; while :; do sleep 0.1; done"
    command = ["sh", "-c", 'sh -c "$1" & sh -c "$2" & trap "wait $!; exit 3" TERM; touch begun; wait', "sh", child, asked]
    runner = start(tmp_path, ["a"], command)
    assert wait_until(lambda: all((tmp_path / name).exists() for name in ("child", "other", "begun", "pid")), 30)
    pid = int((tmp_path / "pid").read_text())
    runner.send_signal(signal.SIGTERM)
    runner.communicate(timeout=30)
    assert runner.returncode == 143
    assert wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, 10)
    assert (tmp_path / "asked").exists()


def test_a_module_of_python_is_forked_as_a_script_is(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    (tmp_path / "pkg" / "names.py").write_text("GREETING = 'hello'\n")
    (tmp_path / "pkg" / "mod.py").write_text(
        "import os, sys\n"
        "loaded = 'dagster_pipes' in sys.modules\n"
        "from . import names\n"
        "print(names.GREETING, __name__, __package__, loaded, os.getppid(), os.path.basename(sys.argv[0]), sys.argv[1:])\n"
    )
    runner = start(tmp_path, ["a"], ["python", "-m", "pkg.mod", "--fast"])
    out, err = runner.communicate(timeout=30)
    assert err == "" and out.splitlines()[1] == f"hello __main__ pkg True {runner.pid} mod.py ['--fast']"


def test_without_a_limit_as_many_run_as_cpus_are_granted(tmp_path: Path) -> None:
    command = [
        "sh",
        "-c",
        'ls | grep -c "^runs" ; touch "runs $RAYSLURM_PARTITION_KEY"; sleep 0.2; rm runs*"$RAYSLURM_PARTITION_KEY"',
    ]
    runner = start(tmp_path, list("abcd"), command, 0, SLURM_CPUS_ON_NODE="1")
    out, _ = runner.communicate(timeout=30)
    assert [line for line in out.splitlines() if line.isdigit()] == ["0"] * 4
    cpus = len(os.sched_getaffinity(0))
    (tmp_path / "payload.json").write_text(json.dumps({"want_cpus": cpus + 2}))
    assert partition_runner.granted_cpus(str(tmp_path)) == cpus + 2
    (tmp_path / "payload.json").write_text(json.dumps({"want_cpus": None}))
    assert partition_runner.granted_cpus(str(tmp_path)) == cpus
