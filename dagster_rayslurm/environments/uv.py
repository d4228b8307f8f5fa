"""Environments from lock files of uv.

uv writes or checks the lock here, and installs on the cluster, where it is sent as well.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import tomli

from ..edge.environment import PREFIX
from ..ssh.local import locked
from . import UvEnvironment, wheels
from .platforms import Platform, Python, cached
from .recipe import Piece, Recipe

# The paths of packages that a lock file of uv takes from this machine; "." is the project itself.
_LOCAL = re.compile(rb'^source = \{ (?:editable|virtual|directory|path) = "([^"]*)"', re.MULTILINE)
_VERSION = re.compile(r"\d+(\.\d+)*")


def wanted_command(python: str | None) -> str:
    """The command or path of the Python to look for on the cluster; "" for all that have a usual name."""
    if python is None:
        return ""
    return "python" + ".".join(python.split(".")[:2]) if _VERSION.fullmatch(python) else python


def uv_recipe(environment: UvEnvironment, platform: Platform) -> Recipe:
    """How the environment is made on the platform; raises `ValueError` if it cannot be made."""
    try:
        from packaging.pylock import Pylock, PylockSelectError
    except ImportError:
        raise ValueError(f"packaging here is too old to read lock files; {wheels.EXTRA}") from None
    uv, version = wheels.find_uv()
    top = os.path.abspath(os.path.expanduser(environment.project))
    if environment.requirements is None:
        text, inputs = _export(uv, version, top, environment.groups), [os.path.join(top, "pyproject.toml"), *_lock_file(top)]
        lock = Pylock.from_dict(tomli.loads(text))
        python, brought = _choose(uv, platform, environment.python, lock.requires_python)
    else:
        python, brought = _choose(uv, platform, environment.python, None)
        inputs = [os.path.abspath(os.path.expanduser(environment.requirements))]
        if not os.path.isfile(inputs[0]):
            raise ValueError(f"there is no requirements file {inputs[0]}")
        top = os.path.dirname(inputs[0])
        lock = Pylock.from_dict(tomli.loads(wheels.compile_requirements(uv, inputs[0], platform, python)))
    tags, directories, files = wheels.tags_of(platform, python), [], []
    try:
        for package, source in lock.select(environment=wheels.markers_of(python), tags=tags):
            name = f"{package.name} {package.version or ''}".strip()
            if wheels.kind_of(source) == "directory":
                directories.append(wheels.path_of(top, source))
            files.append(wheels.wheel_of(uv, name, source, top, platform, python, set(tags)))
    except PylockSelectError as error:
        where, newest = wheels.described(platform, python), replace(platform, glibc=(2, 99))
        try:
            selected = lock.select(environment=wheels.markers_of(python), tags=wheels.tags_of(newest, python))
            newer = [str(package.name) for package, source in selected if not wheels.runs_on(source, set(tags))]
        except PylockSelectError:
            raise ValueError(f"the lock file lacks a wheel for {where}: {error}") from None
        needs = f"the lock file's wheels of {', '.join(newer)} need a newer glibc than {where} has"
        raise ValueError(f"{needs}; lock older versions of them") from None
    there = wheels.uv_program(uv, version, platform, python)
    unpack: list[list[str | Piece]] = [["tar", "-x", "-f", brought, "-C", PREFIX]] if brought else []
    commands: list[list[str | Piece]] = [
        *unpack,
        [there, "venv", *wheels.ISOLATED, "--no-project", "--allow-existing", "--python", python.path, PREFIX],
    ]
    if files:
        commands.append(wheels.install_command(there, files))

    return Recipe(commands, lambda: wheels.state_of(inputs, directories), platform.runner(None if brought else python))


# ---- The lock


def _lock_file(directory: str) -> Iterator[str]:
    """The lock file of a project: in its directory, or in one above it, for a member of a workspace."""
    while not os.path.isfile(path := os.path.join(directory, "uv.lock")):
        directory, child = os.path.dirname(directory), directory
        if directory == child:
            return
    yield path


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _export(uv: str, version: str, project: str, groups: Sequence[str]) -> str:
    """The lock of a project as a pylock.toml (PEP 751), kept while the lock and the project's only manifest stay as they are."""
    manifest = os.path.join(project, "pyproject.toml")
    if not os.path.isfile(manifest):
        raise ValueError(f"there is no pyproject.toml in {project}; name the directory of a project of uv, or use requirements=…")
    if not any(_lock_file(project)):
        raise ValueError(f"{project} has no uv.lock; run there: uv lock")
    arguments = ["--quiet", "--locked", "--no-editable", "--no-default-groups", *(f"--group={group}" for group in groups)]
    contents = [_content(path) for path in (manifest, *_lock_file(project))]
    digest = hashlib.sha256(repr([version, project, arguments, contents]).encode()).hexdigest()
    kept = cached("exports", digest[:32], "pylock.toml")
    if os.path.exists(kept):
        return _content(kept).decode()
    try:
        text = wheels.run_uv(uv, "export", *arguments, "--format=pylock.toml", directory=project)
        if set(_LOCAL.findall(contents[-1])) <= {b"."}:  # Others have manifests that the lock must fit too.
            with tempfile.NamedTemporaryFile("w", dir=os.path.dirname(kept), delete=False) as file:
                file.write(text)
            os.replace(file.name, kept)
        return text
    except ValueError as error:
        if "needs to be updated" in str(error):
            raise ValueError(f"uv.lock in {project} does not fit its pyproject.toml; run there: uv lock") from None
        raise ValueError(f"uv cannot read the lock of {project}: {error}") from None


# ---- The interpreter


def _choose(uv: str, platform: Platform, wanted: str | None, allowed: Any) -> tuple[Python, Piece | None]:
    """The interpreter for a new environment, and the archive that brings it if the cluster has none that fits.

    `allowed` is the project's `requires-python`, or None.
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
        return _bring(uv, version, platform)
    except ValueError as error:
        raise ValueError(f"{lacks}, and uv cannot bring one: {error}") from None


def _bring(uv: str, version: str, platform: Platform) -> tuple[Python, Piece]:
    """An interpreter of uv for the platform, in an archive with the directory `interpreter`."""
    request = f"cpython-{version}-linux-{platform.machine}-gnu"
    path = cached("pythons", request, "interpreter.tar.gz")
    with locked("environment-python"):
        found = [each for each in os.listdir(os.path.dirname(path)) if each.startswith("cpython-")]
        if not os.path.exists(path) or not found:
            directory = os.path.dirname(path)
            wheels.run_uv(uv, "python", "install", "--no-bin", f"--install-dir={directory}", request)
            # uv also makes a link without the third number.
            names = [each for each in os.listdir(directory) if each.startswith("cpython-")]
            found = [each for each in names if not os.path.islink(os.path.join(directory, each))]
            draft = f"{path}.{os.getpid()}"
            with tarfile.open(draft, "w:gz", compresslevel=1) as archive:
                archive.add(os.path.join(directory, found[0]), "interpreter")
            os.replace(draft, path)
    full = max((each.split("-")[1] for each in found), key=len)
    python = Python(f"{PREFIX}/interpreter/bin/python3", tuple(map(int, full.split("."))), "cpython", platform.machine)
    digest = hashlib.sha256(f"{request} {full}".encode()).hexdigest()
    return python, Piece(digest, "interpreter.tar.gz", lambda: path)
