"""Ownership of a payload that outlives its Dagster process: only the owner ends it, judges it or removes its files.

The name of a file in the run directory names the owner. A later attempt takes the payload over by renaming that file. The
owner renames it, too, before it ends or judges the payload; after that no attempt can take it over. A rename is atomic, so
exactly one of two simultaneous attempts succeeds. No lock has to be released when a process is killed.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..edge import files
from ..runtime.protocol.messages import EndReason
from ..runtime.protocol.record import JOURNAL, PAYLOAD, RUNTIME, LineReader, Record
from ..slurm.submit import JOB_SCRIPT
from ..ssh.base import Connection

FIRST_OWNER = "owner.first"
"""Name of the owner file (the file that names the owner) of the attempt that started the payload."""

_PREFIX = "owner."  # Beginning of the name of each owner file.
_JUDGED = ".judged"  # Suffix of the owner file once the owner has begun to end or to judge the payload.

_TRIES = 3  # Tries to rename an owner file while other attempts rename it, too.


@dataclass(eq=False)
class Ownership:
    """One attempt's ownership of a payload: take the payload over, and confirm that no later attempt has taken it over."""

    connection: Connection
    run_dir: str
    name: str  # The owner file of this attempt: `FIRST_OWNER`, or `owner_file(...)` for a later attempt.
    successor: Callable[[], str | None]
    """Finds the Dagster run that took the payload over, in Dagster's event log; returns None if there is none."""
    new_owner: str | None = None  # The attempt that has taken the payload over, in words; None if no such attempt is known.
    _confirmed: bool = False

    def take_over(self) -> bool:
        """Try to become the owner; returns False if the present owner has begun to end or to judge the payload.

        Raises:
            OSError: the owner cannot be determined.
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

    def confirm(self, remove: bool = False) -> bool:
        """Whether this attempt is still the owner; if so, no later attempt can take the payload over from now on.

        Args:
            remove: whether the owner removes the run directory, too.

        Raises:
            OSError: the owner cannot be determined.
        """
        if self.new_owner is None and not self._confirmed:
            judged = self.name + _JUDGED
            try:
                self._rename(self.name, judged)
            except FileNotFoundError:
                self.new_owner = self._find_new_owner(judged)
            self._confirmed = self.new_owner is None
        if remove and self._confirmed:
            self.connection.remove(self.run_dir)
        return self._confirmed

    def confirm_or_assume(self) -> bool:
        """As `confirm`, but while the cluster does not answer this attempt counts as the owner, unless a new one is known."""
        try:
            return self.confirm()
        except OSError:
            return self.new_owner is None

    def _find_new_owner(self, judged: str) -> str | None:
        """Returns the new owner in words, if this attempt's owner file is missing; None if this attempt is still the owner."""
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
        """The names of the owner files, at most two during a rename; None if the run directory does not exist."""
        try:
            names = self.connection.call(files.names, self.run_dir, repeat=True)
        except FileNotFoundError:
            return None
        return [name for name in names if name.startswith(_PREFIX)]


def owner_file(run_id: str) -> str:
    """Returns a new name for the owner file of a later attempt: with the run, this process, this host and a random part."""
    return f"{_PREFIX}{run_id}.{os.getpid()}.{re.sub('[^A-Za-z0-9.-]', '_', socket.gethostname())}.{secrets.token_hex(4)}"


def owner_in_words(name: str) -> str:
    """Returns the owner that an owner file names, in words: its run, process and host."""
    run_id, _, rest = name.removeprefix(_PREFIX).removesuffix(_JUDGED).partition(".")
    pid, _, rest = rest.partition(".")
    return f"run {run_id} (process {pid} on {rest.rpartition('.')[0]})"


REQUIREMENTS_FILE = "wish.json"
"""File in the run directory of a session's payload: what the payload required before the session adapted it."""

_MOST_BYTES = 4 * 1024 * 1024  # Bytes of one read of a file in the run directory.
_CALLER_LINES = (b"# rayslurm: ", b"#SBATCH --comment=")
"""Beginnings of lines of a job script that name the Dagster run, and so differ between attempts."""
_RANDOM: dict[str, Any] = {"control_key": None, "control_ports": []}
"""Members of `runtime.json` that are random, with the values that replace them in a comparison."""
_CALLER_MEMBERS = ("run_id", "ray", "want_cpus", "want_gpus", "time_limit")
"""Members of `payload.json` that name the Dagster run, or that a session chose; a comparison leaves them out."""


def reattachable_job(
    connection: Connection,
    run_dir: str,
    nonce: str,
    request: Mapping[str, bytes],
    job_of: Callable[[Record | None], str | None],
    log: Any,
    requeue: bool = False,
) -> str | None:
    """Returns the id of the job whose payload a retry may continue: same request, and not failed; None if there is none.

    Args:
        request: the files of the run directory as they would be written now.
        job_of: finds the id of the payload's job from the record's `start`, or from None; returns None if the job is gone.
        log: the step's Dagster log, for a warning if the job runs for another request.
        requeue: whether Slurm may run the job again, so that an `end` after a signal from outside is not final.
    """
    if connection.stat(os.path.join(run_dir, JOURNAL)) is None:
        return None
    same = same_request({name: connection.read(os.path.join(run_dir, name), 0, _MOST_BYTES) for name in request}, request)
    start, end = _start_and_end(connection, run_dir, nonce)
    if end is not None and not (requeue and end["reason"] == EndReason.TERMINATED):
        succeeded = end["reason"] == EndReason.EXIT and end["exit_code"] == 0
        return str(start["allocation"]["job_id"]) if start is not None and succeeded and same else None
    job_id = job_of(start)
    if job_id is not None and not same:
        log.warning(
            f"[rayslurm] Slurm job {job_id} goes on with what the attempt before asked for, which is not what is asked for now; "
            f"see {run_dir} on {connection.place}, where `scancel {job_id}` ends the job"
        )
        return None
    return job_id


def same_request(one: Mapping[str, bytes], other: Mapping[str, bytes]) -> bool:
    """Whether the files of two run directories state the same request, apart from Dagster run and random keys. Pure."""
    return _normalized(one) == _normalized(other)


def _normalized(files: Mapping[str, bytes]) -> list[Any] | None:
    """The request in the files of a run directory, in a form to compare: without Dagster run and random keys. None if damaged."""
    request: list[Any] = []
    try:
        payload = json.loads(files[PAYLOAD])
        request.append({key: value for key, value in payload.items() if key not in _CALLER_MEMBERS})
        if RUNTIME in files:
            request.append({**json.loads(files[RUNTIME]), **_RANDOM})
    except ValueError:
        return None
    if REQUIREMENTS_FILE in files:
        request.append(files[REQUIREMENTS_FILE])
    request += [line for line in files.get(JOB_SCRIPT, b"").splitlines() if not line.startswith(_CALLER_LINES)]
    return request


def _start_and_end(connection: Connection, run_dir: str, nonce: str) -> tuple[Record | None, Record | None]:
    """Returns the last `start` of a payload's record, and the `end` that follows it; None for each that is missing."""
    reader = LineReader()
    start, end = None, None
    while data := connection.read(os.path.join(run_dir, JOURNAL), reader.next_read, _MOST_BYTES):
        for record in reader.feed(data):
            if record.get("type") == "start":
                start, end = record, None
            elif record.get("type") == "end" and record.get("nonce") == nonce:
                end = record
    return start, end
