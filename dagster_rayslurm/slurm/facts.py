"""What Slurm itself says of one job, from `scontrol show job` and `sacct`. Pure; of Slurm 22.05 and 24.11.

scontrol knows a job until MinJobAge after its end (300 s unless the site says otherwise) and needs no accounting; sacct
knows it for good, its steps, and what they used.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..runtime.protocol.slurm_text import expand_nodelist, parse_duration
from .snapshot import parse_count
from .states import TERMINAL

SACCT_FIELDS = (
    "JobID",
    "State",
    "ExitCode",
    "Reason",
    "ElapsedRaw",
    "TimelimitRaw",
    "NNodes",
    "NodeList",
    "ReqMem",
    "MaxRSS",
)
"""What `sacct --format` is asked for; none of it is text that a user may choose, so "|" separates it well enough."""

_OUT_OF_MEMORY_SIGNAL = 125
"""What Slurm reports as the signal of a job in the state OUT_OF_MEMORY (SIG_OOM in slurm.h)."""
_KILLED = 9
_ENDS = {
    "DeadLine": "DEADLINE",
    "NodeDown": "NODE_FAIL",
    "NonZeroExitCode": "FAILED",
    "OutOfMemory": "OUT_OF_MEMORY",
    "RaisedSignal": "FAILED",
    "TimeLimit": "TIMEOUT",
}
"""States of jobs by the reason that slurmctld gives along with them (job_reason_string in slurm_protocol_defs.c)."""
_WORST = ("COMPLETED", "FAILED", "", "CANCELLED", "DEADLINE", "TIMEOUT", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL", "NODE_FAIL")
"""Final states by how much they explain, the least first; "" for one that is not known yet."""
_JOB_ID = re.compile(r"(?P<number>[0-9]+)(?:\+(?P<component>[0-9]+))?(?:\.(?P<step>.+))?")
_MEMORY_KILL = re.compile(r"exceeded memory limit|oom[-_]kill event|Out Of Memory", re.IGNORECASE)


@dataclass(frozen=True)
class StepFacts:
    """A step of a job, as accounting knows it.

    Attributes:
        name: "batch", "extern" or a number; with the component before it, "+1.0", where that is not the first.
        state: Slurm's word; steps have their own.
        cancelled_by: user id of whoever cancelled it; 0 also stands for Slurm itself.
        exit_code: as `JobFacts.exit_code`.
        signal: what ended it; None if none did.
        max_rss: largest memory of one of its tasks, in bytes; None if it was not sampled.
    """

    name: str
    state: str
    cancelled_by: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    max_rss: int | None = None


@dataclass(frozen=True)
class JobFacts:
    """A job, as far as Slurm knows it. Durations are seconds, sizes bytes.

    Attributes:
        job_id: its number; of the first component of a heterogeneous job.
        state: Slurm's word, such as "TIMEOUT", without the "by 1001" of sacct.
        cancelled_by: user id of whoever cancelled it; only accounting knows.
        canceller: a user id and its name, for whoever cancelled it or one of its components; None if that is not known.
        reason: such as "TimeLimit"; "" for none.
        exit_code: the batch script's; sacct alone shows one above 128 less 128.
        signal: what ended it; None if none did.
        elapsed: how long it ran.
        time_limit: None if there is none.
        nodes: names of its nodes; of all components.
        num_nodes: number of nodes that it had or asked for.
        memory: memory that it was granted on all nodes.
        restarts: how often it was requeued.
        max_rss: largest memory of one task; None if it was not sampled.
        steps: of the last attempt; empty without accounting.
        components: of a heterogeneous job, in its order; empty for any other job. State, reason, exit code and signal of such
            a job are those of `telling`.
        component_id: what its user calls it, if it is such a component; Slurm has no names for them.
    """

    job_id: int
    state: str
    cancelled_by: int | None = None
    canceller: tuple[int, str] | None = None
    reason: str = ""
    exit_code: int | None = None
    signal: int | None = None
    elapsed: float | None = None
    time_limit: float | None = None
    nodes: tuple[str, ...] = ()
    num_nodes: int = 0
    memory: int | None = None
    restarts: int = 0
    max_rss: int | None = None
    steps: tuple[StepFacts, ...] = ()
    components: tuple[JobFacts, ...] = ()
    component_id: str | None = None

    @property
    def telling(self) -> int:
        """The component whose end explains that of all, counted from 0; 0 for a job without.

        One that is cancelled or killed takes the others along, and those, where the batch script may run, then just fail.
        """
        return max(range(len(self.components)), key=lambda index: self.components[index]._tells, default=0)

    def naming(self, component_ids: Sequence[str | None]) -> JobFacts:
        """The job with the names of its components."""
        if len(self.components) != len(component_ids):
            return self
        pairs = zip(self.components, component_ids, strict=True)
        return dataclasses.replace(self, components=tuple(dataclasses.replace(each, component_id=name) for each, name in pairs))

    @property
    def _tells(self) -> int:
        """How much it explains."""
        if self.out_of_memory:
            return len(_WORST)
        final = self.final_state
        return _WORST.index(final) if final in _WORST else _WORST.index("")

    @property
    def final_state(self) -> str | None:
        """The terminal state that it has come to, or comes to, as far as Slurm knows; None if it may still become anything.

        While an epilog runs slurmctld shows COMPLETING in the place of that state, and tells by the reason alone.
        """
        if self.state in TERMINAL:
            return self.state
        return _ENDS.get(self.reason.partition(":")[0]) if self.state == "COMPLETING" else None

    @property
    def settled(self) -> bool:
        """Whether it has come to its final state with all of its components: the last one may explain why the others ended."""
        return all(each.final_state is not None for each in self.components or (self,))

    @property
    def out_of_memory(self) -> bool:
        """Whether a memory limit ended it, as far as that can be seen here.

        Without accounting only a cgroup's kill shows; `memory_kill` finds the others in the job's output.
        """
        if self.components:
            return any(each.out_of_memory for each in self.components)
        words = (self.state, *(step.state for step in self.steps))
        if any(word.startswith("OUT_OF_ME") for word in words) or self.reason == "OutOfMemory":
            return True
        return self.signal == _OUT_OF_MEMORY_SIGNAL or any(map(self._over_limit, self.steps))

    def _over_limit(self, step: StepFacts) -> bool:
        """Whether slurmd found the step above its limit (JobAcctGatherParams=OverMemoryKill) and killed it as root.

        An administrator's `scancel` of a step looks the same, but for the memory.
        """
        by_slurm = step.cancelled_by == 0 and step.signal == _KILLED
        return by_slurm and (step.max_rss or 0) >= (self.memory or 0) / max(1, self.num_nodes) > 0


def memory_kill(output: str) -> str | None:
    """The line in a job's output in which slurmstepd tells that a memory limit ended it; None if there is none."""
    lines = (line.strip() for line in output.splitlines())
    return next((line for line in lines if "slurmstepd" in line and _MEMORY_KILL.search(line)), None)


