"""Cancelling: the terminate button, Ctrl-C once and twice, and Dagster killed without a word."""

import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import psutil
import pytest

from dagster_rayslurm import BashLauncher, ComputeResource
from dagster_rayslurm.execution import run as execution
from dagster_rayslurm.execution.interrupts import mark_canceling

from ..conftest import marked_processes, wait_until

pytestmark = pytest.mark.timeout(240)

DEFINITIONS = """
import dagster as dg
from dagster_rayslurm import BashLauncher, ComputeResource, RayLauncher, SessionConfig

@dg.asset
def slow(context: dg.AssetExecutionContext, compute: ComputeResource):
    return compute.run(context=context, payload_path={payload!r}, uses_pipes=False).get_materialize_result()

job = dg.define_asset_job("job", "slow", executor_def=dg.{executor})
compute = ComputeResource(local_base={base!r}, enable_cluster_reuse={warm}, session=SessionConfig(idle_timeout=60),
    default_launcher={launcher})
defs = dg.Definitions([slow], jobs=[job], resources={{"compute": compute}})
"""

POLITE = """
import os, pathlib, signal, sys, time
here = pathlib.Path({here!r})
def stop(signum, frame):
    (here / "stopped").write_text(str(time.time()))
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("payload is up", flush=True)
(here / "up").write_text(str(os.getpid()))
time.sleep(120)
"""

STUBBORN = """
import os, pathlib, signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["setsid", "sleep", "300"])
(pathlib.Path({here!r}) / "up").write_text(str(os.getpid()))
time.sleep(120)
"""


class Dagster:
    """A Dagster instance in a directory, and processes that run the job in it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.env = {**os.environ, "DAGSTER_HOME": str(home), "DAGSTER_DISABLE_TELEMETRY": "yes"}

    def write(self, payload: str, **fields: Any) -> Path:
        script = self.home / "payload.py"
        script.write_text(payload.format(here=str(self.home)))
        defaults = {
            "executor": "in_process_executor",
            "launcher": "BashLauncher(grace_period=3)",
            "warm": False,
            "base": str(self.home / "base"),
        }
        definitions = self.home / "definitions.py"
        definitions.write_text(DEFINITIONS.format(payload=str(script), **{**defaults, **fields}))
        return definitions

    def command(self, definitions: Path) -> list[str]:
        return [sys.executable, "-m", "dagster", "job", "execute", "-f", str(definitions), "-j", "job"]

    def execute(self, definitions: Path) -> "subprocess.Popen[bytes]":
        """As a service: without a terminal."""
        with open(self.home / "log", "ab") as log:
            return subprocess.Popen(
                self.command(definitions), env=self.env, cwd=self.home, stdout=log, stderr=log, start_new_session=True
            )

    def type_command(self, definitions: Path) -> tuple[int, int]:
        """As a person: in a terminal; its process id, and the keyboard."""
        pid, keyboard = pty.fork()
        if pid == 0:
            os.chdir(self.home)
            os.execve(sys.executable, self.command(definitions), self.env)
        threading.Thread(target=self._show, args=(keyboard,), daemon=True).start()
        return pid, keyboard

    def _show(self, screen: int) -> None:
        with open(self.home / "log", "ab") as log, contextlib.suppress(OSError):  # EIO: the terminal is closed.
            while data := os.read(screen, 4096):
                log.write(data)

    def statuses(self) -> list[dg.DagsterRunStatus]:
        with dg.DagsterInstance.from_config(str(self.home)) as instance:
            return [run.status for run in instance.get_runs()]

    def messages(self) -> list[str]:
        with dg.DagsterInstance.from_config(str(self.home)) as instance:
            return [entry.user_message for run in instance.get_runs() for entry in instance.all_logs(run.run_id)]

    def up(self) -> int:
        """The payload's process id, once it runs."""
        file = self.home / "up"
        assert wait_until(lambda: file.exists() and file.read_text(), 90), (self.home / "log").read_text()
        return int(file.read_text())


@pytest.fixture
def dagster(tmp_path: Path) -> Iterator[Dagster]:
    home = tmp_path / "home"
    home.mkdir()
    # Runs are launched by the webserver itself; the default coordinator wants a daemon for that.
    (home / "dagster.yaml").write_text(
        "run_coordinator: {module: dagster._core.run_coordinator, class: DefaultRunCoordinator}\ntelemetry: {enabled: false}\n"
    )
    yield Dagster(home)


