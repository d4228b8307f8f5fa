"""Ask a session to run one payload, again until it is known whether a session accepted the payload: it must not run twice."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import FailureKind, StartError
from ...interrupts import delayed_interrupts
from ...runtime.protocol.messages import Operation, Refusal
from ...runtime.protocol.record import EXIT, JOURNAL, SECRETS, SESSION, LineReader
from ...slurm.script import parse_exit
from ...slurm.shared_queue import SharedQueue, fetch_queue
from ...slurm.states import TERMINAL
from ...ssh.base import Connection, ConnectionFailed
from .client import AnswerLost, Unreachable, parse_announcement, send_request
from .registry import LiveSession

_PAUSES = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Seconds between two tries of a request; the last number repeats."""
_ANSWER_DEADLINE = 600.0
"""Seconds in which a session must answer while the edge node is in reach."""
_SECRETS_REWRITES = 5
"""How often secrets are written again for a session that does not see them."""
_MOST_BYTES = 1024 * 1024
"""Most bytes of a file that are read."""
_WITHDRAWALS = 3
"""Most tries to withdraw a request."""
_WITHDRAW_TIMEOUT = 20.0
"""Seconds after which no further withdrawal is tried; a person has pressed Ctrl-C and waits."""


@dataclass(kw_only=True, eq=False)
class RunRequest:
    """The request to run one payload: submit it to a session, or withdraw it.

    Attributes:
        connection: reaches the files and the session.
        commands: runs Slurm's programs.
        run_dir: the payload's run directory.
        nonce: the payload's nonce, which is the request's idempotency key.
        carrier: how requests reach the session, see `send_request`.
        patience: seconds for which the edge node may be out of reach once a session may have accepted the payload.
        on_accepted: called with the session that accepted the payload, before an interrupt can come.
        secrets: content of the payload's file of secret variables; empty if it has none.
        unsettled: whether a session may have accepted the payload although its answer is not known.
    """

    connection: Connection
    commands: Connection
    queue: SharedQueue
    run_dir: str
    nonce: str
    carrier: str
    patience: float
    on_accepted: Callable[[LiveSession], None]
    log: Any
    secrets: bytes = b""

    unsettled: bool = field(default=False, init=False)
    _tried: dict[str, LiveSession] = field(default_factory=dict, init=False)
    """Sessions to which the request was sent, by the id of their Ray cluster."""
    _problem: str = field(default="", init=False)
    """Why the last try failed."""
    _alive: bool | None = field(default=None, init=False)
    """Whether the session was alive after the last failed try; None if that is not known."""

    def submit(self, session: LiveSession, files: Mapping[str, str], needs: Sequence[str]) -> dict[str, Any]:
        """Ask a session to run the payload, and return its answer.

        Args:
            session: the session.
            files: the first files of the run directory.
            needs: paths of the bundles that must be on the cluster.

        Returns:
            The session's answer. It is {"ok": True} also if an earlier session had accepted the payload, and has the error
            "gone" if this session has ended.

        Raises:
            StartError: the session does not answer, or cannot write to the run directory.
            ConnectionFailed: the edge node cannot be reached; no session got the request.
            OSError: the secrets cannot be written.
        """
        request = self._message(Operation.RUN, files=dict(files), needs=list(needs))
        if self.secrets:
            request["secrets"] = True
            self._write_secrets()
        self._tried[session.announcement.cluster_id] = session
        pauses = iter(_PAUSES)
        in_reach, since = True, time.monotonic()
        rewrites, logged = 0, ""
        while True:
            was_in_reach, in_reach, answer = in_reach, True, None
            try:
                answer = self._try(session, request)
            except ConnectionFailed as error:
                if not self.unsettled:
                    raise
                in_reach, self._problem = False, str(error)
            if answer is not None:
                message = str(answer.get("message"))
                if answer.get("error") == Refusal.RECORD:
                    raise StartError(FailureKind.RECORD, f"{_name(session)}, {self.commands.place}: {message}")
                if answer.get("error") != Refusal.MISSING_SECRETS:
                    return answer
                # A cleanup removed the file; or the file is new and the session's node does not see it yet.
                self._problem = message
                rewrites += 1
                if rewrites > _SECRETS_REWRITES:
                    raise StartError(FailureKind.RECORD, f"{_name(session)} cannot read what was written for it: {message}")
                self._write_secrets()
            now = time.monotonic()
            if in_reach is not was_in_reach:
                since = now
            if now - since > (_ANSWER_DEADLINE if in_reach else self.patience):
                raise self._no_answer(session, in_reach)
            if self._problem != logged:
                logged = self._problem
                self.log.warning(f"[rayslurm] {logged}; asking again")
            time.sleep(next(pauses, _PAUSES[-1]))

    def describe(self, session: LiveSession) -> dict[str, Any]:
        """A session's description of itself.

        Raises:
            OSError: the session does not answer.
        """
        return self._send(session, {"op": Operation.DESCRIBE})

    def withdraw(self) -> None:
        """Called when the step is interrupted while the request is unsettled: withdraw the request.

        If a session has accepted the payload after all, `on_accepted` is called.
        """
        deadline = time.monotonic() + _WITHDRAW_TIMEOUT
        for _ in range(_WITHDRAWALS):
            try:
                acceptor, _ = self._read_acceptor()
                if acceptor is not None:
                    self._settle(acceptor)
                    return
                newest = list(self._tried.values())[-1]
                if self._try(newest, self._message(Operation.WITHDRAW)) is not None:
                    return
            except OSError as error:
                self._problem = str(error)
            if time.monotonic() > deadline:
                break
            time.sleep(_PAUSES[0])
        self.log.error(f"[rayslurm] a session may have accepted the payload, which may run now: see {self.run_dir}")

    def _message(self, op: Operation, **more: Any) -> dict[str, Any]:
        return {"op": op, "request_id": self.nonce, "run_dir": self.run_dir, **more}

    def _write_secrets(self) -> None:
        """Write the secrets just before the request: while the session waits in the queue, a cleanup may remove them."""
        self.connection.make_dir(self.run_dir)
        self.connection.write(os.path.join(self.run_dir, SECRETS), self.secrets)

    def _send(self, session: LiveSession, request: Mapping[str, Any]) -> dict[str, Any]:
        announcement, command = session.announcement, session.manifest.ask_command
        return send_request(self.connection, self.commands, announcement, request, self.carrier, session.directory, command)

    def _try(self, session: LiveSession, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """Send the request once, and return the answer; None if there is no answer and the session may still live."""
        try:
            return self._send_once(session, request)
        except (AnswerLost, Unreachable) as error:
            self._problem = str(error)
            unreachable = isinstance(error, Unreachable)
        # The record names the session that accepted the payload, and costs nothing but a read.
        if self.unsettled and (acceptor := self._read_acceptor()[0]) is not None:
            return self._settle(acceptor)
        self._alive = self._lives(session, unreachable)
        if self._alive is not False:
            return None
        # The session may have begun the record between the last look and its end.
        acceptor, read_error = self._read_acceptor() if self.unsettled else (None, None)
        if acceptor is not None:
            return self._settle(acceptor)
        if read_error is not None:
            self._problem = f"it may have been accepted, but that cannot be read: {read_error}"
            return None
        self.unsettled = False
        return {"ok": False, "error": Refusal.GONE}

    def _send_once(self, session: LiveSession, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send the request once, return the answer, and keep `unsettled` true to what is known."""
        before = self.unsettled
        # From here on an interrupt leaves it open whether the session accepts the payload.
        self.unsettled = True
        try:
            answer = self._send(session, request)
        except AnswerLost:
            raise
        except OSError:
            self.unsettled = before  # The session did not get this request, so only earlier tries count.
            raise
        if answer.get("ok"):
            return self._settle(session)
        if answer.get("error") == Refusal.DUPLICATE:
            return self._settle(self._find_acceptor(session))
        # Before any other answer, the session has checked that the payload was not accepted before.
        self.unsettled = False
        return answer

    def _settle(self, acceptor: LiveSession) -> dict[str, Any]:
        """Called when it is known which session accepted the payload; returns the answer {"ok": True}."""
        with delayed_interrupts():
            self.on_accepted(acceptor)
            self.unsettled = False
        return {"ok": True}

    def _find_acceptor(self, session: LiveSession) -> LiveSession:
        """The session that accepted the payload, when `session` answers that one has: itself or an earlier, ended one."""
        if len(self._tried) == 1:
            return session
        error: OSError | None = None
        for pause in _PAUSES:
            acceptor, error = self._read_acceptor()
            if acceptor is not None:
                return acceptor
            time.sleep(pause)
        if error is not None:
            raise AnswerLost(f"a session has accepted it, but which one cannot be read: {error}")
        return session

    def _read_acceptor(self) -> tuple[LiveSession | None, OSError | None]:
        """The session that began the payload's record, or None; and the error if the record cannot be read."""
        try:
            data = self.connection.read(os.path.join(self.run_dir, JOURNAL), 0, _MOST_BYTES)
        except ConnectionFailed:
            raise
        except OSError as error:
            return None, error
        starts = (record for record in LineReader().feed(data) if record.get("type") == "start")
        start = next(starts, None)
        return (None if start is None else self._tried.get(str(start.get("cluster_id")))), None

    def _lives(self, session: LiveSession, unreachable: bool) -> bool | None:
        """Whether a session may still answer a request; None if that is not known."""
        job_id = int(session.announcement.job_id)
        try:
            if unreachable:  # A session in reach may still answer, even if it announces that it is closing.
                now = parse_announcement(self.connection.read(os.path.join(session.directory, SESSION), 0, _MOST_BYTES))
                if now is not None and now.closing is not None:
                    return False
            if parse_exit(self.connection.read(os.path.join(session.directory, EXIT), 0, _MOST_BYTES), job_id) is not None:
                return False
            snapshot = self.queue.latest(self.queue.clock.now())
            if snapshot is None or self.queue.error:
                return None
            row = snapshot.job(job_id)
            if row is None:  # The shared snapshot may be older than the job.
                row = fetch_queue(self.commands).job(job_id)
        except ConnectionFailed:
            raise
        except OSError:
            return None
        return row is not None and row.state not in TERMINAL

    def _no_answer(self, session: LiveSession, in_reach: bool) -> StartError:
        """The error to raise when a session has not answered for too long."""
        name, job_id, place = _name(session), session.announcement.job_id, self.commands.place
        if self.unsettled and not in_reach:
            message = (
                f"{name} may have accepted the payload, which may run, and the edge node was out of reach for "
                f"{self.patience:g} s: {self._problem}"
            )
            return StartError(FailureKind.CONNECTION, message, retry=False)
        if self.unsettled:
            message = (
                f"{name} was asked to run the payload, which may run, and has not answered for {_ANSWER_DEADLINE:g} s: "
                f"{self._problem}; see {self.run_dir} on {place}, where `scancel {job_id}` ends the session and all it runs"
            )
            return StartError(FailureKind.RUNTIME, message, retry=False)
        if self._alive:
            remedy = f"Slurm says that it runs; run `scancel {job_id}` on {place}, then try again"
        else:
            remedy = f"whether it lives cannot be found out; see `squeue --job {job_id}` on {place}"
        message = f"{name} does not answer within {_ANSWER_DEADLINE:g} s: {self._problem}; {remedy}"
        return StartError(FailureKind.CLUSTER_START, message)


def _name(session: LiveSession) -> str:
    return f"the session in Slurm job {session.announcement.job_id}"
