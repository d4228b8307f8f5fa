"""Ownership of a payload that outlives its Dagster process. Only the owner ends or judges the payload, or removes its files.

The name of a file in the run directory names the owner. A later attempt takes the payload over by renaming the file. The owner,
too, renames the file before the owner ends or judges the payload. A rename is atomic, so exactly one of two simultaneous attempts
succeeds.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..edge import files
from ..runtime.protocol.messages import EndReason
from ..runtime.protocol.record import JOURNAL, LineReader, Record
from ..ssh.base import Connection
from ..ssh.local import LocalConnection

FIRST_OWNER = "owner.first"  # Name of the owner file (the file that names the owner) of the attempt that started the payload.

_PREFIX = "owner."  # Beginning of the name of each owner file.
_JUDGED = ".judged"  # Suffix of the owner file once the owner has begun to end or to judge the payload.

_TRIES = 3  # Tries to rename an owner file while other attempts rename it, too.
_LEASE = 0.5  # Seconds for which an attempt that was the owner takes itself for the owner.
_LEASE_OVER = (
    4 * _LEASE
)  # Seconds after which a displaced attempt has noticed that it is no longer the owner, and has done its last write.


@dataclass(eq=False)
class Ownership:
    """One attempt's claim to be the owner of a payload: the only attempt that ends it, judges it and removes its files.

    An attempt can take the ownership from an earlier attempt, and lose it to a later attempt.
    """

    connection: Connection
    run_dir: str
    name: str  # The owner file of this attempt: `FIRST_OWNER`, or `owner_file(...)` for a later attempt.
    # Finds the Dagster run that took the payload over, in Dagster's event log; returns None if there is none.
    successor: Callable[[], str | None]
    new_owner: str | None = None  # The attempt that has taken the payload over, in words; None if no such attempt is known.
    _confirmed: bool = False  # Whether `confirm` has returned True.
    _held_at: float = -math.inf  # When this attempt was last seen to be the owner, by the monotonic clock.

    def take_over(self) -> bool:
        """Try to become the owner of a payload that an earlier attempt owns; returns whether this attempt is the owner now.

        Returns False if the present owner has begun to end or judge the payload, or has removed the run directory. Raises OSError
        if the cluster cannot be reached, or if other attempts take the payload over at the same time.
        """
        for _ in range(_TRIES):
            owners = self._owners()
            if not owners or any(owner.endswith(_JUDGED) for owner in owners):
                return False  # Without owner files, the owner has removed the run directory.
            if self.name in owners:
                return True
            with suppress(FileNotFoundError):  # Another attempt was faster, or an answer was lost.
                self._rename(owners[0], self.name)
                return True
        raise OSError(f"{self.run_dir}: others take the payload over at the same time")

    def holds(self) -> bool:
        """Returns whether this attempt is still the owner, and so may write results.

        Reads the run directory at most every `_LEASE` seconds; in between, it returns the last result. Raises OSError if the run
        directory cannot be read.
        """
        now = time.monotonic()
        if self.run_dir and self.new_owner is None and now - self._held_at > _LEASE:
            owners = self._owners() or []
            if self.name not in owners:
                self.new_owner = self._find_new_owner(self.name + _JUDGED)
            self._held_at = now
        return self.new_owner is None

    def displace(self) -> None:
        """Take the payload over by force, so that no other attempt writes results once this function returns.

        Unlike `take_over`, it also works if the owner has begun to end or judge the payload. If there was an owner, the function
        waits `_LEASE_OVER` seconds, in which the displaced attempt notices the loss. Raises OSError if the owner files cannot be
        read or renamed.

        One case is not covered: a displaced attempt whose process was suspended after it had checked the owner file, and before
        it wrote a result, may still write the result later.
        """
        owners = self._owners() or []
        for owner in owners:
            if not owner.startswith(self.name):
                with suppress(FileNotFoundError):  # The run directory is being removed.
                    self._rename(owner, self.name + (_JUDGED if owner.endswith(_JUDGED) else ""))
        if owners:
            time.sleep(_LEASE_OVER)

    def confirm(self) -> bool:
        """Returns whether this attempt is still the owner. Must be called before this attempt ends or judges the payload.

        If the result is True, no later attempt can become the owner by `take_over`, only by `displace`. Raises OSError if the
        owner file cannot be renamed or looked for.
        """
        if self.new_owner is None and not self._confirmed:
            judged = self.name + _JUDGED
            try:
                self._rename(self.name, judged)
            except FileNotFoundError:
                self.new_owner = self._find_new_owner(judged)
            self._confirmed = self.new_owner is None
        return self._confirmed

    def confirm_or_assume(self) -> bool:
        """Call `confirm` and return the result: whether this attempt is still the owner.

        If the cluster does not answer, returns True unless a new owner is already known.
        """
        try:
            return self.confirm()
        except OSError:
            return self.new_owner is None

    def _find_new_owner(self, judged: str) -> str | None:
        """Returns the new owner in words, after this attempt has not found its own owner file. None if no new owner can be found.

        `judged` is the name that the file gets when this attempt begins to end or judge the payload. If a file of this name
        exists, this attempt is still the owner, and the result is None.
        """
        owners = self._owners() or []
        if judged in owners:
            return None  # An earlier rename worked, and its answer was lost.
        others = [name for name in owners if name != self.name]
        if others:
            return owner_in_words(others[0])
        # Without an owner file, a later attempt or a person has removed the directory. The listing of a network file
        # system may be stale, and still show this attempt's own file.
        successor = self.successor()
        if successor is not None:
            return f"run {successor}"
        return "another attempt" if owners else None

    def _rename(self, old: str, new: str) -> None:
        self.connection.rename(os.path.join(self.run_dir, old), os.path.join(self.run_dir, new))

    def _owners(self) -> list[str] | None:
        """Returns the names of the owner files; None if the run directory does not exist.

        If a file is renamed while the directory is listed, both its names may be in the list.
        """
        try:
            names = self.connection.call(files.names, self.run_dir, repeat=True)
        except FileNotFoundError:
            return None
        return [name for name in names if name.startswith(_PREFIX)]


# The ownership of a payload that no later attempt can take over.
UNCONTESTED = Ownership(LocalConnection(), "", FIRST_OWNER, lambda: None, _confirmed=True)


def owner_file(run_id: str) -> str:
    """Returns a unique owner file name for an attempt that takes a payload over.

    The name has the Dagster run id, the process id, the hostname and a random part.
    """
    return f"{_PREFIX}{run_id}.{os.getpid()}.{re.sub('[^A-Za-z0-9.-]', '_', socket.gethostname())}.{secrets.token_hex(4)}"


def owner_in_words(name: str) -> str:
    """Returns a description of an owner, with run, process and host, from the name of the owner file."""
    run_id, _, rest = name.removeprefix(_PREFIX).removesuffix(_JUDGED).partition(".")
    pid, _, rest = rest.partition(".")
    return f"run {run_id} (process {pid} on {rest.rpartition('.')[0]})"


# File in the run directory with the `fingerprint` of the payload and all settings with which it was started.
REQUEST_FILE = "wish.json"

_MOST_BYTES = 4 * 1024 * 1024  # Bytes of one read of a file in the run directory.


def fingerprint(*parts: str) -> bytes:
    """Returns a hash of the texts `parts`, as hexadecimal digits in bytes.

    Two attempts have the same settings if their hashes are equal.
    """
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest().encode()


def reattachable_job(
    connection: Connection,
    run_dir: str,
    nonce: str,
    request: bytes,
    job_of: Callable[[Record | None], str | None],
    log: Any,
    requeue: bool = False,
) -> str | None:
    """Returns the id of the job whose payload a retry may continue; None if there is no such job.

    A retry may continue a payload that was started with the same settings, and that either still runs or waits, or has
    succeeded. Raises OSError if the cluster does not answer.

    Args:
        connection: The connection to the cluster.
        run_dir: The payload's run directory.
        nonce: The random text that tells the payload of `run_dir` from all others.
        request: The fingerprint of the settings of the retry. `REQUEST_FILE` has the fingerprint of the earlier attempt's
            settings.
        job_of: A function that returns the id of the payload's job, or None if the job is gone. The argument is the `start`
            line of the payload's record, or None if the record has no such line.
        log: The step's Dagster log, which gets a warning if the job still runs with other settings.
        requeue: Whether Slurm may requeue the job. If True, an `end` line after a signal from outside is ignored, because the
            payload may run again.
    """
    if connection.modified(os.path.join(run_dir, JOURNAL)) is None:
        return None
    same = connection.read(os.path.join(run_dir, REQUEST_FILE), 0, _MOST_BYTES) == request
    start, end = Journal(connection, run_dir, nonce).start_and_end()
    if end is not None and not (requeue and end["reason"] == EndReason.TERMINATED):
        succeeded = end["reason"] == EndReason.EXIT and end["exit_code"] == 0
        return str(start["allocation"]["job_id"]) if start is not None and succeeded and same else None
    job_id = job_of(start)
    if job_id is not None and not same:
        log.warning(
            f"[rayslurm] Slurm job {job_id} still runs with the settings of an earlier attempt, which have changed since; "
            f"see {run_dir} on {connection.place}, where `scancel {job_id}` ends the job"
        )
        return None
    return job_id


@dataclass(eq=False)
class Journal:
    """Reads the journal (the file of events in the run record) of a payload; each call reads only the lines that are new."""

    connection: Connection
    run_dir: str
    nonce: str  # The payload's nonce: `end` lines with another nonce are ignored.

    def __post_init__(self) -> None:
        self._reader = LineReader()
        self._start: Record | None = None
        self._end: Record | None = None

    def start_and_end(self) -> tuple[Record | None, Record | None]:
        """Returns the last `start` line, and the `end` line after it; None for each missing line.

        Raises OSError if the journal cannot be read.
        """
        path, reader = os.path.join(self.run_dir, JOURNAL), self._reader
        while data := self.connection.read(path, reader.next_read, _MOST_BYTES):
            for record in reader.feed(data):
                if record.get("type") == "start":
                    self._start, self._end = record, None
                elif record.get("type") == "end" and record.get("nonce") == self.nonce:
                    self._end = record
        return self._start, self._end
