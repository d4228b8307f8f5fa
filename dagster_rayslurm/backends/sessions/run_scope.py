"""The end of a run for `SessionConfig(scope="run")`: a process on Dagster's host that outlives the run and ends its session.

Dagster tells nobody that a run was killed, so it is the end of the run's process that counts. Which one that is was
tried on Dagster 1.13 with both of its own executors.
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

_RUN_IS_HERE = ("dagster._core.execution.api", "job_execution_iterator")
_STEP_IS_HERE = ("dagster._core.executor.child_process_executor", "_execute_command_in_child_process")
"""Functions of Dagster that a process is in while it drives a run, and while it runs a step for the process that does."""


@dataclass(frozen=True)
class RunProcess:
    """The process with which a run ends.

    Attributes:
        pid: its id.
        started: see `run_end_watcher.start_time`; None if it has ended already.
    """

    pid: int
    started: str | None

    @property
    def own(self) -> bool:
        """Whether it is this one."""
        return self.pid == os.getpid()


_lock = threading.Lock()
_told: dict[str, list[subprocess.Popen[bytes]]] = {}
"""By run: the watchers that this process, which is the run's own, tells of the run's end."""


def run_process() -> RunProcess | None:
    """The process that is the run of the step that runs here; None with an executor that is none of Dagster's own two.

    With the in-process executor it is this one, with the multiprocess executor the one that started this one, however it
    did so.
    """
    functions = set(_functions())
    if _STEP_IS_HERE in functions:
        parent = multiprocessing.parent_process()
        if parent is None or parent.pid is None:
            return None
        return RunProcess(parent.pid, start_time(parent.pid) if parent.is_alive() else None)
    if _RUN_IS_HERE in functions:
        return RunProcess(os.getpid(), start_time(os.getpid()))
    return None


def _functions() -> Iterator[tuple[str, str]]:
    """The functions that the threads of this process are in, by module and name."""
    for frame in sys._current_frames().values():
        while frame is not None:
            yield frame.f_globals.get("__name__", ""), frame.f_code.co_name
            frame = frame.f_back  # type: ignore[assignment]


def end_with_run(home: Layout, run_id: str, session: Mapping[str, Any], log: Any) -> None:
    """See to it that a session ends when the run ends; whoever asks first starts the process that does it.

    Args:
        home: the base directory on this machine.
        run_id: the Dagster run.
        session: which session, see `local_target` and `slurm_target`; it is handed over by a pipe, so that
            neither an argument list nor a file gets to see the login.
        log: the step's log.
    """
    process = run_process()
    if process is None:
        log.info("[rayslurm] this executor's run is in no process here, so the session ends after its idle_timeout")
        return
    try:
        _start(home, run_id, process, session)
    except OSError as error:
        log.warning(f"[rayslurm] the session will not end with the run but after its idle_timeout: {error}")


def run_ended(run_id: str) -> None:
    """Tell the watchers that a run has ended, whose process may go on: a notebook, a test.

    Only the run's own process has something to tell; in that of a single step this does nothing.
    """
    with _lock:
        watchers = _told.pop(run_id, [])
    for watcher in watchers:
        assert watcher.stdin is not None
        with suppress(OSError):  # It has ended by itself.
            watcher.stdin.write(b"end\n")
            watcher.stdin.flush()
        reap_later(watcher)


def _start(home: Layout, run_id: str, process: RunProcess, session: Mapping[str, Any]) -> None:
    """Start a watcher unless there is one; it keeps the lock for as long as it lives.

    Raises:
        OSError: it cannot be started.
    """
    text = json.dumps(session, sort_keys=True)
    LocalConnection().make_dir(str(home.sessions))
    lock = home.sessions / f"{session['key']}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.watch"
    fd = _take(lock)
    if fd is None:
        return
    try:
        order = {
            "pid": process.pid,
            "started": process.started,
            "path": [path for path in sys.path if path],
            "lock": str(lock),
            "log": str(lock.with_suffix(WATCH_LOG)),
            "session": session,
        }
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
    assert watcher.stdin is not None
    try:
        watcher.stdin.write(json.dumps(order).encode() + b"\n")
        watcher.stdin.flush()
    except OSError:
        reap_later(watcher)
        raise
    if process.own:
        with _lock:
            _told.setdefault(run_id, []).append(watcher)
    else:
        reap_later(watcher)


def _take(path: Path) -> int | None:
    """Lock a file; None if somebody else has it.

    Raises:
        OSError: it cannot be opened or locked.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had it may have removed it in between.
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


def local_target(home: Layout, name: str) -> dict[str, Any]:
    """A session of this machine, by the name of its directory."""
    return {"kind": "local", "key": name, "base": str(home.base)}


def slurm_target(ssh: Any, base: str, key: str) -> dict[str, Any]:
    """A session of a cluster.

    Args:
        ssh: the `SSHConnectionResource`, or None.
        base: the base directory there, absolute.
        key: the session's directory below it.
    """
    return {"kind": "slurm", "key": key, "base": base, "ssh": None if ssh is None else ssh.model_dump(mode="json")}


def _start_anew() -> None:
    """In a forked child, which is not the run, and has none of its parent's threads."""
    global _lock
    _lock = threading.Lock()
    _told.clear()


os.register_at_fork(after_in_child=_start_anew)