def parse_scontrol(text: str) -> JobFacts | None:
    """The job of `scontrol show job ID`, not in one line; None if there is none in it."""
    found = [_scontrol_fields(block) for block in re.split(r"(?m)^(?=JobId=)", text) if block.startswith("JobId=")]
    components = [_of_controller(fields) for fields in found if "JobState" in fields]
    return _whole(components) if components else None


def _of_controller(fields: Mapping[str, str]) -> JobFacts:
    """A job, or one component of it."""
    state, _ = state_word(fields["JobState"])
    exit_code, signal = _exit(state, fields.get("ExitCode", ""))
    return JobFacts(
        job_id=int(fields["JobId"]),
        state=state,
        reason=_reason(fields.get("Reason", "")),
        exit_code=exit_code,
        signal=signal,
        elapsed=parse_duration(fields.get("RunTime", "")),
        time_limit=parse_duration(fields.get("TimeLimit", "")),
        nodes=tuple(_nodes(fields.get("NodeList", ""))),
        num_nodes=parse_count(fields.get("NumNodes", "")),
        memory=parse_size(_tres(fields).get("mem", "")),
        restarts=parse_count(fields.get("Restarts", "")),
    )


def _scontrol_fields(block: str) -> dict[str, str]:
    """The fields of one component; text that a user may choose (job name, command, comment) is left out."""
    fields: dict[str, str] = {}
    in_name = False
    for line in block.splitlines():
        if line.startswith("   Command="):
            break
        in_name = in_name and not line.startswith(("   UserId=", "   HetJobIdSet="))
        for word in () if in_name else line.split():
            key, _, value = word.partition("=")
            if key == "JobName":
                in_name = True
                break
            fields[key] = value
    return fields


def _tres(fields: Mapping[str, str]) -> dict[str, str]:
    """What is granted, by name: `TRES` until 23.02, `AllocTRES` since."""
    granted = fields.get("AllocTRES") or fields.get("TRES") or ""
    return dict(each.split("=", 1) for each in granted.split(",") if "=" in each)


def parse_sacct(text: str, job_id: int) -> JobFacts | None:
    """The last attempt of a job in the output of sacct.

    Args:
        text: of `sacct --duplicates --noheader --parsable2 --format=` with `SACCT_FIELDS`.
        job_id: the job; of the first component of a heterogeneous one.

    Returns:
        None if sacct does not know it.
    """
    attempts: dict[int, list[list[dict[str, str]]]] = {}
    for line in text.splitlines():
        fields = dict(zip(SACCT_FIELDS, line.split("|"), strict=False))
        match = _JOB_ID.fullmatch(fields["JobID"])
        if len(fields) < len(SACCT_FIELDS) or not match or int(match["number"]) != job_id:
            continue
        of_component = attempts.setdefault(int(match["component"] or 0), [])
        fields["step"] = match["step"] or ""
        if not fields["step"]:
            of_component.append([fields])  # A requeued job comes again, under the same number.
        elif of_component:
            of_component[-1].append(fields)
    if 0 not in attempts:
        return None
    return _whole([_of_accounting(job_id, number, found) for number, found in sorted(attempts.items())])


