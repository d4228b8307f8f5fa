"""The verdict on a payload from its evidence: success, or a kind of failure with a sentence for the user. No side effects.

The evidence is all that Dagster's side knows about one payload, mostly from its run record. The `end` record, or `end`, is the
last record there, and tells how the payload ended.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import FailureKind, UnhealthyNode, without_colours
from ..errors import Verdict as Verdict  # Other modules import it from here.
from ..follow import Evidence
from ..runtime.process import processes
from ..runtime.protocol.messages import EndReason
from ..slurm.accounting import explain_job_end, relevant_lines

# Kind of failure and sentence for each reason of an `end` record except EXIT.
_ENDS: dict[str, tuple[FailureKind, str]] = {
    EndReason.ALLOCATION: (FailureKind.ALLOCATION, "the allocation is not what was asked for"),
    EndReason.CANCEL: (FailureKind.CANCELLED, "the run was cancelled"),
    EndReason.CLUSTER_LOST: (FailureKind.CLUSTER_LOST, "the Ray cluster was lost while the payload ran"),
    EndReason.CLUSTER_START: (FailureKind.CLUSTER_START, "the Ray cluster did not start"),
    EndReason.ENVIRONMENT: (FailureKind.ENVIRONMENT, "the environment cannot run the payload"),
    EndReason.INFEASIBLE: (FailureKind.CONFIGURATION, "the payload waits for what its Ray cluster can never grant"),
    EndReason.OTHER_COMPONENT: (FailureKind.CANCELLED, "the payload was ended because of another component"),
    EndReason.RECORD: (FailureKind.RECORD, "the record of the run cannot be kept, so the payload was ended"),
    EndReason.RETURNED: (FailureKind.ALLOCATION, "the session ended before it was the payload's turn, which was never started"),
    EndReason.RUNTIME: (FailureKind.RUNTIME, "the runtime failed"),
    EndReason.SPAWN: (FailureKind.PAYLOAD, "the payload did not start"),
    EndReason.TERMINATED: (FailureKind.CANCELLED, "the run was ended from outside"),
    EndReason.TIMEOUT: (FailureKind.ALLOCATION, "the payload ran out of time"),
}

# Whether another attempt may succeed, for those reasons whose answer differs from the default of their kind of failure.
_RETRY: dict[str, bool] = {EndReason.RETURNED: True, EndReason.TIMEOUT: False}

_SIGNAL_HINTS = {
    signal.SIGKILL: "; the kernel does that when memory runs out (see `dmesg`), else somebody ended it",
    signal.SIGSEGV: "; a native library crashed",
}
_NO_DETAIL = "<no detail available>"  # Python's text for an exception that it cannot print, such as a SyntaxError through Ray.
_NEAR = 20  # Lines of standard error within which the cause of the end is looked for; an earlier traceback is too old.
# Lines of output that do not explain an end: routine log lines, and lines that Ray prints for other processes.
_ROUTINE = re.compile(r"\b(DEBUG|INFO)\b|^\((autoscaler|raylet|[^()]*pid=\d)")


SUCCESS = Verdict(None, "the payload succeeded")


@dataclass(frozen=True)
class Judged:
    """The verdict on one payload, and the evidence from which the verdict was made."""

    verdict: Verdict
    evidence: Evidence


def needs_job_facts(evidence: Evidence) -> bool:
    """Returns whether Slurm's accounting may explain the end of a payload better than the payload's record does.

    Slurm may know more in three cases: the record has no `end`, and the evidence does not tell why; SIGKILL or a signal to the
    runtime ended the payload; or a Ray cluster was lost, and the job has several components.
    """
    end = evidence.end
    if end is None:
        return not evidence.interrupted and evidence.ended_unrecorded is None
    if end["reason"] == EndReason.CLUSTER_LOST:
        # Slurm may have ended the nodes of one component, which the node with the head of the Ray cluster cannot see.
        allocation = (end.get("context") or {}).get("allocation") or {}
        return len(allocation.get("components") or ()) > 1
    # SIGKILL, which enforces memory limits, may have ended the payload, or the command of a payload that is a shell.
    killed = end["reason"] == EndReason.EXIT and (end["signal"] == signal.SIGKILL or end["exit_code"] == 128 + signal.SIGKILL)
    return bool(killed or end["reason"] == EndReason.TERMINATED)


def judge(evidence: Evidence, uses_pipes: bool, require_messages: bool) -> Verdict:
    """Returns the verdict on a payload from its evidence: success, or the kind of failure and a sentence.

    Success needs an `end` with exit code 0, a record without damaged lines, no exception reported through Pipes, and no message
    that Dagster refused. `uses_pipes` tells whether the payload uses Dagster Pipes. If both `uses_pipes` and `require_messages`
    are True, a payload that did not open and close Pipes has failed.
    """
    end = evidence.end
    if needs_job_facts(evidence) and (by_slurm := judge_job(evidence)) is not None:
        return by_slurm
    if end is None:
        return _without_end(evidence)
    if end["reason"] != EndReason.EXIT:
        return _for_reason(end["reason"], end.get("message"))
    if end["signal"] is not None:
        name, hint = signal_name(end["signal"]), _SIGNAL_HINTS.get(end["signal"], "")
        return Verdict(FailureKind.PAYLOAD, f"the payload was killed by {name}{hint}")
    if evidence.exception is not None:
        return Verdict(FailureKind.PAYLOAD, f"the payload raised {_exception(evidence.exception, evidence)}")
    if end["exit_code"] != 0:
        return Verdict(FailureKind.PAYLOAD, _exit_sentence(end["exit_code"], evidence))
    return _judge_messages(evidence, uses_pipes and require_messages)


def unhealthy_nodes(rows: Sequence[Mapping[str, str]]) -> tuple[UnhealthyNode, ...]:
    """Returns the nodes that failed a health check.

    `rows` has the node, check and finding of each failure, from a run record or from a session's announcement (`session.json`).
    """
    return tuple(UnhealthyNode(each["node"], each["check"], each["found"]) for each in rows)


def judge_job(evidence: Evidence) -> Verdict | None:
    """Returns the verdict that follows from Slurm's accounting of the job; None if Slurm does not explain the end."""
    job, end = evidence.job, evidence.end
    if job is None:
        return None
    silent = not evidence.started and not evidence.runtime_log.strip()
    # If srun ended the first node because another node failed, only the other node's log explains it.
    log = "\n".join([evidence.runtime_log, *evidence.tails.values()])
    found = explain_job_end(job, log, terminated=end is not None and end["reason"] == EndReason.TERMINATED, silent=silent)
    if found is None or (end is not None and end["reason"] == EndReason.EXIT and not job.out_of_memory):
        return None  # Slurm explains nothing, or somebody killed the payload alone, and the job went on.
    if found.kind == FailureKind.RUNTIME and evidence.culprit is not None:
        return Verdict(FailureKind.RUNTIME, f"{evidence.culprit}, and Slurm ended those of all nodes")
    if evidence.queued and end is None and found.kind != FailureKind.CANCELLED:
        # A payload that waited in a session did not cause the session's end.
        return replace(_for_reason(EndReason.RETURNED, found.sentence), kind=found.kind)
    return found


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


