"""Make environments on the cluster: one prefix for each recipe, whose name is the hash of the recipe.

The protocol is the same for all kinds: look at the platform of the cluster, write a recipe for it on this machine, send the
files of the recipe that the cluster lacks, and have it run the commands of the recipe once. What comes out is a prefix like one
that was there before.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import shlex
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ..edge import environment as edge
from ..errors import FailureKind, StartError
from ..ssh.base import Connection, ConnectionFailed
from ..ssh.local import locked
from ..upload.bundle import bundle_files
from ..upload.deliver import install, log_progress, mark_installed, missing, place_of, send_files
from . import CommandEnvironment, Environment, PreDeployedEnvironment, SentEnvironment, UvEnvironment

_FORMAT = "rayslurm environment 1"
"""Part of the name of each prefix; a change has all of them made anew."""
_KNOWN_FOR = 300.0
"""Seconds for which this process trusts what it knows of a cluster's platform."""
_LOOK_TIMEOUT, _MAKE_TIMEOUT = 60.0, 3600.0

_platforms: weakref.WeakKeyDictionary[Connection, dict[str, tuple[float, Platform]]] = weakref.WeakKeyDictionary()
"""By connection and wanted Python: when the platform was looked at (`time.monotonic()`), and the platform."""
_recipes: dict[str, tuple[Recipe, object]] = {}
"""By environment and platform: the last recipe, and the state of its inputs on this machine."""


@dataclass(frozen=True)
class Python:
    """An interpreter on the cluster, outside any virtual environment."""

    path: str
    version: tuple[int, ...]
    implementation: str
    machine: str


@dataclass(frozen=True)
class Platform:
    """What environments are made for; `glibc` is empty if the cluster has another C library."""

    place: str
    glibc: tuple[int, ...]
    pythons: tuple[Python, ...]


@dataclass(frozen=True)
class Piece:
    """A file that the cluster needs; `get` returns its path on this machine, and may have to fetch it first."""

    digest: str  # Hash of the content, or of what the file is built from.
    name: str
    get: Callable[[], str]

    @property
    def place(self) -> str:
        """Its path on the cluster, below the base directory."""
        return f"files/{self.digest[:32]}/{self.name}"


@dataclass(frozen=True)
class Recipe:
    """How a prefix is made: commands, some of whose words are files to send, and `edge.PREFIX` for the path of the prefix.

    `inputs` returns the state of the files that the recipe was written from, so that it is written again when one changes.
    """

    commands: Sequence[Sequence[str | Piece]]
    inputs: Callable[[], object]

    @property
    def pieces(self) -> list[Piece]:
        return [word for command in self.commands for word in command if isinstance(word, Piece)]

    def words(self, base: str) -> list[list[str]]:
        """The commands on a cluster with this base directory."""
        return [
            [posixpath.join(base, each.place) if isinstance(each, Piece) else each for each in words] for words in self.commands
        ]

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps([_FORMAT, self.words("")]).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def send_environment(connection: Connection, environment: Environment, base: str, log: Any) -> Environment:
    """The environment, with one that is sent replaced by the prefix that it has become on the cluster.

    The prefix is made if it is missing. Any number of processes may ask at the same time: one makes it, the others wait.

    Raises:
        StartError: the environment cannot be made; the sentence says what to do.
        OSError: the cluster cannot be reached, or a file cannot be sent.
    """
    if not isinstance(environment, SentEnvironment):
        return environment
    try:
        if isinstance(environment, CommandEnvironment):
            return PreDeployedEnvironment(path=_send_commands(connection, environment, base, log))
        recipe = _recipe(connection, environment)
    except ValueError as error:
        raise StartError(FailureKind.CONFIGURATION, f"environment: {error}") from None
    path = posixpath.join(base, "prefixes", recipe.key)
    if missing(connection, base, [path], log):
        with locked(f"environment-{recipe.key[0]}"):
            if missing(connection, base, [path], log):
                _make(connection, recipe, base, path, log)
    return PreDeployedEnvironment(path=path)


