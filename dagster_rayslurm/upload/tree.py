"""Scan directories and files of this machine for a bundle. Of all files only the ignore files are read."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from .ignore import Rules, is_environment
from .manifest import DEFAULT_LIMITS, Entry, EntryKind, Limits, Manifest, remedy

_DANGLING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
"""Errors of stat(2) for a link whose target does not exist."""
_UNSUPPORTED = {
    stat.S_IFSOCK: "a socket",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def scan(directory: str, *, argument: str = "working_dir", limits: Limits = DEFAULT_LIMITS) -> Manifest:
    """The manifest of a directory, without the files that its ignore files name or that no cluster needs.

    A link stays a link if its target is in the bundle, or does not exist; otherwise the target replaces it, as in Ray.

    Args:
        directory: the directory's path.
        argument: the argument of `run()` or the launcher that named the directory, for error messages.
        limits: the largest bundle that is accepted.

    Raises:
        ValueError: the files exceed the limits, or a file cannot be read or copied; the sentence says what to do.
    """
    found = _Scan(argument, limits, os.path.abspath(directory))
    real = os.path.realpath(directory)
    found.walk(_Scope(real, ""), Rules())
    return found.manifest(real)


def scan_files(files: Mapping[str, str], *, argument: str = "extra_files", limits: Limits = DEFAULT_LIMITS) -> Manifest:
    """The manifest of single files and directories. Ignore files do not count; `__pycache__`, `.git` and the like are left out.

    Args:
        files: paths on this machine, by path in the bundle.
        argument: the argument of `run()` or the launcher that named the files, for error messages.
        limits: the largest bundle that is accepted.

    Raises:
        ValueError: as for `scan`; or a path in the bundle is absolute, not normalized, or below another one.
    """
    found = _Scan(argument, limits, None)
    for name, path in sorted(files.items()):
        above = _parents(name)
        taken = next((parent for parent in above if parent in files), None)
        if taken is not None:
            raise ValueError(f"{argument}: {name!r} would stand in {taken!r}, which is a file or directory of its own")
        if any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
            raise ValueError(f"{argument}: {name!r} is not the name of a file in a bundle")
        for parent in above:
            found.add(Entry(parent, EntryKind.DIR, ""))
        found.follow(_Link(os.path.abspath(path), name, None, None))
    return found.manifest(None)


def _stamp(found: os.stat_result) -> tuple[int, ...]:
    """Stat fields of a file that change whenever the file does: tools can set the mtime back, but not the ctime."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _parents(name: str) -> list[str]:
    """The directories above a name in the bundle, the top one first."""
    parts = name.split("/")
    return ["/".join(parts[:length]) for length in range(1, len(parts))]


@dataclass(frozen=True)
class _Scope:
    """A directory whose content is scanned.

    Attributes:
        real: the directory's path, without links.
        name: the directory's name in the bundle.
        via: the directories that contain the links which led to this directory.
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
    rules: Rules | None


class _Scan:
    """Collects the entries of one bundle; raises `ValueError` if they exceed the limits."""

    def __init__(self, argument: str, limits: Limits, root: str | None) -> None:
        self._argument, self._limits, self._root = argument, limits, root
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
        """Add one entry; raises `ValueError` if there are too many."""
        self._entries[entry.name] = entry
        if len(self._entries) > self._limits.max_entries:
            self._check_limits()

    def walk(self, scope: _Scope, rules: Rules | None) -> None:
        """Add the content of a directory, except ignored entries; links wait for `manifest`."""
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
                if is_environment(items):
                    continue
                self.add(Entry(name, EntryKind.DIR, path))
            if rules is not None:
                rules = self._within(rules, name, path, items)
            for item in items.values():
                full = posixpath.join(name, item.name)
                is_link = item.is_symlink()
                is_dir = os.path.isdir(item.path) if is_link else item.is_dir()
                if (rules or Rules()).ignores(full, is_dir):
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
            if link.scope is not None and is_environment(os.listdir(real)):
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

    def _within(self, rules: Rules, name: str, path: str, names: Collection[str]) -> Rules:
        """The rules for a subdirectory, as `Rules.within`; its errors name the argument."""
        with self._readable(path):
            try:
                return rules.within(name, path, names)
            except ValueError as error:
                raise ValueError(f"{self._argument}: {error}") from None

    def _add_file(self, path: str, name: str, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            kind = _UNSUPPORTED.get(stat.S_IFMT(found.st_mode), "no file")
            raise ValueError(f"{self._argument}: {path} is {kind}, which cannot be copied; {remedy(self._root)}")
        self.add(Entry(name, EntryKind.FILE, path, bool(found.st_mode & stat.S_IXUSR), found.st_size, stamp=_stamp(found)))

    def _check_limits(self) -> None:
        excess = self._limits.excess({entry.name: entry.size for entry in self._entries.values()})
        if excess:
            raise ValueError(
                f"{self._argument}: {self._root or 'the files'} would be {excess}; {remedy(self._root)}, and keep data on the "
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
                f"{self._argument}: {where} cannot be read: {error.strerror}; make it readable, or {remedy(self._root)}"
            ) from None
