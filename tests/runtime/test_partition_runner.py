"""The program that runs a payload's partitions, started as the runtime starts it, without Dagster and the runtime."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dagster_pipes import encode_param

from dagster_rayslurm.runtime.payload import partition_runner

from ..conftest import pipes_script, wait_until


def start(path: Path, keys: list[str], command: list[str], limit: int = 2) -> "subprocess.Popen[str]":
    """The runner's process for some partitions, in a run directory at `path`."""
    context: dict[str, Any] = {
        "asset_keys": ["a"],
        "code_version_by_asset_key": {"a": None},
        "provenance_by_asset_key": {"a": None},
    }
    context |= {"run_id": "run", "job_name": "job", "retry_number": 0, "extras": {}, "partitions": dict.fromkeys(keys)}
    (path / "pipes_context.json").write_text(json.dumps(context))
    (path / "messages").touch()
    messages = encode_param({"path": str(path / "messages")})
    env = {**os.environ, "RAYSLURM_RUN_DIR": str(path), "DAGSTER_PIPES_MESSAGES": messages, "HOME": str(path)}
    argv = [sys.executable, partition_runner.__file__, str(limit), *command]
    return subprocess.Popen(argv, cwd=path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def messages(path: Path) -> list[Any]:
    return [json.loads(line) for line in (path / "messages").read_text().splitlines()]


def test_no_more_partitions_run_at_a_time_than_the_limit(tmp_path: Path, script: Callable[..., Path]) -> None:
    payload = script(
        pipes_script(f"""
        import os, time
        os.mkdir({str(tmp_path)!r} + "/runs " + pipes.partition_key)
        time.sleep(0.05)
        at_once = [name for name in os.listdir({str(tmp_path)!r}) if name.startswith("runs ")]
        os.rmdir({str(tmp_path)!r} + "/runs " + pipes.partition_key)
        pipes.report_custom_message(len(at_once))
    """)
    )
    runner = start(tmp_path, [f"k{number}" for number in range(9)], ["python", str(payload)], limit=3)
    out, err = runner.communicate(timeout=30)
    assert (runner.returncode, out, err) == (0, "", "")
    first, *told, last = messages(tmp_path)
    assert (first["method"], last["method"]) == ("opened", "closed") and len({each["params"]["key"] for each in told}) == 9
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
    assert [each["params"].get("key") for each in messages(tmp_path)] == [None, "b", None]  # `a` was ended, and has not failed.
    assert not (tmp_path / "begun c").exists()


def test_a_command_that_cannot_be_started_has_a_sentence(tmp_path: Path) -> None:
    runner = start(tmp_path, ["a"], ["no-such-program"])
    _, err = runner.communicate(timeout=30)
    assert runner.returncode == 0 and "the command 'no-such-program' cannot be started: No such file or directory" in err
    _, told, _ = messages(tmp_path)
    assert told["params"]["end"]["exit_code"] == 127 and "no-such-program" in dict(told["params"]["output"])["stderr"]
