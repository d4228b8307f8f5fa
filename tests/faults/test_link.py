"""Tests: a cut, silent or broken link between Dagster and the edge node. No job fails, and no output is lost or repeated."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import ComputeResource, SSHConnectionResource
from dagster_rayslurm.ssh.openssh import control_path
from dagster_rayslurm.ssh.pool import connection_to
from stack.link import Link

from ..conftest import Ran, pipes_script, small_ray, wait_until
from ..connections.fixtures import end_master
from ..slurm.fixtures import Running, Site
from .scenarios import (
    AFTER,
    NUMBERED,
    Wire,
    big_file,
    has_ended,
    health_check,
    held_sbatch,
    is_there,
    let_go,
    numbers,
    run_dirs,
    submitted,
)

pytestmark = pytest.mark.timeout(240)

Make = Callable[..., ComputeResource]
Start = Callable[..., Running]

CUT = 75.0
"""Seconds of a long cut: longer than the default timers need to detect a dead login and to give up a read."""

STREAM = pipes_script("""
import os, pathlib, time
data = pathlib.Path(os.environ["RAYSLURM_DATA_DIR"])
(data / "up").write_text("x")
number = 0
while not (data / "go").exists() or number % 100:
    print("line", number, flush=True)
    pipes.report_custom_message(number)
    pipes.log.info(f"logged {number} to its end")
    number += 1
    time.sleep(0.02)
pipes.report_asset_materialization(metadata={"lines": number})
""")
"""Payload that writes numbered lines, messages and log entries until the test lets it end."""


@contextmanager
def login(
    site: Site, client: str, port: int, known_hosts: Path, timeout: int = 20, keepalive: int = 1
) -> Iterator[SSHConnectionResource]:
    """The configuration of a login through a local port, with a keepalive that detects a silent server within seconds."""
    fields = {"host": "127.0.0.1", "port": port, "client": client, "keepalive": keepalive, "connect_timeout": timeout}
    ssh = SSHConnectionResource(**{**site.ssh.model_dump(), **fields, "known_hosts_file": str(known_hosts)})
    try:
        yield ssh
    finally:
        connection_to(ssh).close()
        if client == "openssh":
            for number in range(4):
                end_master(control_path(ssh, number))


@pytest.fixture
def ends_sessions(request: pytest.FixtureRequest) -> None:
    """Ends the sessions of a test over a link without faults."""
    request.getfixturevalue("session_compute")()


def custom_messages(ran: Ran) -> list[int]:
    assert not ran.failures, ran.failures[0].description
    return list(ran.completed[0].get_custom_messages())


def test_lines_and_messages_over_several_disconnects(
    mode: str,
    client: str,
    make: Make,
    start: Start,
    script: Any,
    site: Site,
    tmp_path: Path,
    ends_sessions: None,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Each line, message and log entry of a payload arrives once and in its order, whatever the link does meanwhile."""
    with ExitStack() as stack:
        wire = stack.enter_context(Wire(site.ssh.host, site.ssh.port))
        link = stack.enter_context(Link("127.0.0.1", wire.port))
        ssh = stack.enter_context(login(site, client, link.port, tmp_path / "known"))
        running = start(make(slurm={"ssh": ssh}), script(STREAM))
        running.up()
        for _ in range(2):
            time.sleep(0.4)
            wire.reset()
        time.sleep(0.4)
        wire.silence()
        time.sleep(1.5)
        wire.speak()
        time.sleep(0.4)
        link.cut()
        time.sleep(3)
        link.mend()
        time.sleep(0.4)
        wire.reset()
        let_go(site)
        ran = running.result(90)
        assert wire.accepted > 3
    count = ran.metadata["lines"]
    assert count >= 100 and custom_messages(ran) == list(range(count))
    said = capfd.readouterr()
    assert numbers(said.out) == list(range(count))
    logged = [
        line.split("logged ")[1].split()[0] for line in said.err.splitlines() if "logged " in line and " to its end" in line
    ]
    assert logged == [str(number) for number in range(count)]


