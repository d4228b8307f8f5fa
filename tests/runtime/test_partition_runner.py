"""The program that runs a payload's partitions, started as the runtime starts it, without Dagster and the runtime."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from dagster_pipes import encode_param

from dagster_rayslurm import RayLauncher
from dagster_rayslurm.execution.partitions import with_runner
from dagster_rayslurm.follow import Evidence
from dagster_rayslurm.outcome.verdict import judge
from dagster_rayslurm.plan import make_plan
from dagster_rayslurm.runtime.payload import partition_runner
from dagster_rayslurm.runtime.protocol.record import encode

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
    assert wait_until(lambda: len(list(tmp_path.glob("begun *"))) == 2)
    runner.send_signal(signal.SIGTERM)
    runner.communicate(timeout=30)
    assert runner.returncode == 143
    assert [each["params"].get("keys") for each in messages(tmp_path)] == [
        None,
        ["b"],
        None,
    ]  # `a` was ended, and has not failed.
    assert not (tmp_path / "begun c").exists()


def test_other_signals_reach_the_running_partitions_and_more_start(tmp_path: Path, script: Callable[..., Path]) -> None:
    payload = script(f"""
        import os, pathlib, signal, time
        directory, key = pathlib.Path({str(tmp_path)!r}), os.environ["RAYSLURM_PARTITION_KEY"]
        assert signal.getsignal(signal.SIGUSR1) == signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        def hear(signum, _):
            with open(directory / f"heard {{key}}", "a") as file:
                print(int(signum), file=file)
        for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT, signal.SIGRTMIN):
            signal.signal(signum, hear)
        (directory / f"begun {{key}}").touch()
        while not (directory / "over").exists():
            time.sleep(0.01)
    """)
    runner = start(tmp_path, ["a", "b", "c"], ["python", str(payload)])
    assert wait_until(lambda: len(list(tmp_path.glob("begun *"))) == 2)
    sent = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT, signal.SIGRTMIN]
    for signum in sent:
        runner.send_signal(signum)

    def heard(key: str) -> list[int]:
        path = tmp_path / f"heard {key}"
        return sorted(map(int, path.read_text().split())) if path.exists() else []

    assert wait_until(lambda: heard("a") == heard("b") == sorted(sent))
    (tmp_path / "over").touch()
    _, err = runner.communicate(timeout=30)
    assert (runner.returncode, err) == (0, "")
    ends = {each["params"]["keys"][0]: each["params"]["end"]["exit_code"] for each in messages(tmp_path)[1:-1]}
    assert ends == {"a": 0, "b": 0, "c": 0} and not heard("c")


def test_a_command_that_cannot_be_started_has_a_sentence(tmp_path: Path) -> None:
    runner = start(tmp_path, ["a"], ["no-such-program"])
    _, err = runner.communicate(timeout=30)
    assert runner.returncode == 0 and "the command 'no-such-program' cannot be started: No such file or directory" in err
    _, told, _ = messages(tmp_path)
    assert told["params"]["end"]["exit_code"] == 127 and "no-such-program" in dict(told["params"]["output"])["stderr"]


def test_programs_do_not_ignore_the_signals_that_python_ignores(tmp_path: Path) -> None:
    """Otherwise a program that writes to `head` would go on after its end."""
    runner = start(tmp_path, ["a"], ["sh", "-c", "grep SigIgn /proc/self/status; { yes; echo $? >ended; } | head -n 1"])
    out, err = runner.communicate(timeout=30)
    _, mask, line = out.split("\n", 1)[1].split()
    assert (line, err, (tmp_path / "ended").read_text()) == ("y", "", f"{128 + signal.SIGPIPE}\n")
    assert not int(mask, 16) & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1)


def test_at_sigterm_nothing_of_the_running_partitions_is_left(tmp_path: Path) -> None:
    """A partition's own children get the signal, too; those that ignore it are killed once the partition has ended."""
    child = "trap '' TERM; touch child; echo $$ > pid; while :; do sleep 1; done"
    asked = "trap 'touch asked; exit 0' TERM; touch other; while :; do sleep 0.1; done"
    command = ["sh", "-c", 'sh -c "$1" & sh -c "$2" & trap "wait $!; exit 3" TERM; touch begun; wait', "sh", child, asked]
    runner = start(tmp_path, ["a"], command)
    assert wait_until(lambda: all((tmp_path / name).exists() for name in ("child", "other", "begun", "pid")))
    pid = int((tmp_path / "pid").read_text())
    runner.send_signal(signal.SIGTERM)
    runner.communicate(timeout=30)
    assert runner.returncode == 143
    assert wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
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