def _of_accounting(job_id: int, component: int, attempts: list[list[dict[str, str]]]) -> JobFacts:
    """A job, or one component of it, whose ids go on from that of the first."""
    job, *rows = attempts[-1]
    steps = tuple(_step(component, row) for row in rows)
    state, cancelled_by = state_word(job["State"])
    exit_code, signal = _exit(state, job["ExitCode"])
    return JobFacts(
        job_id=job_id + component,
        state=state,
        cancelled_by=cancelled_by,
        reason=_reason(job["Reason"]),
        exit_code=exit_code,
        signal=signal,
        elapsed=float(parse_count(job["ElapsedRaw"])),
        time_limit=60.0 * parse_count(job["TimelimitRaw"]) or None,
        nodes=tuple(_nodes(job["NodeList"])),
        num_nodes=parse_count(job["NNodes"]),
        memory=parse_size(job["ReqMem"]),
        restarts=len(attempts) - 1,
        max_rss=max((step.max_rss for step in steps if step.max_rss is not None), default=None),
        steps=steps,
    )


def _whole(components: Sequence[JobFacts]) -> JobFacts:
    """A job of its components: what they have in sum, and the state of the one that explains the others'."""
    first = components[0]
    if len(components) == 1:
        return first
    job = dataclasses.replace(first, components=tuple(components))
    told = components[job.telling]
    return dataclasses.replace(
        job,
        state=told.state,
        cancelled_by=told.cancelled_by,
        reason=told.reason,
        exit_code=told.exit_code,
        signal=told.signal,
        nodes=tuple(node for each in components for node in each.nodes),
        num_nodes=sum(each.num_nodes for each in components),
        memory=_sum(each.memory for each in components),
        max_rss=max((each.max_rss for each in components if each.max_rss is not None), default=None),
        steps=tuple(step for each in components for step in each.steps),
    )


def _step(component: int, row: Mapping[str, str]) -> StepFacts:
    name = f"+{component}.{row['step']}" if component else row["step"]
    state, cancelled_by = state_word(row["State"])
    return StepFacts(name, state, cancelled_by, *_exit(state, row["ExitCode"]), parse_size(row["MaxRSS"]))


def merge_facts(controller: JobFacts | None, accounting: JobFacts | None) -> JobFacts | None:
    """Both answers in one: the controller's word counts, accounting tells what the controller never knew.

    Of a job that is COMPLETING, accounting may know already what the controller says only after the epilog.
    """
    if controller is None or accounting is None:
        return controller or accounting
    if controller.components and len(controller.components) == len(accounting.components):
        pairs = zip(controller.components, accounting.components, strict=True)
        return _whole([_merged(*pair) for pair in pairs])
    return _merged(controller, accounting)


def _merged(controller: JobFacts, accounting: JobFacts) -> JobFacts:
    same = accounting.restarts == controller.restarts
    ended = same and controller.state == "COMPLETING" and accounting.state in TERMINAL
    return dataclasses.replace(
        controller,
        state=accounting.state if ended else controller.state,
        reason=controller.reason or accounting.reason if ended else controller.reason,
        # Of a job that is COMPLETING slurmctld names the nodes that have not let go of it, and so none that is lost.
        nodes=accounting.nodes if same and len(accounting.nodes) > len(controller.nodes) else controller.nodes,
        # Of nodes that failed accounting knows no code, and the controller one that is none.
        exit_code=None if ended and accounting.exit_code is None else controller.exit_code,
        signal=None if ended and accounting.exit_code is None else controller.signal,
        cancelled_by=accounting.cancelled_by,
        max_rss=accounting.max_rss,
        steps=accounting.steps if same else (),
    )


def state_word(text: str) -> tuple[str, int | None]:
    """Slurm's word for a state without what sacct adds ("CANCELLED by 1001", "CANCELLED+"), and who cancelled it."""
    match = re.fullmatch(r"(\S*?)\+?(?: by ([0-9]+))?", text.strip())
    return (match[1], int(match[2]) if match[2] else None) if match else (text.strip(), None)


def parse_size(text: str) -> int | None:
    """Bytes of "309816K", "2G" or "1.50G"; None if it is no size."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMGTPE]?)", text)
    return int(float(match[1]) * 1024 ** " KMGTPE".index(match[2] or " ")) if match else None


def _exit(state: str, text: str) -> tuple[int | None, int | None]:
    """Exit code and signal of "3:0"; for a node that failed Slurm puts there what nothing ended with."""
    match = None if state == "NODE_FAIL" else re.fullmatch(r"([0-9]+):([0-9]+)", text)
    return (int(match[1]), int(match[2]) or None) if match else (None, None)


def _reason(text: str) -> str:
    return "" if text in ("None", "(null)") else text


def _nodes(text: str) -> list[str]:
    try:
        return expand_nodelist(text)
    except ValueError:
        return [text]


def _sum(amounts: Iterable[int | None]) -> int | None:
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if known else None
