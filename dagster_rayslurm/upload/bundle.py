"""Bundles: directories that are uploaded to the cluster, never changed there, and named by the hash of their content."""

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

from .tree import Entry, EntryKind, Manifest, scan, scan_files

# First bytes of what is hashed for the name of a bundle; a change gives all bundles new names.
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
        """The name in the bundle of a path on this machine; "" for the bundled directory itself, None outside the bundle."""
        path = os.path.abspath(path)
        if self.manifest.root == os.path.realpath(path):
            return ""
        parent, base = os.path.split(path)
        source = os.path.join(os.path.realpath(parent), base)
        found = (entry.name for entry in self.manifest.entries if entry.source in (source, os.path.realpath(path)))
        return next(found, None)

    def write_archive(self, target: IO[bytes]) -> None:
        """Write the bundle as a .tar.gz stream; equal content gives equal bytes. `ValueError` if a file has changed."""
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
    """The bundle of the files in a manifest; `ValueError` if a file cannot be read, or changes while it is read.

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
    """The bundle of the entries of a directory; for errors see `scan`."""
    return make_bundle(scan(directory))


def bundle_files(files: Mapping[str, str], *, argument: str = "extra_files") -> Bundle:
    """The bundle of single files and directories; for arguments and errors see `scan_files`."""
    return make_bundle(scan_files(files, argument=argument))


def _digest(argument: str, entry: Entry) -> str:
    """The SHA-256 of a file; from `_digests` if the file did not change."""
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
    """The content of a file in blocks; raises `ValueError` if it cannot be read, or its size changed since the scan."""
    try:
        with open(entry.source, "rb", buffering=0) as file:
            left = entry.size
            while data := file.read(min(left, _BLOCK) or 1):
                left -= len(data)
                if left < 0:
                    break
                yield data
            if left:
                raise _changed(argument, entry)
    except FileNotFoundError:
        raise _changed(argument, entry) from None
    except OSError as error:
        raise ValueError(
            f"{argument}: {entry.source} cannot be read: {error.strerror}; make it readable or leave it out"
        ) from None


def _changed(argument: str, entry: Entry) -> ValueError:
    return ValueError(
        f"{argument}: {entry.source} changed while it was being copied; try again, or leave it out if it keeps changing"
    )


def _header(entry: Entry) -> bytes:
    """The tar header of an entry; its mode lets only the owner read or execute the unpacked file."""
    info = tarfile.TarInfo(entry.name)
    info.size, info.linkname = entry.size, entry.target
    info.type = _TAR_TYPES[entry.kind]
    info.mode = 0o500 if entry.kind == EntryKind.DIR or entry.executable else 0o400
    # The GNU format allows names of any bytes and any length.
    return info.tobuf(tarfile.GNU_FORMAT, sys.getfilesystemencoding(), "surrogateescape")
