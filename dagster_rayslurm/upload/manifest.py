"""The list of files in a bundle, and the limits of its size."""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class EntryKind(str, Enum):
    """The type of an entry in a bundle: file, directory or symbolic link."""

    FILE = "file"
    DIR = "dir"
    LINK = "link"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Entry:
    """One file, directory or symbolic link of a bundle.

    Attributes:
        name: the entry's path in the bundle.
        source: the entry's path on this machine; "" for a directory that exists only in the bundle.
        executable: whether a file's owner may execute it; no other mode bit is kept.
        size: bytes of a file.
        target: the target of a link; relative to the link if the target is in the bundle.
        stamp: stat fields of a file that change whenever the file does.
    """

    name: str
    kind: EntryKind
    source: str
    executable: bool = False
    size: int = 0
    target: str = ""
    stamp: tuple[int, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """The list of a bundle's entries, before their content is read.

    Attributes:
        argument: the argument of `run()` or the launcher that named the files, for error messages.
        entries: sorted by the bytes of their names.
        root: the bundled directory; None for files that were named one by one.
    """

    argument: str
    entries: tuple[Entry, ...]
    root: str | None = None

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.entries)


@dataclass(frozen=True)
class Limits:
    """Limits of a bundle's size; a larger bundle is refused.

    Attributes:
        max_bytes: maximum bytes of all files together; the default is the limit of Ray 2.60 for working_dir.
        max_entries: maximum number of files, directories and links; more of them suggest a wrong directory.
    """

    max_bytes: int = 500 * 2**20
    max_entries: int = 100_000

    def excess(self, sizes: Mapping[str, int]) -> str | None:
        """Part of an error message: the exceeded limit, and the entries that contribute most; None within the limits.

        Args:
            sizes: bytes by entry name.
        """
        if len(sizes) > self.max_entries:
            most = [f"{name} ({number})" for name, number in largest(dict.fromkeys(sizes, 1))]
            return f"more than {self.max_entries} files and directories, most of them in {', '.join(most)}"
        total = sum(sizes.values())
        if total > self.max_bytes:
            most = [f"{name} ({amount(size)})" for name, size in largest(sizes)]
            return f"{amount(total)}, more than {amount(self.max_bytes)}; the largest are {', '.join(most)}"
        return None


DEFAULT_LIMITS = Limits()


def remedy(root: str | None) -> str:
    """Part of an error message: how to leave a file out of the bundle of a directory `root`, or of single files."""
    return f"list what payloads do not need in {root}/.rayignore" if root else "leave it out"


def largest(sizes: Mapping[str, int], count: int = 5) -> list[tuple[str, int]]:
    """The `count` top-level paths with the largest sums of `sizes`, each with its sum.

    A child with over 90 % of a directory's sum is named instead of the directory.
    """
    sums: Counter[str] = Counter()
    children: dict[str, set[str]] = {}
    for path, size in sizes.items():
        name = path
        while name:
            sums[name] += size
            children.setdefault(posixpath.dirname(name), set()).add(name)
            name = posixpath.dirname(name)
    found = []
    for name in children.get("", ()):
        while inner := [child for child in children.get(name, ()) if sums[child] * 10 > sums[name] * 9]:
            name = inner[0]
        found.append((f"{name}/" if name in children else name, sums[name]))
    return sorted(found, key=lambda item: (-item[1], item[0]))[:count]


def amount(size: float) -> str:
    """A number of bytes as text with a unit, such as "12 MiB"."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
