"""Makes the request for a Slurm job, and renders the job's batch script; the functions have no side effects.

A request is the queue configuration, completed by what the launcher wants on each node. The script has #SBATCH lines, and one
srun that starts the runtime on all nodes. How sbatch and srun read the script was tried on Slurm 22.05 and 24.11.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import eq
from typing import Any

from ..config import check_environment, check_line, mebibytes, time_limit_seconds
from ..fields import check_text
from ..runtime.node.resources import SHARE_FOR_RAY, Footprint
from ..runtime.protocol.record import CANCEL, COMPONENTS, ELEMENT_LOG, ENDED, EXIT
from .config import AUTO, SlurmQueueConfig, split_signal

# Options that request GPUs, other than --gpus-per-node with its own field.
_GPUS = re.compile(r"--(gpus(-per-(socket|task))?=|(gres|tres-per-task)=(.*[,/])?gpu([:=,]|$))")


class Inheritance(Enum):
    """The value that sbatch gives to a component of a heterogeneous job for a field that only an earlier component sets."""

    NONE = "none"  # Nothing: sbatch forgets the option.
    INHERITED = "inherited"  # The value of the earlier component. No option resets it, so each component must set the field.
    RESETTABLE = "resettable"  # The value of the earlier component, unless the component has the option with an empty value.
    WHOLE_JOB = "whole-job"  # The same value: the components begin and end together.


@dataclass(frozen=True)
class SbatchField:
    """How sbatch and this package treat one field of `SlurmQueueConfig`.

    An object tells the option of sbatch for the field, which value later components of a heterogeneous job inherit, and whether a
    session with one value of the field satisfies a payload that wants another value.
    """

    name: str  # Name of the field.
    # Called with the value that a payload wants and the value that a session (a job that runs many payloads) was granted; returns
    # whether the session satisfies the payload. None if the field does not matter for that.
    granted: Callable[[Any, Any], bool] | None
    option: str | None = None  # The long option in the job script, without "--"; None if the script has none.
    negation: str | None = None  # The option for False.
    aliases: tuple[str, ...] = ()  # Further options that mean the same.
    inheritance: Inheritance = Inheritance.NONE
    meaning: Callable[[Any], Any] = lambda value: value  # Gives equal results for values that mean the same.
    # Whether the environment variable `SBATCH_<OPTION>` of the user on the edge node counts if the field is left out.
    login_variable: bool = False
    place: bool = False  # Whether the field says where a job runs.
    # Names of the fields that a `SlurmQueueConfig` cannot set together with this field; these fields name this field in turn. If
    # a more specific configuration sets this field, the values of the others are dropped.
    excludes: tuple[str, ...] = ()


def requests_gpus(option: str) -> bool:
    """Whether `option`, such as "--gres=gpu:2", requests GPUs; False for "--gpus-per-node", which has a field of its own."""
    return _GPUS.match(option) is not None


def granted_gpus(queue: Mapping[str, Any]) -> int | None:
    """Returns the number of GPUs that a queue asks for on each node; 0 for none.

    `queue` has the fields of a `SlurmQueueConfig`. The result is None if only an option in `extra_sbatch` asks for GPUs, because
    the number is then not known.
    """
    if queue["gpus_per_node"] is None and any(map(requests_gpus, queue["extra_sbatch"])):
        return None
    return queue["gpus_per_node"] or 0


def granted_memory(queue: Mapping[str, Any]) -> float:
    """Returns the memory that a queue asks for on each node, in MiB; 0 if the memory is not known before the job starts.

    `queue` has the fields of a `SlurmQueueConfig`. The memory is not known if Slurm chooses it, for example with "0". The memory
    is also not known if only `mem_per_cpu` is given, and Slurm chooses the number of CPUs: an exclusive node grants all its CPUs.
    """
    if queue["mem"] is not None:
        return mebibytes(queue["mem"])
    cpus = 0 if queue["exclusive"] else queue["cpus_per_node"] or 0
    return mebibytes(queue["mem_per_cpu"] or "0") * cpus


def least_memory(queue: SlurmQueueConfig) -> float:
    """Returns the memory in MiB that a node must have at least for a job with this queue; 0 if the queue requests no memory.

    If Slurm chooses the number of CPUs, the result is the memory for one CPU.
    """
    return granted_memory({**queue.model_dump(), "cpus_per_node": queue.cpus_per_node or 1, "exclusive": False})


# These functions are values of `SbatchField.granted`, where their arguments and results are described.
def _at_most(wanted: int, granted: int | None) -> bool:
    """Returns whether a payload that wants the amount `wanted` fits into a session that was granted the amount `granted`.

    `granted` is None for an amount that only the running session knows; the result is then True.
    """
    return granted is None or wanted <= granted


def _memory(wanted: str, granted: str | None) -> bool:
    # 0 stands for all of a node's memory (sbatch(1), Slurm 22.05).
    return wanted == granted or (granted is not None and 0 < mebibytes(wanted) <= (mebibytes(granted) or float("inf")))


def _time(wanted: str, granted: str) -> bool:
    own, whole = time_limit_seconds(wanted), time_limit_seconds(granted)
    return whole is None or (own is not None and own <= whole)


def _partition(wanted: str | None, granted: str | None) -> bool:
    return wanted in (AUTO, granted)


def _contained(wanted: list[str], granted: list[str]) -> bool:
    return set(wanted) <= set(granted)


# Every field of `SlurmQueueConfig`, in the order in which the job script lists their options.
SBATCH_FIELDS = (
    SbatchField("partition", _partition, "partition", login_variable=True, place=True),
    SbatchField("account", eq, "account", inheritance=Inheritance.INHERITED, login_variable=True, place=True),
    SbatchField("qos", eq, "qos", inheritance=Inheritance.INHERITED, login_variable=True, place=True),
    SbatchField("reservation", eq, "reservation", inheritance=Inheritance.INHERITED, login_variable=True, place=True),
    SbatchField("constraint", eq, "constraint", login_variable=True, place=True),
    SbatchField("num_nodes", _at_most, "nodes"),
    SbatchField("cpus_per_node", _at_most, "cpus-per-task"),
    SbatchField("gpus_per_node", _at_most, "gpus-per-node"),
    SbatchField("gpu_type", eq),  # Part of --gpus-per-node.
    SbatchField("mem", _memory, "mem", inheritance=Inheritance.INHERITED, excludes=("mem_per_cpu",)),
    SbatchField("mem_per_cpu", _memory, "mem-per-cpu", excludes=("mem",)),
    SbatchField("time_limit", _time, "time", inheritance=Inheritance.WHOLE_JOB, meaning=time_limit_seconds),
    SbatchField("exclusive", eq, "exclusive"),
    SbatchField("nodelist", eq, "nodelist", aliases=("nodefile",), place=True),
    SbatchField("exclude", eq, "exclude", inheritance=Inheritance.RESETTABLE, place=True),
    SbatchField("switches", eq, "switches"),
    # The job of a session is never requeued.
    SbatchField("requeue", None, "requeue", "no-requeue", inheritance=Inheritance.WHOLE_JOB, meaning=bool),
    # The runtime sends the signal, not Slurm.
    SbatchField("signal_before_timeout", eq, aliases=("signal",), inheritance=Inheritance.WHOLE_JOB, meaning=split_signal),
    SbatchField("extra_sbatch", _contained),
)

# The field of `SlurmQueueConfig` for each option of sbatch that has one.
FIELD_OF_OPTION = {
    option: field.name for field in SBATCH_FIELDS for option in (field.option, field.negation, *field.aliases) if option
}

_INHERITED = """
acctg-freq begin cluster-constraint deadline delay-boot dependency distribution export export-file get-user-env hint hold
ignore-pbs immediate kill-on-invalid-dep mcs-label nice no-kill oom-kill-step priority profile propagate time-min wckey
"""
# Options without a field that sbatch hands on to later components: those listed by "Heterogeneous Job Support" in Slurm's
# documentation, and `hint`, `kill-on-invalid-dep` and `oom-kill-step`, which were seen in later components.
INHERITED_OPTIONS = tuple(_INHERITED.split())

_RESERVED = {
    "the runtime is the one task of each node; use cpus_per_node for its CPUs": (
        "ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket ntasks-per-tres tasks-per-node"
    ),
    "a SlurmResource is one cluster; use another one for another cluster": "cluster clusters",
    "with it sbatch submits nothing": "help test-only usage version",
    "what the job writes stands in its run directory": "chdir error open-mode output",
    "the job's script and its srun would run elsewhere": "batch container container-id het-group pack-group",
    'run_partitions(allocation="each") makes the job arrays': "array",
    "it names the Dagster run, step and partition": "comment",
    "the job reads nothing": "input",
    "the job is found again by its name": "job-name",
    "it is always on": "parsable",
    "results are followed without it": "wait",
    "the job starts the runtime": "wrap",
}
# Options of sbatch that `SlurmQueueConfig.extra_sbatch` may not contain, each with the reason.
RESERVED_OPTIONS = {option: reason for reason, options in _RESERVED.items() for option in options.split()}


_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
_INVISIBLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_LONG_OPTION = re.compile(r"--([A-Za-z][A-Za-z0-9-]*)(=.*)?")

FROM_TERMINAL = "submit"  # Stands for the id of the Dagster run where `rayslurm submit` started the payload.

_NAME_PREFIX = "rayslurm-"
_MAX_STEP = 40  # Most characters of the step's key in a job name.
_MAX_COMMENT = 500  # Most bytes of a job's comment; slurmctld refuses strings of more than 1024 (tried on 22.05 and 24.11).


@dataclass(frozen=True)
class JobRequest:
    """The options of a Slurm job; for a heterogeneous job, the options of the first component.

    `further_components` has the requests of the other components.
    """

    job_name: str
    comment: str
    # The user's configuration, with the CPUs and GPUs that the launcher wants where the user sets none.
    queue: SlurmQueueConfig = field(default_factory=SlurmQueueConfig)
    component_id: str | None = None  # Name of the component that has these options; None for a job without components.
    further_components: tuple[JobRequest, ...] = ()
    array: str | None = None  # The value of `--array`, such as "0-99%16"; None for a job that is no array.

    @property
    def components(self) -> tuple[JobRequest, ...]:
        """The request of each component, in the job's order; for a job without components, the request itself."""
        return (self, *self.further_components)

    @property
    def partitions_text(self) -> str:
        """The requested partitions in words, each partition once, such as "partition gpu and the default partition"."""
        named = (each.queue.partition for each in self.components)
        return " and ".join(dict.fromkeys(f"partition {name}" if name else "the default partition" for name in named))

    @property
    def login_variables(self) -> list[str]:
        """The names of the user's environment variables that sbatch may see, such as "SBATCH_PARTITION".

        The result has a name for each field with `SbatchField.login_variable` that no component sets.
        """
        names = [each.name for each in SBATCH_FIELDS if each.login_variable]
        return [f"SBATCH_{name.upper()}" for name in names if all(getattr(each.queue, name) is None for each in self.components)]


