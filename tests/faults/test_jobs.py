"""Tests: faults of jobs on a Slurm cluster. Each gets a true verdict, and nothing is left on any node."""

import base64
import json
import os
import signal
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import BashLauncher, ComputeResource, RunFailure, SSHConnectionResource
from dagster_rayslurm.slurm.request import render_script
from dagster_rayslurm.slurm.shared_queue import ClusterClock
from dagster_rayslurm.slurm.submit import submit
from dagster_rayslurm.ssh.base import Completed, ConnectionLost
from dagster_rayslurm.ssh.pool import connection_to

from ..conftest import pipes_script, run_asset, small_ray, wait_until
from ..connections.sshd import Sshd
from ..fake_slurm import job_request
from ..slurm.fixtures import Running, Site, dagster_run
from .breaking import docker

pytestmark = pytest.mark.timeout(300)

Make = Callable[..., ComputeResource]
Start = Callable[..., Running]

UP = 'import os, pathlib, time; pathlib.Path(os.environ["RAYSLURM_DATA_DIR"], "up").write_text("x")\n'
SLEEPS = UP + "time.sleep(120)\n"
TWO_NODES = {"num_nodes": 2, "mem": "2500M", "cpus_per_node": 2}
LATER = ["--begin=now+1hour"]


def logged(capfd: pytest.CaptureFixture[str]) -> str:
    return capfd.readouterr().err


# ---- Cancelled by others


def by_root(site: Site) -> str:
    """The words of the failure for a cancel by an administrator, whom only accounting can name."""
    return " by user id 0" if site.stack.accounting else ""


def test_an_admin_cancels_a_running_job(slurm_compute: Make, start: Start, script: Any, site: Site) -> None:
    running = start(slurm_compute(), script(SLEEPS), uses_pipes=False)
    job_id = running.up()
    site.stack.exec("slurmctld", ["scancel", job_id])
    failure = running.result().failure
    assert failure.kind == "cancelled" and f"Slurm job {job_id} was cancelled{by_root(site)}" in (failure.description or "")
    assert failure.metadata["Slurm state"].value == "CANCELLED"


def test_an_admin_cancels_a_pending_job(
    slurm_compute: Make, start: Start, script: Any, site: Site, capfd: pytest.CaptureFixture[str]
) -> None:
    running = start(slurm_compute(queue={"extra_sbatch": LATER}), script("pass"), uses_pipes=False)
    job_id = running.job("PENDING")
    time.sleep(2.5)
    site.stack.exec("slurmctld", ["scancel", job_id])
    failure = running.result(60).failure
    assert failure.kind == "cancelled" and f"Slurm job {job_id} was cancelled{by_root(site)}" in (failure.description or "")
    assert "is waiting for BeginTime" in logged(capfd)


def test_one_of_two_on_a_node_is_cancelled(slurm_compute: Make, start: Start, script: Any, site: Site) -> None:
    compute = slurm_compute(
        queue={"nodelist": "c2", "mem": "1900M", "cpus_per_node": 2}, default_launcher=small_ray(startup_timeout=150)
    )
    payload = script(
        pipes_script("""
        import os, pathlib, ray, time
        ray.init()
        data = pathlib.Path(os.environ["RAYSLURM_DATA_DIR"])
        (data / os.environ["NAME"]).write_text(os.environ["SLURM_JOB_ID"])
        while not (data / "go").exists():
            time.sleep(0.2)

        @ray.remote
        def look():
            return os.environ["NAME"]

        pipes.report_asset_materialization(metadata={"saw": ray.get(look.remote())})
        """)
    )
    victim = start(compute, payload, extra_env={"NAME": "victim"})
    other = start(compute, payload, extra_env={"NAME": "other"})
    victim.up("victim")
    other.up("other")
    site.sh('scancel $(cat "$1/data/victim")', site.base)
    assert victim.result().failure.kind == "cancelled"
    site.sh('touch "$1/data/go"', site.base)
    assert other.result().metadata["saw"] == "other"


