"""Files of warm sessions, whose Slurm jobs serve several payloads. Paths are absolute.

Each session has a directory, with a numbered directory for each allocation (Slurm job) of the session. An allocation is also
called a generation. Once the session can take payloads, it announces itself: it writes its address into the file `session.json`
in the allocation's directory. If all processes that wait for this give up first, the last one marks the allocation as abandoned.

Ages are differences between times of the file system, because the clocks of the machines differ.
"""

import contextlib
import errno
import fnmatch
import os
import pwd
import re
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

JOB_ID = "job_id"  # File in a run directory: the id of the job.
# Entries of an allocation's directory.
CREATOR = "creator"  # The name of the job for which the directory was created.
ABANDONED = "abandoned"  # Exists if the processes that waited for the job have given up.
MANIFEST = "offer.json"  # The settings of the session.
_EXIT, _ANNOUNCEMENT, _WAITING = "exit", "session.json", "waiting"
_MOST_BYTES = 1024 * 1024
_READ_RETRY = 0.2  # Seconds before a failed read is repeated: a network file system that lost a file then finds the file.


def check_owner(*directories: str) -> None:
    """Raise PermissionError if a directory belongs to another user. Such a user could place a session with any command there."""
    for each in directories:
        user = os.stat(each).st_uid
        if user != os.geteuid():
            try:
                name = pwd.getpwuid(user).pw_name
            except KeyError:
                name = "user %d" % user
            raise PermissionError(errno.EPERM, "belongs to %s, who could change what runs there" % name, each)


def generations(base: str, pattern: str, newest: bool) -> "list[dict[str, Any]]":
    """Return a dict for each allocation of the sessions below the base directory `base` whose names match `pattern`.

    Args:
        base: the base directory.
        pattern: the name of a session. The name may have wildcards if `newest` is False.
        newest: whether to return only the newest allocation of the session.

    Each dict has these keys:
        session: the name of the session.
        number: the number of the allocation.
        files: the texts of the allocation's files by name; "" for a missing file. If `newest` is True, the text of `MANIFEST` is
            "" until the session has announced itself by the file `session.json`, and an unreadable file raises OSError. If
            `newest` is False, the text of an unreadable file is "".
        abandoned: True if the allocation is marked as abandoned, or if the allocation's directory is gone.
        age: the age of the allocation in seconds; 0 if the session has announced itself, or if `newest` is False.

    Returns [] if no session matches. Raises PermissionError if a directory belongs to another user.
    """
    sessions, found = os.path.join(base, "sessions"), []
    if not os.path.isdir(sessions):
        return []
    check_owner(base, sessions)
    for session in [pattern] if newest else fnmatch.filter(os.listdir(sessions), pattern):
        directory = os.path.join(sessions, session)
        if os.path.isdir(directory):
            check_owner(directory)
            numbers = sorted(int(name) for name in os.listdir(directory) if re.fullmatch("[1-9][0-9]{0,8}", name))
            found += [_generation(sessions, session, number, newest) for number in numbers[-1 if newest else 0 :]]
    return found


def _generation(sessions: str, session: str, number: int, newest: bool) -> "dict[str, Any]":
    """Return the dict for the allocation `number` of the session `session` that `generations` describes.

    `sessions` is the directory of all sessions; for `newest` see `generations`.
    """
    directory, read = os.path.join(sessions, session, str(number)), _read if newest else _readable
    texts = {name: read(os.path.join(directory, name)) for name in (_ANNOUNCEMENT, _EXIT, JOB_ID, CREATOR)}
    announced = texts[_ANNOUNCEMENT].endswith("}")
    # On NFS a name that was looked up in vain stays missing for up to a minute, and a claim has no manifest at first.
    texts[MANIFEST] = read(os.path.join(directory, MANIFEST)) if announced or not newest else ""
    age = 0.0
    if newest and not announced:
        now, made = clock_of(os.path.dirname(directory)), [_modified(os.path.join(directory, name)) for name in (CREATOR, "")]
        age = now - next((each for each in made if each is not None), now)
    abandoned = not os.path.isdir(directory) or os.path.lexists(os.path.join(directory, ABANDONED))
    return {"session": session, "number": number, "files": texts, "abandoned": abandoned, "age": age}


def _read(path: str) -> str:
    """Return the text of a file, "" for a missing file; tries twice before an unreadable file raises OSError."""
    for retries in (1, 0):
        try:
            with open(path, "rb") as file:
                return file.read(_MOST_BYTES).decode("utf-8", "replace")
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except OSError:
            if not retries:
                raise
            time.sleep(_READ_RETRY)
    raise AssertionError


def _readable(path: str) -> str:
    """Return the text of a file; "" for a missing or unreadable file."""
    try:
        return _read(path)
    except OSError:
        return ""


def wait_for(directory: str, waiter: str) -> None:
    """Record that a process waits for the allocation in `directory` to start; a further call renews the record.

    `waiter` is the name of the process, which no other waiting process has.
    """
    waiting = os.path.join(directory, _WAITING)
    if not os.path.isdir(waiting):
        with contextlib.suppress(FileExistsError):  # Another process was faster, or a network file system shows it late.
            os.mkdir(waiting, 0o700)
    os.close(os.open(os.path.join(waiting, waiter), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    os.utime(os.path.join(waiting, waiter))


def stop_waiting(directory: str, waiter: str, fresh: float) -> bool:
    """Record that a process no longer waits for the allocation in `directory`; returns True if the allocation is then abandoned.

    `waiter` is the name that the process has given to `wait_for`. The function marks the allocation as abandoned if no other
    process waits and the session has not announced itself by the file `session.json`. Another process counts as waiting if its
    last call of `wait_for` was less than `fresh` seconds ago. Returns False if another process waits, if the directory is
    missing, or if the session has announced itself, even if it announced itself while the function made the mark.
    """
    waiting, announcement = os.path.join(directory, _WAITING), os.path.join(directory, _ANNOUNCEMENT)
    if not os.path.isdir(directory):
        return False
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(waiting, waiter))
    now = clock_of(directory)
    others = [_modified(os.path.join(waiting, name)) for name in (os.listdir(waiting) if os.path.isdir(waiting) else ())]
    if any(seen is not None and now - seen < fresh for seen in others) or _read(announcement):
        return False
    with contextlib.suppress(FileExistsError):
        os.mkdir(os.path.join(directory, ABANDONED), 0o700)
    return not _read(announcement)


def clock_of(directory: str) -> float:
    """Return the present time by the clock of the file system of `directory`, in seconds since the epoch."""
    probe = os.path.join(directory, ".rs-" + os.urandom(8).hex() + ".probe")
    os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        return os.stat(probe).st_mtime
    finally:
        os.unlink(probe)


def _modified(path: str) -> "float | None":
    """Return the time of the last change of a file, in seconds since the epoch; None if the file cannot be examined."""
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None