def refusing(path: Path, *numbers: int) -> str:
    """PYTHONPATH with which a process gets EAGAIN for its forks with these numbers, beginning with 1."""
    path.mkdir()
    (path / "sitecustomize.py").write_text(
        f"""import errno, itertools, os
fork, count = os.fork, itertools.count(1)
def refuse():
    if next(count) in {numbers}:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()
os.fork = refuse
"""
    )
    return str(path)


def test_a_partition_that_cannot_be_forked_is_tried_again_when_a_running_one_has_ended(tmp_path: Path) -> None:
    runner = start(tmp_path, ["a", "b", "c"], ["true"], PYTHONPATH=refusing(tmp_path / "site", 2))
    _, err = runner.communicate(timeout=30)
    assert (runner.returncode, err) == (0, "")
    ends = {each["params"]["keys"][0]: each["params"]["end"]["exit_code"] for each in messages(tmp_path)[1:-1]}
    assert ends == {"a": 0, "b": 0, "c": 0}


def test_a_partition_fails_if_it_cannot_be_forked_and_none_runs(tmp_path: Path) -> None:
    runner = start(tmp_path, ["a", "b"], ["true"], PYTHONPATH=refusing(tmp_path / "site", 1))
    runner.communicate(timeout=30)
    _, failed, good, _ = messages(tmp_path)
    assert (runner.returncode, failed["params"]["keys"], good["params"]["end"]["exit_code"]) == (0, ["a"], 0)
    verdict = judge(Evidence(end=failed["params"]["end"]), uses_pipes=False, require_messages=False)
    why = "the payload did not start: no process can be forked for it: Resource temporarily unavailable; request more memory"
    assert verdict.sentence.startswith(why)


def test_partitions_that_exited_before_a_requeue_are_not_run_again(tmp_path: Path) -> None:
    def told(key: str, code: Any) -> dict[str, Any]:
        message = {"method": "partition", "params": {"keys": [key], "end": {"exit_code": code}}}
        return {"type": "pipes", "line": json.dumps(message)}

    damaged = encode(told("d", 0)).replace(b"partition", b"pArtition")
    lines = [encode({"type": "start"}), encode(told("a", 0)), encode(told("b", 3)), encode(told("c", None)), damaged]
    (tmp_path / "journal.jsonl").write_bytes(b"".join(lines) + encode(told("e", 0))[:-9])
    runner = start(tmp_path, list("abcdef"), ["true"], limit=1)
    runner.communicate(timeout=30)
    assert [each["params"].get("keys") for each in messages(tmp_path)[1:-1]] == [["c"], ["d"], ["e"], ["f"]]


def test_the_figures_of_a_partition_are_its_own(tmp_path: Path) -> None:
    """They include the children for which it waited, and nothing of other partitions."""
    big = "x = bytearray(300 << 20).count(1)"
    busy = "import time\nwhile time.process_time() < 0.5: pass"
    command = ["sh", "-c", f'case $RAYSLURM_PARTITION_KEY in a) "$0" -c "{big}";; b) "$0" -c "{busy}";; esac; :', sys.executable]
    runner = start(tmp_path, ["a", "b", "c"], command, limit=1)
    runner.communicate(timeout=30)
    usage = {each["params"]["keys"][0]: each["params"]["usage"] for each in messages(tmp_path)[1:-1]}
    assert usage["a"]["peak_memory"] >= 300 << 20 > 100 << 20 > usage["c"]["peak_memory"]
    assert usage["b"]["cpu_seconds"] >= 0.5 > usage["c"]["cpu_seconds"]


def test_commands_other_than_python_are_not_forked_from_preloaded_modules() -> None:
    """Their peak memory would be at least that of the preload process."""
    launcher = RayLauncher(preload=["ray"])
    plan = make_plan(payload_path=["python", "m.py"], launcher=launcher, nonce="n", max_output_bytes=1, max_stdio_bytes=1)
    assert with_runner(plan, 1).payload.preload == ["ray"]
    other = replace(plan, payload=replace(plan.payload, argv=["sh", "model.sh"]))
    assert with_runner(other, 1).payload.preload == []
