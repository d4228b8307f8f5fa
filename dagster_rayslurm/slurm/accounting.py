"""Reads what Slurm knows about a job, and derives from these facts why a run failed (tried on Slurm 22.05 and 24.11).

There are two sources. scontrol queries Slurm's controller, slurmctld, which forgets a job MinJobAge after the job's end (300 s by
default). sacct queries Slurm's accounting, a database that keeps the job and the memory use of its steps, but that some clusters
lack. In addition, the job's log says which tasks failed.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import FailureKind, Verdict
from ..runtime.node.allocation import expand_nodelist, parse_duration
from ..ssh.base import Connection
from .arrays import by_element
from .shared_queue import QueueRow, parse_count, run_slurm, unanswered
from .states import BY_SEVERITY, LOST_NODES, TERMINAL

_TIMEOUT = 120.0  # Seconds for one call of scontrol, sacct or id.
# Messages of scontrol and of sacct (Slurm 22.05 and 24.11).
_UNKNOWN_JOB = b"Invalid job id specified"
_ACCOUNTING_DISABLED = b"accounting storage is disabled"

_SACCT_FORMAT = "JobID,State,ExitCode,Reason,ElapsedRaw,TimelimitRaw,NNodes,NodeList,ReqMem,MaxRSS"
_SACCT = ("env", "LC_ALL=C", "sacct", "--noheader", "--parsable2", "--duplicates", f"--format={_SACCT_FORMAT}")
# The columns of `sacct --format`. No column has a text that a user chooses, so "|" separates them safely.
SACCT_FIELDS = tuple(_SACCT_FORMAT.split(","))
# The rows of sacct about one run of a job, as dictionaries by column: the row of the job, then the rows of the job's steps.
_Attempt = list[dict[str, str]]
_JOB = re.compile(r"([0-9]+)(?:\+([0-9]+))?")  # A job or component in the column JobID of sacct, such as "12" or "12+1".
# The parts of scontrol's output whose text users choose: job name, command, comment.
_TEXTS_OF_USERS = re.compile(r"(?s) JobName=.*?\n(?=   (?:UserId|HetJobIdSet)=)|\n   Command=.*")

_OUT_OF_MEMORY_SIGNAL = 125  # The signal of a job in the state OUT_OF_MEMORY (SIG_OOM in slurm.h).
# The final state that each reason of slurmctld stands for (job_reason_string in slurm_protocol_defs.c).
_STATE_OF_REASON = {
    "DeadLine": "DEADLINE",
    "NodeDown": "NODE_FAIL",
    "NonZeroExitCode": "FAILED",
    "OutOfMemory": "OUT_OF_MEMORY",
    "RaisedSignal": "FAILED",
    "TimeLimit": "TIMEOUT",
}
# Pending reasons that Slurm still shows for a cancelled job; they do not explain the cancellation.
_REASONS_FOR_WAITING = ("BeginTime", "JobHeldAdmin", "JobHeldUser", "Licenses", "Priority", "Reservation", "Resources")

_MEMORY_KILL = re.compile(r"exceeded memory limit|oom[-_]kill event|Out Of Memory", re.IGNORECASE)
# Messages of slurmstepd, bash and dash if the environment's Python cannot be started.
_NOT_STARTED = re.compile(
    r"^(?:slurmstepd\S*: error: execve\(\)|rayslurm: line \d+(?:: exec)?|rayslurm: \d+: exec): (/.*?)(?:: cannot execute)?"
    r": (No such file .*|not found|Permission denied|Exec format error)$",
    re.MULTILINE,
)
_STEP = re.compile(r"StepId=([0-9]+)")
# Lines of a log in which Slurm comments on its own actions.
_NOISE = re.compile(
    r"srun: (cluster configuration lacks support for cpu binding|launch/slurm: |Job step aborted|forcing job termination"
    r"|got SIGCONT|Terminating |Force Terminated |error: Timed out waiting for job step to complete)"
    # If Slurm itself cancelled the job, the line goes on with the cause, such as "DUE TO TIME LIMIT".
    r"|slurmstepd[^:]*: error: \*\*\* (STEP|JOB) \S+ ON \S+ CANCELLED AT \S+ \*\*\*"
)
_TASKS = re.compile(r"srun: error: (?P<nodes>\S+): tasks? (?P<tasks>[0-9,-]+): (?P<how>.*\S)")


@dataclass(frozen=True)
class JobFacts:
    """What Slurm knows about a job, a component of a heterogeneous job or an element of a job array; None for an unknown fact.

    Durations are in seconds, sizes in bytes.
    """

    job_id: int | str  # The number of a heterogeneous job is that of its first component; "12_7" is an element of an array.
    state: str  # As Slurm writes it, such as "TIMEOUT"; without the "by 1001" of sacct.
    # Id of the user who cancelled the job; only accounting knows. 0 also stands for Slurm itself.
    cancelled_by: int | None = None
    reason: str = ""
    # Exit code of the batch script. sacct shows an exit code above 128 with 128 subtracted.
    exit_code: int | None = None
    signal: int | None = None  # Number of the signal that ended the batch script; None also for no signal.
    elapsed: float | None = None
    time_limit: float | None = None
    nodes: tuple[str, ...] = ()
    num_nodes: int = 0  # Number of nodes that the job had or requested.
    memory: int | None = None  # Memory that was granted, as the sum over all nodes.
    restarts: int = 0  # How often Slurm has requeued the job.
    max_rss: int | None = None  # Largest memory of one task, as Slurm measured it.
    step_out_of_memory: bool = False  # Whether Slurm ended a step because it used too much memory.
    # The components of a heterogeneous job, in order; the job has its own id and all nodes, and otherwise the facts of the
    # component that explains its end.
    components: tuple[JobFacts, ...] = ()
    component_id: str | None = None  # The user's name for this component; Slurm has no names for components.

    def with_component_ids(self, component_ids: Sequence[str | None]) -> JobFacts:
        """Returns a copy of the facts of a heterogeneous job in which each component has its name from the user's configuration.

        `component_ids` has the names in the order of the components; None stands for no name. Returns `self` if the number of
        names differs from the number of components.
        """
        if len(self.components) != len(component_ids):
            return self
        pairs = zip(self.components, component_ids, strict=True)
        return replace(self, components=tuple(replace(each, component_id=name) for each, name in pairs))

    @property
    def final_state(self) -> str | None:
        """The terminal state of the job, such as "TIMEOUT"; None if the state is not known yet.

        A job that is COMPLETING (being cleaned up) has ended, but is not in its terminal state yet. For such a job, the result is
        the terminal state that follows from `reason`; None if no such state follows.
        """
        if self.state in TERMINAL:
            return self.state
        return _STATE_OF_REASON.get(self.reason.partition(":")[0]) if self.state == "COMPLETING" else None

    @property
    def is_final(self) -> bool:
        """Whether the final state of the job is known; for a heterogeneous job, whether all components' final states are known.

        Before all final states are known, it is not clear which component explains the job's end.
        """
        return all(each.final_state is not None for each in self.components or (self,))

    @property
    def out_of_memory(self) -> bool:
        """Whether Slurm's facts show that a memory limit ended the job or one of its steps.

        Slurm may also kill single processes for their memory use, which these facts do not show. `memory_kill` finds such kills
        in the job's log.
        """
        said = self.state.startswith("OUT_OF_ME") or self.reason == "OutOfMemory"
        return said or self.signal == _OUT_OF_MEMORY_SIGNAL or self.step_out_of_memory


def severity(component: JobFacts) -> int:
    """Returns a rank for the end of a component; the component with the highest rank explains the end of its heterogeneous job.

    If one component is cancelled or killed, the other components end too. The component with the batch script may then be only
    FAILED, which is a consequence. So FAILED has a lower rank than CANCELLED, TIMEOUT and the like.
    """
    final = component.final_state if component.final_state in BY_SEVERITY else "UNKNOWN"
    return len(BY_SEVERITY) if component.out_of_memory else BY_SEVERITY.index(final or "UNKNOWN")


def fetch_job_facts(connection: Connection, job_id: int) -> JobFacts | None:
    """Queries slurmctld and the accounting for the facts of a job; returns None if neither of them knows the job.

    If only one of them knows the job, the facts are those of this one, and a failure of the other is ignored. A cluster without
    accounting is no error. Raises SlurmUnanswered if neither knows the job and one of them did not answer. Raises another OSError
    for a failed connection, and if one of them takes longer than `_TIMEOUT` seconds.
    """
    # A job in a hidden partition shows with --all only.
    scontrol = run_slurm(connection, ["env", "LC_ALL=C", "scontrol", "--all", "show", "job", str(job_id)], timeout=_TIMEOUT)
    sacct = run_slurm(connection, [*_SACCT, f"--jobs={job_id}"], timeout=_TIMEOUT)
    controller = None if scontrol.returncode else parse_scontrol(scontrol.stdout.decode("utf-8", "replace"))
    accounting = None if sacct.returncode else parse_sacct(sacct.stdout.decode("utf-8", "replace"), job_id)
    facts = merge_facts(controller, accounting)
    if facts is None and scontrol.returncode and _UNKNOWN_JOB not in scontrol.stderr:
        raise unanswered(connection.place, "scontrol", scontrol)
    # Without accounting, sacct may not be installed.
    if facts is None and sacct.returncode not in (0, 127) and _ACCOUNTING_DISABLED not in sacct.stderr:
        raise unanswered(connection.place, "sacct", sacct)
    return facts


def parse_scontrol(text: str) -> JobFacts | None:
    """Returns the facts of the job in the output of `scontrol show job ID` (without `--oneliner`).

    The result is None if no job is in the output.
    """
    components = []
    for block in re.split(r"(?m)^(?=JobId=)", text):
        shown = dict(re.findall(r"(?:^|\s)([^\s=]+)=(\S*)", _TEXTS_OF_USERS.sub("\n", block)))
        if not block.startswith("JobId=") or "JobState" not in shown:
            continue
        get = collections.defaultdict(str, shown)
        # The granted amount of each resource is in `TRES` until Slurm 23.02, in `AllocTRES` since.
        granted = re.search(r"(?:^|,)mem=([^,]*)", get["AllocTRES"] or get["TRES"])
        facts = _facts(int(get["JobId"]), get["JobState"], get["Reason"], get["ExitCode"], get["NodeList"], get["NumNodes"])
        duration, limit = parse_duration(get["RunTime"]), parse_duration(get["TimeLimit"])
        memory, restarts = parse_size(granted[1]) if granted else None, parse_count(get["Restarts"])
        components.append(replace(facts, elapsed=duration, time_limit=limit, memory=memory, restarts=restarts))
    return combine(components) if components else None


def parse_sacct(text: str, job_id: int) -> JobFacts | None:
    """Returns the facts about the last run of the job `job_id`; None if the job is not in `text`.

    `text` is the output of `sacct --noheader --parsable2 --duplicates` with the columns `SACCT_FIELDS`. If Slurm has requeued
    the job, `text` has rows for each of its runs.
    """
    attempts: dict[int, list[_Attempt]] = {}
    for label, of_label in _attempts_by_label(text).items():
        match = _JOB.fullmatch(label)
        if match and int(match[1]) == job_id:
            attempts.setdefault(int(match[2] or 0), []).extend(of_label)
    if 0 not in attempts:
        return None
    return combine([_from_sacct(job_id + number, rows) for number, rows in sorted(attempts.items())])


def fetch_element_facts(connection: Connection, jobs: Sequence[str]) -> dict[tuple[int, int], JobFacts]:
    """Queries the accounting, in one call, for the facts of elements of job arrays.

    `jobs` are the ids of arrays and elements, such as "12" and "13_7". Returns the facts by array id and element number, without
    elements that the accounting does not know. Returns an empty dict if sacct fails, for instance on a cluster without
    accounting. Raises OSError for a failed connection, and if sacct takes longer than `_TIMEOUT` seconds.
    """
    done = run_slurm(connection, [*_SACCT, f"--jobs={','.join(jobs)}"], timeout=_TIMEOUT)
    return parse_sacct_elements(done.stdout.decode("utf-8", "replace")) if done.returncode == 0 else {}


def parse_sacct_elements(text: str) -> dict[tuple[int, int], JobFacts]:
    """Returns the facts about the last run of each job array element in `text`, by array id and element number.

    `text` is the output of `sacct --noheader --parsable2 --duplicates` with the columns `SACCT_FIELDS`. If Slurm has requeued an
    element, `text` has rows for each of its runs. Jobs in `text` that are no arrays are left out.
    """
    found = by_element(_attempts_by_label(text).items())
    return {(array, number): _from_sacct(f"{array}_{number}", attempts) for (array, number), attempts in found.items()}


def _attempts_by_label(text: str) -> dict[str, list[_Attempt]]:
    """Returns the rows of sacct in `text` by the label of their job, component or element, such as "12+1" or "12_7".

    Each value has one item for each run: the first run, and the run after each requeue.
    """
    attempts: dict[str, list[_Attempt]] = {}
    for line in text.splitlines():
        fields = dict(zip(SACCT_FIELDS, line.split("|"), strict=False))
        label, _, step = fields["JobID"].partition(".")
        if len(fields) < len(SACCT_FIELDS):
            continue
        if not step:
            attempts.setdefault(label, []).append([fields])
        elif label in attempts:
            attempts[label][-1].append(fields)
    return attempts


def _from_sacct(number: int | str, attempts: list[_Attempt]) -> JobFacts:
    """Returns the facts of the last run in `attempts`, the runs of a job, component or element; the facts get the id `number`."""
    job, *steps = attempts[-1]
    facts = _facts(number, job["State"], job["Reason"], job["ExitCode"], job["NodeList"], job["NNodes"])
    return replace(
        facts,
        elapsed=float(parse_count(job["ElapsedRaw"])),
        time_limit=60.0 * parse_count(job["TimelimitRaw"]) or None,
        memory=parse_size(job["ReqMem"]),
        restarts=len(attempts) - 1,
        max_rss=max((size for size in (parse_size(row["MaxRSS"]) for row in steps) if size is not None), default=None),
        step_out_of_memory=any(row["State"].startswith("OUT_OF_ME") for row in steps),
    )


def facts_in_queue(label: str, row: QueueRow) -> JobFacts:
    """Returns the facts in `row`, the squeue row of a job array element; the facts get the id `label`, such as "12_7"."""
    return _facts(label, row.state, row.reason, "", row.nodes, str(row.num_nodes))


def _facts(number: int | str, state: str, reason: str, exit_code: str, nodes: str, num_nodes: str) -> JobFacts:
    """Returns facts from the five texts that scontrol and sacct print in the same form; all other facts are unknown.

    `number` is the id of the job, component or element, and `nodes` a text such as "node[1-3]". After a node failure the facts
    have no exit code, because Slurm then shows a wrong exit code.
    """
    word, cancelled_by = state_word(state)
    ended = None if word == "NODE_FAIL" else re.fullmatch(r"([0-9]+):([0-9]+)", exit_code)
    code, signal = (int(ended[1]), int(ended[2]) or None) if ended else (None, None)
    reason = "" if reason in ("None", "(null)") else reason
    try:
        names = tuple(expand_nodelist(nodes))
    except ValueError:
        names = (nodes,)
    return JobFacts(number, word, cancelled_by, reason, code, signal, nodes=names, num_nodes=parse_count(num_nodes))


def combine(components: Sequence[JobFacts]) -> JobFacts:
    """Returns the facts of a whole job, given the facts of its components; a single item in `components` is returned unchanged.

    The result has the id of the first component and the nodes of all components. The other facts are those of the component that
    explains the job's end (see `severity`).
    """
    if len(components) == 1:
        return components[0]
    nodes = tuple(node for each in components for node in each.nodes)
    return replace(max(components, key=severity), job_id=components[0].job_id, nodes=nodes, components=tuple(components))


def merge_facts(controller: JobFacts | None, accounting: JobFacts | None) -> JobFacts | None:
    """Returns slurmctld's facts of a job, completed by facts that only the accounting knows.

    `controller` has the facts of slurmctld, and `accounting` those of the accounting; None stands for a source that does not know
    the job. The result is then the other argument.
    """
    if controller is None or accounting is None:
        return controller or accounting
    if controller.components and len(controller.components) == len(accounting.components):
        pairs = zip(controller.components, accounting.components, strict=True)
        return combine([_merged(*pair) for pair in pairs])
    return _merged(controller, accounting)


def _merged(controller: JobFacts, accounting: JobFacts) -> JobFacts:
    """Returns `controller`, slurmctld's facts of a job or component, completed by facts of the accounting about the same job.

    If the two disagree on the number of restarts, only `cancelled_by` and `max_rss` come from `accounting`.
    """
    if accounting.restarts != controller.restarts:
        return replace(controller, cancelled_by=accounting.cancelled_by, max_rss=accounting.max_rss)
    merged = replace(
        controller,
        # Of a job that is COMPLETING slurmctld names only the nodes that are not cleaned up yet, and so no lost node.
        nodes=max(controller.nodes, accounting.nodes, key=len),
        cancelled_by=accounting.cancelled_by,
        max_rss=accounting.max_rss,
        step_out_of_memory=accounting.step_out_of_memory,
    )
    if controller.state != "COMPLETING" or accounting.state not in TERMINAL:
        return merged
    merged = replace(merged, state=accounting.state, reason=controller.reason or accounting.reason)
    # If a node failed, accounting has no exit code, and the controller a wrong one.
    return merged if accounting.exit_code is not None else replace(merged, exit_code=None, signal=None)


def state_word(text: str) -> tuple[str, int | None]:
    """Returns the bare state and the user id in a state as sacct prints it, such as "CANCELLED by 1001" or "CANCELLED+".

    The user id is None if the text has no user id.
    """
    match = re.fullmatch(r"(\S*?)\+?(?: by ([0-9]+))?", text.strip())
    return (match[1], int(match[2]) if match[2] else None) if match else (text.strip(), None)


def parse_size(text: str) -> int | None:
    """Returns the bytes in a size that Slurm printed, such as "309816K", "2G" or "1.50G" (K is 1024); None for any other text."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMGTPE]?)", text)
    return int(float(match[1]) * 1024 ** " KMGTPE".index(match[2] or " ")) if match else None


