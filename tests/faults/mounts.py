"""Mounts directories of this machine in containers that run already."""

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
"""Program that mounts a directory of this machine in a container, by open_tree(2) and move_mount(2).

Arguments: a process id in the container, the target there, and the source here; an empty source unmounts the target.
"""


def unmount(path: Path) -> None:
    """Unmount a file system at once, even if processes use it."""
    LIBC.umount2(str(path).encode(), 2)  # MNT_DETACH


@contextmanager
def shown(stack: Stack, service: str, source: Path, target: str) -> Iterator[None]:
    """Mounts a directory of this machine at `target`, an existing directory in a service's container."""
    asked = ["docker", "inspect", "--format={{.State.Pid}}", stack.container(service)]
    pid = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    subprocess.run([sys.executable, "-c", _SHOW, pid, target, str(source)], check=True)
    try:
        yield
    finally:
        # Not checked: if the container was started anew, the mount is gone already.
        subprocess.run([sys.executable, "-c", _SHOW, pid, target, ""], capture_output=True)