# ---- Cancelled from Dagster


@pytest.mark.parametrize(
    ("phase", "executor"),
    [
        pytest.param("pending", "in_process_executor", marks=pytest.mark.thorough),
        ("running", "multiprocess_executor"),
    ],
)
def test_an_interrupted_run_ends_its_job(phase: str, executor: str, site: Site, script: Any, tmp_path: Path) -> None:
    polite = UP + textwrap.dedent("""
        import signal, sys
        def stop(*_):
            pathlib.Path(os.environ["RAYSLURM_DATA_DIR"], "stopped").write_text("x")
            sys.exit(0)
        signal.signal(signal.SIGTERM, stop)
        time.sleep(120)
    """)
    queue = {"partition": "compute", "extra_sbatch": LATER if phase == "pending" else []}
    compute = (
        f"dict(mode='slurm', slurm=SlurmResource(ssh=SSHConnectionResource(**{site.ssh.model_dump()!r}), poll_interval=1, "
        f"remote_base={site.base!r}, queue=SlurmQueueConfig(**{queue!r})), pre_deployed_env_path={site.env_path!r}, "
        f"local_base={str(tmp_path / 'base')!r}, default_launcher=BashLauncher(grace_period=3))"
    )
    with dagster_run(tmp_path, compute, script(polite), executor) as process:
        if phase == "pending":
            assert wait_until(lambda: site.sh("squeue --me --noheader --states=PENDING --format=%A"), 60)
        else:
            assert wait_until(lambda: site.connection.read(f"{site.base}/data/up", 0, 1), 60)
        process.send_signal(signal.SIGINT)
        process.wait(60)
    assert not site.jobs(), site.sh("squeue --me")
    assert phase == "pending" or site.connection.read(f"{site.base}/data/stopped", 0, 1) == b"x"
    assert "CANCELED" in (tmp_path / "log").read_text() or "Interrupted" in (tmp_path / "log").read_text()


# ---- Nodes and daemons


def test_a_node_goes_down(slurm_compute: Make, start: Start, script: Any, site: Site) -> None:
    running = start(slurm_compute(queue={"nodelist": "c2"}), script(SLEEPS), uses_pipes=False)
    job_id = running.up()
    try:
        site.stack.exec("slurmctld", ["scontrol", "update", "nodename=c2", "state=down", "reason=test"])
        failure = running.result(90).failure
    finally:
        # It may be back by itself.
        site.stack.exec("slurmctld", ["scontrol", "update", "nodename=c2", "state=resume"], check=False)
    lost_a_node(failure, job_id)


def test_a_requeued_job_runs_again(
    slurm_compute: Make, start: Start, script: Any, site: Site, capfd: pytest.CaptureFixture[str]
) -> None:
    """What the attempt before reported does not count, and nothing of it is taken for the end."""
    payload = script(
        pipes_script("""
        import os, pathlib, time
        attempt = os.environ.get("SLURM_RESTART_COUNT", "0")
        print("attempt", attempt, "secret", os.environ["SECRET"])
        pipes.report_custom_message(attempt)
        pathlib.Path(os.environ["RAYSLURM_DATA_DIR"], "up").write_text("x")
        if attempt == "0":
            time.sleep(120)
        pipes.report_asset_materialization(metadata={"attempt": attempt})
        """)
    )
    running = start(slurm_compute(queue={"requeue": True}), payload, secret_env={"SECRET": "s"})
    job_id = running.up()
    site.stack.exec("slurmctld", ["scontrol", "requeue", job_id])
    assert wait_until(lambda: "PENDING" in site.sh(f"squeue --noheader --jobs={job_id} --format=%T"), 60)
    # Slurm would wait two minutes by itself. What ends the first attempt's step ends the second's, too, if it is there.
    first = ["pgrep", "-f", rf"^slurmstepd: \[{job_id}\."]
    assert wait_until(lambda: not site.stack.exec("c1", first, check=False), 60)
    site.stack.exec("slurmctld", ["scontrol", "update", f"jobid={job_id}", "starttime=now"])
    ran = running.result()
    assert ran.metadata["attempt"] == "1" and list(ran.completed[0].get_custom_messages()) == ["1"]
    said = capfd.readouterr()
    assert "attempt 0 secret s" in said.out and "attempt 1 secret s" in said.out
    assert "attempt 2 begins, 1 results of the one before are dropped" in said.err


