"""Which attempt owns a payload that outlives its Dagster process: only the owner ends it, judges it or removes its files.

A file name in the run directory says who the owner is. A later attempt takes the payload over by renaming that file. The owner
renames it, too, before it ends or judges the payload; after that nobody can take it over. A rename is atomic, so of two
attempts that try at the same time exactly one succeeds. No lock has to be released when a process is killed.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress

from ..ssh.base import Completed, Connection, ConnectionLost

FIRST_OWNER = "owner.first"
"""The file as it is before anybody has taken the payload over: its owner is the attempt that started it."""

_PREFIX = "owner."
_JUDGED = ".judged"
"""How the name ends once the owner has begun to end or to judge the payload."""

_LIST = 'LC_ALL=C ls -a -- "$1"'
_GONE = b"No such file or directory"
_TRIES = 3


class Ownership:
    """The owner of one payload.

    Args:
        connection: reaches the run directory.
        run_dir: the run directory of the payload.
        name: the file name of this attempt: `FIRST_OWNER`, or what `owner_file` gives.
        successor: finds the Dagster run that goes on with this payload, by Dagster's event log; None if there is none.

    Attributes:
        new_owner: who has taken the payload over, in words; None as far as is known nobody has.
    """

    def __init__(self, connection: Connection, run_dir: str, name: str, successor: Callable[[], str | None]) -> None:
        self.new_owner: str | None = None
        self._connection = connection
        self._run_dir = run_dir
        self._name = name
        self._successor = successor
        self._kept = False

    def take_over(self) -> bool:
        """Take the payload over; False if its owner has begun to end or to judge it.

        Raises:
            OSError: that cannot be found out.
        """
        for _ in range(_TRIES):
            owners = self._owners()
            if owners is None:
                return False  # Its owner has removed it.
            if self._name in owners:
                return True
            if any(each.endswith(_JUDGED) for each in owners):
                return False
            if not owners:  # Version 0.1.0 started it.
                self._connection.write(os.path.join(self._run_dir, self._name), b"")
                return True
            with suppress(FileNotFoundError):  # Somebody else was faster, or the answer to an earlier try was lost.
                self._rename(owners[0], self._name)
                return True
        raise OSError(f"{self._run_dir}: others take the payload over at the same time")

    def confirm(self, remove: bool = False) -> bool:
        """Make sure that nobody takes the payload over from now on; False if somebody has.

        Args:
            remove: whether to remove the run directory then.

        Raises:
            OSError: that cannot be found out.
        """
        if self.new_owner is None and not self._kept:
            judged = self._name + _JUDGED
            try:
                self._rename(self._name, judged)
            except FileNotFoundError:
                self.new_owner = self._who(judged)
            self._kept = self.new_owner is None
        if remove and self._kept:
            self._connection.remove(self._run_dir)
        return self._kept

    def confirm_best_effort(self) -> bool:
        """The same, for a payload that has to be ended even where that cannot be found out."""
        try:
            return self.confirm()
        except OSError:
            return self.new_owner is None

    def _who(self, judged: str) -> str | None:
        """Who has taken the payload over, after this attempt's file was not there; None if nobody has.

        Raises:
            OSError: that cannot be found out.
        """
        owners = self._owners() or []
        if judged in owners:
            return None  # Renamed by an earlier try, whose answer was lost.
        others = [name for name in owners if name != self._name]
        if others:
            return owner_in_words(others[0])
        # Without any such file the directory was removed, by a successor or by hand. The listing of a network file system
        # may be old, and still have this attempt's own file.
        successor = self._successor()
        if successor is not None:
            return f"run {successor}"
        return "another attempt" if owners else None

    def _rename(self, old: str, new: str) -> None:
        self._connection.rename(os.path.join(self._run_dir, old), os.path.join(self._run_dir, new))

    def _owners(self) -> list[str] | None:
        """The owner's file in the run directory, where there may be two while it is renamed; None without the directory.

        Raises:
            OSError: the directory cannot be listed.
        """
        listed = self._list()
        if listed.returncode and _GONE in listed.stderr:
            return None
        if listed.returncode:
            raise OSError(listed.stderr.decode("utf-8", "replace").strip() or f"exit code {listed.returncode}")
        return [name for name in listed.stdout.decode("utf-8", "replace").splitlines() if name.startswith(_PREFIX)]

    def _list(self) -> Completed:
        for left in reversed(range(_TRIES)):
            try:
                return self._connection.run(["sh", "-c", _LIST, "sh", self._run_dir], timeout=60)
            except ConnectionLost:
                if not left:
                    raise
        raise AssertionError("unreachable")


def owner_file(run_id: str) -> str:
    """The file name of an attempt of this process that takes a payload over."""
    return f"{_PREFIX}{run_id}.{os.getpid()}.{re.sub('[^A-Za-z0-9.-]', '_', socket.gethostname())}.{secrets.token_hex(4)}"


def owner_in_words(name: str) -> str:
    """Who the owner is, by the file name."""
    run_id, _, rest = name.removeprefix(_PREFIX).removesuffix(_JUDGED).partition(".")
    pid, _, rest = rest.partition(".")
    return f"run {run_id} (process {pid} on {rest.rpartition('.')[0]})"