def make_request(queue: SlurmQueueConfig, footprint: Footprint, *, job_name: str, comment: str) -> JobRequest:
    """Returns the request for a job on the nodes that `queue` describes.

    Args:
        queue: the user's configuration; every `EnvVar` in it must be resolved.
        footprint: the requirements of the launcher's settings for CPUs, GPUs and memory on each node. If the queue does not set
            the number of CPUs or of GPUs, the job requests the largest number in these requirements.
        job_name: the name of the job in Slurm.
        comment: the comment of the job in Slurm.

    Raises:
        ValueError: the queue contradicts itself, sets a reserved option, or grants less than the footprint wants. The message
            names the fields.
    """
    check_queue(queue)
    queue = queue.having(cpus_per_node=_amount(queue.cpus_per_node, "cpus_per_node", "CPUs", footprint))
    _check_memory(queue, footprint)
    gpus = queue.gpus_per_node
    if not any(map(requests_gpus, queue.extra_sbatch)):
        gpus = _amount(gpus, "gpus_per_node", "GPUs", footprint)
    if queue.gpu_type is not None and not gpus:
        raise ValueError(f"SlurmQueueConfig.gpu_type={queue.gpu_type!r} is given, but no GPU is asked for; set gpus_per_node")
    return JobRequest(check_text(job_name), check_text(comment), queue.having(gpus_per_node=gpus or None))