def _for_reason(reason: str, message: str | None) -> Verdict:
    kind, sentence = _ENDS.get(reason, _ENDS[EndReason.RUNTIME])
    return Verdict(kind, f"{sentence}: {message}" if message else sentence, _RETRY.get(reason))


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


def _exception(exception: Mapping[str, Any], evidence: Evidence) -> str:
    """Returns a clause about `exception`, the exception that the payload reported through Pipes."""
    found = read_traceback(traceback_of(exception))
    if not found or _NO_DETAIL in found[-1].text:
        found = read_traceback(evidence.last_errors()) or found
    if not found:
        first_line = next(iter(str(exception.get("message") or "").strip().splitlines()), "")
        return without_colours(first_line) or str(exception.get("name"))
    return exception_in_words(found, _nodes(evidence))


def _exit_sentence(code: int, evidence: Evidence) -> str:
    """Returns a sentence about the payload's exit code, with the exception or last line of standard error that may tell why."""
    errors = evidence.last_errors()
    found = read_traceback(errors)
    raised = exception_in_words(found, _nodes(evidence)) if found else ""
    if raised and code == 1 and not found[-1].more:
        return f"the payload raised {raised}"
    sentence = f"the payload ended with exit code {code}"
    if code > 128:
        sentence += f"; a shell reports {signal_name(code - 128)} of its command that way"
    if raised and found[-1].more < _NEAR:
        return f"{sentence}, after {raised}"
    lines = [line.rpartition("\r")[2].strip() for line in without_colours(errors).rstrip().split("\n")[-_NEAR:]]
    relevant = [line for line in lines if line and not _ROUTINE.search(line)]
    return f"{sentence}; its standard error ends with: {shortened(relevant[-1])}" if relevant else sentence


def _nodes(evidence: Evidence) -> dict[str, str]:
    nodes = ((evidence.end or {}).get("context") or {}).get("nodes") or []
    return {node["address"]: node["hostname"] for node in nodes}


def exit_in_words(code: int) -> str:
    """Returns an exit code in words; a negative code (from `subprocess`) or 128 + n (from a shell) means a signal."""
    if code < 0 or code > 128:
        return signal_name(-code if code < 0 else code - 128)
    return f"exit code {code}"


