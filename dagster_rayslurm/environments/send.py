"""Installs environments on the cluster: one prefix for each recipe, named by the hash of the recipe.

A prefix is the directory of an installed environment. A recipe lists the files to send and the commands that build the prefix.
Each file of a recipe is a `Piece`, which can fetch or build the file on this machine.

The steps are the same for uv, pixi and packed environments. This machine detects the platform of the cluster, writes a recipe for
this platform, sends the files of the recipe that the cluster lacks, and runs the commands of the recipe on the cluster once. The
new prefix is then used like a pre-deployed environment.
"""

from __future__ import annotations

import os
import posixpath
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from ..edge import environment as edge
from ..errors import FailureKind, StartError
from ..slurm.config import SlurmQueueConfig
from ..ssh.base import Connection, ConnectionFailed, Progress
from ..ssh.local import locked
from ..upload.bundle import bundle_files
from ..upload.deliver import PROGRESS_INTERVAL, install, log_progress, missing, place_of, send_files
from . import (
    CommandEnvironment,
    ContainerEnvironment,
    Environment,
    PixiEnvironment,
    PreDeployedEnvironment,
    SentEnvironment,
    UvEnvironment,
)
from .container import send_container
from .platforms import FRESH_AGE, PLATFORM_AGE, Platform, look_at
from .recipe import Piece, Recipe, activate_script

_MAKE_TIMEOUT = 3600.0
# Error messages of the system, and of uv with the error numbers of Linux, about a full file system or an exceeded quota.
_FULL = r"No space left on device|[Qq]uota exceeded|os error (28|122)\b"
_REFUSAL_AGE = 10.0  # Seconds for which a cached platform is used again after no recipe could be written for it.
_AT_ONCE = 8  # Number of files that are fetched at once.

# By environment and platform: the last recipe, and the state of its inputs on this machine.
_recipes: dict[str, tuple[Recipe, object]] = {}


def send_environment(
    connection: Connection,
    environment: Environment,
    base: str,
    log: Any,
    queues: Sequence[SlurmQueueConfig] = (),
    progress: Progress | None = None,
    make: bool = True,
) -> Environment:
    """Install a missing environment on the cluster; returns a pre-deployed environment with the path of the installed prefix.

    An environment that is not a `SentEnvironment` is returned unchanged. If several processes need the prefix at the same time,
    one process builds the prefix and the other processes wait.

    Args:
        connection: the connection to the edge node.
        environment: the environment to install.
        base: the absolute path of the base directory.
        log: a logger.
        queues: the prefix is built for the nodes that these configurations ask for; without queues, for the edge node.
        progress: a function that is called during the transfer of each file, with the number of bytes sent and the size of the
            file. If None, long transfers are logged instead.
        make: whether to build a missing prefix. If False, a missing prefix is an error.

    Raises:
        StartError: the environment cannot be made, or the prefix is missing and `make` is False.
        OSError: the cluster cannot be reached, or a file cannot be sent.
    """
    if not isinstance(environment, SentEnvironment):
        return environment

    def warn(sentence: str) -> None:
        log.warning(f"[rayslurm] remote_base: {sentence}")

    def ensure(recipe: Recipe) -> str:
        """Return the path of the prefix of a recipe; builds a missing prefix first."""
        path = recipe.path(base)
        if missing(connection, base, [path], warn):
            if not make:
                raise ValueError(f"it is not on {connection.place} yet; run: rayslurm env push")
            with locked(f"environment-{recipe.key[0]}"):
                if missing(connection, base, [path]):
                    _make(connection, recipe, _title(environment), base, log, progress)
        return path

    try:
        if isinstance(environment, CommandEnvironment):
            path = _send_commands(connection, environment, base, warn)
        elif isinstance(environment, ContainerEnvironment):
            path = send_container(connection, environment, base, ensure)
        else:
            recipe = recipe_for(connection, environment, queues, log)
            if missing(connection, base, [path := recipe.path(base)], warn):
                path = ensure(recipe_for(connection, environment, queues, log, FRESH_AGE))
    except ValueError as error:
        raise StartError(FailureKind.CONFIGURATION, f"environment: {error}") from None
    return PreDeployedEnvironment(path=path, imports=environment.imports)


def _title(environment: SentEnvironment) -> str:
    """Return the kind and the fields of an environment as one line, for the list of environments on a cluster."""
    kind = type(environment).model_fields["kind"].default
    chosen = environment.model_dump(exclude={"kind", "imports"}, exclude_defaults=True)
    for name in ("project", "requirements", "manifest", "archive"):
        if path := getattr(environment, name, None):
            chosen[name] = os.path.abspath(os.path.expanduser(path))
    return " ".join([kind, *(f"{name}={value}" for name, value in chosen.items())])


def recipe_for(
    connection: Connection,
    environment: Environment,
    queues: Sequence[SlurmQueueConfig],
    log: Any,
    age: float = PLATFORM_AGE,
) -> Recipe:
    """Return the recipe of a uv, pixi or packed environment for the platform of the cluster.

    The platform is that of the nodes that `queues` ask for; without queues, that of the edge node. A platform that this machine
    detected up to `age` seconds ago is used again. `log` is a logger. Raises `ValueError` if the environment cannot be installed
    on the cluster; the error message names the remedy.
    """
    wanted, write = _writer(environment)
    platform = look_at(connection, wanted, queues, age, log)
    try:
        return _written(environment, platform, write)
    except ValueError:  # The cluster may have changed since the platform was detected.
        now = look_at(connection, wanted, queues, _REFUSAL_AGE, log)
        if now == platform:
            raise
        return _written(environment, now, write)


