"""What a payload needs of this machine: what cannot be used is said before anything is sent."""

from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import BashLauncher
from dagster_rayslurm.backends import cargo
from dagster_rayslurm.errors import StartError
from dagster_rayslurm.plan import make_plan


def test_a_file_here_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no fault of the directory on the cluster."""
    script = tmp_path / "script.py"
    script.write_text("pass")
    plan = make_plan(
        payload_path=script,
        launcher=BashLauncher(),
        nonce="n",
        max_output_bytes=1,
        max_stdio_bytes=1,
    )

    def unreadable(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(script))

    monkeypatch.setattr(cargo, "bundle_files", unreadable)
    with pytest.raises(StartError, match=f"cannot be read on this machine: .*{script}") as caught, cargo.base_errors("/base"):
        cargo.pack(plan, "/base", "/base/data")
    assert caught.value.kind == "configuration" and "remote_base" not in str(caught.value)