def signal_name(number: int) -> str:
    """Returns the number and name of a signal, such as "signal 9 (SIGKILL)"."""
    name = processes.signal_name(number)
    return f"signal {number} ({name})" if name.startswith("SIG") else name


def with_hint(verdict: Verdict, evidence: Evidence) -> Verdict:
    """Returns `verdict`, or a copy with a hint for the user if the sentence names an exception that is common in payloads."""
    context: Mapping[str, Any] = (evidence.end or {}).get("context") or {}
    for pattern, hint in _HINTS.items() if verdict.kind == FailureKind.PAYLOAD else ():
        if re.search(pattern, verdict.sentence):
            text = hint if isinstance(hint, str) else hint(context)
            return replace(verdict, sentence=f"{verdict.sentence}; {text}") if text else verdict
    return verdict


def _missing_module(context: Mapping[str, Any]) -> str:
    environment = context.get("python") or "the payload's Python"
    install = f"install it in the environment of {environment}"
    if re.search(r"/prefixes/[0-9a-f]{32}/", environment):  # dagster-rayslurm has made this environment.
        install = "add it to the project or the requirements from which the environment is made (`uv add`, `pixi add`)"
    return f"{install}, or name the directory that has it in the launcher's working_dir"


def _old_python(context: Mapping[str, Any]) -> str:
    def major_minor(version: str) -> list[int]:
        return [int(number) for number in version.split(".")[:2]]

    theirs, ours = str(context.get("python_version") or ""), sys.version.split()[0]
    if not theirs or major_minor(theirs) >= major_minor(ours):
        return ""
    return f"the payload's Python is {theirs}, that of Dagster {ours}: write for the older one, or choose another environment"


# Hints by a pattern that is searched for in the verdict's sentence: a text, or a function of the context that returns a text.
_HINTS: Mapping[str, str | Callable[[Mapping[str, Any]], str]] = {
    r"No module named ": _missing_module,
    # A name without dot and slash may be a program.
    r"FileNotFoundError: .*No such file or directory: '(?=[^']*[./])[^/']": (
        "a payload has a working directory of its own: name it in extra_files=, or its directory in the launcher's working_dir"
    ),
    r"can't open file '.*': \[Errno 2\]": (
        "a script is sent if it is the first word (payload_path='train.py --epochs 3') or in the launcher's working_dir"
    ),
    r"PermissionError: \[Errno 13\] Permission denied: '(?!\./)([^/'][^']*[./]|/.*/bundles/[0-9a-f]{32}/)": (
        "directories of working_dir are read-only on the cluster: write into a new directory, or below RAYSLURM_DATA_DIR"
    ),
    r"SyntaxError: |TypeError: (unsupported operand type\(s\) for \||'(type|ABCMeta)' object is not subscriptable)": _old_python,
    r"Object of type ((u?int|float|complex)\d+|bool_?|ndarray|Tensor) is not JSON": (
        "convert it with .item() or float(), an array with .tolist()"
    ),
    r"When connecting to an existing cluster, num_cpus and num_gpus": (
        "the cluster runs already: call ray.init() without them, and set num_cpus_per_node and num_gpus_per_node of RayLauncher"
    ),
    r"report_asset_check`? without passing an asset key": "pass asset_key=",
}


# ---- The exception in the text of a traceback: of Python 3.8 to 3.14, or of Ray's exceptions (Ray 2.60), in which the exceptions
# of nested tasks follow each other, the innermost last

_HEADER = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(?P<path>.+)", line (?P<line>\d+)(?:, in (?P<function>.+))?')
_TASK = re.compile(r"ray::(?P<task>\S+)\(\) \(pid=\d+, ip=(?P<address>[^,) ]+)")
_EXCEPTION = re.compile(r"[^\W\d][\w.<>]*(\([\w.<>]+\))?(:.*)?")
_ACTOR = re.compile(r"\t(class_name|ip): (.+)")
# Prefix of a line that Ray prints for another process.
_RAY_LOG = re.compile(r"\((autoscaler|raylet|([^()]+ )?pid=\d+)[^()]*\) ")
_CAUSE = "The above exception was the direct cause of the following exception:"
# Python's lines between two tracebacks, and the value of `Raised.link` for each.
_LINKS = {_CAUSE: "cause", "During handling of the above exception, another exception occurred:": "context"}
# Beginnings of the line before a traceback whose exception does not end the process.
_HARMLESS = ("Exception ignored ", "Exception in thread", "Error in atexit")
# Paths of code that is not the user's own: the standard library, and installed packages.
_LIBRARY = re.compile(r"^<|^python/ray/|/(site|dist)-packages/|/lib/python3\.\d+/")
# Paths of code that only calls other code; passed over if all frames are in libraries.
_PLUMBING = re.compile(r"^<frozen |^python/ray/|/(ray|dagster_pipes)/|/importlib/")
_LONGEST = 400  # Most characters of an exception in a sentence.


