"""Makes bundles: sets of files of this machine. Each bundle becomes a directory on the cluster, named by a hash of the content.

A scan lists a directory and reads only ignore files (.gitignore and .rayignore). The scan leaves out the files that Ray leaves
out of a `runtime_env` working_dir, and files that no cluster needs, such as caches and environments. The other files are read
when the name of the bundle is computed.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import os
import posixpath
import stat
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO

from pathspec import GitIgnoreSpec

from ..runtime.protocol.messages import TextEnum

# Files with patterns in the syntax of gitignore(5). Ray 2.60 reads both, in every directory of the tree.
IGNORE_FILES = (".gitignore", ".rayignore")
# Names of files and directories that no cluster needs.
_LEFT_OUT = frozenset(
    {
        *(".git", ".venv", "venv", "__pycache__"),  # By Ray 2.60 too (RAY_RUNTIME_ENV_DEFAULT_EXCLUDES).
        *(".DS_Store", ".dagster_home", ".hg", ".hypothesis", ".ipynb_checkpoints", ".mypy_cache", ".nox", ".pixi"),
        *(".pytest_cache", ".ruff_cache", ".svn", ".tox", "node_modules"),
    }
)
# Prefix of the directory that `dagster dev` makes in the current directory if DAGSTER_HOME is not set (Dagster 1.13).
_TEMPORARY_HOME = ".tmp_dagster_home_"
# Entries that mark a directory as a virtual or conda environment. A scan leaves environments out, because they would not work on
# another machine.
_ENVIRONMENT_MARKERS = ("pyvenv.cfg", "conda-meta")
# Errors of stat(2) for a link whose target does not exist.
_DANGLING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_UNSUPPORTED = {stat.S_IFSOCK: "a socket", stat.S_IFIFO: "a named pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
# The largest bundle that is accepted; Ray 2.60 has the same limit of bytes. Too many entries suggest a wrong directory.
MAX_BYTES, MAX_ENTRIES = 500 * 2**20, 100_000

# The ignore files that count for a directory, the deepest first. Each item has the file's name (one of IGNORE_FILES), the file's
# directory (its name in the bundle), and the patterns in the file.
_Rules = tuple[tuple[str, str, GitIgnoreSpec], ...]


class EntryKind(TextEnum):
    """The type of an entry in a bundle."""

    FILE = "file"
    DIR = "dir"
    LINK = "link"


@dataclass(frozen=True)
class Entry:
    """One file, directory or symbolic link of a bundle."""

    name: str  # The path in the bundle.
    kind: EntryKind
    # The path on this machine, with links resolved; if the entry itself is a link, the path of this link. "" for a directory that
    # exists only in the bundle.
    source: str
    executable: bool = False  # Whether the file's owner may execute the file; no other mode bit is kept.
    size: int = 0
    target: str = ""  # Target of a link, relative to the link if the target is in the bundle; "" for a file or directory.
    stamp: tuple[int, ...] = ()  # Fields of stat(2) that show a change of the file; () for entries that are not files.


@dataclass(frozen=True)
class Manifest:
    """The entries of a bundle, sorted so that each directory precedes its content; the content of files is not read yet."""

    argument: str  # The argument of `run()` or the launcher that named the files, for error messages.
    entries: tuple[Entry, ...]
    root: str | None = None  # The path of the bundled directory, with links resolved; None for files named one by one.

    @property
    def size(self) -> int:
        """The size of all files together, in bytes."""
        return sum(entry.size for entry in self.entries)


def scan(directory: str) -> Manifest:
    """Return the manifest of a directory, without entries that .gitignore or .rayignore files exclude, or that no cluster needs.

    A link stays a link if the target is in the bundle, or does not exist; otherwise the target replaces the link, as in Ray.
    Virtual and conda environments below the directory, and links to environments, are left out. Raises ValueError if the files
    exceed the limits, or a file cannot be read or copied; the message says what to do.
    """
    root = os.path.abspath(directory)
    found = _Scan("working_dir", f"list what payloads do not need in {root}/.rayignore", root)
    found.walk(os.path.realpath(directory), "", ())
    return found.manifest(os.path.realpath(directory))


def scan_files(files: Mapping[str, str], *, argument: str = "extra_files") -> Manifest:
    """Return the manifest of single files and directories; `files` maps paths in the bundle to paths on this machine.

    `argument` is the name of the user's argument, for error messages. Ignore files are not read; `__pycache__`, `.git` and the
    like are left out. Raises ValueError like `scan`, and if a path in the bundle is absolute, not normalized, or below another
    path in `files`.
    """
    found = _Scan(argument)
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
        found.follow(path, name, None)
    return found.manifest(None)


def _ignored(rules: _Rules, name: str, is_dir: bool) -> bool:
    """Return True if `_LEFT_OUT`, the .gitignore files or the .rayignore files exclude the entry `name`, or if it is a .pyc file.

    `rules` are the ignore files that count for the entry's directory. If several .gitignore files have a pattern for the entry,
    the file in the deepest directory decides; the same holds for .rayignore files. `is_dir` is True also for a link to a
    directory, because Ray treats such a link as a directory.
    """
    base = posixpath.basename(name)
    if base in _LEFT_OUT or base.endswith(".pyc") or base.startswith(_TEMPORARY_HOME):
        return True
    for kind in IGNORE_FILES:
        below = ((name[len(top) + 1 :] if top else name, spec) for each, top, spec in rules if each == kind)
        verdicts = (spec.check_file(f"{path}/" if is_dir else path).include for path, spec in below)
        if next((verdict for verdict in verdicts if verdict is not None), False):
            return True
    return False


@dataclass
class _Scan:
    """Collects the entries of one bundle; raises `ValueError` if the entries exceed the limits."""

    argument: str  # The user's argument that named the files, for error messages.
    remedy: str = "leave it out"  # What the user can do, for error messages.
    root: str = "the files"  # The bundled directory, for error messages.
    _entries: dict[str, Entry] = field(default_factory=dict)
    _places: dict[str, str] = field(default_factory=dict)  # Names in the bundle by path on this machine, with links resolved.
    # Links that `manifest` decides about: the path, the name in the bundle, and the ignore files that count for the directory.
    _links: list[tuple[str, str, _Rules | None]] = field(default_factory=list)

    def manifest(self, root: str | None) -> Manifest:
        """Decide how to include each symbolic link that `walk` has found; return the manifest of all entries.

        `root` is the path of the bundled directory, with links resolved; None if the files were named one by one. Raises
        ValueError if an entry cannot be read or copied, or if the entries exceed the limits.
        """
        if root is not None:
            self._places[root] = ""
        while self._links:
            links, self._links = sorted(self._links, key=lambda link: os.fsencode(link[1])), []
            for link in links:
                self._resolve(*link)
        self._check_limits()
        # GNU tar makes a directory read-only at the next entry that is not below it (tried with 1.34), so "a.py" must not be
        # between "a" and "a/b".
        entries = sorted(self._entries.values(), key=lambda entry: os.fsencode(entry.name).split(b"/"))
        return Manifest(self.argument, tuple(entries), root)

    def add(self, entry: Entry) -> None:
        """Add one entry to the bundle; raises `ValueError` if the bundle then has too many entries."""
        self._entries[entry.name] = entry
        if entry.kind is not EntryKind.LINK:
            self._places.setdefault(entry.source, entry.name)
        if len(self._entries) > MAX_ENTRIES:
            self._check_limits()

    def walk(self, top: str, name: str, rules: _Rules | None) -> None:
        """Add the directory `top` under the name `name`, with all entries below except ignored entries and environments.

        `manifest` decides later about the links that this method has found. `name` is the name in the bundle, "" for the bundled
        directory itself. `rules` are the ignore files of the directories above; if None, no ignore file is read.
        """
        waiting = [(top, name, rules)]
        while waiting:
            path, name, rules = waiting.pop()
            with self._readable(path), os.scandir(path) as listing:
                items = {item.name: item for item in listing}
            if path != top and any(mark in items for mark in _ENVIRONMENT_MARKERS):
                continue
            if name:
                self.add(Entry(name, EntryKind.DIR, path))
            if rules is not None:
                rules = (*(self._ignore_file(kind, name, path) for kind in IGNORE_FILES if kind in items), *rules)
            for item in items.values():
                full = posixpath.join(name, item.name)
                is_link = item.is_symlink()
                is_dir = os.path.isdir(item.path) if is_link else item.is_dir()
                if _ignored(rules or (), full, is_dir):
                    continue
                if is_link:
                    self._links.append((item.path, full, rules))
                elif is_dir:
                    waiting.append((item.path, full, rules))
                else:
                    self._add_file(item.path, full)

    def follow(self, path: str, name: str, rules: _Rules | None) -> None:
        """Add the file or directory at `path`, or the target if `path` is a link, under the name `name` in the bundle.

        For `rules` see `walk`. Raises ValueError if `path` is a link to a directory that contains the link.
        """
        real, parent = os.path.realpath(path), os.path.realpath(os.path.dirname(os.path.abspath(path)))
        if not os.path.isdir(real):
            return self._add_file(real, name)
        if os.path.islink(path) and os.path.commonpath([real, parent]) == real:
            raise ValueError(
                f"{self.argument}: the link {path} leads to {real}, which contains it; remove it or list it in .rayignore"
            )
        self.walk(real, name, rules)

    def _resolve(self, path: str, name: str, rules: _Rules | None) -> None:
        """Add a link as a link if its target is in the bundle or does not exist; otherwise add the target in place of the link.

        A link to a virtual or conda environment outside the bundle is left out.
        """
        target = ""
        with self._readable(path):
            try:
                os.stat(path)
            except OSError as error:
                if error.errno not in _DANGLING:
                    raise
                target = os.readlink(path)
            place = self._places.get(os.path.realpath(path))
            if not target and place is None:
                if not os.path.isdir(path) or not any(mark in os.listdir(path) for mark in _ENVIRONMENT_MARKERS):
                    self.follow(path, name, rules)
                return
        target = target or posixpath.relpath(f"/{place}", f"/{posixpath.dirname(name)}")
        self.add(Entry(name, EntryKind.LINK, path, target=target))

    def _ignore_file(self, kind: str, directory: str, path: str) -> tuple[str, str, GitIgnoreSpec]:
        """Read the ignore file `kind`, such as .gitignore, in the directory `path`; return `kind`, `directory` and the patterns.

        `directory` is the name of the directory in the bundle. Raises ValueError if a pattern is invalid.
        """
        file = os.path.join(path, kind)
        lines: list[str] = []
        if os.path.isfile(file):
            with self._readable(file), open(file, encoding="utf-8-sig", errors="surrogateescape", newline="\n") as text:
                lines = [line.rstrip("\r\n") for line in text]
        try:
            return kind, directory, GitIgnoreSpec.from_lines(lines)
        except ValueError as error:
            raise ValueError(f"{self.argument}: {file} has a pattern that means nothing: {error}") from None

    def _add_file(self, path: str, name: str) -> None:
        """Add the file `path` with the name `name` in the bundle; raises `ValueError` if it is not a regular file."""
        with self._readable(path):
            found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            kind = _UNSUPPORTED.get(stat.S_IFMT(found.st_mode), "no file")
            raise ValueError(f"{self.argument}: {path} is {kind}, which cannot be copied; {self.remedy}")
        # Tools can set the mtime back, but not the ctime.
        stamp = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
        self.add(Entry(name, EntryKind.FILE, path, bool(found.st_mode & stat.S_IXUSR), found.st_size, stamp=stamp))

    def _check_limits(self) -> None:
        """Raise `ValueError` if the bundle has more than `MAX_ENTRIES` entries or `MAX_BYTES` bytes."""
        entries = self._entries.values()
        total = sum(entry.size for entry in entries)
        if len(entries) > MAX_ENTRIES:
            directories = ((f"{posixpath.dirname(entry.name) or '.'}/", 1) for entry in entries)
            most = ", ".join(f"{name} ({number})" for name, number in _largest(directories))
            excess = f"more than {MAX_ENTRIES} files and directories, most of them in {most}"
        elif total > MAX_BYTES:
            files = ((entry.name, entry.size) for entry in entries)
            most = ", ".join(f"{name} ({_amount(size)})" for name, size in _largest(files) if size)
            excess = f"{_amount(total)}, more than {_amount(MAX_BYTES)}; the largest are {most}"
        else:
            return
        raise ValueError(
            f"{self.argument}: {self.root} would be {excess}; {self.remedy}, and keep data on the "
            "cluster, in the directory that payloads find in RAYSLURM_DATA_DIR"
        )

    @contextlib.contextmanager
    def _readable(self, path: str) -> Iterator[None]:
        """Turn an `OSError` raised in the `with` block into a `ValueError` that names the file and the user's argument.

        The message names `path` if the `OSError` names no file.
        """
        try:
            yield
        except OSError as error:
            where = error.filename or path
            raise ValueError(
                f"{self.argument}: {where} cannot be read: {error.strerror}; make it readable, or {self.remedy}"
            ) from None


def _largest(sizes: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Group paths by their first two parts, add up the sizes in each group, and return the five groups with the largest sums.

    Each item of `sizes` is a path and a size. Each item of the result is the first two parts of a group's paths, such as
    "data/images/", and the group's sum.
    """
    sums: Counter[str] = Counter()
    for name, size in sizes:
        parts = name.split("/")
        sums["/".join(parts[:2]) + "/" * (len(parts) > 2)] += size
    return sorted(sums.items(), key=lambda item: (-item[1], item[0]))[:5]


