"""Tests: a network file system that shows changes late or in part. Runs behave as on any other file system."""

import contextlib
import io
import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_rayslurm import ComputeResource
from dagster_rayslurm.follow import Cadence, Follower
from dagster_rayslurm.runtime.protocol.record import JOURNAL, STDIO, RunRecord

from ..conftest import Ran, pipes_script, run_asset, small_ray, wait_until
from ..connections.sshd import Sshd
from ..slurm.fixtures import NODES, Elsewhere, Running, Site
from .lagging import Lag, lagging
from .mounts import shown
from .scenarios import (
    Dagster,
    dagster_on_slurm,  # noqa: F401 - a fixture
    held_in,
    is_there,
)
from .test_cancellation import at_work, interrupted

Make = Callable[..., ComputeResource]

EDGE = Lag(size=2, hidden=2, missing=4, renamed=3, failing=r"^(journal\.jsonl|stdio\.jsonl|session\.json|exit)$", seed=1)
"""The edge node's delays: it sees all changes of others late, and its first read of a record fails."""
NODE = Lag(size=2, missing=4, renamed=3, failing=r"^cancel\.json$", seed=2)
"""The compute nodes' delays. They see existing files at first sight; otherwise Slurm itself could not start a job."""
LATEST = Lag(size=20, least=20, missing=25, renamed=20, seed=3)
"""Long delays: changes of others are seen after 20 to 60 seconds."""

NOT_ON_NODES = """
mkdir -p "$1/env"
cat >"$1/env/activate.sh" <<'E'
case "$(uname -n)" in c[12]) echo "no such module: ray" >&2; exit 9 ;; esac
export PATH=/opt/ray/bin:$PATH
E
"""
"""Script that makes an environment which works on the edge node only."""

LINES = 300
NUMBERED = pipes_script(f"""
import time
for number in range({LINES}):
    print("line", number, flush=True)
    if not number % 10:
        pipes.report_custom_message(number)
    time.sleep(0.02)
pipes.report_asset_materialization(metadata={{"lines": {LINES}}})
""")


@contextmanager
def seen_late(site: Site, edge: Lag) -> Iterator[str]:
    """A base directory of which each compute node and the edge node has a late view of its own."""
    base = f"{site.base}/lagging"
    site.sh('mkdir -p "$1"', base)
    owner, group = (int(site.sh(f"id -{letter}")) for letter in "ug")
    with tempfile.TemporaryDirectory(dir="/tmp") as name, ExitStack() as mounted:
        source = Path(name) / "source"
        source.mkdir(mode=0o700)
        os.chown(source, owner, group)
        for service in ("edge", *NODES):
            view = mounted.enter_context(lagging(source, Path(name) / service, edge if service == "edge" else NODE))
            mounted.enter_context(shown(site.stack, service, view, base))
        yield base


@pytest.fixture
def lagging_base(site: Site, session_compute: Make) -> Iterator[str]:
    with seen_late(site, EDGE) as base:
        yield base
        site.sh("scancel --quiet --me")  # No session outlives what it works on.
        assert wait_until(lambda: not site.jobs(), 45), site.sh("squeue --me")


