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
from typing import IO, Literal

from ..archive import build_runtime, runtime_name
from ..ssh.base import Completed, Connection, ConnectionLost, Progress
from ..ssh.local import private_dir
from .bundle import Bundle

_SMALL = 1024 * 1024
"""Maximum bytes of an archive that goes to the standard input of the command that unpacks it; others go over SFTP first."""
_ENTRY = 1024
"""Upper limit of the bytes that an archive has for an entry in addition to its content: the header and padding."""
_KNOWN_FOR = 300.0
"""Seconds for which this process trusts that an installed item is still there."""
_TRIES = 3
"""Maximum number of attempts of one command when the connection is lost."""
_LOOK_TIMEOUT = 300.0
"""Seconds in which the command that checks for installed items must end."""
_UNPACK_TIMEOUT = 600.0
_UNPACKED_PER_SECOND = 1024 * 1024
"""The command that unpacks an archive must end within `_UNPACK_TIMEOUT` seconds, plus a second for each of these bytes."""
_LOCK_POLL = 0.1
"""Seconds between two attempts to get the lock of this machine."""

_FOREIGN = 77
_OPEN = 78
"""Exit codes of `_LOOK`: `_FOREIGN` if another user owns a directory, `_OPEN` if a directory is world-writable."""
_LOOK = """\
cd -- "$1" 2>/dev/null || exit 0
shift
for directory in . bundles runtime runs sessions; do
    if [ -e "$directory" ] && ! [ -O "$directory" ]; then stat -L -c '%U' -- "$directory"; exit 77; fi
done
find -H . bundles runtime runs sessions -maxdepth 0 -perm -0002 2>/dev/null | { ! grep .; } || exit 78
find -H bundles runtime runs sessions -maxdepth 0 -perm -0020 -exec chmod 700 '{}' + 2>/dev/null
if [ -n "$(find -H . -maxdepth 0 -perm -0020 ! -perm -1000)" ]; then
    group=$(stat -L -c %G -- .)
    [ "$group" = "$(id -un)" ] || printf 'group %s\n' "$group"
fi
for place; do
    touch -c -- "$place" 2>/dev/null
    if [ -e "$place" ] && [ -O "$place" ]; then printf '%s\\n' "$place"; fi
done
"""
"""Shell script that prints which of the given paths below the base directory exist.

The script touches these paths, because `remote_cleanup` keeps recently touched files. Names are predictable, so on a shared
file system another user could place a runtime there. Therefore only files of this user count, in directories that this user
owns and that are not world-writable. For a directory of another user the script prints the owner, and for a world-writable
one its name. It closes our own directories to the group, because project file systems open them by umask or default ACL. The
base directory may hold more than our files: the script only prints its group, unless that is the user's own group or the
sticky bit is set.
"""

# Shell script that unpacks an archive under a temporary name and renames the result. The rename fails if the target is a
# directory with entries: then another process has installed the same bundle, which is fine.
_UNPACK = """\
umask 077
unset TAR_OPTIONS
mkdir -p -- "$1/$2" && cd -- "$1/$2" && chmod 700 . || exit
name=$3 kind=$4 archive=$5 work=.rs-$6.unpack
trap 'if [ -e "$work" ]; then chmod -R u+w "$work"; rm -rf "$work"; fi' EXIT
trap 'exit 143' HUP INT TERM
if [ "$kind" = file ]; then
    cat -- "$archive" >"$work" && chmod 400 "$work" && mv -f -- "$work" "$name"
else
    mkdir "$work" && tar -x -z -m --no-same-owner -C "$work" -f "$archive" && chmod 500 "$work" &&
        { mv -T -- "$work" "$name" 2>/dev/null || { [ -d "$name" ] && [ -O "$name" ]; } || mv -T -- "$work" "$name"; }
fi
code=$?
[ "$archive" = - ] || rm -f -- "$archive"
exit $code
"""

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
    kind: Literal["tree", "file"]
    """A "tree" is sent as an archive and unpacked, a "file" is stored unchanged."""
    size: int
    """An upper limit of the bytes to send; 0 for the runtime, which is always small."""
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

    If nothing is missing, this takes one small command, or none within five minutes of the last one. Several processes may
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
    runtime = _Part("runtime", runtime_name(), "file", 0, lambda target: target.write(build_runtime()))
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
    return _Part("bundles", bundle.name, "tree", size, bundle.write_archive)


