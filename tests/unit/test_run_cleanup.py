"""Outputs, release, removal and sweep at the end of a run."""

import errno
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm.edge.base_directory import sweep_runs
from dagster_rayslurm.execution.files import fetch_outputs
from dagster_rayslurm.ssh.local import LocalConnection


@pytest.mark.parametrize("name", ["../../evil", "ABSOLUTE", "a/../../../evil"])
def test_outputs_cannot_leave_their_directory(tmp_path: Path, name: str) -> None:
    """The account over there must not be able to write to this machine."""
    target = str(tmp_path / "evil") if name == "ABSOLUTE" else name
    run_dir, outputs = tmp_path / "run", tmp_path / "home" / "outputs"
    for path in (run_dir / "work" / "good", run_dir / "work" / target):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("content")
    before = sorted(tmp_path.rglob("*"))
    end: dict[str, Any] = {"outputs": [{"name": target}, {"name": "good"}]}
    with pytest.raises(OSError, match=re.escape(repr(target))):
        fetch_outputs(end, LocalConnection(), str(run_dir), outputs, 1.0)
    assert sorted(tmp_path.rglob("*")) == before
    end = {"outputs": [{"name": "gone"}, {"name": "good"}]}
    fetch_outputs(end, LocalConnection(), str(run_dir), outputs, 1.0)
    assert (outputs / "good").read_text() == "content"
    assert end["outputs_failed"] == ["gone: No such file or directory"]


def test_one_output_that_cannot_be_copied_does_not_affect_the_others(tmp_path: Path) -> None:
    class Unreadable(LocalConnection):
        def download(self, path: str, local_path: str, progress: Any = None) -> None:
            if path.endswith("secret"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            super().download(path, local_path, progress)

    (tmp_path / "work").mkdir()
    for name in ("good", "secret"):
        (tmp_path / "work" / name).write_text(name)
    end: dict[str, Any] = {"outputs": [{"name": "secret"}, {"name": "good"}]}
    fetch_outputs(end, Unreadable(), str(tmp_path), tmp_path / "outputs", 1.0)
    assert os.listdir(tmp_path / "outputs") == ["good"] and end["outputs_failed"] == ["secret: Permission denied"]


def test_a_sweep_of_this_machine_removes_old_runs_and_skips_unreadable_entries(tmp_path: Path) -> None:
    old, names = time.time() - 3 * 86400, [f"0123abcd-{step}-0123456789ab" for step in ("a", "b", "c", "d")]
    for place, name in (("runs", names[0]), ("outputs", names[1])):
        (tmp_path / place / name).mkdir(parents=True)
        os.utime(tmp_path / place / name, (old, old))
    for name, at in ((f"{names[2]}.followed", old), (f"{names[3]}.followed", time.time()), ("other", old)):
        (tmp_path / "runs" / name).write_text("")
        os.utime(tmp_path / "runs" / name, (at, at))
    (tmp_path / "runs" / names[1]).symlink_to(names[1])  # It cannot be looked at, as what belongs to another user may not be.
    removed = sweep_runs(str(tmp_path), 86400.0)
    assert sorted(removed) == [f"outputs/{names[1]}", f"runs/{names[0]}", f"runs/{names[2]}.followed"]


def test_an_incomplete_removal_raises(tmp_path: Path) -> None:
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
