"""Bundles and the runtime on the cluster: sent once, found by name, never half there."""

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
from typing import IO

from ..archive import build_runtime, runtime_name
from ..ssh.base import Connection, ConnectionLost, Progress
from ..ssh.local import private_dir
from .bundle import Bundle

_SMALL = 1024 * 1024
"""Bytes that go along with the command that unpacks them, instead of over SFTP first."""
_ENTRY = 1024
"""Bytes of an archive that go to the header of an entry with a short name, and to fill up its last block."""
_KNOWN_FOR = 300.0
"""Seconds for which this process does not ask again for what is there."""
_TRIES = 3
_LOOK_TIMEOUT = 300.0
_UNPACK_TIMEOUT = 600.0
_UNPACKED_PER_SECOND = 1024 * 1024
"""Seconds, and bytes of an archive for each more of them, within which a file system there answers, however busy it is."""
_LOCK_POLL = 0.1

_FOREIGN = 77
_OPEN = 78
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
"""Prints which places below the base directory are taken, and marks them as in use; in this order, see `remote_sweep`.

Only what this user owns counts, in directories of this user that not everybody may write to: names can be foreseen, so that
on a file system where everybody may write others could put a runtime of theirs there. Of another user's directory it prints
the owner, and the name of one that is open to all. Our own directories are closed to the group, which file systems of projects
open by umask or default ACL. The base directory may be more than ours, so of that one it prints the group, unless that is the
user's own or a sticky bit protects what is in it.
"""

# A rename makes it count. Onto a directory with something in it there is none: then somebody else was faster.
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
"""When something was last seen, by its path, on each connection: their names do not tell one from another."""


@dataclass(frozen=True)
class Installed:
    """Where things are on the cluster.

    Attributes:
        bundles: the directory of each bundle.
        runtime: the runtime's zipapp.
    """

    bundles: Mapping[Bundle, str]
    runtime: str


@dataclass(frozen=True)
class _Part:
    """One thing that is there or not.

    Attributes:
        directory: where it goes, below the base directory.
        name: what it is called there.
        kind: "tree" for an archive that is unpacked, "file" for what is taken as it is.
        size: bytes of what is sent, at most.
        write: writes that.
    """

    directory: str
    name: str
    kind: str
    size: int
    write: Callable[[IO[bytes]], object]

    @property
    def place(self) -> str:
        return posixpath.join(self.directory, self.name)


def place_of(base: str, bundle: Bundle) -> str:
    """Where a bundle is on the cluster, once it is there."""
    return posixpath.join(base, "bundles", bundle.name)


def runtime_place(base: str) -> str:
    """Where the runtime is on the cluster, once it is there."""
    return posixpath.join(base, "runtime", runtime_name())


def install(
    connection: Connection,
    base: str,
    bundles: Sequence[Bundle],
    progress: Progress | None = None,
    afresh: bool = False,
    warn: Callable[[str], object] = lambda _: None,
) -> Installed:
    """See to it that bundles and the runtime are on the cluster, for their owner alone and read-only.

    What is there costs one small command, or none if this process asked within the last five minutes. Several
    processes may do this at once: those of one machine send a thing once, those of several in the worst case each.

    Args:
        connection: how to reach the cluster.
        base: the base directory there, absolute.
        bundles: what payloads need.
        progress: told of what is sent, separately for each bundle.
        afresh: look for all of it, whatever this process knows to be there.
        warn: told of a base directory that others may write to.

    Returns:
        Where all of it is.

    Raises:
        ValueError: a file changed since its bundle got its name.
        OSError: something cannot be written, here or there, or the base directory is another user's.
    """
    parts = [_runtime(), *map(_part, dict.fromkeys(bundles))]
    if afresh:
        _known.pop(connection, None)
    for part in _missing(connection, base, parts, warn):
        if part.size <= _SMALL:
            _send_small(connection, base, part, progress)
        else:
            with _one_at_a_time(f"{connection.place} {base} {part.place}"):
                if _missing(connection, base, [part]):
                    _send_large(connection, base, part, progress)
        _remember(connection, base, [part])
    return Installed({bundle: place_of(base, bundle) for bundle in bundles}, runtime_place(base))


def _runtime() -> _Part:
    return _Part("runtime", runtime_name(), "file", 0, lambda target: target.write(build_runtime()))


def _part(bundle: Bundle) -> _Part:
    most = bundle.size + _ENTRY * len(bundle.manifest.entries)
    return _Part("bundles", bundle.name, "tree", most, bundle.write_archive)


