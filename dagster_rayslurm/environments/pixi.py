"""Environments from lock files of pixi.

py-rattler, the Python package of pixi's library rattler, reads the lock file on this machine, and installs the packages on the
cluster. Each package is sent as the file that the conda channel offers. py-rattler is sent too, with a copy of the environment's
own Python to run py-rattler, so that the cluster needs nothing but `tar`. py-rattler (25 MB) and the Python are sent once to each
cluster. The environment's Python must be 3.10 or newer, because py-rattler needs this version.

Two alternatives were worse. The first alternative is an installer of our own that runs in the edge node's Python. It would repeat
much of rattler: replace the placeholder of the environment's path in text files, C strings and wide strings, shorten long
shebangs, write entry points, and handle files that two packages have in common. It would also need zstd for `.conda` archives,
which Python has since 3.14 only, or larger archives that are packed anew on this machine. The second alternative is to build the
environment on this machine for its path on the cluster. Such an environment can only be sent as a whole, because many of its
files contain the path.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version as version_of
from typing import TYPE_CHECKING, Any

from ..edge.environment import PREFIX
from ..errors import INSTALL
from . import PixiEnvironment, install_conda, pixi_manifest, wheels
from .platforms import Platform, Python, cached
from .recipe import COMPILE_ALL, Piece, Recipe, digest_of, local_piece

if TYPE_CHECKING:
    from rattler.lock import CondaLockedBinaryPackage, LockedPackage, PypiLockedPackage

_SUBDIRS = {"x86_64": "linux-64"}
_OLDEST = (3, 10)  # Python that py-rattler needs.
_COMPILE = '"$@" || :'  # Some packages contain files that are no Python, or that of another version.


def pixi_recipe(environment: PixiEnvironment, platform: Platform) -> Recipe:
    """Return the recipe (files to send and commands to run) that installs the locked packages on the cluster.

    Raises `ValueError` if there is no lock, or if the lock does not fit the manifest or the platform.
    """
    try:
        import packaging.pylock  # noqa: F401
        import rattler  # noqa: F401
    except ImportError:
        raise ValueError(f"this machine lacks what reads lock files of pixi; {INSTALL.format(extra='pixi')}") from None
    wheels.find_uv()  # Without uv, its error comes before all others.
    manifest = os.path.abspath(os.path.expanduser(environment.manifest))
    top = os.path.dirname(manifest)
    lock, subdir = os.path.join(top, "pixi.lock"), _SUBDIRS.get(platform.machine, f"linux-{platform.machine}")
    tables = pixi_manifest.read_manifest(manifest)
    features = pixi_manifest.features_of(tables, environment.environment)
    selector, conda, pypi = _locked(lock, manifest, environment.environment, subdir, platform)
    wanted = pixi_manifest.wanted(tables, features, list(dict.fromkeys(["unix", "linux", subdir, selector])))
    _check_fit(wanted, conda, pypi, lock)
    _check_glibc(conda, platform)
    _check_cpu(conda, lock, platform)
    python = _python(conda, lock, platform)
    target = wheels.Target(platform, python)
    scripts = [os.path.join(top, each) for each in wanted.scripts]
    files, directories = _wheels(pypi, top, target)
    pieces = {each.name: wheels.fetched(each.name, _source(top, each), top) for each in conda}
    there = f"{PREFIX}/{install_conda.INSTALLER}"
    run: list[str | Piece] = [f"{there}/bin/python", "-I"]
    project = json.dumps({"variables": wanted.variables, "scripts": [_text(each) for each in scripts]})
    project = project.replace(PREFIX, f"\\u007b{PREFIX[1:]}")  # Text of the project that equals PREFIX stays.
    commands: list[Sequence[str | Piece]] = [
        ["tar", "-x", "-f", _interpreter(conda, pieces), "-C", PREFIX],
        [*run, "-m", "zipfile", "-e", wheels.tool_wheel("py-rattler", version_of("py-rattler"), target), f"{there}/packages"],
        [*run, local_piece(install_conda.__file__)[0], PREFIX, project, *pieces.values()],
    ]
    if files:
        commands.append(wheels.install_command(wheels.uv_program(target), files, "--break-system-packages"))
    library = f"{PREFIX}/lib/python{python.version[0]}.{python.version[1]}/site-packages"
    compile_all = python.path, "-I", "-m", COMPILE_ALL, "-qq", "-j", "4", library
    commands.append(["sh", "-c", _COMPILE, "sh", *compile_all])
    return Recipe(commands, lambda: wheels.state_of([manifest, lock, *scripts], directories), platform.runner(None))


# ---- The lock


def _locked(
    path: str, manifest: str, name: str, subdir: str, platform: Platform
) -> tuple[str, list[CondaLockedBinaryPackage], list[PypiLockedPackage]]:
    """Return the name of the platform in the lock file, and the locked conda and PyPI packages of the environment `name`.

    `path` is the lock file, and `subdir` is the platform's name in conda. The packages are sorted by name. Raises `ValueError` if
    the lock has no packages of the environment for the platform.
    """
    from rattler.exceptions import ParseCondaLockError
    from rattler.lock import CondaLockedBinaryPackage, LockFile, PypiLockedPackage

    if not os.path.isfile(path):
        raise ValueError(f"there is no {path}; run beside it: pixi lock")
    try:
        lock = LockFile.from_path(path)  # type: ignore[arg-type]
    except ParseCondaLockError as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    environment = lock.environment(name)
    if environment is None:
        raise ValueError(f"{path} does not fit {os.path.basename(manifest)}: it lacks the environment {name!r}; run: pixi lock")
    # A lock may have several platforms of one subdirectory, for machines with other virtual packages.
    found = {each.name: (str(each.subdir), environment.packages(each) or []) for each in environment.platforms()}
    names = sorted((name for name, (_, packages) in found.items() if packages), key=lambda name: (name != subdir, name))
    selector = next((each for each in names if found[each][0] == subdir), None)
    if selector is None:
        raise ValueError(
            f"{path} has no packages of the environment {name!r} for {subdir}, the platform of {platform.place}, but for "
            f"{', '.join(names) or 'none'}; run: pixi workspace platform add {subdir}"
        )
    packages = sorted(found[selector][1], key=lambda each: each.name)
    for each in packages:
        if not isinstance(each, (CondaLockedBinaryPackage, PypiLockedPackage)):
            raise ValueError(f"{each.name} in {path} is built from sources, by pixi; build a package of it, and name its channel")
    pypi = [each for each in packages if isinstance(each, PypiLockedPackage)]
    return selector, [each for each in packages if isinstance(each, CondaLockedBinaryPackage)], pypi


def _check_fit(
    wanted: pixi_manifest.Wanted, conda: Sequence[CondaLockedBinaryPackage], pypi: Sequence[PypiLockedPackage], lock: str
) -> None:
    """Raise `ValueError` if the locked packages `conda` and `pypi` lack a package or a version that the manifest wants.

    `lock` is the path of the lock file, for the message. Only pixi itself can check more.
    """
    from packaging.utils import canonicalize_name
    from rattler.exceptions import InvalidMatchSpecError

    records = {each.name: each for each in conda}
    versions: dict[str, str] = {canonicalize_name(each.name): str(each.version) for each in pypi}
    # A conda package can satisfy a PyPI requirement.
    for each in conda:
        for name in (each.name, *_purls(each)):
            versions.setdefault(canonicalize_name(name), "<conda>")
    problems = [pixi_manifest.misfit(name, spec, versions) for name, spec in wanted.pypi]
    for name, spec in wanted.conda:
        record = records.get(name)
        if record is None:
            problems.append(f"lacks {name}")
        else:
            with contextlib.suppress(InvalidMatchSpecError):  # pixi understood it, as it wrote the lock.
                if not record.satisfies(f"{name} {spec}"):
                    problems.append(f"has {name} {record.version} where the manifest wants {spec}")
    if problem := next(filter(None, problems), ""):
        raise ValueError(f"{lock} does not fit the manifest beside it: it {problem}; run there: pixi lock")


def _purls(package: CondaLockedBinaryPackage) -> list[str]:
    """Return the names of the PyPI packages that a conda package contains, from package URLs such as `pkg:pypi/torch`."""
    record = package.package_record
    purls: Sequence[str] = json.loads(record.to_json()).get("purls") or [] if record is not None else []
    return [found[1] for found in (re.match(r"pkg:pypi/([^@?#]+)", each) for each in purls) if found]


def _check_glibc(conda: Sequence[CondaLockedBinaryPackage], platform: Platform) -> None:
    """Raise `ValueError` if conda packages need another glibc than the platform has. Other virtual packages are not checked."""
    from rattler import MatchSpec, PackageRecord
    from rattler.package import BuildString

    if not platform.glibc:
        raise ValueError(f"{platform.place} has another C library than glibc, which conda packages for Linux need")
    version = ".".join(map(str, platform.glibc))
    there = PackageRecord("__glibc", version, BuildString("0"), 0, "linux-64")
    needs: dict[str, str] = {}
    for each in conda:
        record = each.package_record
        for spec in (*record.depends, *record.constrains) if record is not None else ():
            if spec.split()[0] == "__glibc" and not MatchSpec(spec).matches(there):
                needs[each.name] = spec
    if needs:
        told = ", ".join(f"{name} ({spec})" for name, spec in needs.items())
        raise ValueError(
            f"packages in pixi.lock need another glibc than {version}, which {platform.place} has: {told}; lock older versions, "
            f'with [system-requirements] libc = "{version}"'
        )


def _check_cpu(conda: Sequence[CondaLockedBinaryPackage], lock: str, platform: Platform) -> None:
    """Raise `ValueError` if packages need newer CPUs than the platform has.

    Packages for newer CPUs depend on the package `_x86_64-microarch-level` of conda-forge, whose version is the needed level.
    `lock` is the path of the lock file, for the message.
    """
    level = next((f"x86-64-v{each.version}" for each in conda if each.name == "_x86_64-microarch-level"), "")
    if level > platform.level:
        what = f"{lock} has packages for CPUs of the level {level}, and {platform.place} has {platform.level}"
        raise ValueError(f"{what}; lock others, or ask for newer nodes with SlurmQueueConfig(constraint=…)")


def _python(conda: Sequence[CondaLockedBinaryPackage], lock: str, platform: Platform) -> Python:
    record = next((each for each in conda if each.name == "python"), None)
    if record is None:
        raise ValueError(f"{lock} has no Python from conda; add it: pixi add python")
    version = tuple(map(int, re.findall(r"\d+", str(record.version))[:3]))
    if version < _OLDEST:
        raise ValueError(f"{lock} has Python {record.version}, and an environment of pixi needs 3.10 or newer; lock a newer one")
    return Python(f"{PREFIX}/bin/python", version, "cpython", platform.machine)


# ---- The files


def _wheels(pypi: Sequence[PypiLockedPackage], top: str, target: wheels.Target) -> tuple[list[Piece], list[str]]:
    """Return the wheels of PyPI packages, and the paths of the source directories from which this machine builds some wheels.

    `pypi` are the locked PyPI packages. `top` is the directory of the lock file. Raises `ValueError` if a locked wheel does not
    run on the target.
    """
    sources = {f"{each.name} {each.version}": _source(top, each) for each in pypi}
    unfit = [name for name, source in sources.items() if not wheels.runs_on(source, target)]
    if unfit:
        raise ValueError(
            f"wheels in pixi.lock do not run on {target}: {', '.join(unfit)}; lock others, with [system-requirements]"
        )
    found = [wheels.wheel_of(name, source, top, target) for name, source in sources.items()]
    directories = [wheels.path_of(top, each) for each in sources.values() if wheels.kind_of(each) == "directory"]
    return found, directories


def _source(top: str, package: LockedPackage) -> Any:
    """Return the URL or path, and the SHA-256, of a locked package as an object of `packaging.pylock`, such as `PackageWheel`.

    `top` is the directory of the lock file.
    """
    from packaging import pylock

    place = package.location.removeprefix("direct+")
    if place.startswith("git+"):
        return pylock.PackageVcs(type="git", url=place.removeprefix("git+"), commit_id=place.rpartition("@")[2])
    where: Mapping[str, Any] = {"url": place} if "://" in place else {"path": place}
    path = os.path.join(top, place)
    if "url" not in where and os.path.isdir(path):
        return pylock.PackageDirectory(path=place)
    hashes = package._package.hashes  # `package.hashes` fails if there are none.
    digest = hashes.sha256.hex() if hashes is not None and hashes.sha256 is not None else None
    if digest is None and "path" in where and os.path.isfile(path):
        digest = digest_of(path)
    kind = pylock.PackageWheel if place.split("#")[0].endswith(".whl") else pylock.PackageArchive
    return kind(**where, hashes={} if digest is None else {"sha256": digest})


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError as error:
        raise ValueError(f"the activation script {path} cannot be read: {error.strerror}") from None


def _interpreter(conda: Sequence[CondaLockedBinaryPackage], pieces: Mapping[str, Piece]) -> Piece:
    """Return an archive with the unpacked conda packages of Python and of Python's dependencies.

    The Python in the archive runs `install_conda` on the cluster. `pieces` are the archives of the packages, by the name of the
    package.
    """
    depends = {each.name: each.package_record.depends for each in conda if each.package_record is not None}
    names, new = set[str](), {"python"}
    while new:
        names |= new
        new = {spec.split()[0] for name in new for spec in depends[name]} & depends.keys() - names
    archives = [pieces[name] for name in sorted(names)]
    digest = hashlib.sha256(" ".join(each.digest for each in archives).encode()).hexdigest()

    def get() -> str:
        from rattler.package_streaming import extract

        path = cached("interpreters", digest[:32], "interpreter.tar.gz")
        if not os.path.exists(path):
            with tempfile.TemporaryDirectory(dir=os.path.dirname(path)) as work:
                for each in archives:
                    extract(each.get(), os.path.join(work, "packages"))  # type: ignore[arg-type]
                draft = os.path.join(work, "draft")
                with tarfile.open(draft, "w:gz", compresslevel=1) as archive:
                    archive.add(os.path.join(work, "packages"), install_conda.INSTALLER)
                os.replace(draft, path)
        return path

    return Piece(digest, "interpreter.tar.gz", get)
