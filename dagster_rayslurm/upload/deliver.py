"""Install bundles and the runtime on the Slurm cluster.

Each is sent once, found again by its name, and invisible under that name until it is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import posixpath
import secrets
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TypeVar

from ..archive import build_runtime, runtime_name
from ..edge import delivery
from ..ssh.base import Connection, ConnectionFailed, Progress
from ..ssh.local import private_dir
from .bundle import Bundle

T = TypeVar("T")

_SMALL = 1024 * 1024
"""Maximum bytes of an archive that goes with the call that unpacks it; others are uploaded first."""
_ENTRY = 1024
"""Upper limit of the bytes that an archive has for an entry in addition to its content: the header and padding."""
_KNOWN_FOR = 300.0
"""Seconds for which this process trusts that an installed item is still there."""
_LOOK_TIMEOUT = 300.0
"""Seconds for the check for installed items."""
_UNPACK_TIMEOUT = 600.0
_UNPACKED_PER_SECOND = 1024 * 1024
"""An archive must be unpacked within `_UNPACK_TIMEOUT` seconds, plus a second for each of these bytes."""
_LOCK_POLL = 0.1
"""Seconds between two attempts to get the lock of this machine."""

_known: weakref.WeakKeyDictionary[Connection, dict[str, float]] = weakref.WeakKeyDictionary()
"""By connection: the `time.monotonic()` at which this process last saw each path on the cluster."""


@dataclass(frozen=True)
class Installed:
    """The result of `install`: the paths on the cluster of each bundle and of the runtime, a zipapp."""

    bundles: Mapping[Bundle, str]
    runtime: str


@dataclass(frozen=True)
class _Part:
    """A bundle or the runtime, as an item to install below the base directory."""

    directory: str
    name: str
    size: int
    """An upper limit of the bytes to send."""
    write: Callable[[IO[bytes]], object]

    @property
    def place(self) -> str:
        """The path of the item below the base directory."""
        return posixpath.join(self.directory, self.name)


def place_of(base: str, bundle: Bundle) -> str:
    """The path of a bundle on the cluster."""
    return posixpath.join(base, "bundles", bundle.name)


def runtime_place(base: str) -> str:
    """The path of the runtime on the cluster."""
    return posixpath.join(base, "runtime", runtime_name())


def install(
    connection: Connection,
    base: str,
    bundles: Sequence[Bundle],
    progress: Progress | None = None,
    afresh: bool = False,
    warn: Callable[[str], object] = lambda _: None,
) -> Installed:
    """Install bundles and the runtime on the cluster if they are missing there; only their owner can read them.

    If nothing is missing, this takes one round trip, or none within five minutes of the last one. Several processes may
    install at the same time: those of one machine send a large item once, those of several machines at worst once each.

    Args:
        connection: the connection to the edge node.
        base: the absolute base directory on the cluster.
        bundles: the bundles that payloads need.
        progress: called with the bytes sent, for each item.
        afresh: check all items on the cluster, even those that this process saw a short time ago.
        warn: called with a warning about a base directory that others may write to.

    Raises:
        ValueError: a file changed since its bundle was named.
        OSError: a file cannot be written on this machine or the cluster, or another user owns or can change the base directory.
    """
    runtime = _Part("runtime", runtime_name(), 0, lambda target: target.write(build_runtime()))
    if afresh:
        _known.pop(connection, None)
    installer = _Installer(connection, base)
    for part in installer.missing([runtime, *map(_part, dict.fromkeys(bundles))], warn):
        if part.size <= _SMALL:
            installer.send_small(part, progress)
        else:
            with _machine_lock(f"{connection.place} {base} {part.place}"):
                if installer.missing([part]):
                    installer.send_large(part, progress)
        installer.remember([part])
    return Installed({bundle: place_of(base, bundle) for bundle in bundles}, runtime_place(base))


def _part(bundle: Bundle) -> _Part:
    """The item that installs a bundle."""
    size = bundle.size + _ENTRY * len(bundle.manifest.entries)
    return _Part("bundles", bundle.name, size, bundle.write_archive)


class _Installer:
    """Finds out which items are missing below one base directory, and sends items."""

    def __init__(self, connection: Connection, base: str) -> None:
        self._connection, self._base = connection, base

    def missing(self, parts: Sequence[_Part], warn: Callable[[str], object] = lambda _: None) -> list[_Part]:
        """The items that are not installed; asks the cluster unless this process saw all of them a short time ago."""
        seen, since = _known.get(self._connection, {}), time.monotonic() - _KNOWN_FOR
        if all(seen.get(self._path(part), since) > since for part in parts):
            return []
        owner, open_place, group, found = self._call(
            f"looking at {self._base}", _LOOK_TIMEOUT, delivery.look, self._base, [part.place for part in parts]
        )
        place = self._connection.place
        if owner:
            raise PermissionError(f"{place}: {self._base} belongs to {owner}, who could change what runs there")
        if open_place:
            sentence = f"everybody may write to {open_place}, and so change what runs there; run: chmod o-w {open_place}"
            raise PermissionError(f"{place}: {sentence}")
        if group:
            warn(
                f"{place}: group {group} may write to {self._base}, and so change what runs there; run: "
                f"chmod g-w {self._base} (or chmod +t {self._base}, if the group needs it)"
            )
        self.remember([part for part in parts if part.place in found])
        return [part for part in parts if part.place not in found]

    def remember(self, parts: Sequence[_Part]) -> None:
        """Note that these items are on the cluster now, so that `missing` need not ask again for some minutes."""
        now = time.monotonic()
        _known.setdefault(self._connection, {}).update({self._path(part): now for part in parts})

    def send_small(self, part: _Part, progress: Progress | None) -> None:
        """Install an item with a single call."""
        archive = io.BytesIO()
        part.write(archive)
        self._install(part, "", archive.getvalue())
        if progress:
            progress(archive.tell(), archive.tell())

    def send_large(self, part: _Part, progress: Progress | None) -> None:
        """Install an item by an upload and a call that unpacks the uploaded file."""
        place, name = self._connection.place, f".rs-{secrets.token_hex(8)}.tgz"
        directory = posixpath.join(self._base, part.directory)
        with tempfile.NamedTemporaryFile(prefix="rayslurm-") as archive:
            try:
                part.write(archive)
                archive.flush()
            except OSError as error:
                raise OSError(f"{archive.name} cannot be written before it goes to {place}: {error.strerror}") from None
            self._connection.make_dir(directory)
            self._connection.upload(archive.name, posixpath.join(directory, name), progress)
        self._install(part, name, b"")

    def _path(self, part: _Part) -> str:
        """The absolute path of an item on the cluster."""
        return posixpath.join(self._base, part.place)

    def _install(self, part: _Part, archive: str, data: bytes) -> None:
        """Make an item on the cluster; `archive` is an uploaded file there, or "" for `data`."""
        directory = posixpath.join(self._base, part.directory)
        doing, timeout = f"making {self._path(part)}", _UNPACK_TIMEOUT + part.size / _UNPACKED_PER_SECOND
        try:
            if part.directory == "runtime":
                self._call(doing, timeout, delivery.install_file, directory, part.name, data)
            else:
                self._call(doing, timeout, delivery.install, directory, part.name, archive, data)
        except (ConnectionFailed, TimeoutError):
            raise
        except OSError as error:
            said = str(error).removeprefix(f"{self._connection.place}: ")
            raise OSError(f"{self._connection.place}: {self._path(part)} cannot be made: {said}") from None

    def _call(self, doing: str, timeout: float, function: Callable[..., T], *arguments: object) -> T:
        """Call a function on the cluster, again if the connection is lost."""
        try:
            return self._connection.call(function, *arguments, repeat=True, timeout=timeout)
        except TimeoutError:
            raise TimeoutError(
                f"{self._connection.place}: {doing} took over {timeout:.0f} s and was ended; the file system of {self._base} "
                "does not answer: try again later, or choose another remote_base"
            ) from None


@contextlib.contextmanager
def _machine_lock(name: str) -> Iterator[None]:
    """Hold a lock inside the block, so that of this user's processes on this machine only one at a time installs an item."""
    # Only one hex digit of the hash, so that there are at most 16 lock files.
    path = os.path.join(private_dir(), f"install-{hashlib.sha256(os.fsencode(name)).hexdigest()[0]}")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_LOCK_POLL)
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # Closing is not enough: a child process forked meanwhile has the file open, too.
        os.close(fd)
