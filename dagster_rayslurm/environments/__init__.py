"""Classes for the configuration of payloads' Python environments, and the Python interpreter of an environment.

The module `send` installs an environment on the cluster if the environment is missing there. The module `check` tests an
environment before a job is submitted.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Annotated, Literal, Optional, Union

from ..config import StrictConfig, check_list, check_modules
from ..edge.environment import ACTIVATE, find
from ..fields import check_text, checked, choice, is_env_var, plain_text
from ..ssh.base import check_no_variable, is_rooted

# `activate.sh` of a `CommandEnvironment` prints this text and the command, after the error output of a command that failed.
COMMAND_FAILED = "rayslurm: this command failed: "


def _lines(commands: object) -> object:
    """Return a list of commands unchanged; raises `ValueError` if the list is empty, or if a command is blank or not a string."""
    if isinstance(commands, str):
        raise ValueError(f"{commands!r} is one text; write a list of commands, [{commands!r}]")
    if isinstance(commands, (list, tuple)) and not all(isinstance(each, str) and check_text(each).strip() for each in commands):
        raise ValueError("each command is a line of text")
    if not commands:
        raise ValueError('there is no command; write at least one, such as "module load python"')
    return commands


def _words(values: object) -> list[object]:
    """Return `values` as a list of strings and references to environment variables; raises `ValueError` for any other value."""
    return [value if is_env_var(value) else check_text(value) for value in check_list(values, "texts")]


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
    imports: Annotated[list[str], checked(check_modules)] = []
    """Modules that are imported on the edge node before anything is submitted; a module that cannot be imported fails the run."""


class SentEnvironment(StrictConfig):
    """Base class of environments that are made on the cluster. In local mode payloads run in Dagster's environment instead."""

    imports: Annotated[list[str], checked(check_modules)] = []
    """Modules that are imported on the edge node before anything is submitted; a module that cannot be imported fails the run."""


class CommandEnvironment(SentEnvironment):
    """An environment that shell commands on the cluster activate, such as `module load cuda/12` or `conda activate study`."""

    kind: Literal["command"] = "command"
    """Tells the environments apart in configuration."""
    commands: Annotated[list[str], checked(_lines)]
    """Commands of bash, run after the start-up files of a login shell, before the runtime starts."""
    python: Annotated[Optional[str], plain_text] = None
    """The Python of the environment, a path or a command; None for the `python3` on the PATH after the commands."""


class InstalledEnvironment(SentEnvironment):
    """Base class of environments that are installed on the cluster from files that are sent."""

    stage: Annotated[str, choice("shared", "node-local")] = "shared"
    """Where jobs use the environment: "shared" in the directory where it was made, "node-local" in a copy on each node's own
    disk, for the time of the job."""


class UvEnvironment(InstalledEnvironment):
    """An environment made on the cluster from wheels in a lock file of uv. This machine fetches and sends the wheels."""

    kind: Literal["uv"] = "uv"
    """Tells the environments apart in configuration."""
    project: Annotated[str, plain_text] = "."
    """The project's directory on this machine, with pyproject.toml and uv.lock."""
    groups: Annotated[list[str], checked(_words)] = []
    """Dependency groups of the project to install besides its dependencies."""
    python: Annotated[Optional[str], plain_text] = None
    """The Python on the cluster: a version such as "3.11", a path or a command there; None for one that the project allows,
    preferably of the version that runs Dagster."""
    requirements: Annotated[Optional[str], plain_text] = None
    """A requirements file to install instead of a project's lock file; pinned at its first use."""


class PixiEnvironment(InstalledEnvironment):
    """An environment made on the cluster from packages in a lock file of pixi. This machine fetches and sends the packages."""

    kind: Literal["pixi"] = "pixi"
    """Tells the environments apart in configuration."""
    manifest: Annotated[str, plain_text] = "pixi.toml"
    """The project's manifest on this machine, pixi.toml or pyproject.toml, with pixi.lock beside it."""
    environment: Annotated[str, plain_text] = "default"
    """The environment in the manifest. It needs Python 3.10 or newer from conda."""


class PackedEnvironment(InstalledEnvironment):
    """An environment in an archive on this machine: of conda-pack, venv-pack, pixi-pack --create-executable, or pex."""

    kind: Literal["packed"] = "packed"
    """Tells the environments apart in configuration."""
    archive: Annotated[str, plain_text]
    """Path of the archive; its content shows which tool wrote it."""


class ContainerEnvironment(SentEnvironment):
    """A container image in which the runtime, Ray and the payloads run."""

    kind: Literal["container"] = "container"
    """Tells the environments apart in configuration."""
    image: Annotated[str, plain_text]
    """A path on the cluster, absolute or with `~/`: a SIF file, a squashfs, a directory; a file on this machine, with `./`; or a
    reference such as `docker://rayproject/ray:2.54.0-py312`, which the cluster fetches once."""
    runtime: Annotated[str, choice("apptainer", "charliecloud", "podman", "pyxis")]
    """The program that runs containers on the cluster."""
    mounts: Annotated[list[str], checked(_words)] = []
    """What the container sees of the cluster besides the base directory, the home directory, `data_dir` and /tmp: paths, or
    `SOURCE:TARGET`, or `SOURCE:TARGET:OPTIONS`."""
    options: Annotated[list[str], checked(_words)] = []
    """More options of the runtime's command: `apptainer exec`, `ch-run`, `podman run`, for Pyxis `srun`."""
    python: Annotated[Optional[str], plain_text] = None
    """The Python in the image, a path or a command; None for `python3` on the image's PATH."""
    commands: Annotated[list[str], checked(_words)] = []
    """Commands of bash, run outside the container before it starts, such as `module load apptainer`."""


Environment = Union[
    InheritedEnvironment,
    PreDeployedEnvironment,
    CommandEnvironment,
    UvEnvironment,
    PixiEnvironment,
    PackedEnvironment,
    ContainerEnvironment,
]


@dataclass(frozen=True)
class Interpreter:
    """The Python executable of an environment, and the path of an `activate.sh` to source before Python starts, or None."""

    python: str
    activate: str | None = None
    srun: tuple[str, ...] = ()  # Options with which `srun` starts a container of the image (Pyxis).

    def start(self, *arguments: str) -> list[str]:
        """Return the command that starts this Python with `arguments`, after sourcing `activate.sh` if there is such a file."""
        command = [self.python, *arguments]
        return command if self.activate is None else ["bash", "-c", ACTIVATE, "rayslurm", self.activate, *command]


def resolve_environment(environment: Environment) -> Interpreter:
    """Return the interpreter for payloads on this machine.

    The interpreter is the Python of a pre-deployed environment; for any other environment, the Python that runs Dagster. Raises
    `ValueError` if the path of a pre-deployed environment has neither bin/python nor activate.sh.
    """
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
    """Return the path on the cluster of a pre-deployed environment, or of Dagster's Python for an inherited environment.

    The path is absolute or begins with "~/". The path is "" for an environment that the module `send` installs. `over_ssh` is
    False if Dagster itself runs on the edge node. Raises `ValueError` in two cases: the path of the environment contains a shell
    variable; or `over_ssh` is True, and the environment is an inherited environment or has a relative path.
    """
    if isinstance(environment, SentEnvironment):
        return ""
    if not isinstance(environment, PreDeployedEnvironment):
        if over_ssh:
            raise ValueError(
                "environment: the Python that runs Dagster is not on the cluster; name the environment there: "
                'pre_deployed_env_path="/path/to/env", or send one: environment=UvEnvironment()'
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
