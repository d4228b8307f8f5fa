"""A look at local files that reads none of them but ignore files."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from .ignore import Rules, is_environment
from .manifest import DEFAULT_LIMITS, Entry, Limits, Manifest, remedy

_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_KINDS = {
    stat.S_IFSOCK: "a socket",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def scan(directory: str, *, what: str = "working_dir", limits: Limits = DEFAULT_LIMITS) -> Manifest:
    """Look at a directory, leaving out what its ignore files say and what no cluster has a use for.

    A link stays one if what it leads to is in the bundle too; else what it leads to takes its place, as with Ray. One
    that leads nowhere stays as it is.

    Args:
        directory: the directory.
        what: the argument that named it, for messages.
        limits: what is too much.

    Raises:
        ValueError: it holds too much, or something that cannot be read or copied; the sentence says what to do.
    """
    found = _Scan(what, limits, os.path.abspath(directory))
    real = os.path.realpath(directory)
    found.walk(_Scope(real, ""), Rules())
    return found.manifest(real)


def scan_files(files: Mapping[str, str], *, what: str = "extra_files", limits: Limits = DEFAULT_LIMITS) -> Manifest:
    """Look at files and directories that were named one by one: they are taken whole, whatever ignore files say.

    Only what is always left out (`__pycache__`, `.git` and the like) is left out of a directory.

    Args:
        files: where each is on this machine, by its path in the bundle.
        what: the argument that named them, for messages.
        limits: what is too much.

    Raises:
        ValueError: as for `scan`; or a path in the bundle is absolute, not in its simplest form, or below another one.
    """
    found = _Scan(what, limits, None)
    for name, path in sorted(files.items()):
        above = _parents(name)
        taken = next((parent for parent in above if parent in files), None)
        if taken is not None:
            raise ValueError(f"{what}: {name!r} would stand in {taken!r}, which is a file or directory of its own")
        if any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
            raise ValueError(f"{what}: {name!r} is not the name of a file in a bundle")
        for parent in above:
            found.add(Entry(parent, "dir", ""))
        found.follow(_Link(os.path.abspath(path), name, None, None))
    return found.manifest(None)


def _stamp(found: os.stat_result) -> tuple[int, ...]:
    """Numbers that change whenever a file does: tools can set its mtime back, but not its ctime."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _parents(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:length]) for length in range(1, len(parts))]


@dataclass(frozen=True)
class _Scope:
    """A directory whose content stands below a name of the bundle.

    Attributes:
        real: the directory, without links in its path.
        name: the name.
        via: the directories of the links that led from the first scope to this one.
    """

    real: str
    name: str
    via: tuple[str, ...] = ()

    def name_of(self, real: str) -> str | None:
        """The name in the bundle of what is below the directory."""
        if real == self.real:
            return self.name
        prefix = self.real.rstrip("/") + "/"
        return posixpath.join(self.name, real[len(prefix) :]) if real.startswith(prefix) else None


@dataclass(frozen=True)
class _Link:
    """Something that is perhaps looked through.

    Attributes:
        path: where it is.
        name: its name in the bundle.
        scope: where it was found; None if the user named it.
        rules: what holds around it; None for what is taken whole.
    """

    path: str
    name: str
    scope: _Scope | None
    rules: Rules | None


class _Scan:
    """Collects entries until there are too many of them.

    Args:
        what: the argument that named them.
        limits: what is too much.
        root: what messages call the directory whose entries they are, if it is one.
    """

    def __init__(self, what: str, limits: Limits, root: str | None) -> None:
        self._what, self._limits, self._root = what, limits, root
        self._entries: dict[str, Entry] = {}
        self._links: list[_Link] = []

    def manifest(self, root: str | None) -> Manifest:
        """What was found, once it is known which links stay links."""
        while self._links:
            links, self._links = sorted(self._links, key=lambda link: os.fsencode(link.name)), []
            for link in links:
                self._settle(link)
        self._check_limits()
        return Manifest(self._what, tuple(sorted(self._entries.values(), key=lambda entry: os.fsencode(entry.name))), root)

    def add(self, entry: Entry) -> None:
        """Take an entry."""
        self._entries[entry.name] = entry
        if len(self._entries) > self._limits.max_entries:
            self._check_limits()

    def walk(self, scope: _Scope, rules: Rules | None) -> None:
        """Take what is in a directory."""
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
                    continue  # Gone since its parent was read.
            if path != scope.real:
                if is_environment(items):
                    continue
                self.add(Entry(name, "dir", path))
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
                    with self._readable(item.path), contextlib.suppress(FileNotFoundError):  # Gone meanwhile.
                        self._add_file(item.path, full, item.stat(follow_symlinks=False))

    def follow(self, link: _Link) -> None:
        """Take what a link leads to in its place."""
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
                f"{self._what}: the link {link.path} leads to {real}, which contains it; remove it or list it in .rayignore"
            )
        self.add(Entry(link.name, "dir", real))
        self.walk(_Scope(real, link.name, via), link.rules)

    def _settle(self, link: _Link) -> None:
        """Keep a link if it will lead somewhere, or leads nowhere already; else take what it leads to."""
        assert link.scope is not None
        with self._readable(link.path):
            try:
                os.stat(link.path)
            except OSError as error:
                if error.errno not in _NOWHERE:
                    raise
                with contextlib.suppress(FileNotFoundError):
                    self.add(Entry(link.name, "link", link.path, target=os.readlink(link.path)))
                return
        mapped = link.scope.name_of(os.path.realpath(link.path))
        if mapped is None or (mapped != link.scope.name and mapped not in self._entries):
            return self.follow(link)
        target = posixpath.relpath(f"/{mapped}", f"/{posixpath.dirname(link.name)}")
        self.add(Entry(link.name, "link", link.path, target=target))

    def _within(self, rules: Rules, name: str, path: str, names: Collection[str]) -> Rules:
        with self._readable(path):
            try:
                return rules.within(name, path, names)
            except ValueError as error:
                raise ValueError(f"{self._what}: {error}") from None

    def _add_file(self, path: str, name: str, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            kind = _KINDS.get(stat.S_IFMT(found.st_mode), "no file")
            raise ValueError(f"{self._what}: {path} is {kind}, which cannot be copied; {remedy(self._root)}")
        self.add(Entry(name, "file", path, bool(found.st_mode & stat.S_IXUSR), found.st_size, stamp=_stamp(found)))

    def _check_limits(self) -> None:
        excess = self._limits.excess({entry.name: entry.size for entry in self._entries.values()})
        if excess:
            raise ValueError(
                f"{self._what}: {self._root or 'the files'} would be {excess}; {remedy(self._root)}, and keep data on the "
                "cluster, in the directory that payloads find in RAYSLURM_DATA_DIR"
            )

    @contextlib.contextmanager
    def _readable(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = error.filename or path
            raise ValueError(
                f"{self._what}: {where} cannot be read: {error.strerror}; make it readable, or {remedy(self._root)}"
            ) from None