def _missing(
    connection: Connection, base: str, parts: Sequence[_Part], warn: Callable[[str], object] = lambda _: None
) -> list[_Part]:
    seen, since = _known.get(connection, {}), time.monotonic() - _KNOWN_FOR
    if all(seen.get(posixpath.join(base, part.place), since) > since for part in parts):
        return []
    there = _look(connection, base, [part.place for part in parts])
    for group in (line.removeprefix("group ") for line in there if line.startswith("group ")):
        warn(
            f"{connection.place}: group {group} may write to {base}, and so change what runs there; run: chmod g-w {base} "
            f"(or chmod +t {base}, if the group needs it)"
        )
    _remember(connection, base, [part for part in parts if part.place in there])
    return [part for part in parts if part.place not in there]


def _look(connection: Connection, base: str, places: Sequence[str]) -> list[str]:
    for left in reversed(range(_TRIES)):
        try:
            done = connection.run(["sh", "-c", _LOOK, "sh", base, *places], timeout=_LOOK_TIMEOUT)
        except ConnectionLost:
            if not left:
                raise
            continue
        except TimeoutError:
            raise _hangs(connection, base, f"looking at {base}", _LOOK_TIMEOUT) from None
        said = done.stdout.decode("utf-8", "replace").split("\n")
        if done.returncode == _FOREIGN:
            raise PermissionError(f"{connection.place}: {base} belongs to {said[0]}, who could change what runs there")
        if done.returncode == _OPEN:
            place = posixpath.normpath(posixpath.join(base, said[0]))
            raise PermissionError(
                f"{connection.place}: everybody may write to {place}, and so change what runs there; run: chmod o-w {place}"
            )
        return said
    raise AssertionError("there is a last try")


def _remember(connection: Connection, base: str, parts: Sequence[_Part]) -> None:
    now = time.monotonic()
    _known.setdefault(connection, {}).update({posixpath.join(base, part.place): now for part in parts})


def _send_small(connection: Connection, base: str, part: _Part, progress: Progress | None) -> None:
    archive = io.BytesIO()
    part.write(archive)
    size = archive.tell()
    _unpack(connection, base, part, "-", archive.getvalue())
    if progress:
        progress(size, size)


def _send_large(connection: Connection, base: str, part: _Part, progress: Progress | None) -> None:
    directory, source = posixpath.join(base, part.directory), f".rs-{secrets.token_hex(8)}.tgz"
    with tempfile.NamedTemporaryFile(prefix="rayslurm-") as archive:
        try:
            part.write(archive)
            archive.flush()
        except OSError as error:
            raise OSError(f"{archive.name} cannot be written before it goes to {connection.place}: {error.strerror}") from None
        connection.make_dir(directory)
        connection.upload(archive.name, posixpath.join(directory, source), progress)
    _unpack(connection, base, part, source, b"")


def _unpack(connection: Connection, base: str, part: _Part, source: str, stdin: bytes) -> None:
    timeout = _UNPACK_TIMEOUT + part.size / _UNPACKED_PER_SECOND
    for left in reversed(range(_TRIES)):
        command = ["sh", "-c", _UNPACK, "sh", base, part.directory, part.name, part.kind, source, secrets.token_hex(8)]
        try:
            done = connection.run(command, stdin, timeout)
        except ConnectionLost:
            if not left:
                raise
            if not _missing(connection, base, [part]):
                return
            continue
        except TimeoutError:
            raise _hangs(connection, base, f"making {posixpath.join(base, part.place)}", timeout) from None
        if done.returncode == 0:
            return
        said = done.stderr.decode("utf-8", "replace")[-500:].strip() or f"exit code {done.returncode}"
        raise OSError(f"{connection.place}: {posixpath.join(base, part.place)} cannot be made: {said}")


def _hangs(connection: Connection, base: str, doing: str, timeout: float) -> TimeoutError:
    return TimeoutError(
        f"{connection.place}: {doing} took over {timeout:.0f} s and was ended; the file system of {base} does not answer: try "
        "again later, or choose another remote_base"
    )


@contextlib.contextmanager
def _one_at_a_time(what: str) -> Iterator[None]:
    """Be the only thread and process of this user on this machine that does something."""
    # One digit: a lock file for everything that was ever sent would fill the directory.
    path = os.path.join(private_dir(), f"install-{hashlib.sha256(os.fsencode(what)).hexdigest()[0]}")
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
        fcntl.flock(fd, fcntl.LOCK_UN)  # A child that was forked meanwhile holds the file open as well.
        os.close(fd)
