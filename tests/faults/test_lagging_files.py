"""A network file system that shows things late, in part, or not at first: runs are as they are on any other."""

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_rayslurm import ComputeResource
from dagster_rayslurm.follow import Cadence, Follower
from dagster_rayslurm.runtime.record import JOURNAL, STDIO, RunRecord

from ..conftest import pipes_script, run_asset
from ..slurm.fixtures import NODES, Site
from .lagging import Lag, lagging
from .mounts import shown

Make = Callable[..., ComputeResource]

EDGE = Lag(size=2, hidden=2, missing=4, renamed=3, failing=r"^(journal\.jsonl|stdio\.jsonl|session\.json|exit)$", seed=1)
"""All that others do comes late here, and looking at a record fails at first."""
NODE = Lag(size=2, missing=4, renamed=3, failing=r"^cancel\.json$", seed=2)
"""What is there when a node looks for the first time is seen: else Slurm itself could not start a job there."""

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


@pytest.fixture
def lagging_base(site: Site, tmp_path: Path) -> Iterator[str]:
    """A base directory on a file system of which each node, and the edge, has a view of its own."""
    base = f"{site.base}/lagging"
    site.sh('mkdir -p "$1"', base)
    owner, group = (int(site.sh(f"id -{letter}")) for letter in "ug")
    with tempfile.TemporaryDirectory(dir="/tmp") as name, ExitStack() as mounted:
        source = Path(name) / "source"
        source.mkdir(mode=0o700)
        os.chown(source, owner, group)
        for service in ("edge", *NODES):
            view = mounted.enter_context(lagging(source, Path(name) / service, EDGE if service == "edge" else NODE))
            mounted.enter_context(shown(site.stack, service, view, base))
        yield base


@pytest.mark.timeout(200)
def test_runs_on_a_lagging_file_system(
    mode: str, make: Make, script: Any, lagging_base: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where what others wrote is seen late and in part, each line and message comes once and in order, and the end is found."""
    idle = {"session": {"idle_timeout": 15}} if mode == "slurm-session" else {}
    compute = make(slurm={"remote_base": lagging_base}, **idle)
    payload = script(NUMBERED)
    for _ in range(2):
        ran = run_asset(compute, payload)
        assert ran.metadata["lines"] == LINES
        assert list(ran.completed[0].get_custom_messages()) == list(range(0, LINES, 10))
        out = [line for line in capfd.readouterr().out.splitlines() if line.startswith("line ")]
        assert out == [f"line {number}" for number in range(LINES)]
    failure = run_asset(compute, script("import sys; print('last words'); sys.exit(3)", "fails.py"), uses_pipes=False).failure
    assert failure.kind == "payload" and failure.metadata["Exit code"].value == 3
    assert "last words" in str(failure.metadata["Last output"].value)


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
    said: list[str] = []
    with tempfile.TemporaryDirectory() as run_dir:
        record = RunRecord(run_dir, 1 << 20)
        views = Views(run_dir, choose)
        views.note()
        log = logging.getLogger("lagging")
        log.disabled = True
        follower = Follower(views, run_dir, "n", handler, log, Cadence(0.0, 0.0, 0.0))
        follower._show = lambda _, text: said.append(text)  # type: ignore[method-assign]
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
                assert follower.turn(lambda _: None) is not None, "there is no end yet"
        record.end({"type": "end", "nonce": "n", "reason": "exit", "exit_code": 0})
        views.note()
        for _ in range(choose(15)):
            follower.turn(lambda _: None)
        views.honest = True
        for _ in range(10):
            if follower.turn(lambda _: None) is None:
                break
        evidence = follower.evidence
    assert evidence.end is not None and evidence.end["reason"] == "exit"
    assert [int(text.split()[0]) for text in "".join(said).splitlines()] == list(range(lines))
    assert handler.messages == list(range(messages))