# ---- The log of a job, with lines of srun and slurmstepd


def relevant_lines(log: str) -> list[str]:
    """Returns the lines of a job's log, without empty lines and without lines in which Slurm only reports its own actions."""
    return [line for line in map(str.strip, log.splitlines()) if line and not _NOISE.match(line)]


def failed_tasks(log: str) -> list[tuple[str, int, str]]:
    """Returns the node, the task number and the end of each task that srun reports as failed in the log of a job.

    The end is srun's text, such as "Exited with exit code 3" or "Killed". Once a task has failed, srun ends the other tasks and
    reports their end as "Terminated" or "Killed".
    """
    tasks = []
    for match in filter(None, map(_TASKS.fullmatch, map(str.strip, log.splitlines()))):
        try:
            nodes = expand_nodelist(match["nodes"])
            numbers = [int(each[1:]) for each in expand_nodelist(f"t[{match['tasks']}]")]
        except ValueError:
            continue
        if len(nodes) != len(numbers):  # Several tasks on one node, which jobs of this package never have.
            nodes = [match["nodes"]] * len(numbers)
        tasks += [(node, number, match["how"]) for node, number in zip(nodes, numbers, strict=True)]
    return tasks


def memory_kill(output: str) -> str | None:
    """Returns the first line of a job's output in which slurmstepd reports an out-of-memory kill; None if there is none."""
    lines = (line.strip() for line in output.splitlines())
    return next((line for line in lines if "slurmstepd" in line and _MEMORY_KILL.search(line)), None)


