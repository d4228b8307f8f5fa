"""A warm local Ray cluster: found by many processes, started by one, ended by itself when idle."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...archive import runtime_name
from ...config import SessionConfig
from ...environments import Interpreter
from ...errors import FailureKind, StartError
from ...follow import Evidence
from ...plan import Plan, fingerprint
from ...runtime.payload.environment import shared_variables
from ...runtime.protocol.record import JOURNAL, RUNTIME_LOG, SESSION, tail_file
from ...runtime.protocol.requests import Operation
from ...runtime.protocol.spec import ComponentSpec, RaySpec, RuntimeSpec
from ...ssh.local import LocalConnection
from ..local_process import reap_later, runtime_command, start_process
from ..run_dir import Layout, write_runtime_spec

_ANSWER_TIMEOUT = 30.0
_START_TIMEOUT = 60.0
_END_TIMEOUT = 120.0
"""Seconds for payloads' grace periods and the end of the Ray cluster."""
_LATE = 3.0
"""Seconds in which a session that was being started when its starter was killed may still come."""
_ATTEMPTS = 5


class SessionClient:
    """One connection to a session.

    Raises:
        OSError: nobody listens.
    """

    def __init__(self, socket_path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_ANSWER_TIMEOUT)
        try:
            self._socket.connect(socket_path)
        except OSError:
            self._socket.close()
            raise

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer; a session that ends meanwhile answers "gone".

        Raises:
            TimeoutError: the session does not answer.
        """
        try:
            self.send(**request)
            line = self._socket.makefile("rb").readline()
        except (BrokenPipeError, ConnectionResetError):
            line = b""
        # One that ends in the middle of its answer has not given any.
        return json.loads(line) if line.endswith(b"\n") else {"ok": False, "error": "gone"}

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


class LocalPayload:
    """What every runtime on this machine has in common: there is no Slurm."""

    job_id: str | None = None
    waiting = False
    place = ""
    requeue = False

    def metadata(self, evidence: Evidence) -> Mapping[str, Any]:  # noqa: ARG002
        return {}


class SharedRuntime(LocalPayload):
    """A payload in a session's runtime; the connection is its lifeline."""

    def __init__(self, client: SessionClient, cluster_id: str, directory: Path) -> None:
        self.cluster_id = cluster_id
        self._client = client
        self._directory = directory

    def poll(self, evidence: Evidence) -> str | None:  # noqa: ARG002
        return "its session closed the connection" if self._client.at_end() else None

    def cancel(self, now: bool = False) -> None:
        try:
            self._client.send(op=Operation.CANCEL, now=now)
        except (BrokenPipeError, ConnectionResetError):
            return  # It is gone already; `poll` tells.

    def kill(self) -> None:
        return  # The session serves others; the end of the connection cancels what it still runs for this one.

    def explain(self, evidence: Evidence) -> None:
        evidence.runtime_log = tail_file(str(self._directory / RUNTIME_LOG))

    def release(self, evidence: Evidence) -> None:  # noqa: ARG002
        self._client.close()


def session_name(config: SessionConfig, run_id: str) -> str:
    """The name under which a session is looked for; with `scope="run"` each Dagster run has its own."""
    name = config.name or "default"
    return f"{name}-{run_id[:8]}" if config.scope == "run" else name


def submit(
    layout: Layout,
    interpreter: Interpreter,
    plan: Plan,
    ray: RaySpec,
    config: SessionConfig,
    run_id: str,
    run_dir: str,
    ends_with_run: Callable[[str], None],
) -> SharedRuntime:
    """Hand a payload to the session that fits, starting it if there is none.

    Args:
        layout: where sessions are.
        interpreter: the Python that runs them.
        plan: what to run.
        ray: the session's cluster.
        config: how sessions are shared.
        run_id: the Dagster run.
        run_dir: the payload's run directory.
        ends_with_run: sees to it that the session of a directory's name ends with the run; for `scope="run"`.

    Raises:
        StartError: no session can be had, or `on_misfit="error"` and one of this name has another cluster.
        OSError: the session directory cannot be written.
    """
    name = session_name(config, run_id)
    directory = layout.sessions / f"{name}-{session_fingerprint(ray, interpreter)}"
    if config.on_misfit == "error":
        _refuse_misfit(layout, name, directory)
    if config.scope == "run":
        ends_with_run(directory.name)
    # An activated environment is the session's own; otherwise a warm payload sees what a cold one would.
    request = {
        "op": Operation.RUN,
        "run_dir": run_dir,
        "request_id": os.path.basename(run_dir),
        "environ": dict(os.environ) if interpreter.activate is None else None,
    }
    refused = ""
    for _ in range(_ATTEMPTS):
        announced = _announced(directory) or _start(layout, interpreter, plan, ray, config, directory)
        try:
            client = SessionClient(announced["socket"])
        except OSError:
            continue  # It ended after it was announced.
        try:
            answer = client.ask(**request)
        except TimeoutError:
            client.close()
            raise StartError(FailureKind.CLUSTER_START, _stalled(directory, announced)) from None
        if answer["ok"] or (answer["error"] == "gone" and _was_accepted(run_dir)):
            return SharedRuntime(client, announced["cluster_id"], directory)
        client.close()
        refused = answer.get("message", answer["error"])
        if answer["error"] not in ("closing", "gone"):
            break
    raise StartError(
        FailureKind.CLUSTER_START, f"the warm session {directory.name} does not take the payload: {refused or 'it keeps ending'}"
    )


