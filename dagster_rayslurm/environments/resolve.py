"""From a named environment to the interpreter that is started."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from ..ssh.base import check_no_variable, is_rooted
from .config import Environment, PreDeployedEnvironment

PYTHONS = ("bin/python", "bin/python3", "env/bin/python")
"""Where a prefix has its Python; the first that is there is taken."""
ACTIVATE = '. "$1" && shift && exec "$@"'
"""Sources a script and becomes the command; the script and the command are arguments, never part of the text."""


@dataclass(frozen=True)
class Interpreter:
    """A Python and how to get its environment around it."""

    python: str
    activate: str | None = None

    def start(self, *arguments: str) -> list[str]:
        """The command that starts this Python with some arguments."""
        command = [self.python, *arguments]
        if self.activate is None:
            return command
        return ["bash", "-c", ACTIVATE, "rayslurm", self.activate, *command]


def resolve_environment(environment: Environment) -> Interpreter:
    """The interpreter of an environment on this machine.

    Raises:
        ValueError: a pre-deployed environment is not there or has no Python.
    """
    if not isinstance(environment, PreDeployedEnvironment):
        return Interpreter(sys.executable)
    prefix = Path(os.path.abspath(os.path.expanduser(environment.path)))
    activate = prefix / "activate.sh"
    python = next((path for path in map(prefix.joinpath, PYTHONS) if os.access(path, os.X_OK)), None)
    if activate.is_file():
        return Interpreter(str(python or "python3"), str(activate))
    if python is None:
        raise ValueError(
            f"environment: {prefix} has neither bin/python nor activate.sh; point it at a conda prefix, a venv, or a "
            "directory with an activate.sh"
        )
    return Interpreter(str(python))


def path_on_cluster(environment: Environment, over_ssh: bool) -> str:
    """Where an environment is on the cluster, as its user wrote it: a prefix, or this very Python.

    Args:
        environment: the environment.
        over_ssh: whether the cluster is behind SSH; else its nodes see the files of this machine.

    Returns:
        An absolute path, or one that begins with "~/".

    Raises:
        ValueError: it means nothing there.
    """
    if not isinstance(environment, PreDeployedEnvironment):
        if over_ssh:
            raise ValueError(
                "environment: the Python that runs Dagster is not on the cluster; name the environment there: "
                'pre_deployed_env_path="/path/to/env"'
            )
        return sys.executable
    check_no_variable(environment.path, "environment")
    if is_rooted(environment.path):
        return environment.path
    if over_ssh:
        raise ValueError(
            f"environment: {environment.path!r} does not say where it is on the cluster; write an absolute path, or one that "
            'begins with "~/"'
        )
    return os.path.abspath(os.path.expanduser(environment.path))
