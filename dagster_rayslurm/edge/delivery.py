"""The base directory: find and install the bundles and the runtime."""

import contextlib
import grp
import os
import pwd
import stat

from . import files, processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_OURS = ("bundles", "files", "prefixes", "runtime", "runs", "sessions")


def look(base: str, places: "Sequence[str]") -> "tuple[str, str, str, list[str]]":
    """Which of some paths below the base directory exist.

    Returns the name of another user who owns one of our directories, or ""; one of them that everybody may write to, or ""; the
    group that may change the base directory, or ""; and the paths that exist.

    The paths are touched, because the sweep keeps recently touched files. Names are predictable, so on a shared file system
    another user could place a runtime there. Therefore only files of this user count, in directories that this user owns and
    that are not world-writable. Our own directories are closed to the group, because project file systems open them by umask or
    default ACL. The base directory may hold more than our files.
    """
    user, group, found = os.geteuid(), "", []
    for name in ("", *_OURS):
        path = os.path.join(base, name)
        try:
            status = os.stat(path)
        except OSError:
            if name:
                continue
            return "", "", "", []
        if status.st_uid != user:
            return _name(pwd.getpwuid, status.st_uid), "", "", []
        if status.st_mode & stat.S_IWOTH:
            return "", os.path.normpath(path), "", []
        if name and status.st_mode & stat.S_IWGRP:
            with contextlib.suppress(OSError):
                os.chmod(path, 0o700)
        elif status.st_mode & (stat.S_IWGRP | stat.S_ISVTX) == stat.S_IWGRP:
            group = _name(grp.getgrgid, status.st_gid)
    for place in places:
        with contextlib.suppress(OSError):
            path = os.path.join(base, place)
            os.utime(path)
            if os.stat(path).st_uid == user:
                found.append(place)
    return "", "", "" if group == _name(pwd.getpwuid, user) else group, found


def _name(entry: "object", number: int) -> str:
    try:
        return str(entry(number)[0])  # type: ignore[operator]
    except KeyError:
        return str(number)


def install(directory: str, name: str, archive: str, data: bytes) -> None:
    """Make the directory `name` in a directory from `data`, or from the archive of this name there, which is removed.

    The name tells the content. If the directory is there already, by this user, that is fine.
    """
    make_private(directory)
    target, uploaded = os.path.join(directory, name), os.path.join(directory, archive) if archive else ""
    work = files.temporary_name(target)
    try:
        if _is_ours(target):
            return
        os.mkdir(work, 0o700)
        script = 'unset TAR_OPTIONS; umask 077; exec tar -x -z -m --no-same-owner -C "$1" -f "$2"'
        code, _, error = processes.run(["sh", "-c", script, "sh", work, uploaded or "-"], data)
        if code:
            raise OSError(error.decode("utf-8", "replace")[-500:].strip() or "tar ended with exit code {}".format(code))
        os.chmod(work, 0o500)
        try:
            os.rename(work, target)
        except OSError:
            if not _is_ours(target):  # Otherwise another process was faster.
                raise
    finally:
        remove(work)
        if uploaded:
            files.remove(uploaded)


def _is_ours(path: str) -> bool:
    return os.path.isdir(path) and os.stat(path).st_uid == os.geteuid()


def make_private(directory: str) -> None:
    """Make a directory that only this user can enter, or close one to all others."""
    files.make_dir(directory)
    os.chmod(directory, 0o700)


def install_file(directory: str, name: str, data: bytes) -> None:
    """Make a read-only file."""
    make_private(directory)
    files.write(os.path.join(directory, name), data, 0o400)


def remove(path: str) -> None:
    """Remove a file, or a directory with everything in it, also if parts of it are read-only."""
    for parent, _, _ in os.walk(path):
        with contextlib.suppress(OSError):
            os.chmod(parent, 0o700)
    files.remove(path)
