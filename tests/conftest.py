"""Fixtures and helpers for all tests: resources, payloads from text, and the check that a test leaves no process or directory."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import hypothesis
import psutil
import pytest
from xdist.scheduler import LoadScopeScheduling

from dagster_rayslurm import BashLauncher, CompletedRun, ComputeResource, Launcher, RayLauncher, RunFailure
from dagster_rayslurm.backends.base import Layout
from dagster_rayslurm.backends.sessions import local

from .core import is_core, unknown_entries
from .fake_slurm import FakeSlurm
from .stack.access import Stack, stack_of_ones_own

pytest_plugins = ["tests.connections.fixtures", "tests.slurm.fixtures", "tests.unit.sending"]

# Property tests have no deadline for an example, because a busy machine would fail them.
hypothesis.settings.register_profile("rayslurm", deadline=None)
hypothesis.settings.load_profile("rayslurm")

MARK = "PYTEST_OF_RAYSLURM"
"""Environment variable with the mark of the current test; every process that the test starts inherits it, detached or not."""


_ON_THE_STACK = ("connections", "docs", "example", "faults", "slurm", "stack")
"""Directories below tests/ with tests that need the Slurm stack."""


_TOGETHER = ("runtime/test_preload.py", "runtime/test_ray_internals.py", "unit/test_pixi_environments.py")
"""Files below tests/ whose tests share a costly fixture, which each process that runs some of them would make."""


class _Scheduling(LoadScopeScheduling):
    """Distributes tests over processes: those with costly fixtures, as those of the stack, by file; others one by one."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if file.split("/")[1] in _ON_THE_STACK or file.endswith(_TOGETHER) else nodeid


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Called by pytest after collection: marks tests that use the Slurm stack `stack`, and those of `make test-stack` `core`.

    Raises ValueError if all tests are collected, and tests/core.py names a test that is not there. (pytest-xdist hides the text
    of a UsageError.)
    """
    if config.args == config.getini("testpaths") and (unknown := unknown_entries([item.nodeid for item in items])):
        raise ValueError(f"tests/core.py names tests that are not there: {', '.join(unknown)}")
    for item in items:
        if "stack" in getattr(item, "fixturenames", ()):
            item.add_marker("stack")
        inside = "callspec" in vars(item) and item.callspec.params.get("env_path")  # type: ignore[attr-defined]
        if is_core(item.nodeid, item.get_closest_marker("stack") is not None) and not inside:
            item.add_marker("core")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Scheduling:
    """Called by pytest-xdist: returns the object that distributes the tests over processes."""
    return _Scheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def scratch_base() -> Iterator[Path]:
    """Gives the test run a TMPDIR of its own with a short name, so that it never sees scratch directories of other runs."""
    path = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(path)
    tempfile.tempdir = None
    yield path
    shutil.rmtree(path, ignore_errors=True)
    os.environ.pop("TMPDIR")
    if before is not None:
        os.environ["TMPDIR"] = before
    tempfile.tempdir = None


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """The Slurm stack: containers with Slurm, an edge node and compute nodes. No other test process uses it meanwhile."""
    with stack_of_ones_own() as stack:
        yield stack


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSlurm]:
    """A fake Slurm on the PATH of this machine, whose jobs really run unless a test sets otherwise."""
    slurm = FakeSlurm(tmp_path / "slurm", monkeypatch)
    yield slurm
    slurm.close()


@pytest.fixture(autouse=True)
def signals_as_usual() -> Iterator[None]:
    """Restores the default handling of signals that the parent ignores (nohup, a shell's `&`), as child processes inherit it.

    Afterwards it forgets the descriptor of a test's event loop, or a signal would write into whatever gets that number next.
    """
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL, signal.SIGTERM: signal.SIG_DFL}
    for signum, handler in usual.items():
        if signal.getsignal(signum) == signal.SIG_IGN:
            signal.signal(signum, handler)
    yield
    signal.set_wakeup_fd(-1)


@pytest.fixture(autouse=True)
def nothing_is_left(scratch_base: Path) -> Iterator[None]:
    """Fails a test that leaves a process or a scratch directory behind."""
    mark = uuid.uuid4().hex
    os.environ[MARK] = mark
    before = set(scratch_base.glob("rs-*"))  # The test that left these has failed already; later tests need not.
    yield
    os.environ.pop(MARK)
    assert wait_until(lambda: not marked_processes(mark)), [p.cmdline() for p in marked_processes(mark)]
    left = lambda: set(scratch_base.glob("rs-*")) - before  # noqa: E731
    assert wait_until(lambda: not left()), left()


def marked_processes(mark: str) -> list[psutil.Process]:
    """The running processes, other than this one, that have a test's mark in their environment."""
    found = []
    for pid in psutil.pids():
        # Reads /proc instead of asking psutil, which is slow, because each test looks at all processes.
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if pid != os.getpid() and f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(psutil.Process(pid))
    return found


def open_files(below: Path) -> list[str]:
    """The open files and directories of this process whose paths begin with `below`; files of other threads may come and go."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [path for path in found if path.startswith(str(below))]


def wait_until(condition: Callable[[], Any], timeout: float = 30.0) -> Any:
    """The condition's first true value, or its last value after `timeout` seconds. A slow condition is evaluated less often."""
    deadline = time.monotonic() + timeout
    while True:
        began = time.monotonic()
        value = condition()
        if value or time.monotonic() > deadline:
            return value
        time.sleep(min(max(0.02, 3 * (time.monotonic() - began)), 0.5))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The `local_base` of the resources of a test."""
    return tmp_path / "base"


@pytest.fixture
def compute(base: Path) -> ComputeResource:
    """A resource in local mode whose payloads run without a Ray cluster."""
    return ComputeResource(local_base=str(base), default_launcher=BashLauncher(grace_period=2))


def end_sessions(base: Path) -> None:
    """End the warm sessions of this machine."""
    for session in local.list_sessions(Layout(base)):
        local.end_session(session)


PLAIN_INSTANCE = """
telemetry: {enabled: false}
compute_logs: {module: dagster._core.storage.noop_compute_log_manager, class: NoOpComputeLogManager}
"""
"""`dagster.yaml` of an instance whose processes write all they say to their own output.

Otherwise Dagster mirrors the output of a step by `tail`, which it kills at the end, so that the last lines may be missing.
"""


def event_log(instance: dg.DagsterInstance) -> str:
    """All messages and errors in the event logs of an instance's runs."""
    said = []
    for run in instance.get_runs():
        for entry in instance.all_logs(run.run_id):
            error = getattr(entry.dagster_event and entry.dagster_event.event_specific_data, "error", None)
            said.append(f"{entry.user_message}\n{error.to_string() if error else ''}")
    return "\n".join(said)


def small_ray(**fields: Any) -> RayLauncher:
    """A Ray launcher for tests, with a small object store, no dashboard and no autoscaler. `fields` override its fields."""
    small = {"object_store_memory_gb": 0.1, "dashboard": False, "ray_args": ["--no-monitor"]}
    defaults = {**small, "startup_timeout": 120, "grace_period": 2}
    return RayLauncher(**{**defaults, **fields})


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a payload from its text, and returns the path."""

    def write(text: str, name: str = "payload.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    """Mounts a file system of a size such as "256k" at `path`; skips the test without root."""
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode != 0:
        if os.environ.get("CI"):
            pytest.fail(f"a small tmpfs cannot be mounted: {mounted.stderr.decode()}")
        pytest.skip("mounting a small tmpfs needs root")
    try:
        yield path
    finally:
        # A runtime still cleans up after it has written its `end`, and keeps its log open until it exits.
        assert wait_until(lambda: subprocess.run(["umount", str(path)], capture_output=True).returncode == 0)


PIPES = """
from dagster_pipes import open_dagster_pipes
with open_dagster_pipes() as pipes:
"""


def pipes_script(body: str) -> str:
    """The text of a payload that opens Dagster Pipes and runs `body` with the variable `pipes`."""
    return PIPES + textwrap.indent(textwrap.dedent(body), "    ")


class Ran:
    """The result of materializing one asset: Dagster's events, and the completed run or the failures."""

    def __init__(self, result: dg.ExecuteInProcessResult, completed: list[CompletedRun], failures: list[RunFailure]) -> None:
        self.result = result
        self.completed = completed
        self.failures = failures

    @property
    def failure(self) -> RunFailure:
        assert len(self.failures) == 1, "the run was expected to fail"
        return self.failures[0]

    @property
    def metadata(self) -> dict[str, Any]:
        materialization = self.result.asset_materializations_for_node("asset_under_test")[0]
        return {key: value.value for key, value in materialization.metadata.items()}


_SHARED = threading.local()


def shared_instance() -> dg.DagsterInstance:
    """A Dagster instance in memory for many runs of this thread, because to make one costs more than a small run."""
    if not hasattr(_SHARED, "instance"):
        _SHARED.instance = dg.DagsterInstance.ephemeral()
    instance: dg.DagsterInstance = _SHARED.instance
    return instance


def run_asset(compute: ComputeResource, payload: Any, *, instance: dg.DagsterInstance | None = None, **arguments: Any) -> Ran:
    """Materialize an asset that calls `run()` once with a payload, and return the result."""
    completed: list[CompletedRun] = []
    failures: list[RunFailure] = []

    @dg.asset
    def asset_under_test(context: dg.AssetExecutionContext, compute: ComputeResource) -> Any:
        try:
            run = compute.run(context=context, payload_path=payload, **arguments)
        except RunFailure as failure:
            failures.append(failure)
            raise
        completed.append(run)
        return run.get_materialize_result()

    instance = instance or shared_instance()
    result = dg.materialize([asset_under_test], resources={"compute": compute}, instance=instance, raise_on_error=False)
    assert result.success == (not failures), [event.message for event in result.all_events if event.is_failure]
    return Ran(result, completed, failures)


__all__ = ["Launcher", "Ran", "pipes_script", "run_asset", "small_disk", "small_ray", "wait_until"]