def test_a_node_dies(
    slurm_compute: Make, start: Start, script: Any, site: Site, back_to_idle: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """A machine goes, with a worker of one run and all that could tell of another one, its batch script and srun too.

    The worker is named, and that payload goes on until Slurm notices, too; then Slurm's word is all there is for both.
    """
    ticks = """
        beat = pathlib.Path(os.environ["RAYSLURM_DATA_DIR"], "beat")
        for number in range(600):
            beat.write_text(str(number))
            time.sleep(0.2)
    """
    alone = start(
        slurm_compute(queue={"nodelist": "c2"}), script(SLEEPS.replace('"up"', '"up-alone"'), "alone.py"), uses_pipes=False
    )
    job_alone = alone.up("up-alone")
    payload = script("import ray; ray.init()\n" + UP + textwrap.dedent(ticks))
    running = start(slurm_compute(queue=TWO_NODES, default_launcher=small_ray()), payload, uses_pipes=False)
    running.up()
    (job_id,) = set(site.jobs()) - {job_alone}
    beat = lambda: int(site.connection.read(f"{site.base}/data/beat", 0, 9) or 0)  # noqa: E731
    heard: list[str] = []

    def told() -> bool:
        heard.append(logged(capfd))
        return "node-lost: node c2 is lost" in "".join(heard)

    with dead(site, "c2"):
        assert wait_until(told), "".join(heard)
        before = beat()
        assert wait_until(lambda: beat() > before) and job_id in site.jobs()
        failure = running.result(150).failure
        lost_a_node(failure, job_id)
        assert "c2" in (failure.description or "") or not site.stack.accounting, failure.description
        lost_a_node(alone.result(150).failure, job_alone)
        assert wait_until(lambda: not site.jobs()), site.sh("squeue --me")


@contextmanager
def dead(site: Site, node: str) -> Iterator[None]:
    """Kills a node with all its processes, and brings it back at the end."""
    site.killed = True
    container = site.stack.container(node)
    docker("kill", container)
    try:
        yield
    finally:
        docker("start", container)


def lost_a_node(failure: RunFailure, job_id: str) -> None:
    """Checks that the failure names the job and NODE_FAIL, and that Dagster may retry."""
    assert failure.kind == "allocation" and failure.allow_retries, (failure.kind, failure.description)
    said = failure.description or ""
    assert "NODE_FAIL" in said and job_id in said, said


def test_slurmctld_restarts(slurm_compute: Make, start: Start, script: Any, site: Site) -> None:
    payload = script(pipes_script(textwrap.indent(UP, "") + "time.sleep(12)\nprint('went on')\n"))
    running = start(slurm_compute(), payload)
    running.up()
    subprocess.run(["docker", "restart", "--time=5", site.stack.container("slurmctld")], check=True, capture_output=True)
    ran = running.result(120)
    assert ran.result.success
    assert wait_until(lambda: site.stack.exec("edge", ["scontrol", "ping"], check=False).count("UP"), 60)


def test_sshd_restarts(slurm_compute: Make, start: Start, script: Any, site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    """Every connection is cut in the middle; each line and message arrives once all the same."""
    server = Sshd(site.stack, "edge")
    try:
        login = {**site.ssh.model_dump(), "host": server.host, "port": server.port, "host_key_checking": "off"}
        payload = script(
            pipes_script(
                UP
                + textwrap.dedent("""
                for number in range(400):
                    print("line", number, flush=True)
                    time.sleep(0.02)
                pipes.report_asset_materialization(metadata={"lines": 400})
                """)
            )
        )
        running = start(slurm_compute(slurm={"ssh": SSHConnectionResource(**login)}), payload)
        running.up()
        for _ in range(2):
            time.sleep(1)
            server.stop()
            time.sleep(1)
            server.start()
        ran = running.result(120)
        assert ran.metadata["lines"] == 400
        out = capfd.readouterr().out
        assert [line for line in out.splitlines() if line.startswith("line ")] == [f"line {number}" for number in range(400)]
    finally:
        connection_to(SSHConnectionResource(**login)).close()
        server.close()


# ---- Limits


def chart_of(failure: RunFailure) -> str:
    return base64.b64decode(str(failure.metadata["Usage"].value).rpartition("base64,")[2][:-1]).decode()


def test_out_of_memory(slurm_compute: Make, script: Any, site: Site) -> None:
    payload = script(pipes_script("import time; time.sleep(3); hog = bytearray(600 * 2**20); time.sleep(60)"))
    compute = slurm_compute(queue={"mem": "200M", "nodelist": "c1"})
    failure = run_asset(compute, payload).failure
    assert failure.kind == "allocation" and not failure.allow_retries
    sentence = failure.description or ""
    assert "OUT_OF_MEMORY" in sentence and "200 MiB" in sentence and "SlurmQueueConfig.mem" in sentence
    # Of its last sample: nobody was left to write an end.
    assert float(failure.metadata["Peak memory (MiB)"].value) > 5 and "of 200 MiB" in chart_of(failure)
    # Slurm killed the keeper as well, so the directory is left to the next runtime on the node.
    assert run_asset(compute, script(pipes_script("pass"), "next.py")).result.success
    assert not site.left("c1")


def test_the_time_limit(slurm_compute: Make, script: Any) -> None:
    failure = run_asset(
        slurm_compute(queue={"time_limit": "00:01:00"}), script("import time; time.sleep(200)"), uses_pipes=False
    ).failure
    assert failure.kind == "allocation" and not failure.allow_retries
    sentence = failure.description or ""
    assert "TIMEOUT" in sentence and "00:01:00" in sentence and "time_limit" in sentence


def test_a_queue_timeout(slurm_compute: Make, script: Any) -> None:
    compute = slurm_compute(queue={"extra_sbatch": LATER}, queue_timeout=3)
    failure = run_asset(compute, script("pass"), uses_pipes=False).failure
    assert failure.kind == "allocation"
    assert "queue_timeout=3 s" in (failure.description or "") and "BeginTime" in (failure.description or "")


# ---- The Ray cluster


def test_a_worker_that_cannot_reach_the_head(slurm_compute: Make, script: Any, site: Site) -> None:
    """The second node is told a wrong address; the failure names it, and shows what it tried."""
    wrong = "SLURM_LAUNCH_NODE_IPADDR=192.0.2.1 SLURM_STEP_NODELIST=192.0.2.2,c2"
    path = site.env_after(f'if [ "$(uname -n)" = c2 ]; then export {wrong}; fi')
    site.killed = True  # srun ends the node that was never heard of.
    compute = slurm_compute(queue=TWO_NODES, default_launcher=small_ray(startup_timeout=20), pre_deployed_env_path=path)
    failure = run_asset(compute, script("pass"), uses_pipes=False).failure
    assert failure.kind == "cluster-start"
    sentence = failure.description or ""
    assert "1 of 2 nodes joined, missing: c2" in sentence and "startup_timeout=20" in sentence
    assert "192.0.2.1" in str(failure.metadata["Log: runtime on c2"].value)


def test_a_health_check_fails_on_one_node(slurm_compute: Make, script: Any) -> None:
    launcher = small_ray(health_check='[ "$(uname -n)" = c1 ] || { echo "no InfiniBand"; exit 4; }')
    failure = run_asset(slurm_compute(queue=TWO_NODES, default_launcher=launcher), script("pass"), uses_pipes=False).failure
    assert failure.kind == "cluster-start"
    assert all(word in (failure.description or "") for word in ("c2", "exit code 4", "no InfiniBand"))


def test_fewer_nodes_than_granted_may_do(slurm_compute: Make, script: Any) -> None:
    """`max_workers=0` leaves the second node out; `min_nodes=1` does without it."""
    payload = script(
        pipes_script("""
        import ray
        ray.init()
        pipes.report_asset_materialization(metadata={"nodes": sum(node["Alive"] for node in ray.nodes())})
        """)
    )
    alone = run_asset(slurm_compute(queue=TWO_NODES, default_launcher=small_ray(max_workers=0)), payload)
    assert alone.metadata["nodes"] == 1
    launcher = small_ray(min_nodes=1, health_check='[ "$(uname -n)" = c1 ]')
    assert run_asset(slurm_compute(queue=TWO_NODES, default_launcher=launcher), payload).metadata["nodes"] == 1


@pytest.mark.parametrize("victim", ["raylet", "runtime", "keeper"])
def test_something_is_killed_on_the_head(victim: str, slurm_compute: Make, start: Start, script: Any, site: Site) -> None:
    payload = script("import ray; ray.init()\n" + SLEEPS)
    queue = TWO_NODES if victim == "runtime" else {**TWO_NODES, "num_nodes": 1, "nodelist": "c1"}
    running = start(slurm_compute(queue=queue, default_launcher=small_ray()), payload, uses_pipes=False)
    running.up()
    listed = site.stack.exec("c1", ["ps", "-u", "dev", "-o", "pid=,ppid=,args="]).splitlines()
    rows = [line.split(None, 2) for line in listed]
    nodes = {pid: parent for pid, parent, args in rows if " node " in args and ".pyz" in args and "python" in args.split()[0]}
    keeper = next(pid for pid, parent in nodes.items() if parent not in nodes)
    pids = {
        "raylet": next(pid for pid, _, args in rows if args.split()[0].endswith("/raylet")),
        "keeper": keeper,
        "runtime": next(pid for pid, parent in nodes.items() if parent == keeper),
    }
    site.killed = True
    began = time.monotonic()
    site.stack.exec("c1", ["kill", "-9", pids[victim]])
    failure = running.result(120).failure
    assert failure.kind == ("cluster-lost" if victim == "raylet" else "runtime"), failure.description
    assert time.monotonic() - began < 25


def test_symmetric_run(slurm_compute: Make, script: Any) -> None:
    payload = script(
        pipes_script("""
        import ray
        ray.init()
        pipes.report_asset_materialization(metadata={"nodes": sum(node["Alive"] for node in ray.nodes())})
        """)
    )
    launcher = small_ray(launch_style="symmetric-run", startup_timeout=120)
    assert run_asset(slurm_compute(queue=TWO_NODES, default_launcher=launcher), payload).metadata["nodes"] == 2


def test_symmetric_run_that_starts_nothing(slurm_compute: Make, script: Any) -> None:
    """`ray symmetric-run` ends with 0 when `ray start` fails; that is no success here."""
    launcher = small_ray(launch_style="symmetric-run", ray_args=["--no-such-option=1"], startup_timeout=60)
    failure = run_asset(
        slurm_compute(queue={"mem": "2500M", "cpus_per_node": 2}, default_launcher=launcher), script("pass"), uses_pipes=False
    ).failure
    assert failure.kind == "cluster-start" and "symmetric-run" in (failure.description or "")


# ---- Submission


class CutOff:
    """A connection that breaks once, before or after it has run a command."""

    def __init__(self, connection: Any, before: bool) -> None:
        self._connection = connection
        self._before = before
        self.broken = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def run(self, command: Any, *more: Any) -> Completed:
        if any("sbatch" in word for word in command) and not self.broken:
            self.broken += 1
            if not self._before:
                self._connection.run(command, *more)
            raise ConnectionLost("the connection broke")
        return self._connection.run(command, *more)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_submission_that_is_cut_off_makes_one_job(before: bool, site: Site) -> None:
    connection = CutOff(site.connection, before)
    name = f"rayslurm-cut-{os.path.basename(site.base)[2:]}"
    job = f"#!/bin/sh\n#SBATCH --job-name={name} --begin=now+1hour\ntrue\n".encode()
    warnings: list[str] = []
    clock = ClusterClock(site.connection)
    request = job_request(name, "")
    submitted = submit(connection, f"{site.base}/runs/x", {"job.sh": job}, request, clock, warnings.append)  # type: ignore[arg-type]
    found = site.sh(f"squeue --me --noheader --name={name} --format=%A").split()
    site.sh(f"scancel --name={name}")
    assert connection.broken == 1 and len(warnings) == 1
    assert found == [submitted.job_id] == site.sh('cat "$1/runs/x/job_id"', site.base).split()


@pytest.mark.parametrize(("asked", "found"), [("compute", "compute"), (None, "gpu")])
def test_variables_of_sbatch_fill_gaps_and_change_nothing(asked: str | None, found: str, site: Site) -> None:
    connection = site.login(SBATCH_PARTITION="gpu", SBATCH_JOB_NAME="x", SBATCH_TIMELIMIT="2", SBATCH_HOLD="1")
    name = f"rayslurm-vars-{os.path.basename(site.base)[2:]}"
    request = job_request(name, "", partition=asked, extra_sbatch=("--begin=now+1hour",))
    job = render_script(request, ["true"], f"{site.base}/runs/x", {}).encode()
    files = {"job.sh": job}
    submitted = submit(connection, f"{site.base}/runs/x", files, request, ClusterClock(site.connection), print)
    shown = site.sh(f"squeue --noheader --jobs={submitted.job_id} --format='%P %j %l'").split()
    site.sh(f"scancel {submitted.job_id}")
    assert shown == [found, name, "1:00:00"]


def test_two_runs_at_once_from_two_processes(slurm_compute: Make, start: Start, script: Any) -> None:
    payload = script(pipes_script('pipes.report_asset_materialization(metadata={"x": 1})'))
    compute = slurm_compute()
    several = [start(compute, payload) for _ in range(6)]
    assert all(running.result().metadata["x"] == 1 for running in several)


def test_odd_characters_everywhere(slurm_compute: Make, tmp_path: Path, site: Site) -> None:
    """In the base directory, names of files, arguments, variables, and what Slurm is told."""
    odd = 'it\'s "$HOME"; `id` & é | \\ % * #'
    directory = tmp_path / odd.replace("/", "")
    directory.mkdir()
    (directory / f"{odd}.py").write_text(
        pipes_script("""
        import json, os, sys
        pipes.report_asset_materialization(metadata={
            "argv": json.dumps(sys.argv[1:]), "value": os.environ["VALUE"], "site": os.environ["SITE"],
            "here": json.dumps(sorted(os.listdir("."))),
        })
        """)
    )
    (directory / f"data {odd}").write_text("x")
    compute = slurm_compute(slurm={"remote_base": f"{site.base}/{odd}", "site": {"SITE": odd}})
    # Newlines too, where nothing but the payload reads them.
    argv = ["python", f"{odd}.py", odd, "two\nlines", ""]
    launcher = BashLauncher(working_dir=str(directory))
    ran = run_asset(compute, argv, launcher=launcher, extra_env={"VALUE": odd + "\n"}, extra_files=[directory / f"data {odd}"])
    metadata = ran.metadata
    assert json.loads(metadata["argv"]) == [odd, "two\nlines", ""]
    assert metadata["value"] == odd + "\n" and metadata["site"] == odd
    assert json.loads(metadata["here"]) == sorted([f"data {odd}", f"{odd}.py"])
