"""Warm sessions on this machine: one process starts a session with a Ray cluster, other processes find it and use it.

A session that is idle for long enough ends itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...archive import runtime_name
from ...config import SessionConfig
from ...environments import Interpreter
from ...errors import FailureKind, StartError
from ...follow import Evidence
from ...plan import Plan, fingerprint
from ...runtime.payload.environment import shared_variables
from ...runtime.protocol.messages import Operation, Refusal
from ...runtime.protocol.record import JOURNAL, RUNTIME_LOG, SESSION, tail_file
from ...runtime.protocol.spec import ComponentSpec, RaySpec, RuntimeSpec
from ...ssh.local import LocalConnection
from ..base import Step
from ..local_process import LocalPayload, reap_later, runtime_command, start_process
from ..run_dir import Layout, write_runtime_spec
from .run_scope import end_with_run, local_target

_ANSWER_TIMEOUT = 30.0
"""Seconds in which a session answers a request."""
_START_TIMEOUT = 60.0
"""Seconds in which a session that was started listens."""
_END_TIMEOUT = 120.0
"""Seconds in which a session ends after a stop request, with its payloads' grace periods and the end of its Ray cluster."""
_LATE_START = 3.0
"""Seconds for which a session may still appear after the process that was starting it was killed."""
_ATTEMPTS = 5
"""Most sessions that are asked to run one payload, where each ends before it accepts the payload."""


class SessionClient:
    """A connection to a session's socket; the constructor raises an OSError if no session listens."""

    def __init__(self, socket_path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_ANSWER_TIMEOUT)
        try:
            self._socket.connect(socket_path)
        except OSError:
            self._socket.close()
            raise

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and return the answer; if the session ends before it answers, the answer has the error "gone".

        Raises:
            TimeoutError: the session does not answer.
        """
        try:
            self.send(**request)
            line = self._socket.makefile("rb").readline()
        except (BrokenPipeError, ConnectionResetError):
            line = b""
        # A line that was cut off is no answer.
        return json.loads(line) if line.endswith(b"\n") else {"ok": False, "error": Refusal.GONE}

    def send(self, **request: Any) -> None:
        self._socket.sendall(json.dumps(request).encode() + b"\n")

    def at_end(self) -> bool:
        """Whether the session closed the connection."""
        self._socket.setblocking(False)
        try:
            return self._socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True
        finally:
            self._socket.settimeout(_ANSWER_TIMEOUT)

    def close(self) -> None:
        self._socket.close()


@dataclass(frozen=True)
class LocalSession:
    """A session on this machine that accepts connections.

    Attributes:
        directory: the session's directory.
        cluster_id: name of the session's Ray cluster.
        socket: path of the session's socket.
        pid: id of the session's process; None if the session does not announce it.
    """

    directory: Path
    cluster_id: str
    socket: str
    pid: int | None

    def ask(self, op: Operation) -> dict[str, Any]:
        """Send a request without arguments and return the answer; if the session has ended, the answer has the error "gone".

        Raises:
            StartError: the session does not answer.
        """
        try:
            client = SessionClient(self.socket)
            try:
                return client.ask(op=op)
            finally:
                client.close()
        except TimeoutError:
            raise StartError(FailureKind.RUNTIME, self.no_answer) from None
        except OSError:
            return {"ok": False, "error": Refusal.GONE}

    @property
    def no_answer(self) -> str:
        """The error message for a session that does not answer."""
        return (
            f"the warm session {self.directory.name} (pid {self.pid}) does not answer within {_ANSWER_TIMEOUT:g} s; "
            "end that process, then try again"
        )


class SessionRuntime(LocalPayload):
    """A payload that runs in a session; when this object closes its connection, the session cancels the payload."""

    def __init__(self, client: SessionClient, session: LocalSession) -> None:
        self.cluster_id = session.cluster_id
        self._client = client
        self._directory = session.directory

    def poll(self, evidence: Evidence) -> str | None:  # noqa: ARG002
        return "its session closed the connection" if self._client.at_end() else None

    def cancel(self, now: bool = False) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # Then `poll` tells of the end.
            self._client.send(op=Operation.CANCEL, now=now)

    def kill(self) -> None:
        return  # The session serves other payloads; `release` closes the connection.

    def explain(self, evidence: Evidence) -> None:
        evidence.runtime_log = tail_file(str(self._directory / RUNTIME_LOG))

    def release(self, evidence: Evidence) -> None:  # noqa: ARG002
        self._client.close()


def submit(
    layout: Layout, interpreter: Interpreter, plan: Plan, ray: RaySpec, config: SessionConfig, step: Step, run_dir: str
) -> SessionRuntime:
    """Run a payload in the session with a given Ray cluster, and start that session if there is none.

    Args:
        layout: where sessions have their directories.
        interpreter: the Python that runs sessions.
        plan: the payload.
        ray: the session's Ray cluster.
        config: how sessions are shared.
        step: the step that runs the payload.
        run_dir: the payload's run directory.

    Raises:
        StartError: the session does not start or accept the payload, or `on_misfit="error"` and the session of this name has
            another Ray cluster.
        OSError: the session directory cannot be written.
    """
    name = config.name or "default"
    if config.scope == "run":
        name = f"{name}-{step.run_id[:8]}"
    directory = layout.sessions / f"{name}-{_session_fingerprint(ray, interpreter)}"
    if config.on_misfit == "error":
        _refuse_misfit(layout, name, directory)
    if config.scope == "run":
        end_with_run(layout, step.run_id, local_target(layout, directory.name), step.log)
    # If the session has an activated environment, the payload gets that one; otherwise it gets this process's variables, as a
    # payload without a session does.
    request = {
        "op": Operation.RUN,
        "run_dir": run_dir,
        "request_id": os.path.basename(run_dir),
        "environ": dict(os.environ) if interpreter.activate is None else None,
    }
    refusal = ""
    for _ in range(_ATTEMPTS):
        session = _find(directory) or _start(layout, interpreter, plan, ray, config, directory)
        try:
            client = SessionClient(session.socket)
        except OSError:
            continue  # The session ended meanwhile.
        try:
            answer = client.ask(**request)
        except TimeoutError:
            client.close()
            raise StartError(FailureKind.CLUSTER_START, session.no_answer) from None
        if answer["ok"] or (answer["error"] == Refusal.GONE and _was_accepted(run_dir)):
            return SessionRuntime(client, session)
        client.close()
        refusal = answer.get("message", answer["error"])
        if answer["error"] not in (Refusal.CLOSING, Refusal.GONE):
            break
    message = f"the warm session {directory.name} does not take the payload: {refusal or 'it keeps ending'}"
    raise StartError(FailureKind.CLUSTER_START, message)


def _session_fingerprint(ray: RaySpec, interpreter: Interpreter) -> str:
    """A fingerprint of all that two payloads must have in common to share a session.

    This includes the host: the session's socket works only on its host, even if the base directory is on a shared file system.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot = ""
    return fingerprint(ray, [*interpreter.start(), runtime_name(), socket.gethostname(), boot])


