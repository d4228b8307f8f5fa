"""Runtimes on this machine: kill, and locks."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dagster_rayslurm.backends import local
from dagster_rayslurm.backends.base import Layout
from dagster_rayslurm.backends.local import OwnRuntime
from dagster_rayslurm.environments import Interpreter
from dagster_rayslurm.runtime.protocol.record import STATUS
from dagster_rayslurm.ssh.local import locked

from ..conftest import wait_until


def test_a_runtime_that_has_ended_is_not_ended_again(tmp_path: Path) -> None:
    """The number of its process may be another one's by then."""
    innocent = subprocess.Popen(["sleep", "60"])
    try:
        run_dir = tmp_path / "run"
        run_dir.mkdir()
        runtime = OwnRuntime(Layout(tmp_path), Interpreter(sys.executable), str(run_dir), "local-n")  # Finds nothing to run.
        assert wait_until(lambda: runtime.poll(None) is not None, 60)  # type: ignore[arg-type]
        (run_dir / STATUS).write_text(json.dumps({"runtime_pid": innocent.pid}))
        runtime.kill()
        runtime.release(None)  # type: ignore[arg-type]
        with pytest.raises(subprocess.TimeoutExpired):
            innocent.wait(0.5)
    finally:
        innocent.kill()
        innocent.wait()


def test_a_runtime_that_has_ended_below_its_keeper_is_not_ended_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper lives on for a moment; only what is below it can be the runtime."""
    monkeypatch.setattr(local, "_KEEPER_TIMEOUT", 0.1)
    innocent = subprocess.Popen(["sleep", "60"])
    keeper = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        (tmp_path / STATUS).write_text(json.dumps({"runtime_pid": innocent.pid}))
        runtime = OwnRuntime.__new__(OwnRuntime)
        runtime._process, runtime._run_dir = keeper, tmp_path
        runtime.kill()
        assert keeper.wait(60) == -signal.SIGKILL and innocent.poll() is None
    finally:
        for process in (innocent, keeper):
            process.kill()
            process.wait()


def test_a_forked_child_keeps_no_lock() -> None:
    """A process that Dagster forks while one of its threads holds a lock has the file open as well."""
    reads, writes = os.pipe()
    with locked("fork-test"):
        if (child := os.fork()) == 0:
            os.close(writes)
            os.read(reads, 1)
            os._exit(0)
    try:
        with locked("fork-test", timeout=1):
            pass
    finally:
        os.close(writes)
        os.waitpid(child, 0)
        os.close(reads)
