"""A service manager stops Dagster's process while a job waits or runs: it is cancelled, or left to the next attempt.

Each test is a whole run in a process of its own, on the fake Slurm.
"""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from ..conftest import PLAIN_INSTANCE, pipes_script, wait_until
from ..fake_slurm import FakeSlurm

pytestmark = pytest.mark.timeout(120)

DEFINITIONS = """
    import sys
    import dagster as dg
    from dagster_rayslurm import BashLauncher, ComputeResource, SessionConfig, SlurmResource

    @dg.asset
    def slow(context: dg.AssetExecutionContext, compute: ComputeResource):
        run = compute.run(context=context, payload_path="payload.py", secret_env={{"SECRET": "x"}})
        return run.get_materialize_result()

    compute = ComputeResource(
        mode={mode!r}, slurm=SlurmResource(remote_base={base!r}, poll_interval=1), default_launcher=BashLauncher(grace_period=1),
        local_base={base!r}, session=SessionConfig(idle_timeout=2, scope={scope!r}), on_service_stop={policy!r},
    )
    job = dg.define_asset_job("job", "slow", executor_def=dg.{executor})
    defs = dg.Definitions([slow], jobs=[job], resources={{"compute": compute}})

    def made():
        return defs.resolve_job_def("job")

    if __name__ == "__main__":
        import definitions
        with dg.DagsterInstance.get() as instance:
            again = sys.argv[1:]
            how = {{"reexecution_options": dg.ReexecutionOptions.from_failure(again[0], instance)}} if again else {{}}
            tags = {{"dagster/is_resume_retry": "true"}} if again else {{}}
            result = dg.execute_job(dg.reconstructable(definitions.made), instance=instance, tags=tags, **how)
        sys.exit(0 if result.success else 1)
"""
PAYLOAD = pipes_script("""
    import os, pathlib, time
    print("secret", os.environ["SECRET"])
    pathlib.Path({home!r}, "up").write_text(os.environ["SLURM_JOB_ID"])
    while not pathlib.Path({home!r}, "go").exists():
        time.sleep(0.05)
    pipes.report_asset_materialization(metadata={{"job": os.environ["SLURM_JOB_ID"]}})
""")


class Service:
    """A Dagster instance in a directory, whose runs are processes without a terminal."""

    def __init__(self, home: Path, **fields: Any) -> None:
        self.home = home
        (home / "payload.py").write_text(PAYLOAD.format(home=str(home)))
        fields = {
            "base": str(home / "base"),
            "mode": "slurm",
            "scope": "shared",
            "policy": "detach",
            "executor": "multiprocess_executor",
            **fields,
        }
        (home / "definitions.py").write_text(textwrap.dedent(DEFINITIONS).format(**fields))
        (home / "dagster.yaml").write_text(PLAIN_INSTANCE)

    def start(self, *again: str) -> "subprocess.Popen[bytes]":
        env = {**os.environ, "DAGSTER_HOME": str(self.home), "PYTHONPATH": f"{self.home}:{os.getcwd()}"}
        with open(self.home / "log", "ab") as log:
            command = [sys.executable, "definitions.py", *again]
            return subprocess.Popen(command, env=env, cwd=self.home, stdout=log, stderr=log, start_new_session=True)

    def stop(self, process: "subprocess.Popen[bytes]") -> None:
        process.send_signal(signal.SIGTERM)
        process.wait(60)

    def instance(self) -> dg.DagsterInstance:
        return dg.DagsterInstance.from_config(str(self.home))

    @property
    def log(self) -> str:
        return (self.home / "log").read_text()


@pytest.mark.parametrize(
    ("mode", "waits"), [("slurm", False), ("slurm", True), pytest.param("slurm-session", False, marks=pytest.mark.thorough)]
)
def test_the_next_attempt_goes_on_with_the_job(mode: str, waits: bool, tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    """In the executor with a process for each step; the case of `make test` is in one process, which starts sooner."""
    in_one_process = {"executor": "in_process_executor"} if mode == "slurm" and not waits else {}
    service = Service(tmp_path, mode=mode, **in_one_process)
    fake_slurm.set(starts=not waits)
    process = service.start()
    up = (lambda: fake_slurm.jobs("PENDING")) if waits else (tmp_path / "up").exists
    assert wait_until(lambda: up() or process.poll() is not None, 60) and process.poll() is None, service.log
    if waits:
        assert wait_until(lambda: "Slurm job 1" in service.log), service.log
    service.stop(process)
    assert "this Dagster process is stopped, and Slurm job 1 goes on" in service.log
    assert fake_slurm.state(1) == ("PENDING" if waits else "RUNNING") and fake_slurm.cancelled == []
    with service.instance() as instance:
        [run] = instance.get_runs()
        assert run.status == dg.DagsterRunStatus.FAILURE
    retry = service.start(run.run_id)
    assert wait_until(lambda: "reattached to" in service.log or retry.poll() is not None, 60), service.log
    if waits:
        fake_slurm.release(1)
    (tmp_path / "go").write_text("")
    assert retry.wait(60) == 0, service.log
    with service.instance() as instance:
        [found] = instance.fetch_materializations(dg.AssetKey("slow"), limit=9).records
        assert found.asset_materialization is not None and found.asset_materialization.metadata["job"].value == "1"
    assert fake_slurm.jobs() == [1] and wait_until(lambda: not fake_slurm.processes())


@pytest.mark.parametrize(
    ("fields", "by_button"), [({"policy": "cancel"}, False), ({}, True), ({"mode": "slurm-session", "scope": "run"}, False)]
)
def test_otherwise_the_payload_ends(fields: Any, by_button: bool, tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    service = Service(tmp_path, **fields)
    process = service.start()
    assert wait_until(lambda: (tmp_path / "up").exists() or process.poll() is not None, 60), service.log
    if by_button:  # What Dagster does before it ends the process of a run.
        with service.instance() as instance:
            instance.report_run_canceling(instance.get_runs()[0])
    service.stop(process)
    assert "goes on: the next attempt" not in service.log and "[rayslurm] ending the payload" in service.log
    assert wait_until(lambda: not fake_slurm.jobs("PENDING", "RUNNING"))
