"""Sweep the base directory on a cluster: remove what was not used for long, by names of our own form."""

import contextlib
import json
import os
import re
import time

from . import delivery

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

SWEPT = ".swept"
"""File in the base directory that each sweep touches, so that its age tells when the last sweep was."""
BOOKMARK = ".followed"
"""Suffix of the file that notes how much of a payload's output on the cluster was shown in Dagster."""
_LOCK = ".sweeping"
_LOCK_EXPIRES = 15 * 60.0
"""Seconds after which a lock directory was left by a killed process, so that another process may sweep."""
_LEFTOVER = 86400.0
"""Seconds after which a file or directory with a temporary name was left by a killed process."""
_RUN = "[A-Za-z0-9_.-]+-[0-9a-f]{12}"
_USED = re.compile(rb"(?:bundles|files|prefixes|runtime)/[A-Za-z0-9_.-]+")
_NAMED = (
    ("bundles", "[0-9a-f]{32}"),
    ("files", "[0-9a-f]{32}"),
    ("prefixes", "[0-9a-f]{32}-[0-9a-f]{8}"),
    ("runtime", r"runtime-[0-9a-f]{16}-[A-Za-z0-9_-]+\.pyz"),
)


def sweep(base: str, age: float, every: float, jobs: "Sequence[int] | None") -> "list[str]":
    """Sweep unless another process does, or did less than `every` seconds ago; returns the removed paths.

    Files not used for `age` seconds are removed. `jobs` are the ids of jobs that Slurm knows; None if it does not answer.
    """
    lock, swept = os.path.join(base, _LOCK), os.path.join(base, SWEPT)
    if not os.path.isdir(base) or (_is_recent(swept, every) and not _is_recent(swept, -every)):
        return []  # A time in the future is that of a clock which was wrong once.
    if every and os.path.isdir(lock) and not _is_recent(lock, _LOCK_EXPIRES):
        os.rmdir(lock)
    try:
        if every:
            os.mkdir(lock, 0o700)
    except FileExistsError:
        return []
    try:
        removed = _Sweep(base, age, jobs).run()
        os.close(os.open(swept, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
        return removed
    finally:
        if every:
            os.rmdir(lock)


def sweep_runs(base: str, age: float) -> "list[str]":
    """Remove the run directories, outputs and bookmarks not used for `age` seconds, and nothing else; returns their paths."""
    return _Sweep(base, age, None).runs()


def _is_recent(path: str, age: float) -> bool:
    """Whether a path changed less than `age` seconds ago; False for a missing path."""
    with contextlib.suppress(OSError):
        return time.time() - os.lstat(path).st_mtime < age
    return False


def _below(path: str, depth: int = 1) -> "list[str]":
    """The paths in a directory, and below it, down to a depth; none if it cannot be listed."""
    with contextlib.suppress(OSError):
        found = [os.path.join(path, name) for name in os.listdir(path)]
        return found + [each for one in found if depth > 1 and not os.path.islink(one) for each in _below(one, depth - 1)]
    return []


def _text(path: str) -> str:
    with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
        return file.read()
    return ""


class _Sweep:
    def __init__(self, base: str, age: float, jobs: "Sequence[int] | None") -> None:
        self._base = base
        self._age = age
        self._jobs = jobs
        self._grave = ".rs-" + os.urandom(8).hex() + ".gone"
        self._removed = []  # type: list[str]

    def runs(self) -> "list[str]":
        for place in ("runs", "outputs"):
            for name in self._names(place, _RUN, directory=True):
                inside = [path for path in _below(self._path(place, name)) if ".json" in os.path.basename(path)]
                if self._is_old(place, name) and not any(_is_recent(path, self._age) for path in inside):
                    self._remove(place, name)
        for name in self._names("runs", _RUN + re.escape(BOOKMARK)):
            if self._is_old("runs", name):
                self._remove("runs", name)
        return self._removed

    def run(self) -> "list[str]":
        self.runs()
        for name in self._names("sessions", _RUN, directory=True):
            self._sweep_session(os.path.join("sessions", name))
        unused = [(place, name) for place, form in _NAMED for name in self._names(place, form) if self._is_old(place, name)]
        used = self._used() if unused else set()
        for place, name in unused:
            if place + "/" + (name[:32] if place == "prefixes" else name) not in used:
                self._retire(place, name)
        for name in self._names("prefixes", "[0-9a-f]{32}"):
            if not os.path.exists(self._path("prefixes", name)):
                self._remove("prefixes", name)
        for name in self._names("environments", "[0-9a-f]{32}"):
            if self._is_old("environments", name):
                self._remove("environments", name)
        sessions = [os.path.join("sessions", name) for name in self._names("sessions", _RUN, directory=True)]
        for place in ["bundles", "files", "prefixes", "runtime", "environments", "queue", "runs", "sessions", *sessions]:
            for name in self._names(place, r"\.rs-[0-9a-f]{16}\.[a-z]+|claim-[0-9]+"):
                with contextlib.suppress(OSError):
                    age = time.time() - os.lstat(self._path(place, name)).st_ctime
                    if age > _LEFTOVER and (place == "queue" or name.startswith(".rs-")):
                        self._remove(place, name)
        return self._removed

    def _path(self, *names: str) -> str:
        return os.path.join(self._base, *names)

    def _names(self, place: str, form: str, directory: bool = False) -> "list[str]":
        """The names of a form in a directory, of files or directories that belong to this user."""
        found = []
        for path in _below(self._path(place)):
            name = os.path.basename(path)
            with contextlib.suppress(OSError):
                wanted = not directory or (os.path.isdir(path) and not os.path.islink(path))
                if re.fullmatch(form, name) and os.lstat(path).st_uid == os.getuid() and wanted:
                    found.append(name)
        return found

    def _is_old(self, place: str, name: str) -> bool:
        path = self._path(place, name)
        return not any(_is_recent(each, self._age) for each in [path, *(_below(path) if place == "files" else ())])

    def _sweep_session(self, session: str) -> None:
        """Remove ended generations but the newest, whose number determines the next one; all if nobody looks for the session."""
        numbers = sorted(map(int, self._names(session, "[1-9][0-9]{0,8}", directory=True)))
        old = []
        for number in numbers:
            directory = self._path(session, str(number))
            young = any(_is_recent(path, self._age) for path in [directory, *_below(directory, 2)])
            if not young and self._is_over(directory):
                old.append(number)
        entries = [self._path(session), *_below(self._path(session))]
        if numbers and old == numbers and not any(_is_recent(path, self._age) for path in entries):
            self._retire(*os.path.split(session))
            return
        for number in old:
            if number < numbers[-1]:
                self._retire(session, str(number))

    def _is_over(self, directory: str) -> bool:
        """Whether no job of a session's generation may live."""
        if _text(os.path.join(directory, "exit")):
            return True
        job = _text(os.path.join(directory, "job_id")).split("\n")[0]
        if not job:
            with contextlib.suppress(ValueError, AttributeError):
                job = str(json.loads(_text(os.path.join(directory, "session.json"))).get("job_id", ""))
        return not job or (self._jobs is not None and int(job) not in self._jobs)

    def _used(self) -> "set[str]":
        """What the files of runs, sessions and environments name."""
        used = set()  # type: set[str]
        made = [os.path.join(path, "rayslurm.json") for path in _below(self._path("prefixes"))]
        for path in _below(self._path("runs"), 2) + _below(self._path("sessions"), 3) + made:
            if path.endswith((".json", ".sh")):
                with contextlib.suppress(OSError), open(path, "rb") as file:
                    used.update(match.decode() for match in _USED.findall(file.read()))
        return used

    def _retire(self, place: str, name: str) -> None:
        """Remove what other processes may look for: under another name, so that they see no half of it.

        If it was marked as in use meanwhile, it gets its name back (see `upload.deliver`).
        """
        path, grave = self._path(place, name), self._path(place, self._grave)
        with contextlib.suppress(OSError):
            os.rename(path, grave)
            if _is_recent(grave, self._age):
                os.rename(grave, path)
                return
            self._remove(place, name, self._grave)

    def _remove(self, place: str, name: str, now: str = "") -> None:
        """Remove a file or directory, which may have another name now."""
        path = self._path(place, now or name)
        with contextlib.suppress(OSError):
            delivery.remove(path)
        if not os.path.lexists(path):
            self._removed.append(os.path.join(place, name))
