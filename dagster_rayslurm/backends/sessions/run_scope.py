"""End a session with its Dagster run (`SessionConfig(scope="run")`): start a watcher process that outlives the run.

Dagster tells no process that a run was killed, so the watcher waits for the end of the run's process. Which process that is was
tried on Dagster 1.13 with both of Dagster's own executors.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...ssh.local import LocalConnection
from ..local_process import reap_later
from ..run_dir import WATCH_LOG, Layout
from . import run_scope_watcher
from .run_scope_watcher import start_time

_DRIVES_RUN = ("dagster._core.execution.api", "job_execution_iterator")
_RUNS_STEP = ("dagster._core.executor.child_process_executor", "_execute_command_in_child_process")
"""Dagster's functions (module, name) on the stack of a process that drives a run, and of a process that runs one step."""


@dataclass(frozen=True)
class RunProcess:
    """The process whose end is the end of a Dagster run.

    Attributes:
        pid: the process id.
        started: when the process started, see `run_scope_watcher.start_time`; None if the process has ended.
    """

    pid: int
    started: str | None


_lock = threading.Lock()
_watchers: dict[str, list[subprocess.Popen[bytes]]] = {}
"""For each run that this process drives, the watchers to notify when the run ends, see `run_ended`."""


def run_process() -> RunProcess | None:
    """The process of the Dagster run whose step runs here; None if the run's executor is not one of Dagster's own two.

    With the in-process executor it is this process, with the multiprocess executor the parent of this process.
    """
    functions = set(_functions())
    if _RUNS_STEP in functions:
        parent = multiprocessing.parent_process()
        if parent is None or parent.pid is None:
            return None
        return RunProcess(parent.pid, start_time(parent.pid) if parent.is_alive() else None)
    if _DRIVES_RUN in functions:
        return RunProcess(os.getpid(), start_time(os.getpid()))
    return None


def _functions() -> Iterator[tuple[str, str]]:
    """Module and name of each function on the stacks of all threads of this process."""
    for frame in sys._current_frames().values():
        while frame is not None:
            yield frame.f_globals.get("__name__", ""), frame.f_code.co_name
            frame = frame.f_back  # type: ignore[assignment]


def local_target(home: Layout, name: str) -> dict[str, Any]:
    """Describes a session on this machine as a target for `end_with_run`; `name` is the name of the session's directory."""
    return {"kind": "local", "key": name, "base": str(home.base)}


def slurm_target(ssh: Any, base: str, key: str) -> dict[str, Any]:
    """Describes a session on a Slurm cluster as a target for `end_with_run`.

    Args:
        ssh: the `SSHConnectionResource`, or None.
        base: the base directory there, absolute.
        key: the name of the session's directory.
    """
    return {"kind": "slurm", "key": key, "base": base, "ssh": None if ssh is None else ssh.model_dump(mode="json")}


def end_with_run(home: Layout, run_id: str, target: Mapping[str, Any], log: Any) -> None:
    """Start a watcher process that ends a session when the run ends, unless the session has a watcher already.

    Args:
        home: the base directory on this machine.
        run_id: the Dagster run.
        target: the session, see `local_target` and `slurm_target`.
        log: the step's log.
    """
    process = run_process()
    if process is None:
        log.info("[rayslurm] this executor's run is in no process here, so the session ends after its idle_timeout")
        return
    try:
        watcher = _start_watcher(home, process, target)
    except OSError as error:
        log.warning(f"[rayslurm] the session will not end with the run but after its idle_timeout: {error}")
        return
    if watcher is not None and process.pid == os.getpid():
        with _lock:
            _watchers.setdefault(run_id, []).append(watcher)
    elif watcher is not None:
        reap_later(watcher)


def run_ended(run_id: str) -> None:
    """Called when a run has ended, to tell its watchers so: the run's process may go on, as in a notebook or a test.

    This does nothing in a process that runs only one step of the run.
    """
    with _lock:
        watchers = _watchers.pop(run_id, [])
    for watcher in watchers:
        with suppress(OSError):  # The watcher has ended by itself.
            _write_line(watcher, b"end")
        reap_later(watcher)


def _start_watcher(home: Layout, process: RunProcess, target: Mapping[str, Any]) -> subprocess.Popen[bytes] | None:
    """Start a watcher, which holds the session's lock as long as it lives; None if another watcher holds the lock."""
    text = json.dumps(target, sort_keys=True)
    LocalConnection().make_dir(str(home.sessions))
    lock = home.sessions / f"{target['key']}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.watch"
    fd = _try_lock(lock)
    if fd is None:
        return None
    order = {
        "pid": process.pid,
        "started": process.started,
        "path": [path for path in sys.path if path],
        "lock": str(lock),
        "log": str(lock.with_suffix(WATCH_LOG)),
        "session": target,
    }
    try:
        watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", run_scope_watcher.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[fd],
        )
    finally:
        os.close(fd)
    try:
        # The target holds the SSH login, so it goes through a pipe: other users can read command lines, and perhaps files.
        _write_line(watcher, json.dumps(order).encode())
    except OSError:
        reap_later(watcher)
        raise
    return watcher


def _write_line(watcher: subprocess.Popen[bytes], line: bytes) -> None:
    assert watcher.stdin is not None
    watcher.stdin.write(line + b"\n")
    watcher.stdin.flush()


def _try_lock(path: Path) -> int | None:
    """The descriptor of a locked file; None if another process holds the lock."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last holder of the lock may have removed the file between `open` and `flock`.
            if os.path.exists(path) and os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        except BlockingIOError:
            os.close(fd)
            return None
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _reset_after_fork() -> None:
    """Called in a forked child, which does not drive the run, and has no thread that could release the lock."""
    global _lock
    _lock = threading.Lock()
    _watchers.clear()


os.register_at_fork(after_in_child=_reset_after_fork)