def _was_accepted(run_dir: str) -> bool:
    """Whether a session that ended without an answer had begun to run the payload, which must not run twice."""
    return LocalConnection().read(os.path.join(run_dir, JOURNAL), 0, 1) != b""


def list_sessions(layout: Layout) -> list[LocalSession]:
    """The sessions on this machine that accept connections."""
    found = map(_find, sorted(path.parent for path in layout.sessions.glob(f"*/{SESSION}")))
    return [session for session in found if session is not None]


def stop(layout: Layout, cluster_id: str) -> bool:
    """Ask the session of a Ray cluster to end, with its payloads; False if there is no such session.

    Raises:
        StartError: the session does not answer.
    """
    for session in list_sessions(layout):
        if session.cluster_id == cluster_id:
            session.ask(Operation.STOP)
            return True
    return False


def end_directory(directory: Path) -> None:
    """End the session with a given directory, if there is one, and wait until it is gone.

    Raises:
        StartError: the session does not answer or does not end.
    """
    session = None
    began = time.monotonic()
    while time.monotonic() - began < _END_TIMEOUT:
        before, session = session, _find(directory)
        if session is None and (before is not None or time.monotonic() - began > _LATE_START):
            return
        if session is not None and session != before:
            session.ask(Operation.STOP)
        time.sleep(0.1)
    pid = session.pid if session is not None else None
    message = f"the warm session {directory.name} (pid {pid}) was asked to end and goes on; end that process"
    raise StartError(FailureKind.RUNTIME, message)


def _refuse_misfit(layout: Layout, name: str, directory: Path) -> None:
    for other in list_sessions(layout):
        if other.directory != directory and other.directory.name.rpartition("-")[0] == name:
            raise StartError(
                FailureKind.CLUSTER_START,
                f"session {name!r} is alive with another cluster than this launcher asks for; use the same launcher, "
                'another session name, or SessionConfig(on_misfit="new-session")',
            )


def _find(directory: Path) -> LocalSession | None:
    """The session with a given directory, if it accepts connections; else None."""
    try:
        announced: dict[str, Any] = json.loads((directory / SESSION).read_text(encoding="utf-8"))
        session = LocalSession(directory, announced["cluster_id"], announced["socket"], announced.get("pid"))
        SessionClient(session.socket).close()
        return session
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Let only one process at a time start the session of a directory; the kernel releases the lock when that process dies."""
    LocalConnection().make_dir(str(directory))
    with open(directory / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # Closing is not enough: a child that was forked meanwhile holds the file open too.


def _start(
    layout: Layout, interpreter: Interpreter, plan: Plan, ray: RaySpec, config: SessionConfig, directory: Path
) -> LocalSession:
    """Start a session, unless another process has just started it, and return it once it accepts connections."""
    with _locked(directory):
        session = _find(directory)
        if session is not None:
            return session
        spec = RuntimeSpec(
            cluster_id=f"local-{secrets.token_hex(4)}",
            ray=ray,
            idle_timeout=config.idle_timeout,
            max_concurrent_payloads=config.max_concurrent_payloads,
            worker_env=shared_variables(plan.payload),
            preload=plan.payload.preload,
            components=[ComponentSpec(node.component_id) for node in ray.components],
        )
        write_runtime_spec(LocalConnection(), str(directory), spec)
        for name in (SESSION, RUNTIME_LOG):
            LocalConnection().remove(str(directory / name))
        command = runtime_command(layout, interpreter, "serve", str(directory))
        process = start_process(command, str(directory), subprocess.DEVNULL)
        deadline, pause = time.monotonic() + _START_TIMEOUT, 0.005
        while time.monotonic() < deadline:
            session = _find(directory)
            if session is not None:
                reap_later(process)
                return session
            if process.poll() is not None:
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        process.terminate()
        reap_later(process)
        log = tail_file(str(directory / RUNTIME_LOG), lines=5).strip()
        message = f"the warm session {directory.name} did not start: {log or 'its runtime said nothing'}"
        raise StartError(FailureKind.CLUSTER_START, message)
