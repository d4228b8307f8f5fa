"""Clocks of the nodes, the edge node and the Dagster host that differ by minutes: no wait, no verdict, no figure goes by them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dagster_rayslurm import ComputeResource, SSHConnectionResource
from dagster_rayslurm.connections.shared import connection_to

from ..conftest import pipes_script, run_asset, wait_until
from ..connections.sshd import Sshd
from ..slurm.fixtures import Site
from ..stack.access import Stack

pytestmark = pytest.mark.timeout(120)

Make = Callable[..., ComputeResource]
PLACES = [
    *(("slurm", place, minutes) for place in ("nodes", "edge", "host") for minutes in (-10, 10)),
    ("slurm-session", "edge", -10),  # With the others' clocks off, see test_sessions.py.
    *(pytest.param("slurm-hetjob", place, 10, marks=pytest.mark.thorough) for place in ("nodes", "edge", "host")),
]
TELLS = pipes_script("""
import time
print("the payload's time is", time.time(), flush=True)
until = time.monotonic() + 1
while time.monotonic() < until:  # No sleep: the library that changes the clock breaks it.
    pass
pipes.report_asset_materialization(metadata={"at": time.time()})
""")


def off_by(stack: Stack, minutes: int) -> dict[str, str]:
    """Variables of a process whose clock is off."""
    library = stack.exec("c1", ["sh", "-c", "ls /usr/lib/*/faketime/libfaketimeMT.so.1"]).strip()
    return {"LD_PRELOAD": library, "FAKETIME": f"{minutes:+}m", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}


@contextmanager
def edge_off_by(site: Site, minutes: int) -> Iterator[SSHConnectionResource]:
    """A login to the edge node whose programs all have another time."""
    variables = " ".join(f"{name}={value}" for name, value in off_by(site.stack, minutes).items())
    server = Sshd(site.stack, "edge", f"SetEnv {variables}")
    ssh = SSHConnectionResource(**{**site.ssh.model_dump(), "host": server.host, "port": server.port, "host_key_checking": "off"})
    try:
        there = float(connection_to(ssh).run(["date", "+%s"]).stdout)
        assert abs(there - time.time() - 60 * minutes) < 30, "the clock is not off"
        yield ssh
    finally:
        connection_to(ssh).close()
        server.close()


@pytest.mark.parametrize(("mode", "place", "minutes"), PLACES, indirect=["mode"])
def test_a_clock_is_off(
    mode: str, place: str, minutes: int, make: Make, script: Any, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that is ten minutes fast or slow delays nothing, gives up nothing, and makes no figure wrong by that much."""
    if place == "edge":
        with edge_off_by(site, minutes) as ssh:
            # sbatch hands the variables on; the nodes' clocks are right.
            idle = {"session": {"idle_timeout": 5}} if mode == "slurm-session" else {}
            _run(make(queue_timeout=45, slurm={"ssh": ssh, "site": {"LD_PRELOAD": ""}}, **idle), script)
            assert wait_until(lambda: not site.jobs(), 40), "a session goes by itself, before the way to it does"
        return
    true_time = time.time
    if place == "host":
        monkeypatch.setattr(time, "time", lambda: true_time() + 60 * minutes)
    _run(make(queue_timeout=45, slurm={"site": off_by(site.stack, minutes)} if place == "nodes" else {}), script)


def _run(compute: ComputeResource, script: Any) -> None:
    began = time.monotonic()
    ran = run_asset(compute, script(TELLS))
    failure = run_asset(compute, script("raise SystemExit(3)", "fails.py"), uses_pipes=False).failure
    assert time.monotonic() - began < 45
    assert failure.kind == "payload", failure.description
    figures = {name: ran.metadata[name] for name in ("Elapsed (s)", "Queue wait (s)")}
    assert 1 <= figures["Elapsed (s)"] < 30 and 0 <= figures["Queue wait (s)"] < 45, figures
