"""End a session with its run: the process of the run, and the watcher that waits for its end."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pytest

from dagster_rayslurm.backends.run_dir import Layout
from dagster_rayslurm.backends.sessions import run_scope, run_scope_end, run_scope_watcher
from dagster_rayslurm.backends.sessions.run_scope import RunProcess, end_with_run, run_ended, run_process
from dagster_rayslurm.backends.sessions.run_scope_end import end_session
from dagster_rayslurm.ssh.base import ConnectionFailed
from dagster_rayslurm.ssh.config import SSHConnectionResource

from ..conftest import marked_processes, wait_until

PROBE = """
import os, sys
import dagster as dg
from dagster_rayslurm.backends.sessions.run_scope import run_process

@dg.op
def asks():
    found = run_process()
    print("FOUND", found.pid, found.pid == os.getpid(), found.started is not None, os.getpid(), flush=True)

@dg.job
def job():
    asks()

if __name__ == "__main__":
    import probe
    print("RUN", os.getpid(), flush=True)
    with dg.DagsterInstance.local_temp(sys.argv[1]) as instance:
        config = {"execution": {"config": {sys.argv[2]: {"start_method": {sys.argv[3]: {}}} if sys.argv[3:] else {}}}}
        dg.execute_job(dg.reconstructable(probe.job), instance=instance, run_config=config, raise_on_error=True)
"""


@pytest.fixture
def home(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "base")


@pytest.fixture
def run() -> Iterator[subprocess.Popen[bytes]]:
    """A process in place of a run."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def watchers() -> list[psutil.Process]:
    found = []
    for process in marked_processes(os.environ["PYTEST_OF_RAYSLURM"]):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if run_scope_watcher.__file__ in process.cmdline():
                found.append(process)
    return found


def session(home: Layout, key: str = "s-0123456789ab") -> dict[str, Any]:
    return run_scope.local_target(home, key)


@pytest.mark.parametrize("executor", [("in_process",), ("multiprocess", "spawn"), ("multiprocess", "forkserver")])
def test_the_process_of_the_run_is_found(tmp_path: Path, executor: tuple[str, ...]) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}", "DAGSTER_DISABLE_TELEMETRY": "yes"}
    command = [sys.executable, str(tmp_path / "probe.py"), str(tmp_path), *executor]
    said = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    run = next(line.split()[1] for line in said.stdout.splitlines() if line.startswith("RUN"))
    found = next(line.split() for line in said.stdout.splitlines() if line.startswith("FOUND"))
    assert found[1] == run and found[3] == "True", said.stderr
    assert (found[2] == "True") == (found[4] == run) == (executor == ("in_process",))


def test_another_executor_has_no_run_process() -> None:
    assert run_process() is None