def gibibytes_for_ray(queue: Mapping[str, Any]) -> float | None:
    """Returns the part of `granted_memory(queue)` that Ray may use, in GiB; None if the memory is not known."""
    return granted_memory(queue) * SHARE_FOR_RAY / 1024 or None


def _check_memory(queue: SlurmQueueConfig, footprint: Footprint) -> None:
    usable = gibibytes_for_ray(queue.model_dump())
    for want in footprint:
        if want.unit == "GiB" and want.amount is not None and usable is not None and want.amount > usable:
            per_cpu = f"mem_per_cpu={queue.mem_per_cpu!r} for {queue.cpus_per_node} CPUs"
            field = f"mem={queue.mem!r}" if queue.mem is not None else per_cpu
            raise ValueError(
                f"{want.field}={want.amount:g} is more than SlurmQueueConfig.{field} leaves for Ray: {usable:.3g} GiB of each "
                f"node; raise {field.partition('=')[0]}, or lower {want.field.partition('.')[2]}"
            )


def _amount(granted: int | None, field: str, unit: str, footprint: Footprint) -> int | None:
    """Returns the number of CPUs or GPUs that a job requests on each node; None if no number is wanted.

    The result is `granted` or, if `granted` is None, the largest amount that the footprint has for `unit`. Raises ValueError if
    the footprint has a larger amount than `granted`.

    Args:
        granted: the number that the user's queue sets, or None.
        field: the name of the queue's field with the number `granted`, for the error message.
        unit: "CPUs" or "GPUs"; requirements with another unit are ignored.
        footprint: the requirements of the launcher on each node.
    """
    wants = [want for want in footprint if want.unit == unit and want.amount]
    if granted is None:
        return max((int(want.amount) for want in wants if want.amount), default=None)
    for want in wants:
        if want.amount is not None and want.amount > granted:
            raise ValueError(
                f"{want.field}={want.amount:g} is more than SlurmQueueConfig.{field}={granted} grants; raise {field}, or leave "
                "it out to ask for what the launcher wants"
            )
    return granted


