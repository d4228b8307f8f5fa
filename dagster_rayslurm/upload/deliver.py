"""Install bundles and the runtime on the Slurm cluster.

Each is sent once, found again by its name, and invisible under that name until it is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import posixpath
import secrets
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..archive import build_runtime, runtime_name
from ..edge import delivery
from ..ssh.base import Connection, ConnectionFailed, Progress
from ..ssh.local import locked
from .bundle import Bundle

_SMALL = 1024 * 1024
"""Maximum bytes of an archive that goes to the function that unpacks it; others are uploaded as a file first."""
_ENTRY = 1024
"""Upper limit of the bytes that an archive has for an entry in addition to its content: the header and padding."""
_AT_ONCE = 8
"""Number of files that are sent at once; most of them are small, so that the time is that of round trips."""
_PROGRESS_INTERVAL = 5.0
"""Seconds between two log lines about an upload."""
_KNOWN_FOR = 300.0
"""Seconds for which this process trusts that an installed item is still there."""
_LOOK_TIMEOUT = 300.0
_UNPACK_TIMEOUT = 600.0
_UNPACKED_PER_SECOND = 1024 * 1024
"""An archive must be unpacked within `_UNPACK_TIMEOUT` seconds, plus a second for each of these bytes."""

_known: weakref.WeakKeyDictionary[Connection, dict[str, float]] = weakref.WeakKeyDictionary()
"""By connection: the `time.monotonic()` at which this process last saw each path on the cluster."""


def place_of(base: str, bundle: Bundle) -> str:
    """The path of a bundle on the cluster."""
    return posixpath.join(base, "bundles", bundle.name)


def runtime_place(base: str) -> str:
    """The path of the runtime, a zipapp, on the cluster."""
    return posixpath.join(base, "runtime", runtime_name())


def install(
    connection: Connection,
    base: str,
    bundles: Sequence[Bundle],
    progress: Progress | None = None,
    afresh: bool = False,
    warn: Callable[[str], object] = lambda _: None,
) -> None:
    """Install bundles and the runtime on the cluster if they are missing there; only their owner can read them.

    If nothing is missing, this takes one small call, or none within five minutes of the last one. Several processes may
    install at the same time: those of one machine send a large item once, those of several machines at worst once each.

    Args:
        base: the absolute base directory on the cluster.
        progress: called with the bytes sent, for each large item.
        afresh: check all items on the cluster, even those that this process saw a short time ago.
        warn: called with a warning about a base directory that others may write to.

    Raises:
        ValueError: a file changed since its bundle was named.
        OSError: a file cannot be written on this machine or the cluster, or another user owns or can change the base directory.
    """
    if afresh:
        _known.pop(connection, None)
    items: dict[str, Bundle | None] = {runtime_place(base): None}
    items |= {place_of(base, bundle): bundle for bundle in bundles}
    for path in _missing(connection, base, list(items), warn):
        bundle = items[path]
        if bundle is None:
            _make(connection, base, path, delivery.install_file, build_runtime())
        elif bundle.size + _ENTRY * len(bundle.manifest.entries) <= _SMALL:
            archive = io.BytesIO()
            bundle.write_archive(archive)
            _make(connection, base, path, delivery.install, "", archive.getvalue())
        else:
            # Only one hex digit of the hash, so that there are at most 16 lock files.
            with locked(f"install-{hashlib.sha256(f'{connection.place} {path}'.encode(errors='replace')).hexdigest()[0]}"):
                if _missing(connection, base, [path]):
                    name = _upload(connection, posixpath.dirname(path), bundle, progress)
                    timeout = _UNPACK_TIMEOUT + bundle.size / _UNPACKED_PER_SECOND
                    _make(connection, base, path, delivery.install, name, b"", timeout=timeout)
        _known.setdefault(connection, {})[path] = time.monotonic()


def missing(connection: Connection, base: str, paths: Sequence[str], log: Any) -> list[str]:
    """The paths below the base directory that are not on the cluster; those that are there count as used from now on."""
    return _missing(connection, base, paths, lambda sentence: log.warning(f"[rayslurm] remote_base: {sentence}"))


def mark_installed(connection: Connection, path: str) -> None:
    """Note that this process has seen a path on the cluster."""
    _known.setdefault(connection, {})[path] = time.monotonic()


def send_files(connection: Connection, base: str, files: Mapping[str, str], progress: Progress) -> None:
    """Send files, which are paths on this machine by path on the cluster; others can read none of them.

    `progress` is called with the bytes of all files that have arrived. Raises `OSError` if one cannot be read, sent or written.
    """
    sizes = {path: os.path.getsize(local) for path, local in files.items()}
    arrived = dict.fromkeys(files, 0)

    def send(path: str) -> None:
        def report(done: int, _: int) -> None:
            arrived[path] = done
            progress(sum(arrived.values()), sum(sizes.values()))

        connection.make_dir(posixpath.dirname(path))
        connection.upload(files[path], path, report, mode=0o500)
        mark_installed(connection, path)

    connection.call(delivery.make_private, posixpath.join(base, "files"), repeat=True)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(send, files))


def log_progress(log: Any) -> Progress:
    """A callback that logs the progress of long uploads."""
    logged_at = time.monotonic()

    def report(done: int, size: int) -> None:
        nonlocal logged_at
        if done < size and time.monotonic() - logged_at > _PROGRESS_INTERVAL:
            logged_at = time.monotonic()
            log.info(f"[rayslurm] uploading: {done / 2**20:.0f} of {size / 2**20:.0f} MiB")

    return report


def _missing(
    connection: Connection, base: str, paths: Sequence[str], warn: Callable[[str], object] = lambda _: None
) -> list[str]:
    """The paths that are not installed; asks the cluster unless this process saw all of them a short time ago.

    Raises:
        PermissionError: another user owns or can change the base directory.
    """
    known, now = _known.setdefault(connection, {}), time.monotonic()
    if all(path in known and now - known[path] < _KNOWN_FOR for path in paths):
        return []
    where, places = connection.place, [posixpath.relpath(path, base) for path in paths]
    with _in_time(connection, base, f"looking at {base}", _LOOK_TIMEOUT):
        owner, open_place, group, found = connection.call(delivery.look, base, places, repeat=True, timeout=_LOOK_TIMEOUT)
    if owner:
        raise PermissionError(f"{where}: {base} belongs to {owner}, who could change what runs there")
    if open_place:
        sentence = f"everybody may write to {open_place}, and so change what runs there; run: chmod o-w {open_place}"
        raise PermissionError(f"{where}: {sentence}")
    if group:
        warn(
            f"{where}: group {group} may write to {base}, and so change what runs there; run: "
            f"chmod g-w {base} (or chmod +t {base}, if the group needs it)"
        )
    known.update({posixpath.join(base, place): now for place in found})
    return [path for path, place in zip(paths, places, strict=True) if place not in found]


def _upload(connection: Connection, directory: str, bundle: Bundle, progress: Progress | None) -> str:
    """Copy the archive of a bundle to the cluster; returns the name of the file there."""
    name = f".rs-{secrets.token_hex(8)}.tgz"
    with tempfile.NamedTemporaryFile(prefix="rayslurm-") as archive:
        try:
            bundle.write_archive(archive)
            archive.flush()
        except OSError as error:
            raise OSError(f"{archive.name} cannot be written before it goes to {connection.place}: {error.strerror}") from None
        connection.make_dir(directory)
        connection.upload(archive.name, posixpath.join(directory, name), progress)
    return name


def _make(
    connection: Connection,
    base: str,
    path: str,
    function: Callable[..., None],
    *content: object,
    timeout: float = _UNPACK_TIMEOUT,
) -> None:
    """Make the runtime or a bundle on the cluster by a function of `delivery`."""
    try:
        with _in_time(connection, base, f"making {path}", timeout):
            connection.call(function, *posixpath.split(path), *content, repeat=True, timeout=timeout)
    except (ConnectionFailed, TimeoutError):
        raise
    except OSError as error:
        said = str(error).removeprefix(f"{connection.place}: ")
        raise OSError(f"{connection.place}: {path} cannot be made: {said}") from None


@contextlib.contextmanager
def _in_time(connection: Connection, base: str, doing: str, timeout: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise TimeoutError(
            f"{connection.place}: {doing} took over {timeout:.0f} s and was ended; the file system of {base} "
            "does not answer: try again later, or choose another remote_base"
        ) from None
