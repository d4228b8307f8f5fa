"""Files of a payload are checked before they are sent."""

from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import BashLauncher
from dagster_rayslurm.backends import payload_files
from dagster_rayslurm.backends.layout import remote_base_errors
from dagster_rayslurm.errors import StartError
from dagster_rayslurm.plan import make_plan


def test_an_unreadable_local_file_is_a_configuration_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error does not blame the base directory."""
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

    monkeypatch.setattr(payload_files, "bundle_files", unreadable)
    with (
        pytest.raises(StartError, match=f"cannot be read on this machine: .*{script}") as caught,
        remote_base_errors("/base"),
    ):
        payload_files.pack(plan, "/base", "/base/data")
    assert caught.value.kind == "configuration" and "remote_base" not in str(caught.value)
