"""Tests: the clocks of the nodes, the edge node and the Dagster host differ by minutes. No wait, verdict or figure is wrong."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dagster_rayslurm import ComputeResource, SSHConnectionResource
from dagster_rayslurm.ssh.pool import connection_to

from ..conftest import pipes_script, run_asset, small_ray, wait_until
from ..connections.sshd import Sshd
from ..slurm.fixtures import Site
from ..stack.access import Stack

pytestmark = pytest.mark.timeout(120)

Make = Callable[..., ComputeResource]
PLACES = [
    *(("slurm", place, minutes) for place in ("nodes", "edge", "host") for minutes in (-10, 10)),
    *(("slurm-session", place, -10) for place in ("nodes", "edge")),  # For the others, see test_sessions.py.
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


OFF = {"c1": 10, "c2": -10}
"""Minutes by which the clock of each node is ahead."""


def off_by(stack: Stack, minutes: int) -> dict[str, str]:
    """Environment variables that make the clock of a process wrong by some minutes."""
    library = stack.exec("c1", ["sh", "-c", "ls /usr/lib/*/faketime/libfaketimeMT.so.1"]).strip()
    return {"LD_PRELOAD": library, "FAKETIME": f"{minutes:+}m", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}


def on_nodes(site: Site, minutes: int) -> dict[str, Any]:
    """Fields of a resource whose jobs see a wrong time, in the container as well if they have one."""
    variables = off_by(site.stack, minutes)
    fields: dict[str, Any] = {"slurm": {"site": variables}}
    if site.in_container:
        fields["pre_deployed_env_path"] = site.env_after(f"export LD_PRELOAD={variables['LD_PRELOAD']}")
    return fields


PYTHON = """#!/usr/bin/python3
import functools, select, sys, time
time.sleep = functools.partial(select.select, (), (), ())
exec(sys.argv[-1])
"""
"""An interpreter for the agent on the edge node without `sleep`, which the library that changes the clock breaks."""


@contextmanager
def edge_off_by(site: Site, minutes: int) -> Iterator[SSHConnectionResource]:
    """The configuration of a login to the edge node whose programs all see a wrong time."""
    variables = " ".join(f"{name}={value}" for name, value in off_by(site.stack, minutes).items())
    server = Sshd(site.stack, "edge", f"SetEnv {variables}")
    python = f"{site.base}/python"
    site.connection.make_dir(site.base)
    site.connection.write(python, PYTHON.encode(), mode=0o700)
    there = {"host": server.host, "port": server.port, "host_key_checking": "off", "python": python}
    ssh = SSHConnectionResource(**{**site.ssh.model_dump(), **there})
    try:
        now = float(connection_to(ssh).run(["date", "+%s"]).stdout)
        assert abs(now - time.time() - 60 * minutes) < 30, "the clock is not off"
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
            _run(make(queue_timeout=45, slurm={"ssh": ssh, "site": {"LD_PRELOAD": ""}}, **idle), script, 0)
            assert wait_until(lambda: not site.jobs(), 40), "a session goes by itself, before the way to it does"
        return
    true_time = time.time
    if place == "host":
        monkeypatch.setattr(time, "time", lambda: true_time() + 60 * minutes)
    ahead = minutes if place == "nodes" else -minutes
    _run(make(queue_timeout=45, **(on_nodes(site, minutes) if place == "nodes" else {})), script, ahead)


def _run(compute: ComputeResource, script: Any, ahead: int) -> None:
    """Run a payload that succeeds and one that fails, where the nodes' clocks are so many minutes ahead of this process's."""
    began = time.monotonic()
    ran = run_asset(compute, script(TELLS))
    assert abs(ran.metadata["at"] - (time.time() + 60 * ahead)) < 40, "the clock is not off"
    failure = run_asset(compute, script("raise SystemExit(3)", "fails.py"), uses_pipes=False).failure
    assert time.monotonic() - began < 45
    assert failure.kind == "payload", failure.description
    figures = {name: ran.metadata[name] for name in ("Elapsed (s)", "Queue wait (s)")}
    assert 1 <= figures["Elapsed (s)"] < 30 and 0 <= figures["Queue wait (s)"] < 45, figures


ENVIRONMENT = """
base=$1
/opt/ray/bin/python -m venv --without-pip "$base/env"
cd "$base"/env/lib/python*/site-packages
ls -d /opt/ray/lib/python*/site-packages >clocks.pth
echo 'import functools, select, time; time.sleep = functools.partial(select.select, (), (), ())' >>clocks.pth
"""
"""An environment in which `sleep`, which the library that changes the clock breaks, is replaced."""

ON_TWO_NODES = pipes_script("""
import platform, time
import ray

ray.init()

@ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
def look():
    until = time.monotonic() + 1
    while time.monotonic() < until:
        pass
    return platform.node(), time.time()

clocks = {}
while len(clocks) < 2:
    clocks.update(ray.get([look.remote() for _ in range(4)]))
pipes.report_asset_materialization(metadata=clocks)
""")


@pytest.mark.timeout(200)
def test_clocks_of_two_nodes_with_ray_differ(slurm_compute: Make, script: Any, site: Site) -> None:
    """One node is ten minutes ahead, the other as much behind: the cluster forms, works on both, and tells sane figures."""
    variables = {node: " ".join(f"{name}={value}" for name, value in off_by(site.stack, OFF[node]).items()) for node in OFF}
    site.sh(ENVIRONMENT, site.base)
    cases = " ".join(f"{node}) export {variables[node]} ;;" for node in OFF)
    path = site.env_after(f'case "$(uname -n)" in {cases} esac', f"{site.base}/env/bin/python")
    compute = slurm_compute(
        {"num_nodes": 2, "mem": "2500M", "cpus_per_node": 2},
        pre_deployed_env_path=path,
        default_launcher=small_ray(),
        queue_timeout=60,
    )
    began = time.monotonic()
    ran = run_asset(compute, script(ON_TWO_NODES))
    took = time.monotonic() - began
    for node, minutes in OFF.items():
        assert abs(ran.metadata[node] - (time.time() + 60 * minutes)) < 40, "the clock is not off"
    figures = {name: value for name, value in ran.metadata.items() if name.endswith("(s)")}
    assert set(figures) == {"Elapsed (s)", "Queue wait (s)", "Ray bring-up (s)", "CPU time (s)"}
    cpu_time = figures.pop("CPU time (s)")
    assert took < 150 and all(0 <= value < took for value in figures.values()) and figures["Elapsed (s)"] >= 1, figures
    used = {row.data["node"]: row.data["CPU time (s)"] for row in ran.metadata["Nodes"].records}
    assert used.keys() == OFF.keys() and all(0 < each < 2 * took for each in used.values()), used
    assert abs(cpu_time - sum(used.values())) < 0.1