def check_queue(queue: SlurmQueueConfig) -> None:
    """Raises ValueError if fields of a queue contradict each other, or if `extra_sbatch` has an option that is not allowed.

    The error message names the fields.
    """
    for name, other in ((each.name, other) for each in SBATCH_FIELDS for other in each.excludes):
        one, two = getattr(queue, name), getattr(queue, other)
        if one is not None and two is not None:
            raise ValueError(f"SlurmQueueConfig.{name}={one!r} and {other}={two!r} exclude each other; set one of them")
    _, before = split_signal(queue.signal_before_timeout)
    limit = time_limit_seconds(queue.time_limit)
    if before is not None and limit is not None and before >= limit:
        raise ValueError(
            f"SlurmQueueConfig.signal_before_timeout={queue.signal_before_timeout!r} is not within "
            f"time_limit={queue.time_limit!r}, which is {limit:.0f} seconds; lower the one or raise the other"
        )
    for option in queue.extra_sbatch:
        _check_extra_option(queue, option)


def _check_extra_option(queue: SlurmQueueConfig, option: str) -> None:
    """Raises ValueError if `option`, an item of `queue.extra_sbatch`, is refused.

    An option is refused if it is not written as --NAME or --NAME=VALUE, if `SlurmQueueConfig` has a field for it, or if it is in
    `RESERVED_OPTIONS`. An option that requests GPUs is also refused if `queue.gpus_per_node` is set. --exclusive=VALUE, such as
    --exclusive=user, is accepted unless `queue.exclusive` is True.
    """
    match = _LONG_OPTION.fullmatch(option)
    if not match:
        raise ValueError(f"SlurmQueueConfig.extra_sbatch: {option!r} is not written as --NAME or --NAME=VALUE")
    name, value = match.groups()
    if name == "exclusive" and value and not queue.exclusive:
        return  # --exclusive=user and such, which the field cannot express.
    if name in FIELD_OF_OPTION:
        raise ValueError(f"SlurmQueueConfig.extra_sbatch: --{name} has a field of its own; use {FIELD_OF_OPTION[name]}")
    if name in RESERVED_OPTIONS:
        raise ValueError(f"SlurmQueueConfig.extra_sbatch: --{name} cannot be chosen; {RESERVED_OPTIONS[name]}")
    if queue.gpus_per_node is not None and requests_gpus(option):
        raise ValueError(
            f"SlurmQueueConfig.extra_sbatch: {option!r} asks for GPUs, and so does gpus_per_node={queue.gpus_per_node}; "
            "use one of the two"
        )


