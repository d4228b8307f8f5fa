"""File systems of this machine, shown to containers that run already."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..stack.access import Stack

LIBC = ctypes.CDLL(None, use_errno=True)

_SHOW = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
pid, target, source = sys.argv[1:]
def must(found):
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found
open_tree, move_mount, clone, from_fd, detach = 428, 429, 1, 4, 2
tree = must(libc.syscall(open_tree, -100, source.encode(), clone)) if source else None
must(libc.setns(os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY), 0))
if tree is None:
    must(libc.umount2(target.encode(), detach))
else:
    must(libc.syscall(move_mount, tree, b"", -100, target.encode(), from_fd))
"""
"""Takes a mount from this machine into a container, which has a tree of mounts of its own, by open_tree(2) and
move_mount(2); or takes it away there, with an empty source."""


def unmount(path: Path) -> None:
    """Take a file system away, whoever uses it."""
    LIBC.umount2(str(path).encode(), 2)  # MNT_DETACH


@contextmanager
def shown(stack: Stack, service: str, source: Path, target: str) -> Iterator[None]:
    """A directory of this machine, in its place in a container, where a directory must be."""
    asked = ["docker", "inspect", "--format={{.State.Pid}}", stack.container(service)]
    pid = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    subprocess.run([sys.executable, "-c", _SHOW, pid, target, str(source)], check=True)
    try:
        yield
    finally:
        # With the container, should it have been started anew, the mount has gone.
        subprocess.run([sys.executable, "-c", _SHOW, pid, target, ""], capture_output=True)