@pytest.mark.timeout(200)
def test_runs_on_a_lagging_file_system(
    mode: str, make: Make, script: Any, lagging_base: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where what others wrote is seen late and in part, each line and message comes once and in order, and the end is found."""
    compute = make(slurm={"remote_base": lagging_base})
    payload = script(NUMBERED)
    for _ in range(2):
        ran = run_asset(compute, payload)
        check_lines(ran, capfd)
    failure = run_asset(compute, script("import sys; print('last words'); sys.exit(3)", "fails.py"), uses_pipes=False).failure
    assert failure.kind == "payload" and failure.metadata["Exit code"].value == 3
    assert "last words" in str(failure.metadata["Last output"].value)


def check_lines(ran: Ran, capfd: pytest.CaptureFixture[str]) -> None:
    """Checks that each line and message of the numbered payload has arrived once, in order."""
    assert ran.metadata["lines"] == LINES
    assert list(ran.completed[0].get_custom_messages()) == list(range(0, LINES, 10))
    out = [line for line in capfd.readouterr().out.splitlines() if line.startswith("line ")]
    assert out == [f"line {number}" for number in range(LINES)]


POLITE = """
import os, pathlib, signal, sys, time

data = pathlib.Path(os.environ["RAYSLURM_DATA_DIR"])

def end(*_):
    (data / "ended").write_text("x")
    sys.exit()

signal.signal(signal.SIGTERM, end)
for number in range(40):
    print("line", number, flush=True)
(data / "up").write_text("x")
time.sleep(150)
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("mode", ["slurm", pytest.param("slurm-session", marks=pytest.mark.thorough)])
def test_a_run_is_interrupted_there(mode: str, dagster: Dagster, lagging_base: str, script: Any, site: Site) -> None:
    """The payload hears of it in time to end by itself, and nothing of it is left."""
    site.sh('mkdir "$1/data"', lagging_base)
    dagster.site = replace(site, base=lagging_base)
    dagster.payload = script(POLITE, "polite.py")
    with held_in("running", dagster, mode, arguments={"uses_pipes": False}) as held:
        began = time.monotonic()
        held.process.send_signal(signal.SIGINT)
        assert held.process.wait(60) != 0 and time.monotonic() - began < 40, dagster.log[-4000:]
        if mode == "slurm":
            assert wait_until(lambda: not site.jobs()), site.sh("squeue --me")
        assert wait_until(lambda: not at_work(site)), at_work(site)
    assert wait_until(lambda: is_there(dagster.site, "ended")), "the payload did not hear of it"
    assert interrupted(dagster), dagster.log[-4000:]


@pytest.mark.timeout(200)
def test_two_at_once_begin_a_session_there(lagging_base: str, script: Any, site: Site, tmp_path: Path) -> None:
    """From two hosts, neither of which sees at once what the other one does."""
    login = Sshd(site.stack, "g1")
    try:
        there, payload = replace(site, base=lagging_base), script(pipes_script("pass"))
        ssh = {"host": login.host, "port": login.port, "host_key_checking": "off"}
        callers = [Elsewhere(there, tmp_path, payload, ["a"]), Elsewhere(there, tmp_path, payload, ["b"], ssh=ssh)]
        told = [answer for each in callers for answer in each.results()]
    finally:
        login.close()
    assert [each for each in told if "kind" in each] == []
    assert there.submitted() == list({each["job"] for each in told})


WITH_RAY = NUMBERED.replace("import time\n", "import ray, time\n    ray.init()\n")


@pytest.mark.timeout(200)
def test_two_nodes_with_ray_there(slurm_compute: Make, script: Any, lagging_base: str, capfd: pytest.CaptureFixture[str]) -> None:
    """All nodes read there what they are to do, and with which token."""
    queue = {"num_nodes": 2, "mem": "2500M", "cpus_per_node": 2}
    compute = slurm_compute(queue, slurm={"remote_base": lagging_base}, default_launcher=small_ray())
    ran = run_asset(compute, script(WITH_RAY))
    assert len(ran.metadata["Nodes"].records) == 2
    check_lines(ran, capfd)


@pytest.mark.timeout(200)
def test_what_ends_at_once_is_seen_late(slurm_compute: Make, script: Any, site: Site, start: Callable[..., Running]) -> None:
    """Jobs are over before anything of their records is seen: each is told as what it was, and that it never began as well."""
    site.sh(NOT_ON_NODES, site.base)
    with seen_late(site, LATEST) as base:
        make = partial(slurm_compute, slurm={"remote_base": base})
        began = time.monotonic()
        good = start(make(), script(pipes_script("pipes.report_asset_materialization(metadata={'told': 1})"), "good.py"))
        bad = start(make(), script("import sys; print('last words'); sys.exit(3)", "bad.py"), uses_pipes=False)
        none = start(make(pre_deployed_env_path=f"{site.base}/env"), script("pass", "none.py"), uses_pipes=False)
        failure = none.result().failure
        assert failure.kind == "runtime" and "no such module: ray" in (failure.description or "")
        assert time.monotonic() - began < 50, "there is nothing to wait for"
        failure = bad.result().failure
        assert failure.kind == "payload" and failure.metadata["Exit code"].value == 3, failure.description
        assert "last words" in str(failure.metadata["Last output"].value)
        assert good.result().metadata["told"] == 1
        assert time.monotonic() - began > 20, "all was seen at once"


# ---- Whatever the order of things


class Views:
    """A record as a client sees it that is late: each look shows one of the states that the files have been in.

    Args:
        run_dir: where it is really written.
        choose: an integer from 0 to a limit, as chance has it.
    """

    def __init__(self, run_dir: str, choose: Callable[[int], int]) -> None:
        self._choose = choose
        self._files = {name: Path(run_dir, name) for name in (JOURNAL, STDIO)}
        self._history: dict[str, list[bytes]] = {name: [] for name in self._files}
        self.honest = False
        """Whether everything is seen as it is, as in the end it always is."""

    def note(self) -> None:
        """Remember what there is now."""
        for name, path in self._files.items():
            self._history[name].append(path.read_bytes() if path.exists() else b"")

    def read(self, path: str, offset: int, limit: int) -> bytes:
        states = self._history[os.path.basename(path)]
        if self.honest:
            return states[-1][offset : offset + limit]
        what = self._choose(7)
        if what == 0:
            raise OSError(5, "Input/output error")
        if what == 1:
            raise OSError(116, "Stale file handle")
        if what == 2:
            return b""  # The name is not there for now.
        seen = states[len(states) - 1 - min(self._choose(3), len(states) - 1)][offset : offset + limit]
        if what == 3:
            return seen[: self._choose(len(seen))]
        if what == 4 and seen:
            # A page that came before what is to fill it.
            return seen[: self._choose(len(seen))].ljust(len(seen), b"\0")
        return seen


class Handler:
    def __init__(self) -> None:
        self.messages: list[int] = []

    def handle_message(self, message: Any) -> None:
        self.messages.append(message["params"]["n"])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_is_seen_each_part_comes_once_and_in_order(data: st.DataObject) -> None:
    """However writes and stale, torn, hidden or failing reads follow each other, nothing is lost, doubled or out of order."""
    choose = lambda limit: data.draw(st.integers(0, limit))  # noqa: E731
    handler = Handler()
    shown = io.StringIO()
    with tempfile.TemporaryDirectory() as run_dir, contextlib.redirect_stdout(shown):
        record = RunRecord(run_dir, 1 << 20)
        views = Views(run_dir, choose)
        views.note()
        log = logging.getLogger("lagging")
        log.disabled = True
        follower = Follower(views, run_dir, "n", handler, log, Cadence(0.0, 0.0, 0.0))
        lines = messages = 0
        for _ in range(choose(25)):
            what = choose(3)
            if what == 0:
                record.output("stdout", f"{lines} " + "x" * choose(40) + "\n", 0.0)
                lines += 1
            elif what == 1:
                record.write({"type": "pipes", "line": '{"method": "log", "params": {"n": %d}}' % messages})
                messages += 1
            elif what == 2:
                views.note()
            else:
                assert follower.poll(lambda _: None) is not None, "there is no end yet"
        record.end({"type": "end", "nonce": "n", "reason": "exit", "exit_code": 0})
        views.note()
        for _ in range(choose(15)):
            follower.poll(lambda _: None)
        views.honest = True
        for _ in range(10):
            if follower.poll(lambda _: None) is None:
                break
        evidence = follower.evidence
    assert evidence.end is not None and evidence.end["reason"] == "exit"
    assert [int(text.split()[0]) for text in shown.getvalue().splitlines()] == list(range(lines))
    assert handler.messages == list(range(messages))