def job_name(step_key: str, nonce: str) -> str:
    """Returns a name for a Slurm job, with the key of the Dagster step and, at the end, the random text `nonce`.

    No other job's name has this text, so callers can find the job again by its name (see `is_job_of`).
    """
    return f"{_NAME_PREFIX}{_UNSAFE.sub('_', step_key)[:_MAX_STEP]}-{nonce}"


def is_job_of(name: str, nonce: str) -> bool:
    """Whether `name` is a job name that `job_name` made with the random text `nonce`."""
    return name.startswith(_NAME_PREFIX) and name.endswith(f"-{nonce}")


def job_comment(run_id: str, step_key: str, partition_key: str | None) -> str:
    """Returns a comment for a Slurm job, which names the Dagster run, the step and, if there is one, the Dagster partition.

    `partition_key` is None for a step without a partition. The comment is one line of at most 500 bytes.
    """
    words = ["rayslurm submit", step_key] if run_id == FROM_TERMINAL else ["dagster run", run_id, "step", step_key]
    if partition_key is not None:
        words += ["partition", partition_key]
    line = _INVISIBLE.sub("\N{REPLACEMENT CHARACTER}", " ".join(words)).encode()
    if len(line) <= _MAX_COMMENT:
        return line.decode()
    return line[: _MAX_COMMENT - len("…".encode())].decode(errors="ignore") + "…"


# srun does not read the variables with which users set options of sbatch.
_SRUN = 'exec srun {} "$@"'


def srun_command(queue: SlurmQueueConfig, patience: int | None) -> list[str]:
    """Returns the beginning of an srun command, to which the caller appends the command to run.

    srun submits a job of its own, which runs the appended command on one CPU of a node on which jobs with the configuration
    `queue` may run. srun fails if Slurm grants no such CPU within `patience` seconds; if `patience` is None, srun waits without
    limit.
    """
    fields = [each for each in SBATCH_FIELDS if each.place]
    queue = queue.having(partition=None) if queue.partition == AUTO else queue
    own = [f"--{each.option}={getattr(queue, each.name)}" for each in fields if getattr(queue, each.name) is not None]
    names = [each.name for each in fields if each.login_variable and getattr(queue, each.name) is None]
    variables = " ".join(f'${{SBATCH_{name.upper()}:+"--{name}=$SBATCH_{name.upper()}"}}' for name in names)
    options = [
        *own,
        "--nodes=1",
        "--ntasks=1",
        "--cpus-per-task=1",
        f"--job-name={_NAME_PREFIX}environment",
        "--quiet",
        "--mpi=none",
    ]
    options += ["--time=60"] if patience is None else ["--time=2", f"--immediate={patience}"]
    return ["sh", "-c", _SRUN.format(variables), "srun", *options]