class _Installer:
    """Finds out which items are missing below one base directory, and sends items."""

    def __init__(self, connection: Connection, base: str) -> None:
        self._connection, self._base = connection, base

    def missing(self, parts: Sequence[_Part], warn: Callable[[str], object] = lambda _: None) -> list[_Part]:
        """The items that are not installed; asks the cluster unless this process saw all of them a short time ago."""
        seen, since = _known.get(self._connection, {}), time.monotonic() - _KNOWN_FOR
        if all(seen.get(self._path(part), since) > since for part in parts):
            return []
        lines = self._look([part.place for part in parts])
        for group in (line.removeprefix("group ") for line in lines if line.startswith("group ")):
            warn(
                f"{self._connection.place}: group {group} may write to {self._base}, and so change what runs there; run: "
                f"chmod g-w {self._base} (or chmod +t {self._base}, if the group needs it)"
            )
        self.remember([part for part in parts if part.place in lines])
        return [part for part in parts if part.place not in lines]

    def remember(self, parts: Sequence[_Part]) -> None:
        """Note that these items are on the cluster now, so that `missing` need not ask again for some minutes."""
        now = time.monotonic()
        _known.setdefault(self._connection, {}).update({self._path(part): now for part in parts})

    def send_small(self, part: _Part, progress: Progress | None) -> None:
        """Install an item with a single command, which reads the item from its standard input."""
        archive = io.BytesIO()
        part.write(archive)
        self._unpack(part, "-", archive.getvalue())
        if progress:
            progress(archive.tell(), archive.tell())

    def send_large(self, part: _Part, progress: Progress | None) -> None:
        """Install an item by an upload over SFTP and a command that unpacks the uploaded file."""
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
        self._unpack(part, name, b"")

    def _path(self, part: _Part) -> str:
        """The absolute path of an item on the cluster."""
        return posixpath.join(self._base, part.place)

    def _look(self, places: Sequence[str]) -> list[str]:
        """The lines that `_LOOK` prints: the places that exist, and warnings about groups.

        Raises:
            PermissionError: another user owns or can change the base directory.
        """
        command = ["sh", "-c", _LOOK, "sh", self._base, *places]
        done = self._run(lambda: command, b"", _LOOK_TIMEOUT, f"looking at {self._base}")
        assert done is not None
        output = done.stdout.decode("utf-8", "replace").split("\n")
        where = self._connection.place
        if done.returncode == _FOREIGN:
            raise PermissionError(f"{where}: {self._base} belongs to {output[0]}, who could change what runs there")
        if done.returncode == _OPEN:
            place = posixpath.normpath(posixpath.join(self._base, output[0]))
            raise PermissionError(
                f"{where}: everybody may write to {place}, and so change what runs there; run: chmod o-w {place}"
            )
        return output

    def _unpack(self, part: _Part, archive: str, stdin: bytes) -> None:
        """Turn an archive into the item's path on the cluster; `archive` is an uploaded file there, or "-" for `stdin`."""

        def command() -> list[str]:
            return ["sh", "-c", _UNPACK, "sh", self._base, part.directory, part.name, part.kind, archive, secrets.token_hex(8)]

        timeout = _UNPACK_TIMEOUT + part.size / _UNPACKED_PER_SECOND
        done = self._run(command, stdin, timeout, f"making {self._path(part)}", lambda: not self.missing([part]))
        if done is not None and done.returncode != 0:
            error = done.stderr.decode("utf-8", "replace")[-500:].strip() or f"exit code {done.returncode}"
            raise OSError(f"{self._connection.place}: {self._path(part)} cannot be made: {error}")

    def _run(
        self,
        command: Callable[[], list[str]],
        stdin: bytes,
        timeout: float,
        doing: str,
        done: Callable[[], bool] = lambda: False,
    ) -> Completed | None:
        """The result of a command, which is run up to `_TRIES` times if the connection is lost.

        None if `done` returns True after a lost connection: the command has reached its aim all the same.
        """
        for left in reversed(range(_TRIES)):
            try:
                return self._connection.run(command(), stdin, timeout)
            except ConnectionLost:
                if not left:
                    raise
                if done():
                    return None
            except TimeoutError:
                raise TimeoutError(
                    f"{self._connection.place}: {doing} took over {timeout:.0f} s and was ended; the file system of {self._base} "
                    "does not answer: try again later, or choose another remote_base"
                ) from None
        raise AssertionError("the last attempt returns or raises")


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