def _written(environment: Environment, platform: Platform, write: Callable[[Any, Platform], Recipe]) -> Recipe:
    """Return the recipe of an environment for a platform, as `write` creates it.

    If this process has called `write` for the same arguments before, and no file that the recipe depends on has changed, the
    function returns the earlier recipe.
    """
    key = f"{environment!r} {platform!r}"
    known, state = _recipes.get(key, (None, None))
    if known is None or known.inputs() != state:
        known = write(environment, platform)
        known = replace(known, node_local=getattr(environment, "stage", "") == "node-local")
        _recipes[key] = known, known.inputs()
    return known


def _writer(environment: Environment) -> tuple[str, Callable[[Any, Platform], Recipe]]:
    """Return the Python to look for on the cluster, and the function that creates the recipe of the environment.

    The Python is a command or a path; "" stands for any Python. Only the module of the returned function is imported, because
    each import takes time.
    """
    if isinstance(environment, UvEnvironment):
        from .uv import uv_recipe, wanted_command

        return wanted_command(environment.python), uv_recipe
    if isinstance(environment, PixiEnvironment):
        from .pixi import pixi_recipe

        return "", pixi_recipe
    from .packed import packed_recipe

    return "", packed_recipe


def fetch(pieces: Sequence[Piece], log: Any) -> list[str]:
    """Fetch or build the files of a recipe, and return their paths on this machine; raises `StartError` if this fails."""
    found: list[str] = []
    logged_at = time.monotonic()
    try:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for path in pool.map(lambda piece: piece.get(), pieces):
                found.append(path)
                if time.monotonic() - logged_at > PROGRESS_INTERVAL:
                    logged_at = time.monotonic()
                    log.info(f"[rayslurm] environment: fetched {len(found)} of {len(pieces)} files")
    except (ValueError, OSError) as error:
        raise StartError(FailureKind.ENVIRONMENT, f"environment: {error}") from None
    return found


def _make(connection: Connection, recipe: Recipe, title: str, base: str, log: Any, progress: Progress | None) -> None:
    """Send the recipe's files that the cluster lacks, and run the recipe's commands on the cluster.

    `title` describes the environment in lists of environments. `base` is the base directory. `progress` is called during
    transfers; if `progress` is None, long transfers are logged. Raises `StartError` if a step fails, and `OSError` if the cluster
    cannot be reached.
    """
    began, pieces = time.monotonic(), {posixpath.join(base, each.place): each for each in recipe.pieces}
    path, lacking = recipe.path(base), missing(connection, base, list(pieces))
    local = dict(zip(lacking, fetch([pieces[each] for each in lacking], log), strict=True))
    size = sum(map(os.path.getsize, local.values())) / 2**20
    if recipe.runner:
        log.info("[rayslurm] environment: it is made on a compute node, as the edge node lacks its Python or has other CPUs")
    log.info(f"[rayslurm] environment: sending {len(local)} of {len(pieces)} files, {size:.1f} MiB, to {connection.place}")
    try:
        send_files(connection, base, local, progress or log_progress(log))
        how = {"title": title, "commands": recipe.words(base), "runner": list(recipe.runner)}
        if recipe.node_local:
            how["node_local"] = recipe.words_for_copy(base)
        arguments = *posixpath.split(path), how, _MAKE_TIMEOUT
        problem = connection.call(edge.make, *arguments, repeat=True, timeout=_MAKE_TIMEOUT * 2)
    except (ConnectionFailed, TimeoutError):
        raise
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        remedy = "; make room there, or choose another remote_base" if re.search(_FULL, problem) else ""
        sentence = f"environment: it cannot be made in {base} on {connection.place}: {' '.join(problem.split())}{remedy}"
        raise StartError(FailureKind.ENVIRONMENT, sentence)
    log.info(f"[rayslurm] environment: made {path} in {time.monotonic() - began:.1f} s")


# ---- Commands


def _send_commands(connection: Connection, environment: CommandEnvironment, base: str, warn: Callable[[str], None]) -> str:
    """Send a directory with the script `activate.sh` to the cluster; returns the path of the directory there.

    The script runs the commands that the user has set in `environment`. If `environment` names a Python, the directory also has a
    `bin/python` that starts this Python. `base` is the base directory on the cluster. If a group may write to the base directory,
    the function calls `warn` with a sentence about this.
    """
    texts = {"activate.sh": activate_script(environment.commands)}
    if environment.python is not None:
        home = '"$HOME"/' if environment.python.startswith("~/") else ""
        program = home + shlex.quote(environment.python.removeprefix("~/"))
        texts["bin/python"] = f'#!/bin/sh\nexec {program} "$@"\n'
    with tempfile.TemporaryDirectory(prefix="rayslurm-") as directory:
        paths = {name: os.path.join(directory, os.path.basename(name)) for name in texts}
        for name, text in texts.items():
            with open(paths[name], "w", encoding="utf-8", errors="surrogateescape") as file:
                file.write(text)
            os.chmod(paths[name], 0o700)
        bundle = bundle_files(paths, argument="environment")
        install(connection, base, [bundle], warn=warn)
    return place_of(base, bundle)
