"""A run that is taken for dead lives on while a retry goes on with its payload: one result, of the retry."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from ..conftest import PLAIN_INSTANCE, wait_until

ROOT = Path(__file__).parents[2]

DEFINITIONS = """
import subprocess, sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import dagster as dg

import dagster_rayslurm.call as calls
from dagster_rayslurm import BashLauncher, ComputeResource
from dagster_rayslurm.backends.base import Step
from dagster_rayslurm.backends.ownership import FIRST_OWNER
from dagster_rayslurm.backends.base import Layout, run_files, write_cancel_request, write_run_dir
from dagster_rayslurm.backends.sessions.payload import SessionPayload
from dagster_rayslurm.ssh.local import LocalConnection
from dagster_rayslurm.follow import Cadence

BASE = Path({base!r})

class Job:
    job_id, place = "7", ""
    def __init__(self, run_dir):
        self.status, self._run_dir = self, Path(run_dir)
    @property
    def over(self):
        return not self._run_dir.exists() or (self._run_dir / "exit").exists()
    def observe(self, *_, **__):
        return True
    def end_description(self, started):
        return "the job is over" if self.over else None
    def explain(self, *_, **__):
        pass
    def metadata(self, _):
        return {{}}

@dataclass
class Outliving:
    '''Payloads that outlive their Dagster process, as on a cluster.'''
    layout: Layout = Layout(BASE)
    connection: LocalConnection = LocalConnection()
    cadence: Cadence = Cadence(0.05, 0.05, 0.05)
    def check(self, plan): ...
    def sweep(self, days): ...
    def example(self, plan): return ""
    def start(self, plan, run_dir, context, step, hold):
        nonce = plan.payload.nonce
        if not step.reattached:
            write_run_dir(self.connection, run_dir, {{**run_files(plan, context, step), FIRST_OWNER: b""}})
            subprocess.Popen([sys.executable, {runtime!r}, run_dir, nonce, str(BASE)], start_new_session=True)
        site = SimpleNamespace(connection=self.connection, plan=plan, run_dir=run_dir, step=step, end_command="kill",
                               send=lambda *_: {{"ok": False}})
        session = SimpleNamespace(announcement=SimpleNamespace(cluster_id="c"), directory="s/1")
        attempt = SessionPayload(site, session, Job(run_dir), poll_interval=1.0)
        hold(attempt)
        poll = attempt.poll

        def first_poll(evidence):
            print("both follow:", step.run_id, flush=True)
            attempt.poll = poll
            return poll(evidence)

        attempt.poll = first_poll
        return attempt
    def end_abandoned(self, run_dir, grace_period):
        write_cancel_request(self.connection, run_dir, now=False)
    def can_reattach(self, plan, run_dir, step):
        return Path(run_dir, "journal.jsonl").exists()

calls.choose_backend = lambda *_: Outliving()

@dg.asset
def slow(context: dg.AssetExecutionContext, compute: ComputeResource):
    return compute.run(context=context, payload_path="true", uses_pipes=False, secret_env={{"S": "1"}}).get_materialize_result()

compute = ComputeResource(local_base=str(BASE), default_launcher=BashLauncher(grace_period=2))
defs = dg.Definitions([slow], jobs=[dg.define_asset_job("job", "slow", executor_def=dg.in_process_executor)],
                      resources={{"compute": compute}})

def made():
    return defs.resolve_job_def("job")

if __name__ == "__main__":
    import definitions
    with dg.DagsterInstance.get() as instance:
        retried = sys.argv[1:]
        how = {{"reexecution_options": dg.ReexecutionOptions.from_failure(retried[0], instance)}} if retried else {{}}
        tags = {{"dagster/is_resume_retry": "true"}} if retried else {{}}
        result = dg.execute_job(dg.reconstructable(definitions.made), instance=instance, tags=tags, **how)
    sys.exit(0 if result.success else 1)
"""

RUNTIME = """
import os, sys, time
from pathlib import Path
from dagster_rayslurm.runtime.protocol.record import encode

run_dir, nonce, base = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])

def write(record):
    with open(run_dir / "journal.jsonl", "ab") as file:
        file.write(encode(record))

def end(reason, message, code):
    write({"type": "end", "nonce": nonce, "reason": reason, "message": message, "exit_code": code, "signal": None,
           "started_at": time.time(), "ended_at": time.time(), "pipes_messages": 0, "usage": {}, "outputs": [],
           "outputs_left_out": [], "context": {}})
    (run_dir / "exit").write_text("0")
    sys.exit()

