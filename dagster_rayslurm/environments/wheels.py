"""Wheels for a cluster: selects, fetches and builds wheels, and provides uv to install the wheels there.

A `Piece` is a file to send to the cluster; this machine fetches or builds the file only if need be. Only this machine needs the
internet.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import tomli

from ..edge import files
from ..edge.environment import PREFIX
from ..errors import INSTALL
from ..ssh.local import locked
from ..upload.bundle import bundle_directory
from .platforms import Platform, Python, cached
from .recipe import COMPILE, Piece

if TYPE_CHECKING:
    from packaging.pylock import Pylock

EXTRA = INSTALL.format(extra="uv")
ISOLATED = ("--no-config", "--offline")  # Options of uv on the cluster: no configuration files, and no internet.
# Minor versions of glibc 2 that `uv --python-platform` knows (uv 0.13).
_MANYLINUX = (40, 39, 38, 37, 36, 35, 34, 33, 32, 31, 28, 17)
_TIMEOUT = 900.0

# ---- uv


def find_uv() -> str:
    """Return the path of uv on this machine; raises `ValueError` if uv is not installed."""
    try:
        from uv import find_uv_bin

        path: str | None = find_uv_bin()
    except (ImportError, FileNotFoundError):
        path = shutil.which("uv")
    if path is None:
        raise ValueError(f"uv is not installed on this machine; {EXTRA}")
    return path


@functools.cache
def uv_version() -> str:
    """Return the version of uv on this machine."""
    return run_uv("--version").split()[1]


def run_uv(*arguments: str, directory: str | None = None) -> str:
    """Run uv on this machine and return the output; raises `ValueError` with the error message of uv if uv fails.

    `directory` is the working directory of uv; None for the working directory of this process.
    """
    environ = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    try:
        done = subprocess.run(
            [find_uv(), *arguments], cwd=directory, env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"uv {arguments[0]} took over {_TIMEOUT:.0f} s and was ended") from None
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().removeprefix("error: ")
        raise ValueError(" ".join(said.split())[-1000:] or f"uv {arguments[0]} ended with exit code {done.returncode}")
    return done.stdout.decode("utf-8", "replace")


# ---- The platform


@dataclass(frozen=True)
class Target:
    """The platform and the Python of a new environment, for which wheels are selected and built."""

    platform: Platform
    python: Python

    def __str__(self) -> str:
        """Return the platform and the Python in words, for error messages about wheels."""
        glibc = ".".join(map(str, self.platform.glibc))
        python = f"Python {self.python.version[0]}.{self.python.version[1]}"
        return f"{self.platform.place} ({python}, glibc {glibc}, {self.python.machine})"

    def select(self, lock: Pylock) -> list[tuple[Any, Any]]:
        """Return the packages of a lock that the target needs, each with the fitting wheel or the sources.

        Both are objects of `packaging.pylock`, such as `Package` and `PackageWheel`. Raises `PylockSelectError` if the lock has
        neither a fitting wheel nor sources of a package.
        """
        return list(lock.select(environment=self._markers, tags=self._tags))

    def runs(self, wheel: str) -> bool:
        """Return True if the wheel with the file name `wheel` runs on the target."""
        from packaging.utils import parse_wheel_filename

        return not parse_wheel_filename(wheel)[-1].isdisjoint(self._tags)

    @functools.cached_property
    def _tags(self) -> list[Any]:
        """The tags (of `packaging.tags`) of wheels that run on the target, the best tag first.

        Tags such as `linux_x86_64` are left out, because such tags do not say which glibc a wheel needs.
        """
        from packaging.tags import compatible_tags, cpython_tags

        minor_of_glibc, machine = self.platform.glibc[1], self.python.machine
        names = [f"manylinux_2_{minor}_{machine}" for minor in range(minor_of_glibc, 4, -1)]
        for minor, alias in ((17, "manylinux2014"), (12, "manylinux2010"), (5, "manylinux1")):
            if minor_of_glibc >= minor:
                names.append(f"{alias}_{machine}")
        version = self.python.version[:2]
        abi = "cp{}{}".format(*version)
        return [*cpython_tags(version, [abi], names), *compatible_tags(version, abi, names)]

    @property
    def _markers(self) -> Any:
        """The values of the environment markers (PEP 508) for the cluster's Python, by name; the operating system is Linux."""
        full = ".".join(map(str, self.python.version))
        return {
            "implementation_name": "cpython",
            "implementation_version": full,
            "os_name": "posix",
            "platform_machine": self.python.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": full,
            "python_version": ".".join(map(str, self.python.version[:2])),
            "sys_platform": "linux",
        }


