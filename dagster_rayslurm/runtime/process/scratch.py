"""Makes and removes scratch directories: private directories with short names on the node's own disk.

The names are short because Ray creates Unix sockets below its temporary directory. The path of a socket may have 107 bytes
(unix(7)), of which Ray 2.60 needs 68 with the dashboard, so 39 are left.

The process that makes a scratch directory holds a lock on the directory as long as the process lives. So a directory that is not
locked was left by a killed process, and `sweep` removes the directory. Only directories that contain the marker file of this
module are ever removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
from typing import Dict, List, Optional

MAX_RAY_TEMP_DIR_BYTES = 39  # Longest path of a temporary directory that leaves room for the names of Ray's Unix sockets.
_NAME = re.compile(r"^rs-[0-9a-f]{8}$")
_MARKER = ".rayslurm-scratch"  # Name of the empty file that marks a directory as one of this module.
_MIN_FREE_BYTES = 256 * 1024  # Bytes that a disk must have free for a scratch directory.
_INHERITED = "RAYSLURM_SCRATCH_LOCK"  # Environment variable with the file descriptor for `inherit`.
_lock_before = -1  # The file descriptor that `inherit` has found; -1 if there is none.


def _bases(short: bool) -> List[str]:
    """Returns the directories in which scratch directories may be made, such as "/tmp", the preferred first.

    If `short` is True, directories with long paths are left out, so that the sockets of Ray fit: the path of a socket may have
    107 bytes, and Ray's temporary directory is `x/r` in the scratch directory, where `x` is one character.
    """
    candidates = [os.environ.get("TMPDIR", ""), "/tmp", "/var/tmp", tempfile.gettempdir()]
    longest = MAX_RAY_TEMP_DIR_BYTES - len("/rs-12345678/x/r")
    return list(dict.fromkeys(each for each in candidates if each and not (short and len(os.fsencode(each)) > longest)))


class Scratch:
    """A new private directory (mode 0700) on this node, for sockets, tokens and Ray's files; the attribute `path` has its path.

    For a copy of a Python environment, `needed` is the number of bytes that the disk must have free; the disk must also allow
    programs to run, and the path may be long. For any other use, `needed` is 0, and the path is short. Raises OSError if no
    directory can be made. `remove` removes the directory.
    """

    def __init__(self, needed: int = 0) -> None:
        refusals = []
        for base in _bases(short=not needed):
            self.path = os.path.join(base, "rs-" + os.urandom(4).hex())
            try:
                if needed:
                    _check_disk(base, needed)
                os.mkdir(self.path, 0o700)
                self._lock = _claim(self.path)
                return
            except OSError as error:
                refusals.append("%s: %s" % (base, error.strerror or error))
        raise OSError("no private directory can be made (%s)" % "; ".join(refusals))

    @property
    def ray_temp_dir(self) -> str:
        """Path of Ray's temporary directory in this scratch directory."""
        return os.path.join(self.path, "r")

    def join(self, *names: str) -> str:
        """Returns the path of a file in this directory; `names` are the parts of the path below the directory."""
        return os.path.join(self.path, *names)

    def remove(self) -> None:
        _remove(self.path, self._lock)

    def outlive_exec(self) -> Dict[str, str]:
        """Keep the lock on this directory when this process soon replaces its program by another one (`os.execve`).

        Returns the environment variable, as {name: value}, that the caller must give to the new program. There, `inherit` takes
        over the lock.
        """
        os.set_inheritable(self._lock, True)
        return {_INHERITED: str(self._lock)}


def inherit() -> None:
    """Take over the lock that the previous program of this process kept with `outlive_exec`; without such a lock, do nothing."""
    global _lock_before
    _lock_before = int(os.environ.pop(_INHERITED, -1))
    if _lock_before != -1:
        os.set_inheritable(_lock_before, False)


def release() -> None:
    """Close this process's file descriptor of the lock from `inherit`.

    To be called after a fork, so that only the child holds the lock. When the child has ended, the scratch directory is not
    locked any more, and `sweep` can remove it. Without a lock, does nothing.
    """
    global _lock_before
    if _lock_before != -1:
        os.close(_lock_before)
        _lock_before = -1


def is_full(path: str) -> bool:
    """Returns whether the disk of `path` is too full for a scratch directory; False also if the free space cannot be read."""
    try:
        return _free_bytes(os.statvfs(path)) < _MIN_FREE_BYTES
    except OSError:
        return False


def _free_bytes(disk: os.statvfs_result) -> int:
    return disk.f_bavail * disk.f_frsize


def _check_disk(path: str, needed: int) -> None:
    found = os.statvfs(path)
    if _free_bytes(found) < needed:
        raise OSError(errno.ENOSPC, "%.1f of %.1f GiB are free" % (_free_bytes(found) / 2**30, needed / 2**30))
    if found.f_flag & getattr(os, "ST_NOEXEC", 0):
        raise OSError(errno.EACCES, "it is mounted with noexec")


def _claim(path: str) -> int:
    """Lock the new directory `path`, write the marker file there, and return the file descriptor that holds the lock.

    If the directory cannot be locked, or the file cannot be written, the directory is removed, and OSError is raised.
    """
    lock = None
    try:
        lock = _lock(path)
        with open(os.path.join(path, _MARKER), "xb", 0) as marker:
            if marker.write(os.urandom(_MIN_FREE_BYTES)) < _MIN_FREE_BYTES:  # A full disk still takes empty files.
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            marker.truncate(0)
        return lock
    except OSError:
        _remove(path, lock)
        raise


def _lock(path: str) -> int:
    """Lock a directory, and return the file descriptor that holds the lock.

    Raises OSError if another process holds the lock, or if the file system has no locks.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd
    except OSError:
        os.close(fd)
        raise


def _remove(path: str, lock: Optional[int]) -> None:
    """Remove the scratch directory `path`, and close `lock`, the file descriptor of its lock (None if it is not locked).

    The marker file is removed last: if this process is killed before, or if a file cannot be removed, `sweep` still recognizes
    the directory by the marker file.
    """
    with contextlib.suppress(OSError):
        others = [entry for entry in os.scandir(path) if entry.name != _MARKER]
        for entry in others:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry.path)
        if not any(os.path.lexists(entry.path) for entry in others):
            shutil.rmtree(path, ignore_errors=True)
    if lock is not None:
        os.close(lock)


def sweep() -> List[str]:
    """Remove the scratch directories that killed processes of this user have left, and return the paths of those removed.

    Directories that a living process has locked stay. A directory that cannot be removed is skipped.
    """
    removed = []
    for base in _bases(short=False):
        with contextlib.suppress(OSError):
            for path in [os.path.join(base, name) for name in os.listdir(base) if _NAME.match(name)]:
                # The directory may be locked, or removed meanwhile, or not this user's to read.
                with contextlib.suppress(OSError):
                    # Without a marker, the directory is just being made, or is no scratch directory.
                    if os.lstat(path).st_uid == os.geteuid() and os.path.lexists(os.path.join(path, _MARKER)):
                        _remove(path, _lock(path))
                        removed += [] if os.path.exists(path) else [path]
    return removed