def test_a_cut_in_each_phase(
    mode: str, make: Make, start: Start, script: Any, site: Site, tmp_path: Path, ends_sessions: None, capfd: Any
) -> None:
    """A run comes to its end, in one job and with all it said, though the link is cut in each phase that it goes through."""
    with ExitStack() as stack:
        sbatch = stack.enter_context(held_sbatch(site, "after"))
        wire = stack.enter_context(Wire(sbatch.host, sbatch.port, rate=400_000))
        link = stack.enter_context(Link("127.0.0.1", wire.port))
        ssh = stack.enter_context(login(site, "paramiko", link.port, tmp_path / "known"))

        def cut_until(done: Callable[[], Any]) -> None:
            """Cut the link, and mend it once something has happened that nobody here could see."""
            link.cut()
            assert done() is not False
            time.sleep(2.5)  # The login is found to be dead.
            link.mend()

        queue = {"extra_sbatch": ["--hold"], "mem": "2000M"}
        launcher = small_ray(health_check=health_check(site))
        compute = make(queue=queue, slurm={"ssh": ssh}, default_launcher=launcher)
        wire.silence()
        running = start(compute, script(NUMBERED), extra_files=[big_file(tmp_path / "big", 1_500_000)])
        assert wait_until(lambda: wire.accepted)  # Connecting.
        time.sleep(1)
        wire.speak()
        assert wait_until(lambda: wire.sent > 700_000)  # Uploading.
        cut_until(lambda: None)
        wire.rate = None
        assert wait_until(lambda: is_there(site, "after"), 60)  # Submitted, and Dagster does not know it.
        cut_until(sbatch.go)
        job_id = running.job("PENDING")
        cut_until(lambda: site.sh('scontrol release "$1"', job_id))
        assert wait_until(lambda: is_there(site, "starting"), 60)  # The cluster starts.
        cut_until(lambda: site.sh('touch "$1/data/healthy"', site.base))
        running.up()
        cut_until(lambda: None)
        cut_until(lambda: let_go(site) or wait_until(lambda: has_ended(site), 30))  # Ending.
        ran = running.result(90)
        assert custom_messages(ran) == list(range(AFTER))
    assert numbers(capfd.readouterr().out) == list(range(AFTER))
    assert submitted(site) == site.lines("ran") == [ran.metadata["job"]]
    assert run_dirs(site) == []


@pytest.mark.parametrize("mode", ["slurm", pytest.param("slurm-session", marks=pytest.mark.thorough)], indirect=True)
def test_a_cut_for_longer_than_a_minute(
    mode: str, make: Make, start: Start, script: Any, site: Site, tmp_path: Path, ends_sessions: None, capfd: Any
) -> None:
    """A payload that ended while nobody could see it is told in full, though its session is gone by then, too."""
    usual = SSHConnectionResource(host="edge")
    with ExitStack() as stack:
        link = stack.enter_context(Link(site.ssh.host, site.ssh.port))
        timers = {"timeout": usual.connect_timeout, "keepalive": usual.keepalive}
        ssh = stack.enter_context(login(site, "paramiko", link.port, tmp_path / "known", **timers))
        short = {"session": {"idle_timeout": 10}} if mode == "slurm-session" else {}
        running = start(make(slurm={"ssh": ssh}, **short), script(NUMBERED))
        job_id = running.up()
        link.cut()
        until = time.monotonic() + CUT
        time.sleep(3)
        let_go(site)
        assert wait_until(lambda: has_ended(site))
        assert wait_until(lambda: not site.jobs(), 40), site.sh("squeue --me")
        time.sleep(max(0.0, until - time.monotonic()))
        link.mend()
        ran = running.result(60)
        assert custom_messages(ran) == list(range(AFTER))
    assert numbers(capfd.readouterr().out) == list(range(AFTER))
    assert submitted(site) == site.lines("ran") == [job_id] == [ran.metadata["job"]]
    assert run_dirs(site) == []


@pytest.mark.parametrize("mode", ["slurm", pytest.param("slurm-session", marks=pytest.mark.thorough)], indirect=True)
def test_a_link_that_is_away_while_a_job_is_submitted(
    mode: str, make: Make, start: Start, script: Any, site: Site, tmp_path: Path, ends_sessions: None
) -> None:
    """A submission whose answer is lost is looked for until connection_loss_timeout, however long a login may take."""
    del mode
    with ExitStack() as stack:
        sbatch = stack.enter_context(held_sbatch(site, "after"))
        link = stack.enter_context(Link(sbatch.host, sbatch.port))
        ssh = stack.enter_context(login(site, "paramiko", link.port, tmp_path / "known", timeout=1))
        running = start(make(slurm={"ssh": ssh}, connection_loss_timeout=60), script(NUMBERED))
        assert wait_until(lambda: is_there(site, "after"), 60)
        link.cut()
        sbatch.go()
        time.sleep(10)
        link.mend()
        job_id = running.up()
        let_go(site)
        assert running.result(90).result.success
    assert submitted(site) == site.lines("ran") == [job_id]


def test_a_link_that_stays_away_for_too_long(
    mode: str, make: Make, start: Start, script: Any, site: Site, tmp_path: Path, ends_sessions: None
) -> None:
    """After connection_loss_timeout a run has failed of its connection, and says truly that the job may go on, which it does."""
    with ExitStack() as stack:
        link = stack.enter_context(Link(site.ssh.host, site.ssh.port))
        ssh = stack.enter_context(login(site, "paramiko", link.port, tmp_path / "known", timeout=5, keepalive=5))
        # Longer than a busy machine keeps a living link waiting, else the run fails before the cut.
        running = start(make(slurm={"ssh": ssh}, connection_loss_timeout=15), script(NUMBERED))
        job_id = running.up()
        link.cut()
        failure = running.result(90).failure
        link.mend()
    sentence = failure.description or ""
    assert failure.kind == "connection" and not failure.allow_retries, sentence
    assert "out of reach for too long, and the run may go on" in sentence and "127.0.0.1" in sentence
    assert failure.metadata["Slurm job ID"].value == job_id
    assert site.jobs() and not has_ended(site)
    let_go(site)
    assert wait_until(lambda: has_ended(site))
    assert site.lines("ran") == [job_id] and len(run_dirs(site)) == 1
