"""Scan directories and files of this machine for a bundle. Of all files only the ignore files are read.

Left out are the files that Ray leaves out of a `runtime_env` working_dir, and files that no cluster needs, such as caches.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from pathspec import GitIgnoreSpec

from ..runtime.protocol.messages import TextEnum

IGNORE_FILES = (".gitignore", ".rayignore")
"""Files with patterns in the syntax of gitignore(5). Ray 2.60 reads both, in every directory of the tree."""
_LEFT_OUT = frozenset(
    {
        *(".git", ".venv", "venv", "__pycache__"),  # By Ray 2.60 too (RAY_RUNTIME_ENV_DEFAULT_EXCLUDES).
        *(".DS_Store", ".dagster_home", ".hg", ".hypothesis", ".ipynb_checkpoints", ".mypy_cache", ".nox", ".pixi"),
        *(".pytest_cache", ".ruff_cache", ".svn", ".tox", "node_modules"),
    }
)
"""Names of files and directories that no cluster needs."""
_ENVIRONMENT_MARKERS = ("pyvenv.cfg", "conda-meta")
"""Entries of virtual and conda environments, which are left out, as they would not work on another machine."""
_DANGLING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
"""Errors of stat(2) for a link whose target does not exist."""
_UNSUPPORTED = {
    stat.S_IFSOCK: "a socket",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class EntryKind(TextEnum):
    """The type of an entry in a bundle."""

    FILE = "file"
    DIR = "dir"
    LINK = "link"


@dataclass(frozen=True)
class Entry:
    """One file, directory or symbolic link of a bundle.

    Attributes:
        name: the entry's path in the bundle.
        source: the entry's path on this machine; "" for a directory that exists only in the bundle.
        executable: whether a file's owner may execute it; no other mode bit is kept.
        target: the target of a link; relative to the link if the target is in the bundle.
        stamp: stat fields of a file that change whenever the file does.
    """

    name: str
    kind: EntryKind
    source: str
    executable: bool = False
    size: int = 0
    target: str = ""
    stamp: tuple[int, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """The entries of a bundle, sorted by the bytes of their names, before their content is read.

    Attributes:
        argument: the argument of `run()` or the launcher that named the files, for error messages.
        root: the bundled directory, without links; None for files that were named one by one.
    """

    argument: str
    entries: tuple[Entry, ...]
    root: str | None = None

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.entries)


@dataclass(frozen=True)
class Limits:
    """The largest bundle that is accepted; Ray 2.60 has the same limit of bytes. Too many entries suggest a wrong directory."""

    max_bytes: int = 500 * 2**20
    max_entries: int = 100_000


_LIMITS = Limits()


def scan(directory: str, *, argument: str = "working_dir", limits: Limits = _LIMITS) -> Manifest:
    """The manifest of a directory, without the files that its ignore files name or that no cluster needs.

    A link stays a link if its target is in the bundle, or does not exist; otherwise the target replaces it, as in Ray.
    `argument` is what the user named the directory with.

    Raises:
        ValueError: the files exceed the limits, or a file cannot be read or copied; the sentence says what to do.
    """
    found = _Scan(argument, limits, os.path.abspath(directory))
    real = os.path.realpath(directory)
    found.walk(_Scope(real, ""), ())
    return found.manifest(real)


def scan_files(files: Mapping[str, str], *, argument: str = "extra_files", limits: Limits = _LIMITS) -> Manifest:
    """The manifest of single files and directories, which are paths on this machine by path in the bundle.

    Ignore files do not count; `__pycache__`, `.git` and the like are left out.

    Raises:
        ValueError: as for `scan`; or a path in the bundle is absolute, not normalized, or below another one.
    """
    found = _Scan(argument, limits, None)
    for name, path in sorted(files.items()):
        parts = name.split("/")
        above = ["/".join(parts[:length]) for length in range(1, len(parts))]
        taken = next((parent for parent in above if parent in files), None)
        if taken is not None:
            raise ValueError(f"{argument}: {name!r} would stand in {taken!r}, which is a file or directory of its own")
        if any(part in ("", ".", "..") for part in parts) or "\0" in name:
            raise ValueError(f"{argument}: {name!r} is not the name of a file in a bundle")
        for parent in above:
            found.add(Entry(parent, EntryKind.DIR, ""))
        found.follow(_Link(os.path.abspath(path), name, None, None))
    return found.manifest(None)


@dataclass(frozen=True)
class _IgnoreFile:
    """One ignore file: its name (`kind`), its directory in the tree, and its patterns."""

    kind: str
    directory: str
    spec: GitIgnoreSpec

    def ignores(self, name: str, is_dir: bool) -> bool | None:
        """Whether an entry of the tree is ignored; None if no pattern matches it."""
        below = name[len(self.directory) + 1 :] if self.directory else name
        return self.spec.check_file(f"{below}/" if is_dir else below).include


_Rules = tuple[_IgnoreFile, ...]
"""The ignore files that count for one directory: its own, and then those of its parents, up to the top of the tree."""


def _ignored(rules: _Rules, name: str, is_dir: bool) -> bool:
    """Whether an entry is left out. Among the ignore files of one name, the deepest with a matching pattern decides, as in git.

    Ray treats links to directories as directories.
    """
    base = posixpath.basename(name)
    if base in _LEFT_OUT or base.endswith(".pyc"):
        return True
    verdicts = ((file.ignores(name, is_dir) for file in rules if file.kind == kind) for kind in IGNORE_FILES)
    return any(next((verdict for verdict in each if verdict is not None), False) for each in verdicts)


@dataclass(frozen=True)
class _Scope:
    """A directory whose content is scanned: its path without links, its name in the bundle.

    `via` are the directories that contain the links which led to this directory.
    """

    real: str
    name: str
    via: tuple[str, ...] = ()

    def name_of(self, real: str) -> str | None:
        """The name in the bundle of a path below the directory; None for any other path."""
        if real == self.real:
            return self.name
        prefix = self.real.rstrip("/") + "/"
        return posixpath.join(self.name, real[len(prefix) :]) if real.startswith(prefix) else None


@dataclass(frozen=True)
class _Link:
    """A link of a scanned directory, or a path that the user named; only for the latter, scope and rules are None."""

    path: str
    name: str
    scope: _Scope | None
    rules: _Rules | None


class _Scan:
    """Collects the entries of one bundle; raises `ValueError` if they exceed the limits."""

    def __init__(self, argument: str, limits: Limits, root: str | None) -> None:
        self._argument, self._limits, self._root = argument, limits, root
        self._remedy = f"list what payloads do not need in {root}/.rayignore" if root else "leave it out"
        self._entries: dict[str, Entry] = {}
        self._links: list[_Link] = []

    def manifest(self, root: str | None) -> Manifest:
        """The manifest of all collected entries. Links are resolved here, when all other entries are known."""
        while self._links:
            links, self._links = sorted(self._links, key=lambda link: os.fsencode(link.name)), []
            for link in links:
                self._resolve(link)
        self._check_limits()
        return Manifest(self._argument, tuple(sorted(self._entries.values(), key=lambda entry: os.fsencode(entry.name))), root)

    def add(self, entry: Entry) -> None:
        self._entries[entry.name] = entry
        if len(self._entries) > self._limits.max_entries:
            self._check_limits()

    def walk(self, scope: _Scope, rules: _Rules | None) -> None:
        """Add the content of a directory, except ignored entries; links wait for `manifest`. Rules None read no ignore file."""
        waiting = [(scope.real, scope.name, rules)]
        while waiting:
            path, name, rules = waiting.pop()
            with self._readable(path):
                try:
                    with os.scandir(path) as listing:
                        items = {item.name: item for item in listing}
                except FileNotFoundError:
                    if path == scope.real:
                        raise
                    continue  # The directory was removed after its parent was read.
            if path != scope.real:
                if any(mark in items for mark in _ENVIRONMENT_MARKERS):
                    continue
                self.add(Entry(name, EntryKind.DIR, path))
            if rules is not None:
                rules = (*self._ignore_files(name, path, items), *rules)
            for item in items.values():
                full = posixpath.join(name, item.name)
                is_link = item.is_symlink()
                is_dir = os.path.isdir(item.path) if is_link else item.is_dir()
                if _ignored(rules or (), full, is_dir):
                    continue
                if is_link:
                    self._links.append(_Link(item.path, full, scope, rules))
                elif is_dir:
                    waiting.append((item.path, full, rules))
                else:
                    with self._readable(item.path), contextlib.suppress(FileNotFoundError):  # The file was removed meanwhile.
                        self._add_file(item.path, full, item.stat(follow_symlinks=False))

    def follow(self, link: _Link) -> None:
        """Add the target of a link to the bundle, under the name of the link."""
        real = os.path.realpath(link.path)
        with self._readable(link.path):
            found = os.stat(real)
            if not stat.S_ISDIR(found.st_mode):
                return self._add_file(real, link.name, found)
            if link.scope is not None and any(mark in os.listdir(real) for mark in _ENVIRONMENT_MARKERS):
                return
        via = () if link.scope is None else (*link.scope.via, os.path.dirname(link.path))
        if any(os.path.commonpath([real, directory]) == real for directory in via):
            raise ValueError(
                f"{self._argument}: the link {link.path} leads to {real}, which contains it; remove it or list it in .rayignore"
            )
        self.add(Entry(link.name, EntryKind.DIR, real))
        self.walk(_Scope(real, link.name, via), link.rules)

    def _resolve(self, link: _Link) -> None:
        """Add a link as a link if its target is in the bundle or does not exist; else add its target instead."""
        assert link.scope is not None
        with self._readable(link.path):
            try:
                os.stat(link.path)
            except OSError as error:
                if error.errno not in _DANGLING:
                    raise
                with contextlib.suppress(FileNotFoundError):
                    self.add(Entry(link.name, EntryKind.LINK, link.path, target=os.readlink(link.path)))
                return
        mapped = link.scope.name_of(os.path.realpath(link.path))
        if mapped is None or (mapped != link.scope.name and mapped not in self._entries):
            return self.follow(link)
        target = posixpath.relpath(f"/{mapped}", f"/{posixpath.dirname(link.name)}")
        self.add(Entry(link.name, EntryKind.LINK, link.path, target=target))

    def _ignore_files(self, directory: str, path: str, names: Collection[str]) -> Iterator[_IgnoreFile]:
        """The ignore files of a directory on this machine, whose name in the tree is `directory`."""
        for kind in IGNORE_FILES:
            file = os.path.join(path, kind)
            if kind not in names or not os.path.isfile(file):
                continue
            with self._readable(file), open(file, encoding="utf-8-sig", errors="surrogateescape", newline="\n") as text:
                lines = [line.rstrip("\r\n") for line in text]
            try:
                yield _IgnoreFile(kind, directory, GitIgnoreSpec.from_lines(lines))
            except ValueError as error:
                raise ValueError(f"{self._argument}: {file} has a pattern that means nothing: {error}") from None

    def _add_file(self, path: str, name: str, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            kind = _UNSUPPORTED.get(stat.S_IFMT(found.st_mode), "no file")
            raise ValueError(f"{self._argument}: {path} is {kind}, which cannot be copied; {self._remedy}")
        # Tools can set the mtime back, but not the ctime.
        stamp = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
        self.add(Entry(name, EntryKind.FILE, path, bool(found.st_mode & stat.S_IXUSR), found.st_size, stamp=stamp))

    def _check_limits(self) -> None:
        entries, limits = self._entries.values(), self._limits
        total = sum(entry.size for entry in entries)
        if len(entries) > limits.max_entries:
            directories = ((f"{posixpath.dirname(entry.name) or '.'}/", 1) for entry in entries)
            most = ", ".join(f"{name} ({number})" for name, number in _largest(directories))
            excess = f"more than {limits.max_entries} files and directories, most of them in {most}"
        elif total > limits.max_bytes:
            files = ((entry.name, entry.size) for entry in entries)
            most = ", ".join(f"{name} ({_amount(size)})" for name, size in _largest(files) if size)
            excess = f"{_amount(total)}, more than {_amount(limits.max_bytes)}; the largest are {most}"
        else:
            return
        raise ValueError(
            f"{self._argument}: {self._root or 'the files'} would be {excess}; {self._remedy}, and keep data on the "
            "cluster, in the directory that payloads find in RAYSLURM_DATA_DIR"
        )

    @contextlib.contextmanager
    def _readable(self, path: str) -> Iterator[None]:
        """Turn an `OSError` inside the block into a `ValueError` that names the file and the argument."""
        try:
            yield
        except OSError as error:
            where = error.filename or path
            raise ValueError(
                f"{self._argument}: {where} cannot be read: {error.strerror}; make it readable, or {self._remedy}"
            ) from None


def _largest(sizes: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """The five largest sums of sizes, by the first two parts of the names."""
    sums: Counter[str] = Counter()
    for name, size in sizes:
        parts = name.split("/")
        sums["/".join(parts[:2]) + "/" * (len(parts) > 2)] += size
    return sorted(sums.items(), key=lambda item: (-item[1], item[0]))[:5]


def _amount(size: float) -> str:
    """A number of bytes as text with a unit, such as "12 MiB"."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
