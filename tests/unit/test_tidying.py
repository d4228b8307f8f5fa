"""What a run leaves: outputs that come back, attempts that are let go of, what is removed and what a removal may meet."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm.backends.run_dir import Layout, sweep_old
from dagster_rayslurm.execution.cleanup import fetch_outputs
from dagster_rayslurm.execution.run import release_all
from dagster_rayslurm.follow import Evidence
from dagster_rayslurm.ssh.local import LocalConnection


@pytest.mark.parametrize("name", ["../../evil", "ABSOLUTE", "a/../../../evil"])
def test_outputs_stay_in_their_directory_whatever_a_record_says(tmp_path: Path, name: str) -> None:
    """The account over there must not be able to write to this machine."""
    target = str(tmp_path / "evil") if name == "ABSOLUTE" else name
    run_dir, outputs = tmp_path / "run", tmp_path / "home" / "outputs"
    for path in (run_dir / "outputs" / "good", run_dir / "outputs" / target):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("content")
    before = sorted(tmp_path.rglob("*"))
    evidence = Evidence(end={"outputs": [{"name": target}, {"name": "good"}]})
    error = fetch_outputs(evidence, LocalConnection(), str(run_dir), outputs, 1.0)
    assert error is not None and target in str(error) and sorted(tmp_path.rglob("*")) == before
    assert fetch_outputs(Evidence(end={"outputs": [{"name": "good"}]}), LocalConnection(), str(run_dir), outputs, 1.0) is None
    assert (outputs / "good").read_text() == "content"


def test_what_cannot_be_swept_keeps_nobody_from_running(tmp_path: Path) -> None:
    layout, old = Layout(tmp_path), time.time() - 3 * 86400
    for name in ("a", "z"):
        (layout.runs / name).mkdir(parents=True)
        os.utime(layout.runs / name, (old, old))
    for name, at in (("old.followed", old), ("new.followed", time.time()), ("other", old)):
        (layout.runs / name).write_text("")
        os.utime(layout.runs / name, (at, at))
    (layout.runs / "loop").symlink_to("loop")  # It cannot be looked at, as what belongs to another user may not be.
    assert sorted(path.name for path in sweep_old(layout, 1)) == ["a", "old.followed", "z"]


class Attempt:
    def __init__(self, released: list[Any], fails: bool) -> None:
        self.released, self.fails = released, fails

    def release(self, evidence: Evidence) -> None:
        self.released.append((self, evidence))
        if self.fails:
            raise KeyboardInterrupt


def test_all_attempts_are_let_go_of_though_one_is_interrupted() -> None:
    released: list[Any] = []
    held = [Attempt(released, fails) for fails in (False, True, False)]
    own = Evidence(interrupted=True)
    with pytest.raises(KeyboardInterrupt):
        release_all(held, {held[2]: own})  # type: ignore[arg-type, list-item, dict-item]
    assert [attempt for attempt, _ in released] == held and released[2][1] is own


def test_a_removal_that_leaves_something_says_so(tmp_path: Path) -> None:
    """As `rm` does over there."""
    connection = LocalConnection()
    connection.remove(str(tmp_path / "never there"))
    (tmp_path / "tree" / "deep").mkdir(parents=True)
    connection.remove(str(tmp_path / "tree"))
    assert not (tmp_path / "tree").exists()
    (tmp_path / "link").symlink_to(tmp_path)
    connection.remove(str(tmp_path / "link"))
    assert tmp_path.is_dir() and not (tmp_path / "link").is_symlink()
    with pytest.raises(OSError):
        connection.remove("/proc/self/fdinfo")