def compile_requirements(requirements: str, target: Target, final: bool = False) -> str:
    """Resolve a requirements file to wheels for a target; returns the text of a pylock.toml.

    `requirements` is the path of the file. The text is cached on this machine. A later call keeps the versions of the cached text
    that the requirements still allow. `final` is True if the file never changes; a cached text is then returned without a run of
    uv. Raises `ValueError` if uv finds no solution, or if the platform's glibc is too old for wheels.
    """
    version, glibc = ".".join(map(str, target.python.version[:2])), target.platform.glibc
    newest = next((minor for minor in _MANYLINUX if glibc >= (2, minor)), None)
    if newest is None:
        raise ValueError(f"glibc on {target.platform.place} is older than 2.17, for which there are no wheels")
    platform = f"{target.python.machine}-manylinux_2_{newest}"
    key = hashlib.sha256(f"{requirements}\0{version}\0{platform}".encode("utf-8", "surrogateescape")).hexdigest()[:32]
    path = cached("locks", key, "pylock.toml")
    options = "--quiet", "--no-header", "--only-binary=:all:", "--format=pylock.toml"
    arguments = requirements, *options, f"--python-version={version}", f"--python-platform={platform}", f"--output-file={path}"
    with locked(f"environment-lock-{key[0]}"):
        # The cache of uv suffices mostly. Otherwise uv asks the package index.
        for offline in () if final and os.path.exists(path) else (["--offline"], []):
            try:
                run_uv("pip", "compile", *offline, *arguments, directory=os.path.dirname(requirements))
                break
            except ValueError as error:
                problem = f"{requirements} cannot be resolved to wheels for {target}: {error}"
                if not offline:
                    raise ValueError(problem) from None
        with open(path, encoding="utf-8") as file:
            return file.read()


# ---- The wheels


def state_of(paths: Iterable[str], directories: Iterable[str]) -> object:
    """Return a value that changes if one of the files `paths`, or a file in one of `directories`, changes."""
    found = [os.stat(path) if os.path.exists(path) else None for path in paths]
    stamps = [each and (each.st_ino, each.st_size, each.st_mtime_ns) for each in found]
    return stamps, [bundle_directory(directory).name for directory in directories]


def runs_on(source: Any, target: Target) -> bool:
    """Return True if `source` is a wheel that runs on the target, or if `source` is not a wheel but source code.

    `source` is an object of `packaging.pylock`, such as `PackageWheel`.
    """
    return kind_of(source) != "wheel" or target.runs(source.filename)


def path_of(top: str, source: Any) -> str:
    """Return the normalized path of a package's source that is a file or directory of this machine.

    `source` is an object of `packaging.pylock` with a `path`, which may be relative to `top`, the directory of the lock file.
    """
    return os.path.normpath(os.path.join(top, source.path))


def kind_of(source: object) -> str:
    """Return the kind of a package's source in `packaging.pylock`: "wheel", "sdist", "directory", "archive" or "vcs"."""
    return type(source).__name__.removeprefix("Package").lower()


def wheel_of(name: str, source: Any, top: str, target: Target) -> Piece:
    """Return the wheel of a package: the wheel in the lock, or a wheel that this machine builds from the locked sources.

    Args:
        name: the package in words, for error messages.
        source: the place of the wheel or of the sources, as an object of `packaging.pylock`.
        top: the directory from which relative paths in the lock start.
        target: the platform and the Python on which a built wheel must run. A wheel in the lock is not checked.

    Raises `ValueError` if there can be no wheel for the target.
    """
    what = kind_of(source)
    if what == "vcs":
        raise ValueError(f"{name} comes from a repository, {source.url}; name a wheel of it, or a directory with its sources")
    if what == "directory":
        path = path_of(top, source)
        return _built(name, bundle_directory(path).name, lambda: path, target)
    file = fetched(name, source, top)
    return file if file.name.endswith(".whl") else _built(name, file.digest, file.get, target)


