"""A bundle: entries and a name that says what is in all of them."""

from __future__ import annotations

import gzip
import hashlib
import os
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO

from .manifest import DEFAULT_LIMITS, Entry, Limits, Manifest
from .tree import scan, scan_files

_FORMAT = b"rayslurm bundle 1\n"
_BLOCK = 1024 * 1024
_NAME_LENGTH = 32
_SETTLED = 2_000_000_000
"""Nanoseconds after which a changed file has another mtime, whatever the granularity of the file system's clock."""

_digests: dict[str, tuple[tuple[int, ...], str]] = {}


@dataclass(frozen=True)
class Bundle:
    """An immutable directory for the cluster. Two of them are equal if their content is.

    Attributes:
        name: hash of names, contents, links and executable bits.
        manifest: what is in it.
        digests: SHA-256 of each file, by its name in the bundle.
    """

    name: str
    manifest: Manifest = field(compare=False, repr=False)
    digests: Mapping[str, str] = field(compare=False, repr=False)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return self.manifest.size

    def name_of(self, path: str) -> str | None:
        """What a file or directory of this machine is called in the bundle: "" is all of it, None if it is not in there."""
        path = os.path.abspath(path)
        if self.manifest.root == os.path.realpath(path):
            return ""
        parent, base = os.path.split(path)
        source = os.path.join(os.path.realpath(parent), base)
        found = (entry.name for entry in self.manifest.entries if entry.source in (source, os.path.realpath(path)))
        return next(found, None)

    def write_archive(self, target: IO[bytes]) -> None:
        """Write the bundle as a tar file under gzip, the same bytes for the same content.

        Args:
            target: where it goes; it is never held in memory.

        Raises:
            ValueError: a file is not what it was when the bundle got its name.
            OSError: it cannot be written.
        """
        # Level 1: few links to a cluster are so slow that saving a tenth of the bytes is worth thrice the time.
        with gzip.GzipFile(filename="", mode="wb", compresslevel=1, fileobj=target, mtime=0) as stream:
            for entry in self.manifest.entries:
                stream.write(_header(entry))
                if entry.kind == "file":
                    digest = hashlib.sha256()
                    for data in _content(self.manifest.what, entry):
                        digest.update(data)
                        stream.write(data)
                    if digest.hexdigest() != self.digests[entry.name]:
                        raise _changed(self.manifest.what, entry)
                    stream.write(bytes(-entry.size % tarfile.BLOCKSIZE))
            stream.write(bytes(2 * tarfile.BLOCKSIZE))


def make_bundle(manifest: Manifest) -> Bundle:
    """Name the content of a manifest. Files that this process has read before, and that did not change, are not read again.

    Raises:
        ValueError: a file cannot be read, or changes while it is.
    """
    digests = {entry.name: _digest(manifest.what, entry) for entry in manifest.entries if entry.kind == "file"}
    whole = hashlib.sha256(_FORMAT)
    for entry in manifest.entries:
        name, target = os.fsencode(entry.name), os.fsencode(entry.target)
        start = f"{entry.kind} {entry.executable:d} {digests.get(entry.name, '-')} {len(name)} {len(target)} "
        whole.update(start.encode() + name + target + b"\n")
    return Bundle(whole.hexdigest()[:_NAME_LENGTH], manifest, digests)


def bundle_directory(directory: str, *, what: str = "working_dir", limits: Limits = DEFAULT_LIMITS) -> Bundle:
    """The bundle of a directory's entries; see `scan`."""
    return make_bundle(scan(directory, what=what, limits=limits))


def bundle_files(files: Mapping[str, str], *, what: str = "extra_files", limits: Limits = DEFAULT_LIMITS) -> Bundle:
    """The bundle of files and directories that were named one by one; see `scan_files`."""
    return make_bundle(scan_files(files, what=what, limits=limits))


def _digest(what: str, entry: Entry) -> str:
    stamp, known = _digests.get(entry.source, ((), ""))
    if stamp == entry.stamp:
        return known
    digest = hashlib.sha256()
    now = time.time_ns()
    for data in _content(what, entry):
        digest.update(data)
    if max(entry.stamp[-2:]) < now - _SETTLED:  # Else it may change once more without a sign.
        _digests[entry.source] = (entry.stamp, digest.hexdigest())
    return digest.hexdigest()


def _content(what: str, entry: Entry) -> Iterator[bytes]:
    """A file's bytes.

    Raises:
        ValueError: it cannot be read, or has not as many as when it was looked at.
    """
    try:
        with open(entry.source, "rb", buffering=0) as file:
            left = entry.size
            while data := file.read(min(left, _BLOCK) or 1):
                left -= len(data)
                if left < 0:
                    break
                yield data
            if left:
                raise _changed(what, entry)
    except FileNotFoundError:
        raise _changed(what, entry) from None
    except OSError as error:
        raise ValueError(f"{what}: {entry.source} cannot be read: {error.strerror}; make it readable or leave it out") from None


def _changed(what: str, entry: Entry) -> ValueError:
    return ValueError(
        f"{what}: {entry.source} changed while it was being copied; try again, or leave it out if it keeps changing"
    )


def _header(entry: Entry) -> bytes:
    """The blocks of a tar file that announce an entry, which nobody will be able to write to."""
    info = tarfile.TarInfo(entry.name)
    info.size, info.linkname = entry.size, entry.target
    info.type = {"file": tarfile.REGTYPE, "dir": tarfile.DIRTYPE, "link": tarfile.SYMTYPE}[entry.kind]
    info.mode = 0o500 if entry.kind == "dir" or entry.executable else 0o400
    # GNU's own format holds names of any bytes and any length; tar has yet to learn that of the standard's.
    return info.tobuf(tarfile.GNU_FORMAT, sys.getfilesystemencoding(), "surrogateescape")