# ---- The verdict


def explain_job_end(job: JobFacts, log: str, terminated: bool, silent: bool) -> Verdict | None:
    """Returns the failure of a run that the facts of its Slurm job explain; None if the facts explain no failure.

    A pure function.

    Args:
        job: the facts of the job.
        log: the output of the batch script, of slurmstepd and of the runtime (this package's program on the nodes).
        terminated: whether a signal from outside ended the runtime, as the runtime itself has recorded.
        silent: whether the job wrote nothing into the run directory.
    """
    killed = memory_kill(log)
    part = _explaining_part(job, killed)
    which = f"Slurm job {job.job_id}"
    if part is not job:
        which = f"component {repr(part.component_id) if part.component_id else part.job_id} of {which}"
    on_nodes = f"{which} on {', '.join(part.nodes[:8])}" if part.nodes else which
    reason = f" ({job.reason})" if job.reason else ""
    state = job.final_state
    if job.out_of_memory or killed:
        granted = f": {_mebibytes(part.memory / max(1, part.num_nodes))} on each node" if part.memory else ""
        measured = f", of which Slurm saw {_mebibytes(part.max_rss)}" if part.max_rss else ""
        sentence = f"OUT_OF_MEMORY: {on_nodes} used more memory than it was granted{granted}"
        sentence += f" ({killed})" if killed else measured
        return Verdict(FailureKind.ALLOCATION, f"{sentence}; ask for more with SlurmQueueConfig.mem or mem_per_cpu", False)
    if state in ("TIMEOUT", "DEADLINE"):
        what = "time limit" if state == "TIMEOUT" else "deadline"
        limit = f" of {_duration(job.time_limit)}" if job.time_limit else ""
        ran = f" after {_duration(job.elapsed)}" if job.elapsed else ""
        sentence = f"{state}: {which} was ended at its {what}{limit}{ran}; raise SlurmQueueConfig.time_limit"
        return Verdict(FailureKind.ALLOCATION, sentence, False)
    if (lost := state or job.state) in LOST_NODES:
        return Verdict(FailureKind.ALLOCATION, f"{lost}: {on_nodes} is lost, {LOST_NODES[lost]}{reason}", True)
    if state == "CANCELLED":
        by = "" if job.cancelled_by is None else f" by user id {job.cancelled_by}"
        why = "" if job.reason in _REASONS_FOR_WAITING else reason
        return Verdict(FailureKind.CANCELLED, f"{which} was cancelled{by}{why}")
    if terminated and state is None:
        code = f", exit code {job.exit_code}" if job.exit_code else ""
        ends = f"{on_nodes} is {job.state}{reason}{code}; `sacct -j {job.job_id}` may tell more by now"
        if job.state == "COMPLETING":  # Jobs that fail by themselves have a reason.
            what = "the job was ended from outside, and Slurm does not say yet by whom"
            return Verdict(FailureKind.CANCELLED, f"{what}: {ends}")
        return Verdict(FailureKind.RUNTIME, f"the runtime got a signal from outside, and Slurm does not say why: {ends}")
    if terminated:
        what = f"the runtime got a signal from outside, though Slurm cancelled nothing: {on_nodes} is {state}"
        why = "the runtime of another node died, or somebody signalled it (see the nodes' logs)"
        return Verdict(FailureKind.RUNTIME, f"{what}; {why}")
    not_started = _NOT_STARTED.search(log)
    if not_started and state == "FAILED":
        what = f"{on_nodes} cannot start {not_started[1]}: {not_started[2]}"
        advice = "name an environment that the compute nodes see at this path, and can run"
        return Verdict(FailureKind.ENVIRONMENT, f"{what}; {advice}")
    if silent and state in ("FAILED", "COMPLETED"):
        what = f"{state}: {on_nodes} ended before it could write into its run directory{reason}"
        advice = "SlurmResource.remote_base must be on a file system that the edge and the compute nodes share"
        return Verdict(FailureKind.ALLOCATION, f"{what}; {advice}", False)
    return None


def _explaining_part(job: JobFacts, killed: str | None) -> JobFacts:
    """Returns the facts of the component that explains the end of `job`, or else `job` itself.

    The result is `job` if it has no components, or if all its components ended alike. `killed` is the line that `memory_kill`
    found, or None. The component that this line names explains the end, however the other components ended.
    """
    if not job.components:
        return job
    step = _STEP.search(killed or "")
    if step:
        return next((each for each in job.components if each.job_id == int(step[1])), job)
    ends = {(each.final_state, each.out_of_memory) for each in job.components}
    return job if len(ends) == 1 else max(job.components, key=severity)


def _mebibytes(amount: float) -> str:
    return f"{amount / 2**20:.0f} MiB"


def _duration(seconds: float) -> str:
    """Returns a duration in seconds as Slurm writes durations: "[D-]HH:MM:SS"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}-" * (days > 0) + f"{hour:02}:{minute:02}:{second:02}"
