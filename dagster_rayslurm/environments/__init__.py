"""The Python environments that payloads run in: how configuration names one, and the interpreter that it stands for."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Annotated, Literal, Union

from ..config import StrictConfig, plain_text
from ..edge.environment import ACTIVATE, find
from ..ssh.base import check_no_variable, is_rooted


class InheritedEnvironment(StrictConfig):
    """The Python that runs Dagster, for local mode or when Dagster runs on the cluster's shared file system."""

    kind: Literal["inherited"] = "inherited"
    """Tells the environments apart in configuration."""


class PreDeployedEnvironment(StrictConfig):
    """An environment that is already installed where the payload runs."""

    kind: Literal["pre-deployed"] = "pre-deployed"
    """Tells the environments apart in configuration."""
    path: Annotated[str, plain_text]
    """A prefix with `bin/python` (conda, venv), or a directory with an `activate.sh` to source."""


Environment = Union[InheritedEnvironment, PreDeployedEnvironment]


@dataclass(frozen=True)
class Interpreter:
    """A Python executable, and the `activate.sh` to source before it starts; None without such a script."""

    python: str
    activate: str | None = None

    def start(self, *arguments: str) -> list[str]:
        """The command that starts this Python with the given arguments, after its environment is activated."""
        command = [self.python, *arguments]
        return command if self.activate is None else ["bash", "-c", ACTIVATE, "rayslurm", self.activate, *command]


def resolve_environment(environment: Environment) -> Interpreter:
    """The interpreter of an environment on this machine; raises `ValueError` if there is none."""
    if not isinstance(environment, PreDeployedEnvironment):
        return Interpreter(sys.executable)
    prefix = os.path.abspath(os.path.expanduser(environment.path))
    python, activate = find(prefix)
    if not python and not activate:
        raise ValueError(
            f"environment: {prefix} has neither bin/python nor activate.sh; point it at a conda prefix, a venv, or a "
            "directory with an activate.sh"
        )
    return Interpreter(python or "python3", activate or None)


def path_on_cluster(environment: Environment, over_ssh: bool) -> str:
    """The path of an environment on the cluster, absolute or with "~/" of the cluster; Dagster's Python for the inherited one.

    Without `over_ssh`, this machine is the edge node. Raises `ValueError` if the environment cannot be on the cluster.
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
