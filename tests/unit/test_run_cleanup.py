"""Outputs, release, removal and sweep at the end of a run."""

import errno
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm.backends.run_dir import Layout, sweep_old
from dagster_rayslurm.execution.cleanup import fetch_outputs
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


def test_a_sweep_skips_unreadable_entries(tmp_path: Path) -> None:
    layout, old = Layout(tmp_path), time.time() - 3 * 86400
    for name in ("a", "z"):
        (layout.runs / name).mkdir(parents=True)
        os.utime(layout.runs / name, (old, old))
    for name, at in (("old.followed", old), ("new.followed", time.time()), ("other", old)):
        (layout.runs / name).write_text("")
        os.utime(layout.runs / name, (at, at))
    (layout.runs / "loop").symlink_to("loop")  # It cannot be looked at, as what belongs to another user may not be.
    assert sorted(path.name for path in sweep_old(layout, 1)) == ["a", "old.followed", "z"]


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