@dataclass
class Raised:
    """One exception, as read from the text of a traceback."""

    link: str = ""  # How the previous exception led to this one: "cause", "context", or "" if there is no link.
    harmless: bool = False  # Whether the process survived the exception.
    task: str = ""  # The Ray task that raised the exception; "" for the payload's own process.
    address: str = ""  # The IP address of the task's node.
    frames: list[tuple[str, int, str]] = field(default_factory=list)  # Path, line and function, the innermost frame last.
    text: str = ""  # The exception's name and the first line of its message.
    more: int = 0  # Number of lines of the message after the first line.

    def in_words(self, nodes: Mapping[str, str]) -> str:
        """Returns the exception with file, line, function and node, as far as known; `nodes` has hostnames by IP address."""
        where = []
        if self.frames:
            # The innermost frame of the user's code, recognised by its path; else the innermost frame.
            own = [[frame for frame in self.frames if not foreign.search(frame[0])] for foreign in (_LIBRARY, _PLUMBING)]
            path, line, function = (own[0] or own[1] or self.frames)[-1]
            where.append(f"{path.rpartition('/')[2]}:{line}")
            if function not in ("", "<module>"):
                where.append(f"in {function}")
        elif self.task:
            where.append(f"in {self.task}")
        if self.address:
            where.append(f"on {nodes.get(self.address, self.address)}")
        text = shortened(self.text)
        return f"{text} ({', '.join(where)})" if where else text


def shortened(text: str) -> str:
    """Returns the text, cut to `_LONGEST` characters to fit into a sentence."""
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def exception_in_words(found: list[Raised], nodes: Mapping[str, str]) -> str:
    """Returns a clause about the last exception in `found`.

    If this exception has a cause, ", caused by" and the original cause follow. `found` is a result of `read_traceback`, with at
    least one exception. `nodes` has the hostnames of nodes by IP address.
    """
    last = cause = len(found) - 1
    while cause > 0 and found[cause].link == "cause":
        cause -= 1
    sentence = found[last].in_words(nodes)
    return sentence if cause == last else f"{sentence}, caused by {found[cause].in_words(nodes)}"


def traceback_of(exception: Mapping[str, Any]) -> str:
    """Returns the traceback of an exception that Dagster Pipes reported, as Python prints it."""
    cause = exception.get("cause")
    before = f"{traceback_of(cause)}\n{_CAUSE}\n\n" if isinstance(cause, Mapping) else ""
    stack = exception.get("stack")
    frames = "".join(map(str, stack)) if isinstance(stack, list) else ""
    return f"{before}{_HEADER}\n{frames}{exception.get('message') or ''}"


def read_traceback(text: str) -> list[Raised]:
    """Returns the exceptions in the tracebacks of a text, in order, without exceptions that the process survived."""
    found: list[Raised] = []
    link, harmless = "", False
    for line in without_colours(text).splitlines():
        if not line.strip() or _RAY_LOG.match(line):
            continue
        line = line.removeprefix("  | ").rstrip()
        current = found[-1] if found else None
        is_open = current is not None and not current.text
        task, frame = _TASK.search(line), _FRAME.fullmatch(line)
        if task and is_open:
            # The process or task of the open traceback only waited for the failed task.
            found[-1] = current = Raised(found[-1].link, found[-1].harmless)
        elif task or _HEADER in line or (frame and not is_open):
            current = Raised(link, harmless or bool(link and found and found[-1].harmless))
            found.append(current)
            link, harmless = "", False
        if line in _LINKS:
            link = _LINKS[line]
        elif line.startswith(_HARMLESS):
            harmless = True
        elif current is not None and task:
            current.task, current.address = task["task"], task["address"]
        elif current is not None and frame:
            current.frames.append((frame["path"], int(frame["line"]), frame["function"] or ""))
        elif current is not None:
            _take_text(current, line)
    return [each for each in found if each.text and not each.harmless]


def _take_text(current: Raised, line: str) -> None:
    """Add what `line` tells to the exception `current`: its name, a line of its message, or its Ray actor.

    `line` is a line after the frames of a traceback.
    """
    actor = _ACTOR.match(line)
    if actor and current.text:
        current.text = f"{current.text.rstrip('.')}, {actor[1]} {actor[2]}"
    elif line[0].isspace() or _HEADER in line:
        return
    elif not current.text:
        if _EXCEPTION.fullmatch(line):
            current.text = line
    else:
        current.more += 1
        if current.text.endswith(":"):
            current.text = f"{current.text} {line}"
