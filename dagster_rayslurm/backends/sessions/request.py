"""Ask a session to run a payload, and repeat the request until it is known whether the session accepted the payload.

Until this is known, no other session gets the request, because a payload must not run twice. A request goes by TCP through the
SSH connection, or by an `srun` in the session's allocation (Slurm job). The journal of a payload is a file in the payload's run
directory; its `start` record names the session that accepted the payload.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import FailureKind, StartError
from ...runtime.protocol.messages import Operation, Refusal
from ...runtime.protocol.record import JOURNAL, SECRETS, SESSION, LineReader
from ...runtime.protocol.rpc import ANSWER, ANSWER_TIMEOUT, SENT, AnswerLost, NotConnected, call
from ...runtime.protocol.spec import Announcement, PayloadSpec
from ...slurm.shared_queue import run_slurm
from ...slurm.steps import step_on_head
from ...ssh.base import Connection, ConnectionFailed, ConnectionLost
from ..base import delayed_interrupts
from .acquire import Site
from .registry import MOST_BYTES, Generation, LiveSession, parse_announcement, session_of_cluster

# Seconds after a failure of TCP where srun got through, until this process tries TCP to that session again.
_TCP_RETRY_AFTER = 300.0
# Seconds in which a TCP connection is made, and in which the session then proves its identity. A firewall that drops packets
# delays a request as long.
PROOF_TIMEOUT = 3.0
_SRUN_TIMEOUT = 60.0 + ANSWER_TIMEOUT  # Seconds for an srun that carries a request: its start, and the session's answer.
_PAUSES = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # Seconds between two tries of a request; the last number repeats.
_ANSWER_DEADLINE = 600.0  # Seconds in which a session must answer while the edge node is in reach.
# Seconds in which a node sees uploaded files: on NFS a name that was looked up in vain stays missing for up to a minute.
_VISIBILITY_TIMEOUT = 90.0
_DELIVERIES = 3  # Most uploads for one session of bundles that disappear again.
# Most tries to withdraw a request, and seconds after which none begins; a person has pressed Ctrl-C and waits.
_WITHDRAWALS, _WITHDRAW_TIMEOUT = 3, 20.0

_tcp_failed_at: dict[str, float] = {}  # When TCP failed while srun succeeded (monotonic clock), by session directory.


class Unreachable(OSError):
    """Raised if a session cannot be reached, and so certainly has not received the request."""


def send_request(
    connection: Connection, session: LiveSession | Generation, request: Mapping[str, Any], carrier: str = "auto"
) -> dict[str, Any]:
    """Send `request`, such as {"op": "stop"}, to a session; wait for the session's answer, and return it.

    `carrier` says how the request gets to the session: "direct" by TCP from the edge node, "srun" by an `srun` in the session's
    allocation. With "auto", the function tries TCP, and uses `srun` if TCP fails; if TCP to this session failed a short time ago,
    the function uses `srun` at once. A session on this machine gets each request by TCP.

    Raises:
        Unreachable: the session did not receive the request.
        AnswerLost: the session may have received the request, but the session's answer is not known.
        ConnectionFailed: the edge node cannot be reached to start `srun`.
    """
    said, manifest, directory = session.announcement, session.manifest, session.directory
    if said is None:
        raise Unreachable(f"the session in {directory} does not say where it is")
    name = f"the session in job {said.job_id} on {said.hostname}"
    command = manifest.ask_command if manifest is not None else ()
    blocked = time.monotonic() - _tcp_failed_at.get(directory, -_TCP_RETRY_AFTER) < _TCP_RETRY_AFTER
    tcp = carrier == "direct" or not command or (carrier == "auto" and not blocked)
    if tcp:
        try:
            return _send_by_tcp(connection, said, request)
        except NotConnected as error:
            if carrier == "direct" or not command:
                raise Unreachable(f"{name} cannot be reached by TCP: {error}") from None
    answer = _send_by_srun(connection, said, request, [*command, directory], name)
    if tcp:  # The session lives, so TCP failed for another reason than its end.
        _tcp_failed_at[directory] = time.monotonic()
    return answer


def grace_period(answer: Mapping[str, Any]) -> float:
    """Returns the seconds that a session gives its payloads to end by themselves; `answer` is its answer to a stop request.

    A session of an older version of dagster-rayslurm does not report these seconds; the result is then the default grace period.
    """
    return float(answer.get("grace_period", PayloadSpec.grace_period))


def _send_by_tcp(connection: Connection, announcement: Announcement, request: Mapping[str, Any]) -> dict[str, Any]:
    problem = NotConnected("it announces no host")
    for host in announcement.hosts:
        try:
            with connection.connect(host, announcement.port, PROOF_TIMEOUT) as sock:
                return call(sock, announcement.key, dict(request), PROOF_TIMEOUT)
        except AnswerLost:
            raise
        except OSError as error:
            problem = NotConnected(f"{host}:{announcement.port}: {error}")
    raise problem


def _send_by_srun(
    connection: Connection, announcement: Announcement, request: Mapping[str, Any], program: Sequence[str], name: str
) -> dict[str, Any]:
    step = step_on_head(announcement.job_id, announcement.heterogeneous, announcement.hosts[0])
    command = [*step, "--chdir=/", *program]
    try:
        done = run_slurm(connection, command, json.dumps(request).encode(), timeout=_SRUN_TIMEOUT)
    except (ConnectionLost, TimeoutError) as error:
        raise AnswerLost(f"{name} may have been asked by srun: {error}") from None
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    for line in lines:
        if line.startswith(ANSWER):
            with contextlib.suppress(ValueError):
                return dict(json.loads(line[len(ANSWER) :]))
    error_text = done.stderr.decode("utf-8", "replace").strip()[-500:] or f"exit code {done.returncode}"
    if SENT in lines:
        raise AnswerLost(f"{name} was asked by srun, and its answer is lost: {error_text}")
    raise Unreachable(f"{name} cannot be reached by srun: {error_text}")


@dataclass(eq=False)
class RunRequest:
    """The request to run one payload: `submit` sends it to a session, and `withdraw` takes it back."""

    site: Site  # The cluster or machine of the sessions; also has the payload's plan and run directory.
    on_accepted: Callable[[LiveSession], None]  # Called with the session that accepted; interrupts wait until the call ends.
    secrets: bytes = b""  # Content of the payload's file of secret variables; empty if it has none.
    unsettled: bool = field(default=False, init=False)  # True while it is uncertain whether a session has accepted.
    _tried: dict[str, LiveSession] = field(default_factory=dict, init=False)  # Asked sessions, by Ray cluster id.
    _problem: str = field(default="", init=False)  # Why the last try failed.

    def submit(self, session: LiveSession, files: Mapping[str, str]) -> dict[str, Any]:
        """Ask a session to run the payload, again and again until the session answers; returns the session's answer.

        `files` has the contents of new files of the payload's run directory, by name. If this session, or a session that was
        asked before, has accepted the payload, the function calls the callback `on_accepted` with that session, and the answer
        is {"ok": True}. Otherwise the answer has the reason of the refusal as `error`, such as "gone" if this session has ended.

        Raises:
            StartError: the session does not answer, cannot write the run directory, or does not see the uploaded files.
            OSError: a file cannot be sent; or the edge node cannot be reached, and certainly no session has accepted the
                payload.
        """
        site, needs = self.site, list(self.site.needs)
        if self.secrets:
            needs.append(os.path.join(site.run_dir, SECRETS))
            self._write_secrets()
        request = self._message(Operation.RUN, files=dict(files), needs=needs, **site.members)
        self._tried[session.announcement.cluster_id] = session
        pauses = iter(_PAUSES)
        in_reach, since, missing_since = True, time.monotonic(), 0.0
        deliveries, logged = 0, ""
        while True:
            was_in_reach, in_reach, answer = in_reach, True, None
            try:
                answer = self._try(session, request)
            except ConnectionFailed as error:
                if not self.unsettled:
                    raise
                in_reach, self._problem = False, str(error)
            now = time.monotonic()
            if answer is not None:
                if answer.get("error") == Refusal.RECORD:
                    sentence = f"{self._name(session)}, {site.connection.place}: {answer.get('message')}"
                    raise StartError(FailureKind.RECORD, sentence)
                if answer.get("error") != Refusal.MISSING:
                    return answer
                missing_since = missing_since or now
                if now - missing_since > _VISIBILITY_TIMEOUT:
                    unseen = ", ".join(map(str, answer.get("missing") or ()))
                    raise StartError(FailureKind.RUNTIME, f"{self._name(session)} does not see {unseen}")
                if deliveries < _DELIVERIES:
                    site.deliver()
                    self._write_secrets()
                deliveries += 1
                since = now
                if deliveries == 1:
                    continue  # Later the files are there, but the session's node looked for them too early.
            else:
                if in_reach is not was_in_reach:
                    since = now
                if now - since > (_ANSWER_DEADLINE if in_reach else site.patience):
                    raise self._no_answer(session, in_reach)
                if self._problem != logged:
                    logged = self._problem
                    site.step.log.warning(f"[rayslurm] {logged}; asking again")
            time.sleep(next(pauses, _PAUSES[-1]))

    def resume(self) -> bool:
        """Call `on_accepted` with the session that accepted the payload of an earlier attempt; returns whether it was found.

        No session is asked: the journal names the session, which may be any generation, also one that accepts no more payloads.
        Raises OSError if the files cannot be read.
        """
        cluster_id = self._cluster_in_journal()
        session = cluster_id and session_of_cluster(self.site.connection, self.site.base, cluster_id)
        if session:
            self._settle(session)
        return bool(session)

    def withdraw(self) -> None:
        """Withdraw the request from the session that was asked last. Called while it is uncertain whether a session has accepted.

        If a session has accepted the payload after all, the function calls the callback `on_accepted` with that session, and the
        payload runs. If it remains unknown whether a session has accepted the payload, the function logs an error. The function
        tries at most `_WITHDRAWALS` times, and begins no try after `_WITHDRAW_TIMEOUT` seconds.
        """
        deadline = time.monotonic() + _WITHDRAW_TIMEOUT
        for _ in range(_WITHDRAWALS):
            try:
                if self._try(list(self._tried.values())[-1], self._message(Operation.WITHDRAW)) is not None:
                    return
            except OSError as error:
                self._problem = str(error)
            if time.monotonic() > deadline:
                break
            time.sleep(_PAUSES[0])
        self.site.step.log.error(
            f"[rayslurm] a session may have accepted the payload, which may run now: see {self.site.run_dir}"
        )

    def _message(self, op: Operation, **more: Any) -> dict[str, Any]:
        return {"op": op, "request_id": self.site.plan.payload.nonce, "run_dir": self.site.run_dir, **more}

    def _write_secrets(self) -> None:
        """Write the payload's secret variables to a file in the run directory, even if they were written before.

        An earlier file may have been removed as an old file. Does nothing if there are no secret variables.
        """
        if self.secrets:
            self.site.connection.make_dir(self.site.run_dir)
            self.site.connection.write(os.path.join(self.site.run_dir, SECRETS), self.secrets)

    def _try(self, session: LiveSession, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """Send the request once, and return the session's answer; None if the caller must try again to get an answer.

        The result is None if the session did not answer and may still live, or if the journal, which would show an acceptance,
        cannot be read. If the session has ended without accepting the payload, the result is a refusal with the `error` "gone".
        If a session has accepted the payload, the method calls the callback `on_accepted` with that session. Raises
        ConnectionFailed if the edge node cannot be reached.
        """
        before, alive = self.unsettled, True
        # From here on an interrupt leaves it open whether the session accepts the payload.
        self.unsettled = True
        try:
            answer = self.site.send(session, request)
        except (AnswerLost, Unreachable) as error:
            self._problem, unreachable = str(error), isinstance(error, Unreachable)
            self.unsettled = before or not unreachable
            answer, alive = {}, self._lives(session, unreachable)
        except OSError:
            self.unsettled = before  # The session did not get this request, so only earlier tries count.
            raise
        if answer.get("ok"):
            return self._settle(session)
        duplicate = answer.get("error") == Refusal.DUPLICATE
        if answer and not duplicate:
            # Before any other answer, the session has checked that the payload was not accepted before.
            self.unsettled = False
            return answer
        try:  # A session may begin the record just before its end, so this comes after the look whether it lives.
            acceptor = self._acceptor() if self.unsettled else None
        except ConnectionFailed:
            raise
        except OSError as error:
            self._problem = f"it may have been accepted, but that cannot be read: {error}"
            return None
        if acceptor is not None or duplicate:
            return self._settle(acceptor or session)
        if alive:
            return None
        self.unsettled = False
        return {"ok": False, "error": Refusal.GONE, "message": "it was gone before it could be asked"}

    def _settle(self, acceptor: LiveSession) -> dict[str, Any]:
        """Call `on_accepted` with the session that accepted the payload; returns {"ok": True}, the answer of `submit`."""
        with delayed_interrupts():
            self.on_accepted(acceptor)
            self.unsettled = False
        return {"ok": True}

    def _acceptor(self) -> LiveSession | None:
        """Returns the session that has accepted the payload, according to the payload's journal.

        Returns None if the journal names no session that this request was sent to. Raises OSError if the journal cannot be
        read.
        """
        return self._tried.get(self._cluster_in_journal() or "")

    def _cluster_in_journal(self) -> str | None:
        """Returns the id of the Ray cluster whose session has accepted the payload; None if the journal has no `start` record."""
        data = self.site.connection.read(os.path.join(self.site.run_dir, JOURNAL), 0, MOST_BYTES)
        starts = [record for record in LineReader().feed(data) if record.get("type") == "start"]
        return str(starts[0].get("cluster_id")) if starts else None

    def _lives(self, session: LiveSession, unreachable: bool) -> bool:
        """Returns False if a session has certainly ended, otherwise True: the session lives or may live.

        `unreachable` is True if the last request certainly did not reach the session. Then the result is also False if the
        session has announced that it is closing. Raises ConnectionFailed if the edge node cannot be reached.
        """
        try:
            if unreachable:  # A session in reach may still answer, even if it announces that it is closing.
                data = self.site.connection.read(os.path.join(session.directory, SESSION), 0, MOST_BYTES)
                now = parse_announcement(data)
                if now is not None and now.closing is not None:
                    return False
            return self.site.is_alive(session.announcement.job_id, session.directory) is not False
        except ConnectionFailed:
            raise
        except OSError:
            return True

    def _name(self, session: LiveSession) -> str:
        return f"the session in {self.site.noun} {session.announcement.job_id}"

    def _no_answer(self, session: LiveSession, in_reach: bool) -> StartError:
        """Returns the error to raise when a session has not answered for too long.

        `in_reach` says whether the edge node can be reached.
        """
        name, place = self._name(session), self.site.connection.place
        command = f"`{self.site.end_command} {session.announcement.job_id}`"
        if not self.unsettled:
            message = f"{name} does not answer within {_ANSWER_DEADLINE:g} s: {self._problem}"
            return StartError(FailureKind.CLUSTER_START, f"{message}; if it still runs, run {command} on {place}, then try again")
        silence = f"has not answered for {_ANSWER_DEADLINE:g} s"
        message = (
            f"{name} was asked to run the payload, which may run, and "
            f"{silence if in_reach else f'the edge node was out of reach for {self.site.patience:g} s'}: {self._problem}; "
            f"see {self.site.run_dir} on {place}, where {command} ends the session and all it runs"
        )
        return StartError(FailureKind.RUNTIME if in_reach else FailureKind.CONNECTION, message, retry=False)
