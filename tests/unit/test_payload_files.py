"""Files of a payload are checked before they are sent."""

from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import BashLauncher
from dagster_rayslurm.backends import payload_files
from dagster_rayslurm.errors import StartError
from dagster_rayslurm.plan import make_plan
from dagster_rayslurm.ssh.local import LocalConnection

from .lines import Log


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
        payload_files.remote_base_errors("/base"),
    ):
        payload_files.pack(plan, "/base", "/base/data")
    assert caught.value.kind == "configuration" and "remote_base" not in str(caught.value)


def warnings(base: Path, script: Path, **launcher: Any) -> list[str]:
    plan = make_plan(
        payload_path=script, launcher=BashLauncher(**launcher), nonce="n", max_output_bytes=1, max_stdio_bytes=1, uses_pipes=False
    )
    log = Log()
    payload_files.deliver(LocalConnection(), str(base), payload_files.pack(plan, str(base), "/base/data"), log)
    return [line for line in log.lines if "imports" in line]


IMPORTS = """
import json, helpers.deep as deep
from ray.data import Dataset
from . import nothing
if True:
    def later():
        from a_package.sub import thing
        import module_that_is_nowhere
"""


def test_modules_that_a_script_imports_from_beside_it_are_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(IMPORTS)
    for path in ("helpers/__init__.py", "a_package/__init__.py", "unused.py", "ray.txt"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("")
    base = tmp_path.parent / f"{tmp_path.name}-base"
    (line,) = warnings(base, script)
    assert "train.py imports a_package, helpers from beside it" in line
    assert not warnings(base, script, working_dir=str(tmp_path)), "it is sent"


@pytest.mark.parametrize("text", [b"import helpers", b"helpers = 1", b"import helpers(", b"\0", b"\xff\xfe", b"(" * 9999])
def test_a_script_may_have_any_content(text: bytes, tmp_path: Path) -> None:
    script = tmp_path / "t.py"
    script.write_bytes(text)
    (tmp_path / "helpers.py").write_text("")
    assert bool(warnings(tmp_path / "base", script)) == (text == b"import helpers")