def session_fingerprint(ray: RaySpec, interpreter: Interpreter) -> str:
    """A short name for everything that keeps two payloads from sharing a session.

    The host is part of it: a socket is reached only there, also when the base directory is on a shared file system.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot = ""
    return fingerprint(ray, [*interpreter.start(), runtime_name(), socket.gethostname(), boot])


def _was_accepted(run_dir: str) -> bool:
    """Whether a session that went away without an answer had begun with the payload; it must not run twice."""
    return LocalConnection().read(os.path.join(run_dir, JOURNAL), 0, 1) != b""


def _stalled(directory: Path, announced: dict[str, Any]) -> str:
    return (
        f"the warm session {directory.name} (pid {announced.get('pid')}) does not answer within {_ANSWER_TIMEOUT:g} s; "
        "end that process, then try again"
    )


def stop(layout: Layout, cluster_id: str) -> bool:
    """End the session with a cluster id, and its payloads; False if there is none.

    Raises:
        StartError: it does not answer.
    """
    for directory in _directories(layout):
        announced = _announced(directory)
        if announced is not None and announced["cluster_id"] == cluster_id:
            ask(directory, announced, Operation.STOP)
            return True
    return False


def living(layout: Layout) -> list[tuple[Path, dict[str, Any]]]:
    """The directories of sessions that listen, and what they announce."""
    found = ((directory, _announced(directory)) for directory in sorted(_directories(layout)))
    return [(directory, announced) for directory, announced in found if announced is not None]


def end_directory(directory: Path) -> None:
    """End the session of a directory, if there is one, and wait until it is gone.

    Raises:
        StartError: it does not answer, or does not come to its end.
    """
    announced = None
    deadline = time.monotonic() + _END_TIMEOUT
    late = time.monotonic() + _LATE
    while time.monotonic() < deadline:
        before, announced = announced, _announced(directory)
        if announced is None and (before is not None or time.monotonic() > late):
            return
        if announced is not None and announced != before:
            ask(directory, announced, Operation.STOP)
        time.sleep(0.1)
    pid = (announced or {}).get("pid")
    message = f"the warm session {directory.name} (pid {pid}) was asked to end and goes on; end that process"
    raise StartError(FailureKind.RUNTIME, message)


def ask(directory: Path, announced: dict[str, Any], op: Operation) -> dict[str, Any]:
    """Have a session describe itself, or end; one that has ended answers "gone", which is what "stop" asks for.

    Raises:
        StartError: it does not answer.
    """
    try:
        client = SessionClient(announced["socket"])
        try:
            return client.ask(op=op)
        finally:
            client.close()
    except TimeoutError:
        raise StartError(FailureKind.RUNTIME, _stalled(directory, announced)) from None
    except OSError:
        return {"ok": False, "error": "gone"}


def _directories(layout: Layout) -> list[Path]:
    return [path.parent for path in layout.sessions.glob(f"*/{SESSION}")]


def _refuse_misfit(layout: Layout, name: str, directory: Path) -> None:
    for other in _directories(layout):
        if other != directory and other.name.rpartition("-")[0] == name and _announced(other) is not None:
            raise StartError(
                FailureKind.CLUSTER_START,
                f"session {name!r} is alive with another cluster than this launcher asks for; use the same launcher, "
                'another session name, or SessionConfig(on_misfit="new-session")',
            )


def _announced(directory: Path) -> dict[str, Any] | None:
    """The announcement of a session that listens, else None."""
    try:
        announced: dict[str, Any] = json.loads((directory / SESSION).read_text(encoding="utf-8"))
        SessionClient(announced["socket"]).close()
        return announced
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Be the only one who starts a session here; the kernel lets go when this process dies."""
    LocalConnection().make_dir(str(directory))
    with open(directory / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # A child that was forked meanwhile holds the file open as well.


def _start(
    layout: Layout, interpreter: Interpreter, plan: Plan, ray: RaySpec, config: SessionConfig, directory: Path
) -> dict[str, Any]:
    """Start a session unless somebody else just did, and wait until it listens."""
    with _locked(directory):
        announced = _announced(directory)
        if announced is not None:
            return announced
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
        LocalConnection().remove(str(directory / SESSION))
        LocalConnection().remove(str(directory / RUNTIME_LOG))
        command = runtime_command(layout, interpreter, "serve", str(directory))
        process = start_process(command, str(directory), subprocess.DEVNULL)
        deadline = time.monotonic() + _START_TIMEOUT
        pause = 0.005
        while time.monotonic() < deadline:
            announced = _announced(directory)
            if announced is not None:
                reap_later(process)
                return announced
            if process.poll() is not None:
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        process.terminate()
        reap_later(process)
        log = tail_file(str(directory / RUNTIME_LOG), lines=5).strip()
        message = f"the warm session {directory.name} did not start: {log or 'its runtime said nothing'}"
        raise StartError(FailureKind.CLUSTER_START, message)
