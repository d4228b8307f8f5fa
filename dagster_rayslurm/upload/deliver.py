"""Install bundles and the runtime on the Slurm cluster.

Each is sent once, found again by its name, and invisible under that name until it is complete.
"""

from __future__ import annotations

import hashlib
import io
import posixpath
import secrets
import tempfile
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..archive import build_runtime, runtime_name
from ..edge import base_directory
from ..ssh.base import Connection, ConnectionFailed, Progress
from ..ssh.local import locked
from .bundle import Bundle

T = TypeVar("T")

# Maximum bytes of an archive that goes to the function that unpacks it; others are uploaded as a file first.
_SMALL = 1024 * 1024
_ENTRY = 1024  # Upper limit of the bytes that an archive has for an entry in addition to its content: the header and padding.
_LOOK_TIMEOUT = 300.0
_UNPACK_TIMEOUT = 600.0
# An archive must be unpacked within `_UNPACK_TIMEOUT` seconds, plus a second for each of these bytes.
_UNPACKED_PER_SECOND = 1024 * 1024


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
    warn: Callable[[str], object] = lambda _: None,
) -> None:
    """Install bundles and the runtime on the cluster if they are missing there; only their owner can read them.

    If nothing is missing, this takes one small call. Several processes may install at the same time: those of one machine send a
    large item once, those of several machines at worst once each. `base` is absolute. `progress` is called with the bytes sent,
    for each large item, and `warn` with a warning about a base directory that others may write to.

    Raises ValueError if a file changed since its bundle was named, and OSError if a file cannot be written on this machine or the
    cluster, or another user owns or can change the base directory.
    """
    items: dict[str, Bundle | None] = {runtime_place(base): None}
    items |= {place_of(base, bundle): bundle for bundle in bundles}
    for path in _missing(connection, base, list(items), warn):
        bundle = items[path]
        if bundle is None:
            _make(connection, base, path, base_directory.install_file, build_runtime())
        elif bundle.size + _ENTRY * len(bundle.manifest.entries) <= _SMALL:
            archive = io.BytesIO()
            bundle.write_archive(archive)
            _make(connection, base, path, base_directory.install, "", archive.getvalue())
        else:
            # Only one hex digit of the hash, so that there are at most 16 lock files.
            with locked(f"install-{hashlib.sha256(f'{connection.place} {path}'.encode(errors='replace')).hexdigest()[0]}"):
                if _missing(connection, base, [path]):
                    name = _upload(connection, posixpath.dirname(path), bundle, progress)
                    _make(connection, base, path, base_directory.install, name, b"", more=bundle.size / _UNPACKED_PER_SECOND)


def _missing(
    connection: Connection, base: str, paths: Sequence[str], warn: Callable[[str], object] = lambda _: None
) -> list[str]:
    """The paths that are not installed; raises PermissionError if another user owns or can change the base directory."""
    where, places = connection.place, [posixpath.relpath(path, base) for path in paths]
    look = base_directory.look
    owner, open_place, group, found = _call(connection, base, f"looking at {base}", _LOOK_TIMEOUT, look, base, places)
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
    connection: Connection, base: str, path: str, function: Callable[..., None], *content: object, more: float = 0.0
) -> None:
    """Make the runtime or a bundle on the cluster by a function of `base_directory`, and give it `more` seconds than usual."""
    try:
        _call(connection, base, f"making {path}", _UNPACK_TIMEOUT + more, function, *posixpath.split(path), *content)
    except (ConnectionFailed, TimeoutError):
        raise
    except OSError as error:
        said = str(error).removeprefix(f"{connection.place}: ")
        raise OSError(f"{connection.place}: {path} cannot be made: {said}") from None


def _call(connection: Connection, base: str, doing: str, timeout: float, function: Callable[..., T], *arguments: object) -> T:
    try:
        return connection.call(function, *arguments, repeat=True, timeout=timeout)
    except TimeoutError:
        raise TimeoutError(
            f"{connection.place}: {doing} took over {timeout:.0f} s and was ended; the file system of {base} "
            "does not answer: try again later, or choose another remote_base"
        ) from None
