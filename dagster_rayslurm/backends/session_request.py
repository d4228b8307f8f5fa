"""One payload's request: put to a session until it is known whether that has accepted it, so that it never runs twice."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..connections.base import Connection, ConnectionFailed
from ..errors import StartError
from ..interrupts import delayed_interrupts
from ..runtime.record import EXIT, JOURNAL, SESSION, LineReader
from ..slurm.queue import ask_queue
from ..slurm.script import parse_exit
from ..slurm.states import TERMINAL
from .session_client import AnswerLost, Unreachable, ask, parse_announcement
from .session_registry import Found

GONE = "gone"
"""The answer of a session that is over, made up here."""

_PAUSES = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_SILENT_FOR = 600.0
"""Seconds in which a session whose job lives must answer somebody who has asked it nothing yet."""
_MOST_BYTES = 1024 * 1024
_WITHDRAWALS = 3


class Request:
    """A payload on its way to a session.

    Args:
        connection: reaches the files and the session.
        commands: runs Slurm's programs.
        run_dir: the payload's run directory.
        nonce: the payload's name; sessions accept it once.
        carrier: how requests get to a session.
        patience: seconds for which a session that may have accepted it can be out of reach.
        accept: told of the session that has accepted it, with no interrupt in between.
        log: the step's log.
    """

    def __init__(
        self,
        *,
        connection: Connection,
        commands: Connection,
        run_dir: str,
        nonce: str,
        carrier: str,
        patience: float,
        accept: Callable[[Found], None],
        log: Any,
    ) -> None:
        self.unsettled = False
        """Whether a session may have accepted it whose answer was lost."""
        self._connection = connection
        self._commands = commands
        self._run_dir = run_dir
        self._nonce = nonce
        self._carrier = carrier
        self._patience = patience
        self._accept = accept
        self._log = log
        self._asked: dict[str, Found] = {}

    def put(self, found: Found, files: Mapping[str, str], needs: Sequence[str]) -> dict[str, Any]:
        """Ask a session to run it.

        Args:
            found: the session.
            files: what its run directory begins with.
            needs: paths of bundles.

        Returns:
            The answer; {"ok": True} also where this was accepted before, {"error": "gone"} where nobody is left to answer.

        Raises:
            StartError: the session does not answer.
            ConnectionFailed: the edge node cannot be reached; nothing was asked.
        """
        request = {"op": "run", "request_id": self._nonce, "run_dir": self._run_dir, "files": dict(files), "needs": list(needs)}
        self._asked[found.announcement.cluster_id] = found
        pauses = iter(_PAUSES)
        began = time.monotonic()
        told = ""
        while True:
            try:
                return self._put_once(found, request)
            except AnswerLost as error:
                self.unsettled = True
                why = str(error)
            except Unreachable as error:
                why = str(error)
                if self._is_over(found):
                    return self._without_answer()
            except ConnectionFailed as error:
                if not self.unsettled:
                    raise
                why = str(error)
            if time.monotonic() - began > (self._patience if self.unsettled else _SILENT_FOR):
                raise self._silent(found, why)
            if why != told:
                told = why
                self._log.warning(f"[rayslurm] {why}; asking again")
            time.sleep(next(pauses, _PAUSES[-1]))

    def _put_once(self, found: Found, request: Mapping[str, Any]) -> dict[str, Any]:
        with delayed_interrupts():
            answer = ask(
                self._connection,
                self._commands,
                found.announcement,
                request,
                self._carrier,
                found.directory,
                found.charter.ask,
            )
            duplicate = answer.get("error") == "duplicate"
            if answer.get("ok") or duplicate:
                self._accept(self._acceptor(found) if duplicate else found)
                self.unsettled = False
                return {"ok": True}
        # Whatever it says instead, it has looked whether this payload had been accepted.
        self.unsettled = False
        return answer

    def _without_answer(self) -> dict[str, Any]:
        if self.unsettled and (acceptor := self._started_by()) is not None:
            with delayed_interrupts():
                self._accept(acceptor)
                self.unsettled = False
            return {"ok": True}
        self.unsettled = False
        return {"ok": False, "error": GONE}

    def _acceptor(self, found: Found) -> Found:
        """Which session has accepted it: the one that says so, or one before that is gone by now."""
        return (len(self._asked) > 1 and self._started_by()) or found

    def _started_by(self) -> Found | None:
        """The session in whose name the record was begun; None if there is no record."""
        with contextlib.suppress(OSError):
            for record in LineReader().feed(self._connection.read(os.path.join(self._run_dir, JOURNAL), 0, _MOST_BYTES)):
                if record.get("type") == "start":
                    return self._asked.get(str(record.get("cluster_id")))
        return None

    def _is_over(self, found: Found) -> bool:
        """Whether nobody will ever answer."""
        try:
            said = parse_announcement(self._connection.read(os.path.join(found.directory, SESSION), 0, _MOST_BYTES))
            if said is not None and said.closing is not None:
                return True
            job_id = int(found.announcement.job_id)
            if parse_exit(self._connection.read(os.path.join(found.directory, EXIT), 0, _MOST_BYTES), job_id) is not None:
                return True
            row = ask_queue(self._commands).job(job_id)
        except OSError:
            return False
        return row is None or row.state in TERMINAL

    def _silent(self, found: Found, why: str) -> StartError:
        job_id = found.announcement.job_id
        if self.unsettled:
            return StartError(
                "connection",
                f"the session in Slurm job {job_id} may have accepted the payload, which may run: {why}",
                retry=False,
            )
        return StartError(
            "cluster-start",
            f"the session in Slurm job {job_id} lives, but does not answer within {_SILENT_FOR:g} s: {why}; run "
            f"`scancel {job_id}` on {self._commands.place}, then try again",
        )

    def withdraw(self) -> None:
        """Find out whether it was accepted after all, for somebody who is about to cancel it."""
        for found in reversed(list(self._asked.values())):
            for _ in range(_WITHDRAWALS):
                with contextlib.suppress(OSError):
                    answer = self._put_once(
                        found, {"op": "run", "request_id": self._nonce, "run_dir": self._run_dir, "needs": [""]}
                    )
                    if answer.get("ok") or not self.unsettled:
                        return
                time.sleep(_PAUSES[0])
            break
        self._log.error(f"[rayslurm] a session may have accepted the payload, which may run now: see {self._run_dir}")