# ---- The batch script

LOG = "slurm.log"  # File in the run directory with the output of the batch script and of Slurm.


_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")

_TASK = 'exec "$@" >>"node-$SLURM_NODEID.log" 2>&1'  # Shell command of each task of a heterogeneous job, see `_srun`.
# In Slurm 24.11, srun takes --cpus-per-task from these variables, so that the step of an exclusive job would get too few CPUs.
# Only the tasks get the first variable.
_UNSET = """\
RAYSLURM_CPUS=${SLURM_CPUS_PER_TASK:+,SLURM_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK}
unset SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK"""
# In a heterogeneous job, the batch script's variables for devices, CPUs and tasks hold for the first component only. srun would
# pass these variables to the other components, or use them itself (24.11).
_UNSET_IN_HETJOB = """\
unset CUDA_VISIBLE_DEVICES GPU_DEVICE_ORDINAL ROCR_VISIBLE_DEVICES ZE_AFFINITY_MASK \\
    SLURM_NNODES SLURM_NPROCS SLURM_NTASKS SLURM_TASKS_PER_NODE SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK"""

_END = """\
# scancel sends SIGTERM to srun and to this shell, which must live to write the exit code.
trap : TERM
{srun}
code=$?
echo "$SLURM_JOB_ID ${{SLURM_RESTART_COUNT:-0}} $code" >>{exit}
# Accounting must show CANCELLED for a run that Dagster cancelled. scancel also ends the sleep.
if [ "$code" != 0 ] && cat {cancel} {components}/*/{cancel} 2>/dev/null | grep -q '"op": "cancel"'; then
    scancel --quiet "$SLURM_JOB_ID" && sleep 20
fi
{mark}exit "$code"
"""
# What the script of an element does first, and last: its run directory is below that of the array.
_ELEMENT = 'mkdir -p "$SLURM_ARRAY_TASK_ID" && cd "$SLURM_ARRAY_TASK_ID" || exit'
_ELEMENT_ENDED = f': >"../$SLURM_ARRAY_TASK_ID{ENDED}"\n'


def sbatch_quote(text: str) -> str:
    """Returns a value quoted for an #SBATCH line; raises ValueError if the value contains a control character.

    sbatch takes a backslash as an escape everywhere, also within single quotes, and a `#` outside quotes as the beginning of a
    comment.
    """
    if _PLAIN.fullmatch(check_text(text)):
        return text
    return "'" + text.replace("\\", r"\\").replace("'", r"'\''") + "'"


def escape_pattern(path: str) -> str:
    """Returns a path escaped for sbatch's `--output`, so that sbatch does not replace patterns such as "%j" in the path.

    In a path with a backslash, sbatch replaces no pattern, and drops each backslash that is not doubled (sbatch(1), "filename
    pattern").
    """
    return path.replace("\\", r"\\") if "\\" in path else path.replace("%", "%%")


