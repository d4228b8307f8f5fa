"""From evidence to verdict: success, or a failure of a named kind with the sentence that helps. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import FailureKind, without_colours
from ..follow import Evidence
from ..runtime.process import processes
from ..runtime.protocol.end import EndReason
from ..runtime.protocol.record import Record
from ..slurm.job_log import relevant_lines
from ..slurm.job_verdict import explain_job_end
from .traceback_text import exception_in_words, read_traceback, shortened, traceback_of

_REASONS: dict[str, FailureKind] = {
    EndReason.ALLOCATION: FailureKind.ALLOCATION,
    EndReason.CANCEL: FailureKind.CANCELLED,
    EndReason.CLUSTER_START: FailureKind.CLUSTER_START,
    EndReason.CLUSTER_LOST: FailureKind.CLUSTER_LOST,
    EndReason.ENVIRONMENT: FailureKind.ENVIRONMENT,
    EndReason.OTHER_COMPONENT: FailureKind.CANCELLED,
    EndReason.RECORD: FailureKind.RECORD,
    EndReason.RETURNED: FailureKind.ALLOCATION,
    EndReason.RUNTIME: FailureKind.RUNTIME,
    EndReason.SPAWN: FailureKind.PAYLOAD,
    EndReason.TERMINATED: FailureKind.CANCELLED,
    EndReason.TIMEOUT: FailureKind.ALLOCATION,
}
"""Kinds for the reasons of an `end` that is not the payload's own."""

_RETRY: dict[str, bool] = {EndReason.RETURNED: True, EndReason.TIMEOUT: False}
"""Whether another attempt may succeed, where the kind alone does not say: a payload that was never started, and one that
takes longer than it may."""

_NO_DETAIL = "<no detail available>"
"""Python's text for an exception that it cannot print, such as a SyntaxError that Ray hands on."""

_NEAR = 20
"""Lines that may follow a traceback which is still worth a word."""

_ROUTINE = re.compile(r"\b(DEBUG|INFO)\b|^\((autoscaler|raylet|[^()]*pid=\d)")
"""Lines of output that tell nothing of an end; the latter are those of other processes that Ray hands on."""


@dataclass(frozen=True)
class Verdict:
    """The truth about a run.

    Attributes:
        kind: None for success.
        sentence: what happened.
        retry: whether another attempt may succeed; None for what the kind says.
    """

    kind: FailureKind | None
    sentence: str
    retry: bool | None = None


SUCCESS = Verdict(None, "the payload succeeded")


@dataclass(frozen=True)
class Judged:
    """The verdict on one payload, and the evidence for it."""

    verdict: Verdict
    evidence: Evidence


def needs_job_facts(evidence: Evidence) -> bool:
    """Whether Slurm may know more of the end than the record: there is no `end`, or a signal from outside made it."""
    end = evidence.end
    if end is None:
        return not evidence.interrupted and evidence.ended_unrecorded is None
    if end["reason"] == EndReason.CLUSTER_LOST:
        # Slurm may have ended the nodes of one component, which the head's node saw nothing of.
        allocation = (end.get("context") or {}).get("allocation") or {}
        return len(allocation.get("components") or ()) > 1
    return end["reason"] == EndReason.TERMINATED or (end["reason"] == EndReason.EXIT and _killed(end))


def _killed(end: Record) -> bool:
    """Whether a SIGKILL ended the payload, itself or below a shell; memory limits do that."""
    return bool(end["signal"] == signal.SIGKILL or end["exit_code"] == 128 + signal.SIGKILL)


def judge(evidence: Evidence, uses_pipes: bool, require_messages: bool) -> Verdict:
    """Judge a run.

    Args:
        evidence: what the record and the runtime's own end say.
        uses_pipes: whether the payload is declared to open Dagster Pipes.
        require_messages: whether a payload that never opened or closed Pipes has failed.

    Returns:
        Success only for an `end` with exit code 0, Pipes closed without an exception, and every message used.
    """
    end = evidence.end
    by_slurm = judge_job(evidence) if needs_job_facts(evidence) else None
    if by_slurm is not None:
        return by_slurm
    if end is None:
        return _without_end(evidence)
    reason = end["reason"]
    if reason != EndReason.EXIT:
        return Verdict(_REASONS.get(reason, FailureKind.RUNTIME), _sentence_of(reason, end.get("message")), _RETRY.get(reason))
    if end["signal"] is not None:
        return Verdict(FailureKind.PAYLOAD, f"the payload was killed by {signal_name(end['signal'])}{_hint(end['signal'])}")
    if evidence.exception is not None:
        return Verdict(FailureKind.PAYLOAD, f"the payload raised {_exception(evidence.exception, evidence)}")
    if end["exit_code"] != 0:
        return Verdict(FailureKind.PAYLOAD, _exit_sentence(end["exit_code"], evidence))
    return _judge_messages(evidence, uses_pipes and require_messages)


def _exception(exception: Mapping[str, Any], evidence: Evidence) -> str:
    """What the payload told Pipes that it raised."""
    found = read_traceback(traceback_of(exception))
    if not found or _NO_DETAIL in found[-1].text:
        found = read_traceback(evidence.last_errors()) or found
    if not found:
        return without_colours(_first_line(exception.get("message"))) or str(exception.get("name"))
    return exception_in_words(found, _nodes(evidence))


def _exit_sentence(code: int, evidence: Evidence) -> str:
    """How the payload ended, and the exception that ended it, as far as its standard error tells."""
    found = read_traceback(evidence.last_errors())
    raised = exception_in_words(found, _nodes(evidence)) if found else ""
    if raised and code == 1 and not found[-1].more:
        return f"the payload raised {raised}"
    sentence = f"the payload ended with exit code {code}{_exit_hint(code)}"
    if raised and found[-1].more < _NEAR:
        return f"{sentence}, after {raised}"
    return f"{sentence}; its standard error ends with: {last}" if (last := _last_words(evidence.last_errors())) else sentence


