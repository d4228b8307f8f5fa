"""Files of warm sessions: a directory for each session, and in it a numbered one for each of its allocations. Paths are absolute.

Ages are differences between times of the file system, since the clocks of its clients differ.
"""

import contextlib
import fnmatch
import os
import pwd
import re
import time

JOB_ID = "job_id"
"""File in a run directory: the id of its job."""
CREATOR = "creator"
ABANDONED = "abandoned"
MANIFEST = "offer.json"
CURRENT = "current"
"""Files of a session: the name of the job that created the session, the mark that the creator gave up, the session's manifest,
and the copy of the newest manifest in the parent directory, which saves other processes the search."""
_EXIT, _ANNOUNCEMENT, _WAITING = "exit", "session.json", "waiting"
_MOST_BYTES = 1024 * 1024
_READ_RETRY = 0.2
"""Seconds before a failed read is repeated: a network file system that lost sight of a file finds it then."""


def owner(directories: "list[str]") -> "tuple[bool, str, str]":
    """Whether all directories exist; and the first one that belongs to another user, with the user's name, or two empty texts."""
    for each in directories:
        try:
            user = os.stat(each).st_uid
        except FileNotFoundError:
            return False, "", ""
        if user != os.geteuid():
            try:
                return True, each, pwd.getpwuid(user).pw_name
            except KeyError:
                return True, each, "user %d" % user
    return True, "", ""


def read(directory: str, names: "list[str]") -> "list[str]":
    """The texts of files; "" for a file that does not exist."""
    return [_read(os.path.join(directory, name)) for name in names]


def _read(path: str) -> str:
    for retries in (1, 0):
        try:
            with open(path, "rb") as file:
                return file.read(_MOST_BYTES).decode("utf-8", "replace")
        except FileNotFoundError:
            return ""
        except PermissionError:
            raise
        except OSError:
            if not retries:
                raise
            time.sleep(_READ_RETRY)
    raise AssertionError


def newest(directory: str) -> "tuple[int, float, str, str, bool, bool]":
    """A session's newest allocation: number (0 for none), age in seconds, creator, job id, whether abandoned, whether ended."""
    try:
        numbers = [int(name) for name in os.listdir(directory) if re.fullmatch("[1-9][0-9]{0,8}", name)]
    except FileNotFoundError:
        numbers = []
    if not numbers:
        return 0, 0.0, "", "", False, False
    number, own = max(numbers), os.path.join(directory, str(max(numbers)))
    made = [_modified(path) for path in (os.path.join(own, CREATOR), own)]
    now = _now(directory)
    age = now - next((each for each in made if each is not None), now)
    if not os.path.isdir(own):
        return number, age, "", "", True, False
    creator, job_id = ((text.splitlines() or [""])[0][:300] for text in read(own, [CREATOR, JOB_ID]))
    exit_size = _size(os.path.join(own, _EXIT))
    return number, age, creator, job_id, os.path.lexists(os.path.join(own, ABANDONED)), exit_size > 0


def wait_for(directory: str, waiter: str) -> None:
    """Record, or confirm, that a process waits for an allocation to start."""
    waiting = os.path.join(directory, _WAITING)
    if not os.path.isdir(waiting):
        os.mkdir(waiting, 0o700)
    fd = os.open(os.path.join(waiting, waiter), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.close(fd)
    os.utime(os.path.join(waiting, waiter))


def stop_waiting(directory: str, waiter: str, fresh: float) -> bool:
    """Record that a process no longer waits; True if no process waits any more and no session has announced itself.

    The allocation is then marked as abandoned. A process counts as gone that did not confirm for `fresh` seconds. The session may
    announce itself meanwhile, so its announcement is looked for before and after the mark is made.
    """
    waiting, announcement = os.path.join(directory, _WAITING), os.path.join(directory, _ANNOUNCEMENT)
    if not os.path.isdir(directory):
        return False
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(waiting, waiter))
    now = _now(directory)
    others = [_modified(os.path.join(waiting, name)) for name in (os.listdir(waiting) if os.path.isdir(waiting) else ())]
    if any(seen is not None and now - seen < fresh for seen in others) or _size(announcement) > 0:
        return False
    with contextlib.suppress(FileExistsError):
        os.mkdir(os.path.join(directory, ABANDONED), 0o700)
    return _size(announcement) == 0


def listing(sessions: str, pattern: str) -> "dict[str, dict[str, str]]":
    """Texts of the files of all allocations below `sessions`, by "SESSION/NUMBER" and name, of sessions whose names match."""
    found = {}
    for key in os.listdir(sessions) if os.path.isdir(sessions) else ():
        directory = os.path.join(sessions, key)
        if not fnmatch.fnmatchcase(key, pattern) or not os.path.isdir(directory):
            continue
        for number in os.listdir(directory):
            own = os.path.join(directory, number)
            if re.fullmatch("[1-9][0-9]{0,8}", number) and os.path.isdir(own):
                names = (JOB_ID, _EXIT, _ANNOUNCEMENT, CREATOR, MANIFEST)
                found[key + "/" + number] = {name: _readable(os.path.join(own, name)) for name in names}
    return found


def _readable(path: str) -> str:
    try:
        return _read(path)
    except OSError:
        return ""


def _now(directory: str) -> float:
    """The time by the clock of the file system."""
    probe = os.path.join(directory, ".rs-" + os.urandom(8).hex() + ".probe")
    os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        return os.stat(probe).st_mtime
    finally:
        os.unlink(probe)


def _modified(path: str) -> "float | None":
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