def render_script(
    request: JobRequest, command: Sequence[str], run_dir: str, site: Mapping[str, str], srun_options: Sequence[str] = ()
) -> str:
    """Returns the text of the batch script of a job.

    The script appends the exit code of srun to the file `exit` in the run directory (see `parse_exit`). Messages of Slurm go to
    `slurm.log` in the run directory, and messages for element 7 of a job array to `7.log`. The output of each node's runtime goes
    to `node-<number>.log`. A requeued job runs the script again and appends to the same files.

    Args:
        request: the options of the job.
        command: the command of the runtime, which srun starts once on each node.
        run_dir: the absolute path of the run directory; for a job array, the directory above the run directories of the elements.
        site: environment variables that the script sets.
        srun_options: further options of srun, such as the options of a plugin.

    Raises:
        ValueError: a value contains a control character, or `site` has an invalid or reserved name.
    """
    job_options = {
        "job-name": request.job_name,
        "comment": request.comment,
        # The path of an element's log is relative: in an absolute one that is escaped, nothing would be replaced.
        "output": escape_pattern(f"{run_dir}/{LOG}") if request.array is None else f"%a{ELEMENT_LOG}",
        "open-mode": "append",
        "chdir": run_dir,
    }
    lines = ["#!/bin/sh", f"# rayslurm: {check_text(request.comment)}"]
    if request.array is not None:
        job_options["array"] = request.array
    lines += [f"#SBATCH --{name}={sbatch_quote(value)}" for name, value in job_options.items()]
    for number, component in enumerate(request.components):
        lines += ["#SBATCH hetjob"] if number else []
        resets = _resets(component, request.components[number - 1]) if number else ()
        lines += [f"#SBATCH {option}" for option in (*resets, *sbatch_options(component))]
    lines += ["", f"cd {shlex.quote(check_text(run_dir))} || exit", *([_ELEMENT] if request.array is not None else [])]
    lines.append(_UNSET if len(request.components) == 1 else _UNSET_IN_HETJOB)
    for name, value in check_environment(site, "SlurmResource.site").items():
        lines.append(f"export {name}={shlex.quote(check_line(value, f'SlurmResource.site[{name!r}]'))}")
    mark = _ELEMENT_ENDED if request.array is not None else ""
    srun = _srun(request, command, srun_options)
    lines.append(_END.format(srun=srun, exit=EXIT, cancel=CANCEL, components=COMPONENTS, mark=mark))
    return "\n".join(lines)


def sbatch_options(request: JobRequest) -> Iterator[str]:
    """Yields the sbatch options of a job, or of one component of a heterogeneous job."""
    yield "--ntasks-per-node=1"
    for each in SBATCH_FIELDS:
        value = getattr(request.queue, each.name)
        if isinstance(value, bool):
            option = each.option if value else each.negation
            if option is not None:
                yield f"--{option}"
        elif each.option is not None and value is not None:
            text = f"{request.queue.gpu_type}:{value}" if each.name == "gpus_per_node" and request.queue.gpu_type else str(value)
            yield f"--{each.option}={sbatch_quote(text)}"
    for option in request.queue.extra_sbatch:
        name, equals, value = option.partition("=")
        yield name + equals + (sbatch_quote(value) if equals else "")


def _resets(request: JobRequest, before: JobRequest) -> Iterator[str]:
    """Yields options of sbatch that keep the component `request` from inheriting values of the preceding component, `before`."""
    for each in SBATCH_FIELDS:
        inherits = getattr(before.queue, each.name) is not None and getattr(request.queue, each.name) is None
        if each.inheritance is Inheritance.RESETTABLE and inherits:
            yield f"--{each.option}="


def _srun(request: JobRequest, command: Sequence[str], more: Sequence[str]) -> str:
    """Returns shell text that runs `command` with srun, as one task on each node; the task numbers follow the order of nodes.

    `more` are further options of srun.
    """
    # Without --cpus-per-task the step gets all of the job's CPUs, see `_UNSET`.
    words, number, nodes = shlex.join(check_text(word) for word in command), len(request.components), request.queue.num_nodes
    # The path of the log is relative, because srun replaces patterns in an absolute path, and no escape works in all versions.
    which, output, export = f"--nodes={nodes} --ntasks={nodes}", " --output=node-%t.log --open-mode=append", 'ALL"$RAYSLURM_CPUS"'
    if number > 1:
        # In a heterogeneous job `--output` counts the tasks of each component from 0 (22.05), so a shell chooses the log by
        # SLURM_NODEID.
        which, output, export = f"--het-group=0-{number - 1}", "", "ALL"
        words = f"sh -c {shlex.quote(_TASK)} rayslurm \\\n    {words}"
    options = (
        f"{which} --ntasks-per-node=1 --cpu-bind=none --wait=0 --kill-on-bad-exit=1",
        f"--mpi=none --input=none --chdir=.{output} --export={export}",
        *([shlex.join(check_text(word) for word in more)] if more else []),
    )
    return " \\\n    ".join(("srun", *options, words))