def _recipe(connection: Connection, environment: SentEnvironment) -> Recipe:
    """The recipe of an environment; raises `ValueError`, whose sentence says what to do, if there can be none."""
    from .packed import packed_recipe
    from .uv import uv_recipe, wanted_command

    wanted = wanted_command(environment.python) if isinstance(environment, UvEnvironment) else ""
    platforms, now = _platforms.setdefault(connection, {}), time.monotonic()
    at, platform = platforms.get(wanted, (0.0, None))
    if platform is None or now - at > _KNOWN_FOR:
        found = connection.call(edge.platform, wanted, _LOOK_TIMEOUT, repeat=True, timeout=2 * _LOOK_TIMEOUT)
        pythons = tuple(Python(path, tuple(version), name, machine) for path, version, name, machine in found["pythons"])
        platform = Platform(connection.place, tuple(map(int, filter(None, found["glibc"].split(".")))), pythons)
        platforms[wanted] = now, platform
    key = f"{environment!r} {platform!r}"
    known, state = _recipes.get(key, (None, None))
    if known is None or known.inputs() != state:
        write: Callable[[Any, Platform], Recipe] = uv_recipe if isinstance(environment, UvEnvironment) else packed_recipe
        known = write(environment, platform)
        _recipes[key] = known, known.inputs()
    return known


def _make(connection: Connection, recipe: Recipe, base: str, path: str, log: Any) -> None:
    """Send the files that the cluster lacks, and have it run the recipe; raises `StartError` if that fails."""
    began, pieces = time.monotonic(), {posixpath.join(base, each.place): each for each in recipe.pieces}
    lacking = missing(connection, base, list(pieces), log)
    try:
        with ThreadPoolExecutor(8) as pool:
            local = dict(zip(lacking, pool.map(lambda each: pieces[each].get(), lacking), strict=True))
    except (ValueError, OSError) as error:
        raise StartError(FailureKind.ENVIRONMENT, f"environment: {error}") from None
    size = sum(map(os.path.getsize, local.values())) / 2**20
    log.info(f"[rayslurm] environment: sending {len(local)} of {len(pieces)} files, {size:.1f} MiB, to {connection.place}")
    try:
        send_files(connection, base, local, log_progress(log))
        arguments = *posixpath.split(path), recipe.words(base), _MAKE_TIMEOUT
        problem = connection.call(edge.make, *arguments, repeat=True, timeout=_MAKE_TIMEOUT * 2)
    except (ConnectionFailed, TimeoutError):
        raise
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        sentence = f"environment: it cannot be made in {base} on {connection.place}: {' '.join(problem.split())}"
        raise StartError(FailureKind.ENVIRONMENT, sentence)
    mark_installed(connection, path)
    log.info(f"[rayslurm] environment: made {path} in {time.monotonic() - began:.1f} s")


# ---- Commands

_ACTIVATE = """\
# As a login shell does (bash(1)).
[ ! -r /etc/profile ] || . /etc/profile
for _rayslurm in ~/.bash_profile ~/.bash_login ~/.profile; do [ ! -r "$_rayslurm" ] || { . "$_rayslurm"; break; }; done
_rayslurm() { _rayslurm=$?; printf 'this command failed: %s\\n' "$1" >&2; return $_rayslurm; }
"""


def _send_commands(connection: Connection, environment: CommandEnvironment, base: str, log: Any) -> str:
    """Send a directory with an `activate.sh` that runs the commands; returns its path on the cluster."""
    commands = [f"{{ {command}\n}} || _rayslurm {shlex.quote(command)} || return" for command in environment.commands]
    files = {"activate.sh": _ACTIVATE + "\n".join([*commands, ""])}
    if environment.python is not None:
        files["bin/python"] = f'#!/bin/sh\nexec {shlex.quote(environment.python)} "$@"\n'
    with tempfile.TemporaryDirectory(prefix="rayslurm-") as directory:
        paths = {name: os.path.join(directory, os.path.basename(name)) for name in files}
        for name, text in files.items():
            with open(paths[name], "w", encoding="utf-8", errors="surrogateescape") as file:
                file.write(text)
            os.chmod(paths[name], 0o700)
        bundle = bundle_files(paths, argument="environment")
        install(connection, base, [bundle], warn=lambda sentence: log.warning(f"[rayslurm] remote_base: {sentence}"))
    return place_of(base, bundle)
