"""One payload's request: put to a session until it is known whether that has accepted it, so that it never runs twice."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...errors import FailureKind, StartError
from ...interrupts import delayed_interrupts
from ...runtime.protocol.record import EXIT, JOURNAL, SECRETS, SESSION, LineReader
from ...slurm.queue import SharedQueue, fetch_queue
from ...slurm.script import parse_exit
from ...slurm.states import TERMINAL
from ...ssh.base import Connection, ConnectionFailed
from .client import AnswerLost, Unreachable, ask, parse_announcement
from .registry import Found

GONE = "gone"
"""The answer of a session that is over, made up here."""

_PAUSES = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_SILENT_FOR = 600.0
"""Seconds in which a session must answer that can be reached, as far as the edge node goes."""
_REWRITES = 5
"""Times that secrets are written again which a session does not find."""
_MOST_BYTES = 1024 * 1024
_WITHDRAWALS = 3
_WITHDRAW_WITHIN = 20.0
"""Seconds after which no other try is made to find out whether it was accepted; somebody has pressed Ctrl-C."""


class Request:
    """A payload on its way to a session.

    Args:
        connection: reaches the files and the session.
        commands: runs Slurm's programs.
        queue: the shared view of the queue.
        run_dir: the payload's run directory.
        nonce: the payload's name; sessions accept it once.
        carrier: how requests get to a session.
        patience: seconds for which the edge node can be out of reach once a session may have accepted it.
        accept: told of the session that has accepted it, with no interrupt in between.
        log: the step's log.
        secrets: what its file of secret variables holds; empty if it has none.
    """

    def __init__(
        self,
        *,
        connection: Connection,
        commands: Connection,
        queue: SharedQueue,
        run_dir: str,
        nonce: str,
        carrier: str,
        patience: float,
        accept: Callable[[Found], None],
        log: Any,
        secrets: bytes = b"",
    ) -> None:
        self.unsettled = False
        """Whether a session may have accepted it whose answer is not known, or not known yet."""
        self._connection = connection
        self._commands = commands
        self._queue = queue
        self._run_dir = run_dir
        self._nonce = nonce
        self._carrier = carrier
        self._patience = patience
        self._accept = accept
        self._log = log
        self._secrets = secrets
        self._asked: dict[str, Found] = {}
        self._why = ""
        """What the last try failed of."""
        self._alive: bool | None = None
        """Whether the session lives; None if nobody says so."""

    def put(self, found: Found, files: Mapping[str, str], needs: Sequence[str]) -> dict[str, Any]:
        """Ask a session to run it.

        Args:
            found: the session.
            files: what its run directory begins with.
            needs: paths of bundles.

        Returns:
            The answer; {"ok": True} also where this was accepted before, {"error": "gone"} where nobody is left to answer.

        Raises:
            StartError: the session does not answer, or cannot write to the run directory.
            ConnectionFailed: the edge node cannot be reached; nothing was asked.
            OSError: the secrets cannot be written.
        """
        request = self._request("run", files=dict(files), needs=list(needs))
        if self._secrets:
            request["secrets"] = True
            self._write_secrets()
        self._asked[found.announcement.cluster_id] = found
        pauses = iter(_PAUSES)
        in_reach, since = True, time.monotonic()
        without_secrets = 0
        told = ""
        while True:
            before = in_reach
            try:
                in_reach = True
                answer = self._try(found, request)
            except ConnectionFailed as error:
                if not self.unsettled:
                    raise
                in_reach, answer, self._why = False, None, str(error)
            if answer is not None:
                if answer.get("error") == "record":
                    raise StartError(FailureKind.RECORD, f"{self._name(found)}, {self._commands.place}: {answer.get('message')}")
                if answer.get("error") != "missing-secrets":
                    return answer
                # They were swept; or written on the edge node a moment ago, and another node does not see them yet.
                self._why = str(answer.get("message"))
                without_secrets += 1
                if without_secrets > _REWRITES:
                    raise StartError(FailureKind.RECORD, f"{self._name(found)} cannot read what was written for it: {self._why}")
                self._write_secrets()
            now = time.monotonic()
            if in_reach is not before:
                since = now
            if now - since > (_SILENT_FOR if in_reach else self._patience):
                raise self._silent(found, in_reach)
            if self._why != told:
                told = self._why
                self._log.warning(f"[rayslurm] {told}; asking again")
            time.sleep(next(pauses, _PAUSES[-1]))

    def _request(self, op: str, **more: Any) -> dict[str, Any]:
        return {"op": op, "request_id": self._nonce, "run_dir": self._run_dir, **more}

    def _write_secrets(self) -> None:
        """Only now: while a session waits in the queue nobody sees to its payloads' directories, and they may be swept."""
        self._connection.make_dir(self._run_dir)
        self._connection.write(os.path.join(self._run_dir, SECRETS), self._secrets)

    def _try(self, found: Found, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """Ask once.

        Returns:
            The answer; None if there is none, and it is not known that there will be none.

        Raises:
            ConnectionFailed: the edge node cannot be reached.
        """
        try:
            return self._put_once(found, request)
        except (AnswerLost, Unreachable) as error:
            self._why = str(error)
            nobody_there = isinstance(error, Unreachable)
        # The record tells without anybody's answer, and costs nobody but the file system.
        if self.unsettled and (acceptor := self._started_by()) is not None:
            return self._settled(acceptor)
        self._alive = self._lives(found, nobody_there)
        return self._without_answer() if self._alive is False else None

    def _put_once(self, found: Found, request: Mapping[str, Any]) -> dict[str, Any]:
        before = self.unsettled
        # An interrupt may come from here on: whoever is about to cancel it finds out what became of it.
        self.unsettled = True
        try:
            answer = self._ask(found, request)
        except AnswerLost:
            raise
        except OSError:
            self.unsettled = before  # Nothing was asked.
            raise
        if answer.get("ok"):
            return self._settled(found)
        if answer.get("error") == "duplicate":
            return self._settled(self._acceptor(found))
        # Whatever it says instead, it has looked whether this payload had been accepted.
        self.unsettled = False
        return answer

    def _ask(self, found: Found, request: Mapping[str, Any]) -> dict[str, Any]:
        announcement, start = found.announcement, found.charter.ask
        return ask(self._connection, self._commands, announcement, request, self._carrier, found.directory, start)

    def describe(self, found: Found) -> dict[str, Any]:
        """What a session says of itself.

        Raises:
            OSError: it does not answer.
        """
        return self._ask(found, {"op": "describe"})

    def _settled(self, acceptor: Found) -> dict[str, Any]:
        with delayed_interrupts():
            self._accept(acceptor)
            self.unsettled = False
        return {"ok": True}

    def _without_answer(self) -> dict[str, Any] | None:
        """What is to be said of a session that is over: it had accepted, or never will; None if that cannot be read."""
        if self.unsettled:
            try:
                acceptor = self._read_start()
            except ConnectionFailed:
                raise
            except OSError as error:
                self._why = f"it may have been accepted, but that cannot be read: {error}"
                return None
            if acceptor is not None:
                return self._settled(acceptor)
        self.unsettled = False
        return {"ok": False, "error": GONE}

    def _acceptor(self, found: Found) -> Found:
        """Which session has accepted it: the one that says so, or one before that is gone by now.

        Raises:
            AnswerLost: that cannot be read.
            ConnectionFailed: the edge node cannot be reached.
        """
        if len(self._asked) == 1:
            return found
        problem: OSError | None = None
        for pause in _PAUSES:
            try:
                problem, acceptor = None, self._read_start()
            except ConnectionFailed:
                raise
            except OSError as error:
                problem, acceptor = error, None
            if acceptor is not None:
                return acceptor
            time.sleep(pause)
        if problem is not None:
            raise AnswerLost(f"a session has accepted it, but which one cannot be read: {problem}")
        return found

    def _started_by(self) -> Found | None:
        """The session in whose name the record was begun; None also if that cannot be read, though the edge node is there."""
        try:
            return self._read_start()
        except ConnectionFailed:
            raise
        except OSError:
            return None

    def _read_start(self) -> Found | None:
        """The session in whose name the record was begun; None if there is no record.

        Raises:
            OSError: it cannot be read.
        """
        for record in LineReader().feed(self._connection.read(os.path.join(self._run_dir, JOURNAL), 0, _MOST_BYTES)):
            if record.get("type") == "start":
                return self._asked.get(str(record.get("cluster_id")))
        return None

    def _lives(self, found: Found, nobody_there: bool) -> bool | None:
        """Whether a session is there that may answer some time; None if nobody says so.

        Args:
            found: the session.
            nobody_there: whether it could not be reached. One that can may be about to end, and answer all the same.

        Raises:
            ConnectionFailed: the edge node cannot be reached.
        """
        job_id = int(found.announcement.job_id)
        try:
            if nobody_there:
                said = parse_announcement(self._connection.read(os.path.join(found.directory, SESSION), 0, _MOST_BYTES))
                if said is not None and said.closing is not None:
                    return False
            if parse_exit(self._connection.read(os.path.join(found.directory, EXIT), 0, _MOST_BYTES), job_id) is not None:
                return False
            snapshot = self._queue.latest(self._queue.clock.now())
            if snapshot is None or self._queue.error:
                return None
            row = snapshot.job(job_id)
            if row is None:
                # The shared word may be older than the job; only then is Slurm asked for this payload alone.
                row = fetch_queue(self._commands).job(job_id)
        except ConnectionFailed:
            raise
        except OSError:
            return None
        return row is not None and row.state not in TERMINAL

    def _name(self, found: Found) -> str:
        return f"the session in Slurm job {found.announcement.job_id}"

    def _silent(self, found: Found, in_reach: bool) -> StartError:
        job_id, place = found.announcement.job_id, self._commands.place
        if self.unsettled and not in_reach:
            return StartError(
                FailureKind.CONNECTION,
                f"{self._name(found)} may have accepted the payload, which may run, and the edge node was out of reach for "
                f"{self._patience:g} s: {self._why}",
                retry=False,
            )
        if self.unsettled:
            return StartError(
                FailureKind.RUNTIME,
                f"{self._name(found)} was asked to run the payload, which may run, and has not answered for {_SILENT_FOR:g} s: "
                f"{self._why}; see {self._run_dir} on {place}, where `scancel {job_id}` ends the session and all it runs",
                retry=False,
            )
        if self._alive:
            remedy = f"Slurm says that it runs; run `scancel {job_id}` on {place}, then try again"
        else:
            remedy = f"whether it lives cannot be found out; see `squeue --job {job_id}` on {place}"
        message = f"{self._name(found)} does not answer within {_SILENT_FOR:g} s: {self._why}; {remedy}"
        return StartError(FailureKind.CLUSTER_START, message)

    def withdraw(self) -> None:
        """Withdraw the request, or find out that it was accepted after all, for somebody who is about to cancel it."""
        deadline = time.monotonic() + _WITHDRAW_WITHIN
        for _ in range(_WITHDRAWALS):
            with contextlib.suppress(OSError):
                if (acceptor := self._read_start()) is not None:
                    self._settled(acceptor)
                    return
                newest = list(self._asked.values())[-1]
                if self._try(newest, self._request("withdraw")) is not None:
                    return
            if time.monotonic() > deadline:
                break
            time.sleep(_PAUSES[0])
        self._log.error(f"[rayslurm] a session may have accepted the payload, which may run now: see {self._run_dir}")
