"""Environments from lock files of uv: which wheels the cluster's platform needs, where they come from, and how uv installs them.

uv writes or checks the lock here, and installs on the cluster, where it is sent as well. Only this machine needs the internet.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import unquote, urlsplit

import tomli

from ..edge.environment import PREFIX
from ..ssh.local import locked
from ..upload.bundle import bundle_directory
from . import UvEnvironment
from .send import Piece, Platform, Python, Recipe, cached

_EXTRA = "run: pip install 'dagster-rayslurm[uv]'"
_VERSION = re.compile(r"\d+(\.\d+)*")
# Minor versions of glibc 2 that `uv --python-platform` knows (uv 0.13).
_MANYLINUX = (40, 39, 38, 37, 36, 35, 34, 33, 32, 31, 28, 17)
_ISOLATED = ("--no-config", "--offline")
_TIMEOUT = 900.0


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
        raise ValueError(f"packaging here is too old to read lock files; {_EXTRA}") from None
    uv, version = _find_uv()
    top = os.path.abspath(os.path.expanduser(environment.project))
    if environment.requirements is None:
        text, inputs = _export(uv, top, environment.groups), [os.path.join(top, "pyproject.toml"), *_lock_file(top)]
        lock = Pylock.from_dict(tomli.loads(text))
        python, brought = _choose(uv, platform, environment.python, lock.requires_python)
    else:
        python, brought = _choose(uv, platform, environment.python, None)
        inputs = [os.path.abspath(os.path.expanduser(environment.requirements))]
        if not os.path.isfile(inputs[0]):
            raise ValueError(f"there is no requirements file {inputs[0]}")
        top = os.path.dirname(inputs[0])
        lock = Pylock.from_dict(tomli.loads(_compile(uv, inputs[0], platform, python)))
    tags, directories, wheels = _tags(platform, python), [], []
    try:
        for package, source in lock.select(environment=_markers(python), tags=tags):
            name = f"{package.name} {package.version or ''}".strip()
            if _kind(source) == "directory":
                directories.append(_path(top, source))
            wheels.append(_piece(uv, name, source, top, platform, python, set(tags)))
    except PylockSelectError as error:
        where, newest = _described(platform, python), replace(platform, glibc=(2, 99))
        try:
            selected = lock.select(environment=_markers(python), tags=_tags(newest, python))
            newer = [str(package.name) for package, source in selected if not _runs(source, set(tags))]
        except PylockSelectError:
            raise ValueError(f"the lock file lacks a wheel for {where}: {error}") from None
        needs = f"the lock file's wheels of {', '.join(newer)} need a newer glibc than {where} has"
        raise ValueError(f"{needs}; lock older versions of them") from None
    there = _uv_piece(uv, version, platform, python)
    unpack: list[list[str | Piece]] = [["tar", "-x", "-f", brought, "-C", PREFIX]] if brought else []
    commands: list[list[str | Piece]] = [
        *unpack,
        [there, "venv", *_ISOLATED, "--no-project", "--allow-existing", "--python", python.path, PREFIX],
    ]
    if wheels:
        install = there, "pip", "install", *_ISOLATED, "--no-index", "--no-deps", "--no-cache", "--compile-bytecode"
        commands.append([*install, "--python", f"{PREFIX}/bin/python", *wheels])

    def state() -> object:
        found = [os.stat(path) if os.path.exists(path) else None for path in inputs]
        stamps = [each and (each.st_ino, each.st_size, each.st_mtime_ns) for each in found]
        return stamps, [bundle_directory(directory).name for directory in directories]

    return Recipe(commands, state)


# ---- The lock


def _find_uv() -> tuple[str, str]:
    """The path of uv on this machine, and its version."""
    try:
        from uv import find_uv_bin

        path: str | None = find_uv_bin()
    except (ImportError, FileNotFoundError):
        path = shutil.which("uv")
    if path is None:
        raise ValueError(f"uv is not installed on this machine; {_EXTRA}")
    return path, _version_of(path)


@functools.cache
def _version_of(uv: str) -> str:
    return _uv(uv, "--version").split()[1]


def _uv(uv: str, *arguments: str, directory: str | None = None) -> str:
    """The output of uv; `ValueError` with its error message if it fails."""
    environ = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    try:
        done = subprocess.run(
            [uv, *arguments], cwd=directory, env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"uv {arguments[0]} took over {_TIMEOUT:.0f} s and was ended") from None
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().removeprefix("error: ")
        raise ValueError(" ".join(said.split())[-1000:] or f"uv {arguments[0]} ended with exit code {done.returncode}")
    return done.stdout.decode("utf-8", "replace")


def _lock_file(directory: str) -> Iterator[str]:
    """The lock file of a project: in its directory, or in one above it, for a member of a workspace."""
    while not os.path.isfile(path := os.path.join(directory, "uv.lock")):
        directory, child = os.path.dirname(directory), directory
        if directory == child:
            return
    yield path


def _export(uv: str, project: str, groups: Sequence[str]) -> str:
    """The lock of a project as a pylock.toml (PEP 751)."""
    if not os.path.isfile(os.path.join(project, "pyproject.toml")):
        raise ValueError(f"there is no pyproject.toml in {project}; name the directory of a project of uv, or use requirements=…")
    if not any(_lock_file(project)):
        raise ValueError(f"{project} has no uv.lock; run there: uv lock")
    arguments = ["--quiet", "--locked", "--no-editable", "--no-default-groups", *(f"--group={group}" for group in groups)]
    try:
        return _uv(uv, "export", *arguments, "--format=pylock.toml", directory=project)
    except ValueError as error:
        if "needs to be updated" in str(error):
            raise ValueError(f"uv.lock in {project} does not fit its pyproject.toml; run there: uv lock") from None
        raise ValueError(f"uv cannot read the lock of {project}: {error}") from None


def _compile(uv: str, requirements: str, platform: Platform, python: Python, final: bool = False) -> str:
    """The lock of a requirements file for a platform, as a pylock.toml.

    It is kept on this machine, where uv goes on from it, so that versions stay until the requirements change. It is `final` if
    the requirements never change.
    """
    version = ".".join(map(str, python.version[:2]))
    newest = next((minor for minor in _MANYLINUX if platform.glibc >= (2, minor)), None)
    if newest is None:
        raise ValueError(f"glibc on {platform.place} is older than 2.17, for which there are no wheels")
    target = f"{python.machine}-manylinux_2_{newest}"
    key = hashlib.sha256(f"{requirements}\0{version}\0{target}".encode("utf-8", "surrogateescape")).hexdigest()[:32]
    path = cached("locks", key, "pylock.toml")
    options = "--quiet", "--no-header", "--only-binary=:all:", "--format=pylock.toml"
    arguments = requirements, *options, f"--python-version={version}", f"--python-platform={target}", f"--output-file={path}"
    with locked(f"environment-lock-{key[0]}"):
        # What uv knows suffices mostly. Otherwise it asks the index.
        for offline in () if final and os.path.exists(path) else (["--offline"], []):
            try:
                _uv(uv, "pip", "compile", *offline, *arguments, directory=os.path.dirname(requirements))
                break
            except ValueError as error:
                problem = f"{requirements} cannot be resolved to wheels for {_described(platform, python)}: {error}"
                if not offline:
                    raise ValueError(problem) from None
        with open(path, encoding="utf-8") as file:
            return file.read()


# ---- The platform


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
        return max(fitting, key=lambda each: (each.version[:2] == own, each.version)), None
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
            _uv(uv, "python", "install", "--no-bin", f"--install-dir={directory}", request)
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


def _described(platform: Platform, python: Python) -> str:
    glibc = ".".join(map(str, platform.glibc))
    return f"{platform.place} (Python {python.version[0]}.{python.version[1]}, glibc {glibc}, {python.machine})"


def _tags(platform: Platform, python: Python) -> list[Any]:
    """The tags of the wheels that the platform takes, the best first. A plain linux tag says nothing about glibc."""
    from packaging.tags import compatible_tags, cpython_tags

    names = [f"manylinux_2_{minor}_{python.machine}" for minor in range(platform.glibc[1], 4, -1)]
    for minor, alias in ((17, "manylinux2014"), (12, "manylinux2010"), (5, "manylinux1")):
        if platform.glibc[1] >= minor:
            names.append(f"{alias}_{python.machine}")
    version = python.version[:2]
    abi = "cp{}{}".format(*version)
    return [*cpython_tags(version, [abi], names), *compatible_tags(version, abi, names)]


def _markers(python: Python) -> Any:
    full = ".".join(map(str, python.version))
    return {
        "implementation_name": "cpython",
        "implementation_version": full,
        "os_name": "posix",
        "platform_machine": python.machine,
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": full,
        "python_version": ".".join(map(str, python.version[:2])),
        "sys_platform": "linux",
    }


# ---- The wheels


def _runs(source: Any, tags: set[Any]) -> bool:
    """Whether a wheel runs where these tags count; True for everything else."""
    from packaging.utils import parse_wheel_filename

    return _kind(source) != "wheel" or bool(set(parse_wheel_filename(source.filename)[-1]) & tags)


def _path(top: str, source: Any) -> str:
    return os.path.normpath(os.path.join(top, source.path))


def _kind(source: object) -> str:
    """What a package comes from: "wheel", "sdist", "directory", "archive" or "vcs"."""
    return type(source).__name__.removeprefix("Package").lower()


def _piece(uv: str, name: str, source: Any, top: str, platform: Platform, python: Python, tags: set[Any]) -> Piece:
    """The wheel of a package: fetched, or built on this machine if it comes as sources."""
    what = _kind(source)
    if what == "vcs":
        raise ValueError(f"{name} comes from a repository, {source.url}; name a wheel of it, or a directory with its sources")
    if what == "directory":
        path = _path(top, source)
        return _built(uv, name, bundle_directory(path).name, lambda: path, platform, python, tags)
    file = _fetched(name, source, top)
    if file.name.endswith(".whl"):
        return file
    return _built(uv, name, file.digest, file.get, platform, python, tags)


def _fetched(name: str, source: Any, top: str) -> Piece:
    """A file that the lock names, by URL or path."""
    place = source.url or _path(top, source)
    digest = source.hashes.get("sha256")
    if digest is None:
        raise ValueError(f"the lock file has no SHA-256 of {place}; lock {name} with an index that has it")
    file = os.path.basename(unquote(urlsplit(place).path if source.url else place))

    def get() -> str:
        path = cached("files", digest[:32], file)
        if not os.path.exists(path):
            with tempfile.NamedTemporaryFile(dir=os.path.dirname(path), delete=False) as target:
                try:
                    found = hashlib.sha256()
                    for data in _content(place):
                        target.write(data)
                        found.update(data)
                    target.flush()
                    if found.hexdigest() != digest:
                        raise ValueError(f"{place} is not the file in the lock: its SHA-256 is {found.hexdigest()}")
                    os.replace(target.name, path)
                except BaseException:
                    os.unlink(target.name)
                    raise
        return path

    return Piece(digest, file, get)


def _content(place: str) -> Iterator[bytes]:
    if place.startswith(("http://", "https://")):
        import requests

        with requests.get(place, stream=True, timeout=60) as answer:
            answer.raise_for_status()
            yield from answer.iter_content(2**20)
        return
    with open(unquote(place.removeprefix("file://")) if place.startswith("file://") else place, "rb") as file:
        while data := file.read(2**20):
            yield data


def _built(uv: str, name: str, digest: str, get: Callable[[], str], platform: Platform, python: Python, tags: set[Any]) -> Piece:
    """The wheel of sources, which this machine builds once; it must be one that runs on the platform."""
    from packaging.utils import parse_wheel_filename

    directory = os.path.dirname(cached("built", digest[:32], ""))
    with locked(f"environment-built-{digest[0]}"):
        found = [each for each in os.listdir(directory) if each.endswith(".whl")]
        if not found:
            source = get()
            with tempfile.TemporaryDirectory(dir=directory) as work:
                try:
                    _uv(uv, "build", "--wheel", f"--out-dir={work}", source, directory=os.path.dirname(source))
                except ValueError as error:
                    raise ValueError(f"{name} has no wheel and cannot be built on this machine: {error}") from None
                found = [each for each in os.listdir(work) if each.endswith(".whl")]
                os.replace(os.path.join(work, found[0]), os.path.join(directory, found[0]))
    if not set(parse_wheel_filename(found[0])[-1]) & tags:
        where = _described(platform, python)
        raise ValueError(
            f"there is no wheel of {name} for {where}; what this machine builds of it, {found[0]}, does not run there"
        )
    return Piece(digest, found[0], lambda: os.path.join(directory, found[0]))


def _uv_piece(uv: str, version: str, platform: Platform, python: Python) -> Piece:
    """The program of uv for the cluster, out of its wheel."""
    from packaging.pylock import Pylock

    path = cached("requirements", f"uv-{version}.txt")
    with open(path, "w", encoding="utf-8") as file:
        file.write(f"uv=={version}\n")
    lock = Pylock.from_dict(tomli.loads(_compile(uv, path, platform, python, final=True)))
    _, source = next(iter(lock.select(environment=_markers(python), tags=_tags(platform, python))))
    wheel = _fetched("uv", source, "")

    def get() -> str:
        path = cached("uv", wheel.digest[:32], "uv")
        if not os.path.exists(path):
            with zipfile.ZipFile(wheel.get()) as archive, tempfile.TemporaryDirectory(dir=os.path.dirname(path)) as work:
                name = next(each for each in archive.namelist() if each.endswith(".data/scripts/uv"))
                os.replace(archive.extract(name, work), path)
        return path

    return Piece(wheel.digest, "uv", get)
