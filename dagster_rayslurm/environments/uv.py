"""Environments from lock files of uv.

On this machine, uv checks a project's lock, or locks a requirements file. The wheels of the lock are sent to the cluster. A copy
of uv is sent, too, and installs the wheels there.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli

from ..edge.environment import PREFIX
from ..ssh.local import LocalConnection, locked
from . import UvEnvironment, wheels
from .platforms import Platform, Python, cached
from .recipe import Piece, Recipe

if TYPE_CHECKING:
    from packaging.pylock import Pylock

# The paths of packages that a lock file of uv takes from this machine; "." is the project itself.
_LOCAL = re.compile(rb'^source = \{ (?:editable|virtual|directory|path) = "([^"]*)"', re.MULTILINE)
# What uv says if this machine has no Python for the project.
_LACKS_PYTHON = re.compile(r"cpython-\d|No interpreter found")
_VERSION = re.compile(r"\d+(\.\d+)*")


def wanted_command(python: str | None) -> str:
    """Return the Python to look for on the cluster, given the field `python` of `UvEnvironment`.

    A version such as "3.11.4" gives the command "python3.11", and a command or path stays unchanged. None gives "", which stands
    for all Pythons with a usual name.
    """
    if python is None:
        return ""
    return "python" + ".".join(python.split(".")[:2]) if _VERSION.fullmatch(python) else python


def uv_recipe(environment: UvEnvironment, platform: Platform) -> Recipe:
    """Return the recipe (files to send and commands to run) that installs the locked wheels on the cluster.

    Raises `ValueError` if there is no lock, or if no Python or no wheels fit the platform.
    """
    try:
        from packaging.pylock import Pylock
    except ImportError:
        raise ValueError(f"packaging here is too old to read lock files; {wheels.EXTRA}") from None
    wheels.find_uv()  # Without uv, its error comes before all others.
    if environment.requirements is None:
        top = os.path.abspath(os.path.expanduser(environment.project))
        text, inputs = _export(top, environment.groups)
        lock = Pylock.from_dict(tomli.loads(text))
        python, brought = _choose(platform, environment.python, lock.requires_python)
    else:
        inputs = [os.path.abspath(os.path.expanduser(environment.requirements))]
        top = os.path.dirname(inputs[0])
        if not os.path.isfile(inputs[0]):
            raise ValueError(f"there is no requirements file {inputs[0]}")
        python, brought = _choose(platform, environment.python, None)
        lock = Pylock.from_dict(tomli.loads(wheels.compile_requirements(inputs[0], wheels.Target(platform, python))))
    target = wheels.Target(platform, python)
    files, directories = _wheels(lock, top, target)
    there = wheels.uv_program(target)
    commands: list[list[str | Piece]] = [["tar", "-x", "-f", brought, "-C", PREFIX]] if brought else []
    options = *wheels.ISOLATED, "--no-project", "--allow-existing"
    commands.append([there, "venv", *options, "--python", python.path, PREFIX])
    if files:
        commands.append(wheels.install_command(there, files))
    return Recipe(commands, lambda: wheels.state_of(inputs, directories), platform.runner(None if brought else python))


# ---- The lock


def _lock_file(directory: str) -> str | None:
    """Return the path of the uv.lock in a project's directory or in the nearest parent directory; None if there is no uv.lock.

    The uv.lock of a workspace is in a parent directory of the workspace's members.
    """
    places = [directory, *map(str, Path(directory).parents)]
    return next(filter(os.path.isfile, (os.path.join(each, "uv.lock") for each in places)), None)


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _export(project: str, groups: Sequence[str]) -> tuple[str, list[str]]:
    """Return a project's lock as the text of a pylock.toml (PEP 751), and a list of the paths of pyproject.toml and uv.lock.

    `project` is the absolute path of the project's directory, and `groups` are the dependency groups to include in the text.

    The text is cached until pyproject.toml or uv.lock changes. A text with local packages besides the project itself is not
    cached. Raises `ValueError` if a file is missing, or if uv refuses the lock.
    """
    if not os.path.isfile(manifest := os.path.join(project, "pyproject.toml")):
        raise ValueError(f"there is no pyproject.toml in {project}; name the directory of a project of uv, or use requirements=…")
    if (lock := _lock_file(project)) is None:
        raise ValueError(f"{project} has no uv.lock; run there: uv lock")
    arguments = ["--quiet", "--locked", "--no-editable", "--no-default-groups", *(f"--group={group}" for group in groups)]
    contents = [_content(path) for path in (manifest, lock)]
    digest = hashlib.sha256(repr([wheels.uv_version(), project, arguments, contents]).encode()).hexdigest()
    kept = cached("exports", digest[:32], "pylock.toml")
    if os.path.exists(kept):
        return _content(kept).decode(), [manifest, lock]
    try:
        text = wheels.run_uv("export", *arguments, "--format=pylock.toml", directory=project)
        if set(_LOCAL.findall(contents[-1])) <= {b"."}:  # The lock must fit the manifests of others too.
            LocalConnection().write(kept, text.encode())
        return text, [manifest, lock]
    except ValueError as error:
        if "needs to be updated" in str(error):
            raise ValueError(f"uv.lock in {project} does not fit its pyproject.toml; run there: uv lock") from None
        hint = (
            "; uv needs a Python here that `requires-python` in pyproject.toml allows" if _LACKS_PYTHON.search(str(error)) else ""
        )
        raise ValueError(f"uv refuses the lock of {project}: {error}{hint}") from None


def _wheels(lock: Pylock, top: str, target: wheels.Target) -> tuple[list[Piece], list[str]]:
    """Return the wheels of a lock for the target, and the paths of the source directories from which some wheels are built.

    `top` is the directory from which relative paths in the lock start. Raises `ValueError` if the lock has no fitting wheel of a
    package, or if a wheel cannot be built.
    """
    from packaging.pylock import PylockSelectError

    files, directories = list[Piece](), list[str]()
    try:
        selected = target.select(lock)
    except PylockSelectError as error:
        raise ValueError(_lacking(lock, target, error)) from None
    for package, source in selected:
        name = f"{package.name} {package.version or ''}".strip()
        if wheels.kind_of(source) == "directory":
            directories.append(wheels.path_of(top, source))
        files.append(wheels.wheel_of(name, source, top, target))
    return files, directories


def _lacking(lock: Pylock, target: wheels.Target, error: Exception) -> str:
    """Return the error message for a lock that lacks a fitting wheel for the target.

    `error` is the exception about the missing wheel. If the lock has wheels for a newer glibc, the message names the packages of
    these wheels; otherwise the message contains `error`.
    """
    from packaging.pylock import PylockSelectError

    try:
        selected = replace(target, platform=replace(target.platform, glibc=(2, 99))).select(lock)
    except PylockSelectError:
        return f"the lock file lacks a wheel for {target}: {error}"
    newer = ", ".join(str(package.name) for package, source in selected if not wheels.runs_on(source, target))
    return f"the lock file's wheels of {newer} need a newer glibc than {target} has; lock older versions of them"


# ---- The interpreter


def _choose(platform: Platform, wanted: str | None, allowed: Any) -> tuple[Python, Piece | None]:
    """Return the Python for a new environment, and an archive with this Python; the archive is None if the cluster has it.

    `wanted` is a version such as "3.11", a command or a path; None for any Python. `allowed` is the project's `requires-python`;
    None for any version. Raises `ValueError` if there is no fitting Python.
    """
    if not platform.glibc:
        raise ValueError(f"{platform.place} has another C library than glibc, for which no wheels are fetched")

    def fits(version: tuple[int, ...]) -> bool:
        return version >= (3, 8) and (allowed is None or allowed.contains(".".join(map(str, version))))

    parts = tuple(map(int, wanted.split("."))) if wanted is not None and _VERSION.fullmatch(wanted) else ()
    fitting = [each for each in platform.pythons if each.implementation == "cpython" and fits(each.version)]
    fitting = [each for each in fitting if each.version[: len(parts)] == parts]
    own = sys.version_info[:2]
    if fitting:
        return max(fitting, key=lambda each: (not platform.runner(each), each.version[:2] == own, each.version)), None
    there = ", ".join(f"{each.path} ({'.'.join(map(str, each.version))})" for each in platform.pythons) or "none"
    needs = " ".join(str(each) for each in ("Python", wanted, allowed) if each)
    lacks = f"{platform.place} lacks {needs}, its PATH has {there}"
    minors = [own, *((3, minor) for minor in range(own[1], 7, -1))]
    version = wanted if parts else next((f"{major}.{minor}" for major, minor in minors if fits((major, minor, 99))), None)
    if version is None or (wanted is not None and not parts):
        raise ValueError(f'{lacks}; name one that is there by its path, python="/path/to/python"')
    try:
        return _bring(version, platform)
    except ValueError as error:
        raise ValueError(f"{lacks}, and uv cannot bring one: {error}") from None


def _bring(version: str, platform: Platform) -> tuple[Python, Piece]:
    """Return a Python for the platform, and an archive that has the Python in the directory `interpreter`.

    `version` is the wanted version, such as "3.11". uv downloads the Python, unless the archive is cached on this machine. Raises
    `ValueError` if uv fails.
    """
    request = f"cpython-{version}-linux-{platform.machine}-gnu"
    directory = os.path.dirname(cached("pythons", request, ""))
    with locked("environment-python"):
        kept = [each for each in os.listdir(directory) if each.endswith(".tar.gz")]
        if not kept:
            with tempfile.TemporaryDirectory(dir=directory) as work:
                wheels.run_uv("python", "install", "--no-bin", f"--install-dir={work}", request)
                # uv adds links to it, whose names lack the third number.
                found = next(each for each in Path(work).glob("cpython-*") if not each.is_symlink())
                kept, draft = [f"{found.name.split('-')[1]}.tar.gz"], os.path.join(work, "draft")
                with tarfile.open(draft, "w:gz", compresslevel=1) as archive:
                    archive.add(found, "interpreter")
                os.replace(draft, os.path.join(directory, kept[0]))
    path, full = os.path.join(directory, kept[0]), kept[0].removesuffix(".tar.gz")
    python = Python(f"{PREFIX}/interpreter/bin/python3", tuple(map(int, full.split("."))), "cpython", platform.machine)
    digest = hashlib.sha256(f"{request} {full}".encode()).hexdigest()
    return python, Piece(digest, "interpreter.tar.gz", lambda: path)
