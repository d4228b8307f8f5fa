"""From a named environment to the interpreter that is started."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from .config import Environment, PreDeployedEnvironment

_ACTIVATE = '. "$1" && shift && exec "$@"'
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
        return ["bash", "-c", _ACTIVATE, "rayslurm", self.activate, *command]


def resolve_environment(environment: Environment) -> Interpreter:
    """The interpreter of an environment on this machine.

    Raises:
        ValueError: a pre-deployed environment is not there or has no Python.
    """
    if not isinstance(environment, PreDeployedEnvironment):
        return Interpreter(sys.executable)
    prefix = Path(os.path.abspath(os.path.expanduser(environment.path)))
    activate = prefix / "activate.sh"
    pythons = [prefix / "bin" / "python", prefix / "env" / "bin" / "python"]
    python = next((path for path in pythons if os.access(path, os.X_OK)), None)
    if activate.is_file():
        return Interpreter(str(python or "python3"), str(activate))
    if python is None:
        raise ValueError(
            f"environment: {prefix} has neither bin/python nor activate.sh; point it at a conda prefix, a venv, or a "
            "directory with an activate.sh"
        )
    return Interpreter(str(python))
