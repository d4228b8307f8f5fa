"""Finds and installs bundles and the runtime in the base directory on a cluster, and removes old files from base directories.

The base directory of a machine is the directory in which this package keeps its files. Dagster's machine has one, too.
"""

import contextlib
import grp
import json
import os
import pwd
import re
import stat
import time

from . import files, processes
from .submissions import FETCHED, HANDLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SWEPT = ".swept"  # File in the base directory that each sweep touches first; the age of the file tells when the last sweep began.
BOOKMARK = ".followed"  # Suffix of the file that notes how much of a payload's output on the cluster was shown in Dagster.
_LEFTOVER = 86400.0  # Seconds after which a file or directory with a temporary name counts as left by a killed process.
_RUN = "[A-Za-z0-9_.-]+-[0-9a-f]{12}"
# The directories whose entries stay while a run, session or environment uses them, and the form of the names of the entries.
_NAMED = {
    "bundles": "[0-9a-f]{32}",
    "prefixes": "[0-9a-f]{32}-[0-9a-f]{8}",
    "files": "[0-9a-f]{32}",
    "runtime": r"runtime-[0-9a-f]{16}-[A-Za-z0-9_-]+\.pyz",
}
_USED = re.compile("(?:{})/[A-Za-z0-9_.-]+".format("|".join(_NAMED)).encode())
_OURS = (*_NAMED, "runs", "sessions", "submissions")


def look(base: str, places: "Sequence[str]") -> "tuple[str, str, str, list[str]]":
    """Return who else can change the base directory `base`, and which of the relative paths `places` exist there.

    The function checks the base directory, and the directories in it that have a name in `_OURS`. The result has four parts:
        owner: the name of another user who owns one of the checked directories, or "".
        open: the path of a checked directory that everybody may write to, or "".
        group: the name of a group that may write to the base directory, or "". A group with the name of the user does not count.
        found: the elements of `places` that exist and belong to this user.

    If `owner` or `open` is not "", the other three parts are empty. If there is no base directory, all four parts are empty.

    The owner matters because the names in `places` are predictable: another user of a shared file system could put a program of
    theirs there.

    The function has two effects. It sets the modification times of `found` to now, because `sweep` keeps recently used files. If
    a group may write to a directory of `_OURS`, the function makes this directory private to this user: on the file systems of
    projects, the umask or a default ACL often lets a group write to new directories. The base directory itself is not made
    private, because it may hold files of other programs.
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
            return name_of(pwd.getpwuid, status.st_uid), "", "", []
        if status.st_mode & stat.S_IWOTH:
            return "", os.path.normpath(path), "", []
        if name and status.st_mode & stat.S_IWGRP:
            with contextlib.suppress(OSError):
                files.close_to_others(path)
        elif status.st_mode & (stat.S_IWGRP | stat.S_ISVTX) == stat.S_IWGRP:
            group = name_of(grp.getgrgid, status.st_gid)
    for place in places:
        with contextlib.suppress(OSError):
            path = os.path.join(base, place)
            os.utime(path)
            if os.stat(path).st_uid == user:
                found.append(place)
    return "", "", "" if group == name_of(pwd.getpwuid, user) else group, found


def name_of(entry: "object", number: int) -> str:
    """Return the name of the user or group with the id `number`; the id itself if there is no name.

    `entry` is `pwd.getpwuid` for a user, `grp.getgrgid` for a group.
    """
    try:
        return str(entry(number)[0])  # type: ignore[operator]
    except KeyError:
        return str(number)


def install(directory: str, name: str, archive: str, data: bytes) -> None:
    """Unpack a .tar.gz archive as the directory `name` in `directory`, unless this user has a directory of that name already.

    If `archive` is "", the archive is the bytes `data`. Otherwise, the archive is the file `archive` in `directory`; the function
    always removes this file. An existing directory `name` has the same content, because `name` is the hash of the content. Raises
    OSError if tar fails.
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
        files.remove(work)
        if uploaded:
            files.remove(uploaded)


def _is_ours(path: str) -> bool:
    return os.path.isdir(path) and os.stat(path).st_uid == os.geteuid()


def make_private(directory: str) -> None:
    """Create a directory that only this user can enter; if the directory exists, close it to other users."""
    files.make_dir(directory)
    files.close_to_others(directory)


def install_file(directory: str, name: str, data: bytes) -> None:
    """Write `data` to the read-only file `name` in `directory`, and close `directory` to other users.

    A missing directory is created first. An existing file is replaced.
    """
    make_private(directory)
    files.write(os.path.join(directory, name), data, 0o400)