write({"type": "start", "at": time.time()})
(base / "started").write_text("x")
until = time.monotonic() + 120
while time.monotonic() < until:
    if (run_dir / "cancel.json").exists():
        end("cancel", "cancelled from Dagster", None)
    if (base / "go").exists():
        end("exit", None, 0)
    time.sleep(0.05)
"""
"""Stands for a runtime that no Dagster process owns: it is told to end by a file, or comes to its own end."""


class Scene:
    """A Dagster instance, its first run, and the retry of that.

    Args:
        path: its directory.
    """

    def __init__(self, path: Path) -> None:
        self.home, self.base = path / "home", path / "base"
        self.home.mkdir()
        self.base.mkdir()
        runtime = path / "runtime.py"
        runtime.write_text(RUNTIME)
        (self.home / "dagster.yaml").write_text(PLAIN_INSTANCE)
        text = DEFINITIONS.format(base=str(self.base), runtime=str(runtime))
        (self.home / "definitions.py").write_text(text)
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, retry_of: str | None = None) -> "subprocess.Popen[bytes]":
        env = {**os.environ, "DAGSTER_HOME": str(self.home), "PYTHONPATH": f"{self.home}:{ROOT}"}
        command = [sys.executable, str(self.home / "definitions.py"), *([retry_of] if retry_of else [])]
        with open(self.home / "log", "ab") as log:
            self.processes.append(subprocess.Popen(command, env=env, cwd=self.home, stdout=log, stderr=log))
        return self.processes[-1]

    def begin(self) -> "tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]":
        """The process of a run that is taken for dead, and that of its retry, which goes on with its payload."""
        old = self.start()
        assert wait_until((self.base / "started").exists, 60), self.log
        with dg.DagsterInstance.from_config(str(self.home)) as instance:
            (run,) = instance.get_runs()
            instance.report_run_failed(run)
        new = self.start(run.run_id)
        assert wait_until(lambda: self.log.count("both follow:") == 2, 60), self.log
        return old, new

    def let_go(self) -> None:
        (self.base / "go").write_text("x")

    @property
    def log(self) -> str:
        return (self.home / "log").read_text()

    def check(self) -> None:
        """The retry has the one result, and the first run says which run that is."""
        with dg.DagsterInstance.from_config(str(self.home)) as instance:
            retry, first = instance.get_runs()
            found = instance.fetch_materializations(dg.AssetKey("slow"), limit=10).records
            events = instance.all_logs(first.run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
        assert retry.status == dg.DagsterRunStatus.SUCCESS and first.status != dg.DagsterRunStatus.SUCCESS
        assert [record.run_id for record in found] == [retry.run_id]
        assert f"run {retry.run_id}" in self.log and "has gone on with this payload" in self.log
        self.failures = [str(event.dagster_event.step_failure_data.user_failure_data) for event in events if event.dagster_event]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.let_go()
    for process in made.processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize("later", ["the old one", pytest.param("the retry", marks=pytest.mark.thorough)])
def test_the_retry_has_the_result_if_either_attempt_sees_the_end_first(scene: Scene, later: str) -> None:
    old, new = scene.begin()
    first, last = (new, old) if later == "the old one" else (old, new)
    last.send_signal(signal.SIGSTOP)
    scene.let_go()
    assert wait_until(lambda: first.poll() is not None, 60), scene.log
    last.send_signal(signal.SIGCONT)
    assert (old.wait(60), new.wait(60)) == (1, 0), scene.log
    scene.check()
    assert len(scene.failures) == 1 and "superseded" in scene.failures[0]


@pytest.mark.thorough
def test_an_interrupt_of_the_old_process_leaves_the_payload_to_the_retry(scene: Scene) -> None:
    old, new = scene.begin()
    old.send_signal(signal.SIGTERM)
    assert old.wait(60) != 0
    (run_dir,) = (each for each in (scene.base / "runs").iterdir() if each.is_dir())
    assert not (run_dir / "cancel.json").exists() and (run_dir / "secrets.json").exists()
    assert new.poll() is None
    scene.let_go()
    assert new.wait(60) == 0, scene.log
    scene.check()


def test_an_interrupt_of_the_retry_ends_the_payload(scene: Scene) -> None:
    old, new = scene.begin()
    new.send_signal(signal.SIGTERM)
    assert (new.wait(60) != 0, old.wait(60)) == (True, 1), scene.log
    assert "cancelled from Dagster" in scene.log