def _last_words(text: str) -> str:
    """The last line of some output that may tell why it ended."""
    lines = [line.rpartition("\r")[2].strip() for line in without_colours(text).rstrip().split("\n")]
    telling = [line for line in lines[-_NEAR:] if line and not _ROUTINE.search(line)]
    return shortened(telling[-1]) if telling else ""


def _nodes(evidence: Evidence) -> dict[str, str]:
    """Names of nodes by their addresses."""
    nodes = ((evidence.end or {}).get("context") or {}).get("nodes") or []
    return {node["address"]: node["hostname"] for node in nodes}


def _judge_messages(evidence: Evidence, required: bool) -> Verdict:
    if evidence.message_error:
        return Verdict(FailureKind.PIPES, f"the payload succeeded, but Dagster refused a Pipes message: {evidence.message_error}")
    if evidence.damaged_lines:
        return Verdict(FailureKind.RECORD, f"{evidence.damaged_lines} lines of the record are damaged, so results may be missing")
    if required and not evidence.opened:
        return Verdict(
            FailureKind.PIPES,
            "the payload ended with exit code 0 but never opened Dagster Pipes: call dagster_pipes.open_dagster_pipes() "
            "in it, or run it with uses_pipes=False",
        )
    if required and evidence.closed < evidence.opened:
        return Verdict(
            FailureKind.PIPES,
            "the payload ended with exit code 0 without closing Dagster Pipes, so its last results may be missing: use "
            "`with open_dagster_pipes() as pipes:`, and do not leave by os._exit()",
        )
    return SUCCESS


def judge_job(evidence: Evidence) -> Verdict | None:
    """What Slurm's own word makes of a run; None if it explains nothing."""
    if evidence.job is None:
        return None
    silent = not evidence.started and not evidence.runtime_log.strip()
    end = evidence.end
    # The first node's log tells nothing if srun ended it before it got that far, as another one had failed.
    log = "\n".join([evidence.runtime_log, *evidence.tails.values()])
    found = explain_job_end(
        evidence.job, log, terminated=end is not None and end["reason"] == EndReason.TERMINATED, silent=silent
    )
    if found is None or (end is not None and end["reason"] == EndReason.EXIT and not evidence.job.out_of_memory):
        return None  # A payload that somebody killed, in a job that goes on or came to its end.
    if found[0] == FailureKind.RUNTIME and evidence.culprit is not None:
        return Verdict(FailureKind.RUNTIME, f"{evidence.culprit}, and Slurm ended those of all nodes")
    if evidence.queued and end is None and found[0] != FailureKind.CANCELLED:
        # What ended the session was not this payload's doing.
        return Verdict(found[0], _sentence_of("returned", found[1]), _RETRY["returned"])
    return Verdict(*found)


def _without_end(evidence: Evidence) -> Verdict:
    if evidence.interrupted:
        return Verdict(FailureKind.CANCELLED, "the run was cancelled, and the runtime was killed before it could say how")
    if evidence.ended_unrecorded is not None:
        sentence = f"the payload has ended, but how is not in its record, so it may have succeeded: {evidence.ended_unrecorded}"
        return Verdict(FailureKind.RECORD, sentence)
    if evidence.unreachable is not None:
        sentence = f"the record of the run was out of reach for too long, and the run may go on: {evidence.unreachable}"
        return Verdict(FailureKind.CONNECTION, sentence, retry=False)
    if evidence.runtime_exit is None:
        return Verdict(FailureKind.RUNTIME, "the record has no end and nothing is known of the runtime")
    if evidence.culprit is not None:
        return Verdict(FailureKind.RUNTIME, f"{evidence.culprit}, before the payload's end was recorded")
    log = (relevant_lines(evidence.runtime_log) or [""])[-1]
    sentence = f"the runtime ended ({evidence.runtime_exit}) before the payload's end was recorded"
    return Verdict(FailureKind.RUNTIME, f"{sentence}: {log}" if log else sentence)


def _sentence_of(reason: str, message: str | None) -> str:
    said = {
        "allocation": "the allocation is not what was asked for",
        "cancel": "the run was cancelled",
        "cluster-lost": "the Ray cluster was lost while the payload ran",
        "cluster-start": "the Ray cluster did not start",
        "environment": "the environment cannot run the payload",
        "returned": "the session ended before it was the payload's turn, which was never started",
        "other-component": "the payload was ended because of another component",
        "record": "the record of the run cannot be kept, so the payload was ended",
        "spawn": "the payload did not start",
        "terminated": "the run was ended from outside",
        "timeout": "the payload ran out of time",
    }.get(reason, "the runtime failed")
    return f"{said}: {message}" if message else said


def exit_in_words(code: int) -> str:
    """An exit code as `subprocess` gives it (negative: the signal), or a shell's 128 + signal."""
    if code < 0 or code > 128:
        return signal_name(-code if code < 0 else code - 128)
    return f"exit code {code}"


def signal_name(number: int) -> str:
    """ "signal 9 (SIGKILL)"."""
    name = processes.signal_name(number)
    return f"signal {number} ({name})" if name.startswith("SIG") else name


def _hint(number: int) -> str:
    if number == signal.SIGKILL:
        return "; the kernel does that when memory runs out (see `dmesg`), else somebody ended it"
    if number == signal.SIGSEGV:
        return "; a native library crashed"
    return ""


def _exit_hint(code: int) -> str:
    if code > 128:
        return f"; a shell reports {signal_name(code - 128)} of its command that way"
    return ""


def _first_line(text: object) -> str:
    return next(iter(str(text or "").strip().splitlines()), "")
