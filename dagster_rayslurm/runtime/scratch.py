"""Node-local private directories with short names, and the sweeping of those that a killed runtime left.

Ray puts Unix sockets below its temporary directory; a socket's path must fit 107 bytes (unix(7)), of which Ray
2.60 needs 68 with the dashboard on: 39 are left. The owner holds a lock on a file in the directory for as long as
it lives, so a directory whose lock can be had belongs to nobody.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from typing import List, Optional, Tuple

MAX_RAY_TEMP_DIR_BYTES = 39
_PREFIX = "rs-"
_LOCK = "lock"
_UNLOCKED_AGE = 60.0
"""Seconds for which a directory without a lock file is taken to be in the making."""


class ScratchError(OSError):
    """No directory can serve as scratch; the message lists why."""


def _bases() -> List[str]:
    candidates = [os.environ.get("TMPDIR", ""), "/tmp", "/var/tmp", tempfile.gettempdir()]
    fitting = [c for c in candidates if c and len(os.fsencode(c)) + len("/rs-12345678/r") <= MAX_RAY_TEMP_DIR_BYTES]
    return list(dict.fromkeys(fitting))


class Scratch:
    """A 0700 directory for sockets, tokens and Ray's own files, gone when the runtime ends.

    Raises:
        ScratchError: if no directory can be made in any base.
    """

    def __init__(self) -> None:
        refusals = []
        for base in _bases():
            for _ in range(10):
                path = os.path.join(base, _PREFIX + os.urandom(4).hex())
                try:
                    os.mkdir(path, 0o700)
                    lock = _lock(path)
                except OSError as error:
                    refusals.append("%s: %s" % (base, error.strerror))
                    break
                if lock is not None:  # Else a sweeper was faster; the next name is as good.
                    self.path, self._lock = path, lock
                    return
        raise ScratchError("no private directory can be made for sockets (%s)" % "; ".join(refusals))

    @property
    def ray_temp_dir(self) -> str:
        return os.path.join(self.path, "r")

    def join(self, *names: str) -> str:
        return os.path.join(self.path, *names)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _lock(path: str) -> Optional[int]:
    """Lock a scratch directory; None if somebody else holds it."""
    fd = os.open(os.path.join(path, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd
    except BlockingIOError:
        os.close(fd)
        return None


def sweep() -> List[str]:
    """Remove this user's scratch directories whose runtime is dead.

    Returns:
        The directories that were removed.
    """
    return [path for path, lock in _abandoned() if _remove_locked(path, lock)]


def _abandoned() -> List[Tuple[str, int]]:
    found = []
    for base in _bases():
        try:
            names = [name for name in os.listdir(base) if name.startswith(_PREFIX)]
        except OSError:
            continue
        for name in names:
            path = os.path.join(base, name)
            try:
                info = os.lstat(path)
                if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
                    continue
                if not os.path.exists(os.path.join(path, _LOCK)) and time.time() - info.st_mtime < _UNLOCKED_AGE:
                    continue
                lock = _lock(path)
            except OSError:
                continue  # Removed meanwhile, or not ours to read.
            if lock is not None:
                found.append((path, lock))
    return found


def _remove_locked(path: str, lock: int) -> bool:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
    return not os.path.exists(path)