def running(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize("executor", ["in_process_executor", pytest.param("multiprocess_executor", marks=pytest.mark.thorough)])
def test_ctrl_c_ends_the_payload_politely(executor: str, dagster: Dagster) -> None:
    process, keyboard = dagster.type_command(dagster.write(POLITE, executor=executor))
    pid = dagster.up()
    os.write(keyboard, b"\x03")
    os.waitpid(process, 0)
    os.close(keyboard)
    assert (dagster.home / "stopped").exists() and not running(pid)
    assert dagster.statuses() == [dg.DagsterRunStatus.CANCELED]
    assert "[rayslurm] the run was cancelled: cancelled from Dagster" in dagster.messages()


def test_a_storage_that_fails_at_ctrl_c_is_ignored() -> None:
    """The payload is ended after the run was marked in Dagster's storage, so an error there must not keep it alive."""

    def fail(run_id: str) -> None:
        raise OSError(f"database is locked: {run_id}")

    mark_canceling(SimpleNamespace(instance=SimpleNamespace(get_run_by_id=fail), run=SimpleNamespace(run_id="x")))  # type: ignore[arg-type]


def test_ctrl_c_in_a_callback_of_the_garbage_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python ignores the exception that Dagster raises then, and the run must end all the same."""
    payload, ignored = tmp_path / "payload.py", list[Any]()
    payload.write_text(POLITE.format(here=str(tmp_path)))

    class Garbage:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def announced(*_: Any) -> None:
        assert wait_until(lambda: (tmp_path / "up").exists(), 60)
        Garbage()

    @dg.asset
    def slow(context: dg.AssetExecutionContext, compute: ComputeResource) -> None:
        compute.run(context=context, payload_path=str(payload), uses_pipes=False)

    monkeypatch.setattr(execution, "announce", announced)
    monkeypatch.setattr(sys, "unraisablehook", lambda found: ignored.append(found.exc_type))
    compute = ComputeResource(local_base=str(tmp_path / "base"), default_launcher=BashLauncher(grace_period=3))
    with pytest.raises(dg.DagsterExecutionInterruptedError):
        dg.materialize([slow], resources={"compute": compute})
    assert ignored == [dg.DagsterExecutionInterruptedError] and (tmp_path / "stopped").exists()


def test_a_service_that_is_stopped_leaves_the_verdict_to_dagster(dagster: Dagster) -> None:
    """Nobody cancelled the run: Dagster calls it failed, so that its retries apply; the payload ends all the same."""
    process = dagster.execute(dagster.write(STUBBORN))
    pid = dagster.up()
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    assert 3 <= time.monotonic() - started < 30 and not running(pid)  # grace_period=3, then SIGKILL.
    assert dagster.statuses() == [dg.DagsterRunStatus.FAILURE]


def test_a_second_ctrl_c_waits_no_longer(dagster: Dagster) -> None:
    process, keyboard = dagster.type_command(dagster.write(STUBBORN, launcher="BashLauncher(grace_period=60)"))
    pid = dagster.up()
    started = time.monotonic()
    os.write(keyboard, b"\x03")
    time.sleep(1.5)
    assert running(pid)
    os.write(keyboard, b"\x03")
    os.waitpid(process, 0)
    os.close(keyboard)
    assert time.monotonic() - started < 30 and wait_until(lambda: not running(pid))


def test_a_runtime_that_is_stopped_is_killed_in_the_end(dagster: Dagster) -> None:
    """SIGSTOP: it cannot end its payload, so its keeper does."""
    definitions = dagster.write(POLITE, launcher="BashLauncher(grace_period=0)")
    definitions.write_text("import dagster_rayslurm.execution.run as e\ne._CANCEL_MARGIN = 1.0\n" + definitions.read_text())
    process = dagster.execute(definitions)
    pid = dagster.up()
    runtime = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(runtime, signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    assert wait_until(lambda: not running(pid) and not running(runtime))


@pytest.mark.parametrize(
    "payload", [pytest.param(POLITE, id="polite", marks=pytest.mark.thorough), pytest.param(STUBBORN, id="stubborn")]
)
def test_dagster_killed_without_a_word_leaves_nothing(payload: str, dagster: Dagster) -> None:
    process = dagster.execute(dagster.write(payload))
    pid = dagster.up()
    process.kill()
    process.wait()
    assert wait_until(lambda: not running(pid))
    record = next((dagster.home / "base" / "runs").glob("*/journal.jsonl"))
    ends = wait_until(lambda: [json.loads(line) for line in record.open() if '"type":"end"' in line])
    assert ends[0]["reason"] == "cancel" and "Dagster process that asked for the run is gone" in ends[0]["message"]


def names(mark: str) -> list[str]:
    """The names of the running processes that have a test's mark."""
    found = []
    for each in marked_processes(mark):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(each.name())
    return found


@pytest.mark.ray
def test_dagster_killed_while_ray_starts_leaves_nothing(dagster: Dagster) -> None:
    launcher = "RayLauncher(object_store_memory_gb=0.1, dashboard=False, grace_period=2)"
    process = dagster.execute(dagster.write(POLITE, launcher=launcher))
    mark = os.environ["PYTEST_OF_RAYSLURM"]

    assert wait_until(lambda: "gcs_server" in names(mark), 60)
    process.kill()
    process.wait()
    assert wait_until(lambda: not marked_processes(mark))


@pytest.mark.ray
def test_cancelling_one_payload_keeps_the_warm_cluster(dagster: Dagster) -> None:
    launcher = "RayLauncher(object_store_memory_gb=0.1, dashboard=False, grace_period=2)"
    definitions = dagster.write(POLITE, launcher=launcher, warm=True)
    process = dagster.execute(definitions)
    pid = dagster.up()
    os.killpg(process.pid, signal.SIGINT)
    process.wait(60)
    assert not running(pid)
    session = next((dagster.home / "base").glob("local/*/sessions/*/1/session.json"))
    cluster_id = json.loads(session.read_text())["cluster_id"]
    (dagster.home / "up").unlink()
    again = dagster.execute(definitions)
    dagster.up()
    again.kill()  # This time Dagster says nothing; the payload goes, the cluster stays.
    again.wait()
    assert json.loads(session.read_text())["cluster_id"] == cluster_id
    from dagster_rayslurm import ComputeResource

    assert ComputeResource(local_base=str(dagster.home / "base")).cleanup_cluster(cluster_id)


def graphql(port: int, query: str, **variables: Any) -> Any:
    body = json.dumps({"query": query, "variables": variables}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/graphql", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)["data"]


@pytest.fixture
def webserver(dagster: Dagster) -> Iterator[Callable[[Path], int]]:
    started: list[subprocess.Popen[bytes]] = []

    def serve(definitions: Path) -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "dagster_webserver", "-f", str(definitions), "-h", "127.0.0.1", "-p", str(port)]
        with open(dagster.home / "log", "ab") as log:
            started.append(subprocess.Popen(command, env=dagster.env, cwd=dagster.home, stdout=log, stderr=log))

        def answers() -> bool:
            try:
                return bool(graphql(port, "{ version }"))
            except OSError:
                return False

        assert wait_until(answers, 90), (dagster.home / "log").read_text()
        return port

    yield serve
    for process in started:
        process.terminate()
        process.wait(30)


LAUNCH = """mutation($name: String!, $location: String!) { launchRun(executionParams: {selector: {
  jobName: "job", repositoryName: $name, repositoryLocationName: $location}, runConfigData: {}}) {
  __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }"""


def test_the_terminate_button(dagster: Dagster, webserver: Callable[[Path], int]) -> None:
    """A run that the webserver launched, in steps of their own processes, terminated as the page does it."""
    port = webserver(dagster.write(POLITE, executor="multiprocess_executor"))
    repository = graphql(port, "{ repositoriesOrError { ... on RepositoryConnection { nodes { name location { name } } } } }")
    node = repository["repositoriesOrError"]["nodes"][0]
    launched = graphql(port, LAUNCH, name=node["name"], location=node["location"]["name"])["launchRun"]
    run_id = launched["run"]["runId"]
    pid = dagster.up()
    answer = graphql(port, "mutation($id: String!) { terminateRun(runId: $id) { __typename } }", id=run_id)
    assert answer["terminateRun"]["__typename"] == "TerminateRunSuccess"
    assert wait_until(lambda: dagster.statuses() == [dg.DagsterRunStatus.CANCELED], 60), dagster.statuses()
    assert (dagster.home / "stopped").exists() and not running(pid)
