"""What is in a bundle, and what is too much for one."""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One file, directory or symbolic link of a bundle.

    Attributes:
        name: its path in the bundle.
        kind: "file", "dir" or "link".
        source: where it is on this machine; "" for a directory that is nowhere.
        executable: whether its owner may execute it; no other bit of the mode travels.
        size: bytes of a file.
        target: what a link says, relative to the link where it leads to something in the bundle.
        stamp: numbers that change whenever a file does.
    """

    name: str
    kind: str
    source: str
    executable: bool = False
    size: int = 0
    target: str = ""
    stamp: tuple[int, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """The entries of a bundle.

    Attributes:
        what: the argument that named them, for messages.
        entries: what is in it, sorted by the bytes of the names.
        root: the directory whose entries they are; None for files that were named one by one.
    """

    what: str
    entries: tuple[Entry, ...]
    root: str | None = None

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.entries)


@dataclass(frozen=True)
class Limits:
    """What a bundle may hold.

    Attributes:
        max_bytes: bytes of all files; by default what Ray 2.60 takes as working_dir.
        max_entries: files, directories and links; with more of them somebody named the wrong directory.
    """

    max_bytes: int = 500 * 2**20
    max_entries: int = 100_000

    def excess(self, sizes: Mapping[str, int]) -> str | None:
        """By how much, and by what most of all, some entries go beyond the limits; None if they do not.

        Args:
            sizes: the bytes of each entry, by name.
        """
        if len(sizes) > self.max_entries:
            most = [f"{name} ({count})" for name, count in largest(dict.fromkeys(sizes, 1))]
            return f"more than {self.max_entries} files and directories, most of them in {', '.join(most)}"
        total = sum(sizes.values())
        if total > self.max_bytes:
            most = [f"{name} ({amount(size)})" for name, size in largest(sizes)]
            return f"{amount(total)}, more than {amount(self.max_bytes)}; the largest are {', '.join(most)}"
        return None


DEFAULT_LIMITS = Limits()


def remedy(root: str | None) -> str:
    """What to do about a file that cannot be in a bundle."""
    return f"list what payloads do not need in {root}/.rayignore" if root else "leave it out"


def largest(sizes: Mapping[str, int], most: int = 5) -> list[tuple[str, int]]:
    """The names that explain most of a sum: a directory counts as one, unless nearly all of it is one thing in it.

    Args:
        sizes: a number for each path.
        most: how many names are wanted.
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
    return sorted(found, key=lambda item: (-item[1], item[0]))[:most]


def amount(size: float) -> str:
    """A number of bytes for people."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
