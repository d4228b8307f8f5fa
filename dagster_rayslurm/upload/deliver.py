"""Install bundles (directories with user code) and the runtime (the program that starts Ray and payloads) on the Slurm cluster.

A bundle or the runtime is sent once, and later found on the cluster by name. The name appears on the cluster when the content is
complete. The base directory is the directory on the cluster that the setting `remote_base` names.
"""

from __future__ import annotations

import hashlib
import io
import os
import posixpath
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ..archive import build_runtime, runtime_name
from ..edge import base_directory
from ..ssh.base import Connection, ConnectionFailed, Progress
from ..ssh.local import locked
from .bundle import Bundle

T = TypeVar("T")

# Maximum bytes of an archive that is sent in the call of the function that unpacks it; others are uploaded as a file first.
_SMALL = 1024 * 1024
_ENTRY = 1024  # Upper limit of the bytes that an archive has for an entry in addition to its content: the header and padding.
_AT_ONCE = 8  # Number of files that are sent at once: most files are small, so that round trips take most of the time.
PROGRESS_INTERVAL = 5.0  # Seconds between two log lines about an upload.
_LOOK_TIMEOUT = 300.0
_UNPACK_TIMEOUT = 600.0
# An archive must be unpacked within `_UNPACK_TIMEOUT` seconds, plus a second for so many bytes, and one for so many entries. NFS
# with synchronous writes creates about a hundred files a second.
_UNPACKED_PER_SECOND, _ENTRIES_PER_SECOND = 1024 * 1024, 50


def place_of(base: str, bundle: Bundle) -> str:
    """Return the path of a bundle on the cluster, below the base directory `base`."""
    return posixpath.join(base, "bundles", bundle.name)


def runtime_place(base: str) -> str:
    """Return the path of the runtime, a zipapp, on the cluster, below the base directory `base`."""
    return posixpath.join(base, "runtime", runtime_name())


def install(
    connection: Connection,
    base: str,
    bundles: Sequence[Bundle],
    progress: Progress | None = None,
    warn: Callable[[str], object] = lambda _: None,
) -> None:
    """Install the runtime and bundles on the cluster, except what is there already; only this user can read the installed files.

    `base` is the absolute path of the base directory. `progress` is called during the upload of each large bundle, with the bytes
    sent and the size.

    If nothing is missing, the function makes one small remote call. Several processes may install at the same time. Processes on
    the same machine send each large bundle once; processes on different machines may each send the bundle.

    Raises ValueError if a file changed since `make_bundle` read it. Raises OSError if a file cannot be written on this machine or
    the cluster. Raises PermissionError if another user owns the base directory or a directory of this package in it, or if
    everybody may write to such a directory. If only a group may write to the base directory, the function calls `warn` with a
    sentence, and installs the files.
    """
    items: dict[str, Bundle | None] = {runtime_place(base): None}
    items |= {place_of(base, bundle): bundle for bundle in bundles}
    for path in missing(connection, base, list(items), warn):
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
                if missing(connection, base, [path]):
                    name = _upload(connection, posixpath.dirname(path), bundle, progress)
                    more = bundle.size / _UNPACKED_PER_SECOND + len(bundle.manifest.entries) / _ENTRIES_PER_SECOND
                    _make(connection, base, path, base_directory.install, name, b"", more=more)


def send_files(connection: Connection, base: str, files: Mapping[str, str], progress: Progress) -> None:
    """Send files to the cluster, readable for this user only; `files` maps paths on the cluster to paths on this machine.

    The paths on the cluster are below the directory `files` of the base directory `base`. `progress` is called with the number of
    bytes that have arrived, and the size of all files. Raises `OSError` if a file cannot be read, sent or written.
    """
    sizes = {path: os.path.getsize(local) for path, local in files.items()}
    arrived = dict.fromkeys(files, 0)

    def send(path: str) -> None:
        def report(done: int, _: int) -> None:
            arrived[path] = done
            progress(sum(arrived.values()), sum(sizes.values()))

        connection.make_dir(posixpath.dirname(path))
        connection.upload(files[path], path, report, mode=0o500)

    connection.call(base_directory.make_private, posixpath.join(base, "files"), repeat=True)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(send, files))


def log_progress(log: Any) -> Progress:
    """Return a function that logs the progress of an upload to `log`, at most once in `PROGRESS_INTERVAL` seconds."""
    logged_at = time.monotonic()

    def report(done: int, size: int) -> None:
        nonlocal logged_at
        if done < size and time.monotonic() - logged_at > PROGRESS_INTERVAL:
            logged_at = time.monotonic()
            log.info(f"[rayslurm] uploading: {done / 2**20:.0f} of {size / 2**20:.0f} MiB")

    return report


def missing(connection: Connection, base: str, paths: Sequence[str], warn: Callable[[str], object] = lambda _: None) -> list[str]:
    """Return the items of `paths` that do not exist on the cluster, and mark the existing items as used now.

    `paths` are absolute and below the base directory `base`. Raises PermissionError if another user owns the base directory or a
    directory of this package in it, or if everybody may write to such a directory. If only a group may write to the base
    directory, the function calls `warn` with a sentence.
    """
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
    """Upload the archive of a bundle into a directory on the cluster; return the file name of the archive."""
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
    """Create the file of the runtime's program, or the directory of a bundle, at `path` on the cluster.

    `function` of the module `edge.base_directory` does the work on the edge node. Its arguments are the parent directory of
    `path`, the name in this directory, and the items of `content`. Error messages name the base directory `base`. The call may
    take `_UNPACK_TIMEOUT` plus `more` seconds. Raises OSError if the call fails or takes longer.
    """
    try:
        _call(connection, base, f"making {path}", _UNPACK_TIMEOUT + more, function, *posixpath.split(path), *content)
    except (ConnectionFailed, TimeoutError):
        raise
    except OSError as error:
        said = str(error).removeprefix(f"{connection.place}: ")
        raise OSError(f"{connection.place}: {path} cannot be made: {said}") from None


def _call(connection: Connection, base: str, doing: str, timeout: float, function: Callable[..., T], *arguments: object) -> T:
    """Call a function of `edge` on the cluster, and return the result; over SSH, raises TimeoutError after `timeout` seconds.

    `doing`, such as "looking at /a/b", and the base directory `base` are words for the message of this error.
    """
    try:
        return connection.call(function, *arguments, repeat=True, timeout=timeout)
    except TimeoutError:
        raise TimeoutError(
            f"{connection.place}: {doing} took over {timeout:.0f} s and was ended; the file system of {base} "
            "does not answer: try again later, or choose another remote_base"
        ) from None