def fetched(name: str, source: Any, top: str) -> Piece:
    """Return a `Piece` for a file that the lock names by URL or path; `get` of the piece fetches the file and checks the SHA-256.

    `name` is the package in words, for error messages. `source` is an object of `packaging.pylock`, such as `PackageWheel`, whose
    path may be relative to the directory `top`. Raises `ValueError` if the lock has no SHA-256 of the file.
    """
    place = source.url or path_of(top, source)
    digest = source.hashes.get("sha256")
    if digest is None:
        raise ValueError(f"the lock file has no SHA-256 of {place}; lock {name} with an index that has it")
    file = os.path.basename(unquote(urlsplit(place).path if source.url else place))

    fetching = threading.Lock()  # Two pieces may need the file at the same time.

    def get() -> str:
        path = cached("files", digest[:32], file)
        with fetching:
            if not os.path.exists(path):
                _fetch(place, digest, path)
        return path

    return Piece(digest, file, get)


def _fetch(place: str, digest: str, path: str) -> None:
    with tempfile.NamedTemporaryFile(dir=os.path.dirname(path), delete=False) as target:
        try:
            found = hashlib.sha256()
            try:
                for data in _content(place):
                    target.write(data)
                    found.update(data)
                target.flush()
            except OSError as error:
                raise ValueError(f"{place} cannot be fetched: {error.strerror or error}") from None
            if found.hexdigest() != digest:
                raise ValueError(f"{place} is not the file in the lock: its SHA-256 is {found.hexdigest()}")
            os.replace(target.name, path)
        except BaseException:
            os.unlink(target.name)
            raise


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


def _built(name: str, digest: str, get: Callable[[], str], target: Target) -> Piece:
    """Return the wheel that this machine builds from a package's sources; an earlier wheel of the same sources is used again.

    Args:
        name: the package in words, for error messages.
        digest: the hash of the sources.
        get: a function that returns the path of the sources; called only if the wheel must be built.
        target: the platform and the Python on which the wheel must run.

    Raises `ValueError` if the wheel cannot be built, or does not run on the target.
    """
    directory = os.path.dirname(cached("built", digest[:32], ""))
    with locked(f"environment-built-{digest[0]}"):
        found = [each for each in os.listdir(directory) if each.endswith(".whl")]
        if not found:
            source = get()
            with tempfile.TemporaryDirectory(dir=directory) as work:
                try:
                    run_uv("build", "--wheel", f"--out-dir={work}", source, directory=os.path.dirname(source))
                except ValueError as error:
                    raise ValueError(f"{name} has no wheel and cannot be built on this machine: {error}") from None
                found = [each for each in os.listdir(work) if each.endswith(".whl")]
                os.replace(os.path.join(work, found[0]), os.path.join(directory, found[0]))
    if not target.runs(found[0]):
        raise ValueError(
            f"there is no wheel of {name} for {target}; what this machine builds of it, {found[0]}, does not run there"
        )
    return Piece(digest, found[0], lambda: os.path.join(directory, found[0]))


def tool_wheel(name: str, version: str, target: Target) -> Piece:
    """Return the wheel of a tool that installs environments on the target.

    `name` is "uv" or "py-rattler", and `version` is the version of the tool.
    """
    from packaging.pylock import Pylock

    path = cached("requirements", f"{name}-{version}.txt")
    files.write(path, f"{name}=={version}\n".encode(), 0o600)
    lock = Pylock.from_dict(tomli.loads(compile_requirements(path, target, final=True)))
    _, source = target.select(lock)[0]
    return fetched(name, source, "")


def uv_program(target: Target) -> Piece:
    """Return the executable of uv for the target, extracted from the wheel of uv; its version is that of uv on this machine."""
    wheel = tool_wheel("uv", uv_version(), target)

    def get() -> str:
        path = cached("uv", wheel.digest[:32], "uv")
        if not os.path.exists(path):
            with zipfile.ZipFile(wheel.get()) as archive, tempfile.TemporaryDirectory(dir=os.path.dirname(path)) as work:
                name = next(each for each in archive.namelist() if each.endswith(".data/scripts/uv"))
                os.replace(archive.extract(name, work), path)
        return path

    return Piece(wheel.digest, "uv", get)


def install_command(there: Piece, wheels: list[Piece], *options: str) -> list[str | Piece]:
    """Return the command with which uv installs wheels into the prefix (the directory of the environment) on the cluster.

    `there` is the executable of uv that is sent, and `wheels` are the wheels that are sent. `options` are further options of
    `uv pip install`. In the result, a `Piece` stands for the path of the sent file on the cluster.
    """
    arguments = "--no-index", "--no-deps", "--no-cache", COMPILE, *options
    return [there, "pip", "install", *ISOLATED, *arguments, "--python", f"{PREFIX}/bin/python", *wheels]