def sweep(base: str, age: float, every: float, jobs: "Sequence[int] | None") -> "list[str]":
    """Remove this package's files below the base directory `base` that were not used for `age` seconds.

    Returns the removed paths, relative to `base`. Removes nothing and returns [] if a process on any machine began a sweep less
    than `every` seconds ago, or if there is no base directory. `jobs` are the ids of the jobs that Slurm knows; None if Slurm
    does not answer. The directories of session jobs that may still run always stay.
    """
    swept = os.path.join(base, SWEPT)
    if not os.path.isdir(base) or (_is_recent(swept, every) and not _is_recent(swept, -every)):
        return []  # A time far in the future was written by a wrong clock.
    os.close(os.open(swept, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
    return _Sweep(base, age, jobs).run()


def sweep_runs(base: str, age: float) -> "list[str]":
    """Remove the entries of the directories `runs` and `outputs` in `base` that were not used for `age` seconds.

    The entries are run directories, directories of fetched output files, and files with the suffix `BOOKMARK`, which note how
    much of a payload's output was shown in Dagster. The directory of a run from `ComputeResource.submit` stays until its outputs
    are fetched. Returns the removed paths, relative to `base`.
    """
    return _Sweep(base, age, None).runs()


def sweep_environments(base: str, age: float) -> "list[str]":
    """Remove environments, and files for building environments, that were not used for `age` seconds.

    `base` is the base directory. An environment or file stays if a file of a run, session or environment there mentions its path.
    Returns the removed paths, relative to `base`.
    """
    return _Sweep(base, age, None).unused(("prefixes", "files"))


def _is_recent(path: str, age: float) -> bool:
    """Return True if a path exists and was modified less than `age` seconds ago."""
    with contextlib.suppress(OSError):
        return time.time() - os.lstat(path).st_mtime < age
    return False


def _below(path: str, depth: int = 1) -> "list[str]":
    """Return the paths of the entries of the directory `path`, down to `depth` levels; [] if the directory cannot be listed.

    The direct entries are level 1. Each returned path begins with `path`. Links to directories are returned, but not followed.
    """
    with contextlib.suppress(OSError):
        found = [os.path.join(path, name) for name in os.listdir(path)]
        return found + [each for one in found if depth > 1 and not os.path.islink(one) for each in _below(one, depth - 1)]
    return []


def _of_components(run: str) -> "list[str]":
    """Return the paths of the components in the run directory `run`, and of the files there; [] without `topology="separate"`.

    Each component has a directory of its own, with the files that other runs have directly in their run directories.
    """
    return _below(os.path.join(run, "components"), 2)


def _text(path: str) -> str:
    """Return the text of a file; "" if the file cannot be read."""
    with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
        return file.read()
    return ""


class _Sweep:
    """Removes files below the base directory `base` that were not used for `age` seconds.

    `jobs` are the ids of the jobs that Slurm knows; None if they are unknown.
    """

    def __init__(self, base: str, age: float, jobs: "Sequence[int] | None") -> None:
        self._base = base
        self._age = age
        self._jobs = jobs
        self._grave = ".rs-" + os.urandom(8).hex() + ".gone"
        self._removed = []  # type: list[str]

    def runs(self) -> "list[str]":
        """Remove old entries of `runs` and `outputs`, as `sweep_runs` does; returns all paths that this object has removed."""
        for place in ("runs", "outputs"):
            for name in self._names(place, _RUN, directory=True):
                run = self._path(place, name)
                inside = [path for path in _below(run) + _of_components(run) if ".json" in os.path.basename(path)]
                if self._awaits(run):
                    continue
                if self._is_old(place, name) and not any(_is_recent(path, self._age) for path in inside):
                    self._remove(place, name)
        self._remove_old("runs", _RUN + re.escape(BOOKMARK))
        return self._removed

    @staticmethod
    def _awaits(path: str) -> bool:
        """Return True if `path` is the directory of a run from `ComputeResource.submit` whose outputs were not fetched yet."""
        return os.path.exists(os.path.join(path, HANDLE)) and not os.path.exists(os.path.join(path, FETCHED))

    def run(self) -> "list[str]":
        """Remove all old files of this package, and temporary files of killed processes; returns the removed paths."""
        self.runs()
        self._remove_old("submissions", "[0-9a-f]{32}", directory=True, depth=2)
        for name in self._names("sessions", _RUN, directory=True):
            self._sweep_session(os.path.join("sessions", name))
        self.unused(_NAMED)
        self._remove_old("environments", "[0-9a-f]{32}")
        self._remove_old("unhealthy", "[A-Za-z0-9][A-Za-z0-9_.-]*")
        sessions = [os.path.join("sessions", name) for name in self._names("sessions", _RUN, directory=True)]
        for place in [*_NAMED, "environments", "queue", "runs", "unhealthy", "sessions", *sessions]:
            for name in self._names(place, r"\.rs-[0-9a-f]{16}\.[a-z]+"):
                with contextlib.suppress(OSError):
                    if time.time() - os.lstat(self._path(place, name)).st_ctime > _LEFTOVER:
                        self._remove(place, name)
        return self._removed

    def unused(self, places: "Iterable[str]") -> "list[str]":
        """Remove the old entries of the directories `places` that no run, session or environment uses; returns the removed paths.

        `places` are names in `_NAMED`. The returned list has all paths that this object has removed.
        """
        for place in places:
            # `look` sets the time of a file in this directory, not that of the file's own directory.
            depth = 1 if place == "files" else 0
            old = [name for name in self._names(place, _NAMED[place]) if self._is_old(place, name, depth)]
            used = self._used() if old else set()
            for name in old:
                if place + "/" + (name[:32] if place == "prefixes" else name) not in used:
                    self._retire(place, name)
        for name in self._names("prefixes", "[0-9a-f]{32}"):
            if not os.path.exists(self._path("prefixes", name)):
                self._remove("prefixes", name)
        return self._removed

    def _path(self, *names: str) -> str:
        return os.path.join(self._base, *names)

    def _names(self, place: str, form: str, directory: bool = False) -> "list[str]":
        """Return the names of this user's entries in the directory `place` that match the regular expression `form`.

        `place` is relative to the base directory. If `directory` is True, returns only the names of directories.
        """
        found = []
        for path in _below(self._path(place)):
            name = os.path.basename(path)
            with contextlib.suppress(OSError):
                wanted = not directory or (os.path.isdir(path) and not os.path.islink(path))
                if re.fullmatch(form, name) and os.lstat(path).st_uid == os.getuid() and wanted:
                    found.append(name)
        return found

    def _is_old(self, place: str, name: str, depth: int = 0) -> bool:
        """Return True if the entry `name` of the directory `place` was not used for `age` seconds (see `sweep`).

        If `depth` is not 0, the same must hold for everything in the entry, down to `depth` levels.
        """
        path = self._path(place, name)
        return not any(_is_recent(each, self._age) for each in [path, *(_below(path, depth) if depth else ())])

    def _remove_old(self, place: str, form: str, directory: bool = False, depth: int = 0) -> None:
        """Remove the old entries of the directory `place`; for `form` and `directory` see `_names`, for `depth` see `_is_old`."""
        for name in self._names(place, form, directory):
            if self._is_old(place, name, depth):
                self._remove(place, name)

    def _sweep_session(self, session: str) -> None:
        """Remove the old generations of a session: the numbered directories, each for one Slurm job of the session.

        `session` is the session's directory, relative to the base directory. A generation is old if the job has ended and no file
        of the generation was used for `age` seconds (see `sweep`). The newest generation stays, because the highest number
        determines the next number. If all generations are old, and nothing else in the session's directory was used for `age`
        seconds, the session's whole directory is removed.
        """
        numbers = sorted(map(int, self._names(session, "[1-9][0-9]{0,8}", directory=True)))
        old = []
        for number in numbers:
            if self._is_old(session, str(number), depth=2) and self._is_over(self._path(session, str(number))):
                old.append(number)
        if numbers and old == numbers and self._is_old(*os.path.split(session), depth=1):
            self._retire(*os.path.split(session))
            return
        for number in old:
            if number < numbers[-1]:
                self._retire(session, str(number))

    def _is_over(self, directory: str) -> bool:
        """Return True if the job of a generation has ended, or if no job id is stored; False if the job may still run.

        `directory` is the generation's directory. A job has ended if the directory has a file `exit`, or if Slurm no longer knows
        the job. If Slurm has not answered, only the file counts.
        """
        if _text(os.path.join(directory, "exit")):
            return True
        job = _text(os.path.join(directory, "job_id"))
        if not job:
            with contextlib.suppress(ValueError, AttributeError):
                job = str(json.loads(_text(os.path.join(directory, "session.json"))).get("job_id", ""))
        number = re.match("[0-9]+", job)
        return number is None or (self._jobs is not None and int(number.group()) not in self._jobs)

    def _used(self) -> "set[str]":
        """Return the paths, such as "bundles/NAME", that files of runs, sessions and environments mention."""
        used = set()  # type: set[str]
        made = [os.path.join(path, "rayslurm.json") for path in _below(self._path("prefixes"))]
        components = [path for run in _below(self._path("runs")) for path in _of_components(run)]
        for path in _below(self._path("runs"), 2) + components + _below(self._path("sessions"), 3) + made:
            if path.endswith((".json", ".sh")):
                with contextlib.suppress(OSError), open(path, "rb") as file:
                    used.update(match.decode() for match in _USED.findall(file.read()))
        return used

    def _retire(self, place: str, name: str) -> None:
        """Remove the file or directory `name` in the directory `place`, which is relative to the base directory.

        The file or directory first gets a temporary name, so that no other process finds a partly removed directory under `name`.
        If another process used the file or directory meanwhile, the function restores `name` and removes nothing.
        """
        path, grave = self._path(place, name), self._path(place, self._grave)
        with contextlib.suppress(OSError):
            os.rename(path, grave)
            if _is_recent(grave, self._age):
                os.rename(grave, path)
                return
            self._remove(place, name, self._grave)

    def _remove(self, place: str, name: str, now: str = "") -> None:
        """Remove the file or directory `name` in `place`, and add the path to the list of removed paths.

        `now` is the temporary name that `_retire` has given to the file or directory; "" if the file or directory is still called
        `name`. If the file or directory cannot be removed, the list stays unchanged.
        """
        path = self._path(place, now or name)
        with contextlib.suppress(OSError):
            files.remove(path)
        if not os.path.lexists(path):
            self._removed.append(os.path.join(place, name))