def test_no_watcher_without_a_run_process(home: Layout, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        end_with_run(home, "run", session(home), logging.getLogger("step"))
    assert "idle_timeout" in caplog.text and not home.base.exists()


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces `end_session` in the watcher, which writes its target to this file."""
    path = tmp_path / "ended"
    package = tmp_path / "fake" / "dagster_rayslurm" / "backends" / "sessions"
    package.mkdir(parents=True)
    for directory in (package, package.parent, package.parent.parent):
        (directory / "__init__.py").write_text("")
    (package / "run_scope_end.py").write_text(
        f"import json\ndef end_session(session): open({str(path)!r}, 'w').write(json.dumps(session))\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path / "fake"), *sys.path])
    monkeypatch.setattr(run_scope, "_functions", lambda: iter(()))
    return path


def test_the_watcher_ends_the_session_after_the_run(home: Layout, run: Any, ended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_scope, "run_process", lambda: RunProcess(run.pid, run_scope_watcher.start_time(run.pid)))
    secret = {**session(home), "ssh": {"password": "hush-hush"}}
    for _ in range(3):
        end_with_run(home, "run", secret, None)
    # A process that was just started does not show its command line for a moment.
    assert wait_until(watchers, 10)
    (watcher,) = watchers()
    assert wait_until(lambda: watcher.status() == "sleeping", 5)
    assert watcher.memory_info().rss < 16 * 2**20 and os.getsid(watcher.pid) != os.getsid(0)
    assert not any("hush" in word for word in watcher.cmdline())
    assert all(b"hush" not in path.read_bytes() for path in home.sessions.iterdir())
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        watcher.send_signal(signum)
    run_ended("run")  # The process of a step has nothing to tell.
    time.sleep(0.3)
    assert watcher.is_running() and not ended.exists()
    run.kill()  # Nobody has waited for it yet: it is a zombie now.
    assert wait_until(ended.exists, 5) and wait_until(lambda: not watchers(), 5)
    assert json.loads(ended.read_text()) == secret
    assert list(home.sessions.iterdir()) == [], "neither its lock nor a log is left"


def test_each_session_of_a_run_has_a_watcher(home: Layout, run: Any, ended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_scope, "run_process", lambda: RunProcess(run.pid, run_scope_watcher.start_time(run.pid)))
    for key in ("a-000000000000", "b-000000000000"):
        end_with_run(home, "run", session(home, key), None)
    assert wait_until(lambda: len(watchers()) == 2, 10)
    run.kill()
    assert wait_until(lambda: not watchers(), 5)


def test_run_ended_notifies_the_watcher(home: Layout, ended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_scope, "run_process", lambda: RunProcess(os.getpid(), run_scope_watcher.start_time(os.getpid())))
    end_with_run(home, "run", session(home), None)
    run_ended("another")
    time.sleep(0.3)
    assert wait_until(lambda: len(watchers()) == 1, 10) and not ended.exists()
    run_ended("run")
    assert wait_until(ended.exists, 5) and wait_until(lambda: not watchers(), 5)
    run_ended("run")


@pytest.mark.parametrize("started", [None, "1"])
def test_a_process_that_had_ended_before(
    home: Layout, run: Any, ended: Path, started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its id may belong to another process now."""
    monkeypatch.setattr(run_scope, "run_process", lambda: RunProcess(run.pid, started))
    end_with_run(home, "run", session(home), None)
    assert wait_until(ended.exists, 5) and wait_until(lambda: not watchers(), 5)


def test_without_pidfd(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    monkeypatch.setattr(run_scope_watcher, "_POLL", 0.05)
    reads, writes = os.pipe()
    started = run_scope_watcher.start_time(run.pid)
    subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {run.pid}"])
    began = time.monotonic()
    run_scope_watcher.wait(run.pid, started, reads)
    assert 0.2 < time.monotonic() - began < 5
    os.write(writes, b"end\n")
    run_scope_watcher.wait(os.getpid(), run_scope_watcher.start_time(os.getpid()), reads)
    for fd in (reads, writes):
        os.close(fd)


def test_errors_of_the_watcher_are_logged(home: Layout, run: Any, ended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_scope, "run_process", lambda: RunProcess(run.pid, None))
    (Path(sys.path[0]) / "dagster_rayslurm/backends/sessions/run_scope_end.py").write_text(
        "def end_session(session): raise OSError('out of reach')"
    )
    end_with_run(home, "run", session(home), None)
    assert wait_until(lambda: not watchers(), 5)
    (log,) = home.sessions.glob("*.watch.log")
    assert "OSError: out of reach" in log.read_text()
    assert list(home.sessions.glob("*.watch")) == []


def test_a_watcher_that_does_not_start_causes_a_warning(home: Layout, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setattr(run_scope, "run_process", lambda: RunProcess(os.getpid(), "1"))
    home.base.write_text("this is no directory")
    end_with_run(home, "run", session(home), logging.getLogger("step"))
    assert "the session will not end with the run but after its idle_timeout" in caplog.text


def test_end_session_retries_while_the_cluster_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[float] = []

    def end(_: Any) -> None:
        if len(tries) < 3:
            raise ConnectionFailed("the edge node is away", temporary=True)

    monkeypatch.setattr(run_scope_end, "_end", end)
    end_session({}, sleep=tries.append)
    assert tries == [1.0, 2.0, 5.0]
    tries.clear()
    with pytest.raises(ConnectionFailed):
        end_session({}, patience=-1, sleep=tries.append)
    assert tries == []


def test_end_session_does_not_retry_a_refused_login(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(_: Any) -> None:
        raise ConnectionFailed("the key is refused", temporary=False)

    monkeypatch.setattr(run_scope_end, "_end", end)
    with pytest.raises(ConnectionFailed):
        end_session({}, sleep=lambda _: pytest.fail("it was tried again"))


def test_a_target_keeps_the_login(home: Layout) -> None:
    jump = SSHConnectionResource(host="gate", password="jump")
    ssh = SSHConnectionResource(host="edge", port=2222, key_passphrase="secret", jump_host=jump)
    handed = json.loads(json.dumps(run_scope.slurm_target(ssh, "/base", "key")))
    assert SSHConnectionResource(**handed["ssh"]) == ssh
    assert run_scope.slurm_target(None, "/base", "key")["ssh"] is None


def test_a_forked_child_does_not_notify(home: Layout, ended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_scope, "run_process", lambda: RunProcess(os.getpid(), run_scope_watcher.start_time(os.getpid())))
    end_with_run(home, "run", session(home), None)
    child = os.fork()
    if child == 0:
        run_ended("run")
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(0.3)
    assert wait_until(lambda: len(watchers()) == 1, 10) and not ended.exists()
    run_ended("run")
    assert wait_until(lambda: not watchers(), 5)


def test_a_fork_under_the_lock_does_not_hang(home: Layout) -> None:
    with run_scope._lock:
        child = os.fork()
        if child == 0:
            run_ended("run")
            os._exit(0)
    try:
        assert wait_until(lambda: os.waitpid(child, os.WNOHANG)[0] == child, 10)
    except AssertionError:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise


def test_the_base_directory_is_private(home: Layout, run: Any, ended: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(run_scope, "run_process", lambda: RunProcess(run.pid, None))
    end_with_run(home, "run", session(home), None)
    assert [path.stat().st_mode & 0o777 for path in (home.base, home.sessions)] == [0o700, 0o700]
    assert wait_until(lambda: not watchers(), 5)


def test_teardown_without_a_run(compute: Any) -> None:
    compute.teardown_after_execution(dg.build_init_resource_context())
