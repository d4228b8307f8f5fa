"""An environment that shell commands activate on the cluster, on top of the one that is installed there: `--load-env`."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..ssh.base import Connection, expand_home
from ..upload.bundle import bundle_files
from ..upload.deliver import install, place_of
from . import PreDeployedEnvironment

_HEAD = """\
# The start-up files of a login shell define `module` at most sites.
[ -r /etc/profile ] && . /etc/profile
"""
_BASE = 'if [ -e {path}/activate.sh ]; then . {path}/activate.sh; else PATH={path}/bin:"$PATH"; export PATH; fi\n'


def activation(commands: Sequence[str], path: str | None) -> str:
    """The text of an `activate.sh` that runs the commands, and then activates the environment at a path. Pure."""
    lines = [f"{each} || {{ echo {shlex.quote(f'this command failed: {each}')} >&2; exit 1; }}\n" for each in commands]
    return _HEAD + "".join(lines) + ("" if path is None else _BASE.format(path=shlex.quote(path)))


def send_commands(
    connection: Connection, base: str, commands: Sequence[str], environment: PreDeployedEnvironment | None
) -> PreDeployedEnvironment:
    """Send an `activate.sh` with the commands to the cluster, unless it is there; returns the environment that it makes."""
    path = None if environment is None else expand_home(connection, environment.path)
    with tempfile.TemporaryDirectory(prefix="rayslurm-") as directory:
        script = Path(directory, "activate.sh")
        script.write_text(activation(commands, path))
        bundle = bundle_files({"activate.sh": str(script)}, argument="--load-env")
        install(connection, base, [bundle])
    return PreDeployedEnvironment(path=place_of(base, bundle))