def _amount(size: float) -> str:
    """Return a number of bytes as text with a unit, such as "12 MiB"."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


# -- bundles -----------------------------------------------------------------------------------------------------------

# First bytes of the text whose hash names a bundle; a change gives all bundles new names.
_FORMAT = b"rayslurm bundle 1\n"
_BLOCK = 1024 * 1024  # Bytes that are read from a file at once.
_TAR_TYPES = {EntryKind.FILE: tarfile.REGTYPE, EntryKind.DIR: tarfile.DIRTYPE, EntryKind.LINK: tarfile.SYMTYPE}
# Nanoseconds after which a further change of a file certainly gets another mtime, even on a file system with a coarse clock.
_SETTLED = 2_000_000_000

# By path of a file that this process has read: its stamp (see `Entry`) at that time, and its SHA-256.
_digests: dict[str, tuple[tuple[int, ...], str]] = {}


@dataclass(frozen=True)
class Bundle:
    """A set of files that becomes one immutable directory on the cluster; bundles with equal content are equal."""

    name: str  # Hash of all names, contents, links and executable bits.
    manifest: Manifest = field(compare=False, repr=False)
    digests: Mapping[str, str] = field(compare=False, repr=False)  # SHA-256 of each file, by its name in the bundle.

    @property
    def size(self) -> int:
        """The size of all files together, in bytes."""
        return self.manifest.size

    def name_of(self, path: str) -> str | None:
        """Return the name in the bundle of the file or directory `path` of this machine; None for a path outside of the bundle.

        The name of the bundled directory itself is "".
        """
        path = os.path.abspath(path)
        if self.manifest.root == os.path.realpath(path):
            return ""
        parent, base = os.path.split(path)
        source = os.path.join(os.path.realpath(parent), base)
        found = (entry.name for entry in self.manifest.entries if entry.source in (source, os.path.realpath(path)))
        return next(found, None)

    def write_archive(self, target: IO[bytes]) -> None:
        """Write the bundle to `target` as a .tar.gz archive; raises `ValueError` if a file has changed since `make_bundle`.

        Bundles with equal content give equal bytes.
        """
        # Higher compression levels save a tenth of the bytes and take three times as long.
        with gzip.GzipFile(filename="", mode="wb", compresslevel=1, fileobj=target, mtime=0) as stream:
            for entry in self.manifest.entries:
                stream.write(_header(entry))
                if entry.kind == EntryKind.FILE:
                    digest = hashlib.sha256()
                    for data in _content(self.manifest.argument, entry):
                        digest.update(data)
                        stream.write(data)
                    if digest.hexdigest() != self.digests[entry.name]:
                        raise _changed(self.manifest.argument, entry)
                    stream.write(bytes(-entry.size % tarfile.BLOCKSIZE))
            stream.write(bytes(2 * tarfile.BLOCKSIZE))


def make_bundle(manifest: Manifest) -> Bundle:
    """Read the files of a manifest and return the bundle; raises `ValueError` if a file is unreadable or has another size now.

    Files that did not change since this process last read them are not read again.
    """
    digests = {entry.name: _digest(manifest.argument, entry) for entry in manifest.entries if entry.kind == EntryKind.FILE}
    whole = hashlib.sha256(_FORMAT)
    for entry in manifest.entries:
        name, target = os.fsencode(entry.name), os.fsencode(entry.target)
        start = f"{entry.kind} {entry.executable:d} {digests.get(entry.name, '-')} {len(name)} {len(target)} "
        whole.update(start.encode() + name + target + b"\n")
    return Bundle(whole.hexdigest()[:32], manifest, digests)


def bundle_directory(directory: str) -> Bundle:
    """Scan a directory and return its bundle; for errors see `scan`."""
    return make_bundle(scan(directory))


def bundle_files(files: Mapping[str, str], *, argument: str = "extra_files") -> Bundle:
    """Return the bundle of single files and directories; for arguments and errors see `scan_files`."""
    return make_bundle(scan_files(files, argument=argument))


def _digest(argument: str, entry: Entry) -> str:
    """Return the SHA-256 of a file of a bundle. A file that did not change since the last read is not read again.

    `argument` is the name of the user's argument that named the file, for error messages.
    """
    stamp, known = _digests.get(entry.source, ((), ""))
    if stamp == entry.stamp:
        return known
    digest = hashlib.sha256()
    now = time.time_ns()
    for data in _content(argument, entry):
        digest.update(data)
    if max(entry.stamp[-2:]) < now - _SETTLED:  # Only then would a later change show in the stamp.
        _digests[entry.source] = (entry.stamp, digest.hexdigest())
    return digest.hexdigest()


def _content(argument: str, entry: Entry) -> Iterator[bytes]:
    """Yield the content of a file of a bundle in blocks.

    If the file has grown, like a log, only the first `entry.size` bytes count. Raises ValueError if the file cannot be read, is
    gone, or has become smaller. `argument` is the name of the user's argument that named the file, for the error message.
    """
    try:
        with open(entry.source, "rb", buffering=0) as file:
            left = entry.size
            while left:
                data = file.read(min(left, _BLOCK))
                if not data:
                    raise _changed(argument, entry)
                left -= len(data)
                yield data
    except FileNotFoundError:
        raise _changed(argument, entry) from None
    except OSError as error:
        raise ValueError(
            f"{argument}: {entry.source} cannot be read: {error.strerror}; make it readable or leave it out"
        ) from None


def _changed(argument: str, entry: Entry) -> ValueError:
    """Return the exception for a file that has changed; `argument` is the user's argument that named the file."""
    return ValueError(
        f"{argument}: {entry.source} changed while it was being copied; try again, or leave it out if it keeps changing"
    )


def _header(entry: Entry) -> bytes:
    """Return the tar header of an entry; the mode in the header lets only the owner read or execute the unpacked file."""
    info = tarfile.TarInfo(entry.name)
    info.size, info.linkname = entry.size, entry.target
    info.type = _TAR_TYPES[entry.kind]
    info.mode = 0o500 if entry.kind == EntryKind.DIR or entry.executable else 0o400
    # The GNU format allows names of any bytes and any length.
    return info.tobuf(tarfile.GNU_FORMAT, sys.getfilesystemencoding(), "surrogateescape")
