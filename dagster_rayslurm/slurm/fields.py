"""The options of sbatch: which field of `SlurmQueueConfig` each belongs to, and which options users may not set. Pure.

Everything that treats fields one by one derives from `SBATCH_FIELDS`: the check of `extra_sbatch`, the request, the job
script, the inheritance between components of a heterogeneous job, and the matching of payloads with sessions. Options mean
what sbatch(1) of Slurm 22.05 says; inheritance was tried on Slurm 22.05 and 24.11.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..config import mebibytes, time_limit_seconds
from .config import split_signal

# Options that request GPUs, other than --gpus-per-node with its own field.
_GPUS = re.compile(r"--(gpus(-per-(socket|task))?=|(gres|tres-per-task)=(.*[,/])?gpu([:=,]|$))")


class Inheritance(str, Enum):
    """What a component of a heterogeneous job gets if it leaves out a field that an earlier component sets."""

    NONE = "none"
    """Nothing: sbatch forgets the option."""
    INHERITED = "inherited"
    """The value of the earlier component, and no option resets it: each component must set the field."""
    RESETTABLE = "resettable"
    """The value of the earlier component, unless the option is given with an empty value."""
    WHOLE_JOB = "whole-job"
    """The same value: the components begin and end together."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class SbatchField:
    """How one field of `SlurmQueueConfig` reaches sbatch, and how its values are compared.

    Attributes:
        name: the field.
        granted: called with the value that a payload wants, the value that a session was granted, and all fields of the
            session's queue; says whether the session satisfies the payload. None if the field says nothing about a session.
        option: the long option in the job script, without "--"; None if the script has none.
        negation: the option for False.
        aliases: further options that mean the same.
        inheritance: what later components of a heterogeneous job get if they leave the field out.
        meaning: turns a value into what it means; two values that mean the same give equal results.
        login_variable: whether the user's own variable `SBATCH_<OPTION>` counts if the field is left out.
    """

    name: str
    granted: Callable[[Any, Any, Mapping[str, Any]], bool] | None
    option: str | None = None
    negation: str | None = None
    aliases: tuple[str, ...] = ()
    inheritance: Inheritance = Inheritance.NONE
    meaning: Callable[[Any], Any] = lambda value: value
    login_variable: bool = False


def requests_gpus(option: str) -> bool:
    """Whether an option of sbatch requests GPUs without `SlurmQueueConfig.gpus_per_node`."""
    return _GPUS.match(option) is not None


def granted_gpus(queue: Mapping[str, Any]) -> int | None:
    """The number of GPUs on each node that a queue requests; None if only `extra_sbatch` says how many."""
    if queue["gpus_per_node"] is None and any(map(requests_gpus, queue["extra_sbatch"])):
        return None
    return queue["gpus_per_node"] or 0


# These functions are values of `SbatchField.granted`, which says what they answer.
def _same(wanted: Any, granted: Any, _queue: Mapping[str, Any]) -> bool:
    return bool(wanted == granted)


def _at_most(wanted: int, granted: int | None, _queue: Mapping[str, Any]) -> bool:
    """Whether the wanted amount is granted. None is an amount that Slurm chose and only the session knows: it passes here."""
    return granted is None or wanted <= granted


def _gpus(wanted: int, _granted: int | None, queue: Mapping[str, Any]) -> bool:
    return _at_most(wanted, granted_gpus(queue), queue)


def _memory(wanted: str, granted: str | None, _queue: Mapping[str, Any]) -> bool:
    # 0 stands for all of a node's memory (sbatch(1), Slurm 22.05).
    return wanted == granted or (granted is not None and 0 < mebibytes(wanted) <= (mebibytes(granted) or float("inf")))


def _time(wanted: str, granted: str, _queue: Mapping[str, Any]) -> bool:
    own, whole = time_limit_seconds(wanted), time_limit_seconds(granted)
    return whole is None or (own is not None and own <= whole)


def _contained(wanted: list[str], granted: list[str], _queue: Mapping[str, Any]) -> bool:
    return all(option in granted for option in wanted)


SBATCH_FIELDS = (
    SbatchField("partition", _same, "partition", login_variable=True),
    SbatchField("account", _same, "account", inheritance=Inheritance.INHERITED, login_variable=True),
    SbatchField("qos", _same, "qos", inheritance=Inheritance.INHERITED, login_variable=True),
    SbatchField("reservation", _same, "reservation", inheritance=Inheritance.INHERITED, login_variable=True),
    SbatchField("constraint", _same, "constraint", login_variable=True),
    SbatchField("num_nodes", _at_most, "nodes"),
    SbatchField("cpus_per_node", _at_most, "cpus-per-task"),
    SbatchField("gpus_per_node", _gpus, "gpus-per-node"),
    SbatchField("gpu_type", _same),  # Part of --gpus-per-node.
    SbatchField("mem", _memory, "mem", inheritance=Inheritance.INHERITED),
    SbatchField("mem_per_cpu", _memory, "mem-per-cpu"),
    SbatchField("time_limit", _time, "time", inheritance=Inheritance.WHOLE_JOB, meaning=time_limit_seconds),
    SbatchField("exclusive", _same, "exclusive"),
    SbatchField("nodelist", _same, "nodelist", aliases=("nodefile",)),
    SbatchField("exclude", _same, "exclude", inheritance=Inheritance.RESETTABLE),
    SbatchField("switches", _same, "switches"),
    # The job of a session is never requeued.
    SbatchField("requeue", None, "requeue", "no-requeue", inheritance=Inheritance.WHOLE_JOB, meaning=bool),
    # The runtime sends the signal, not Slurm.
    SbatchField("signal_before_timeout", _same, aliases=("signal",), inheritance=Inheritance.WHOLE_JOB, meaning=split_signal),
    SbatchField("extra_sbatch", _contained),
)
"""Every field of `SlurmQueueConfig`, in the order in which the job script lists their options."""

FIELD_OF_OPTION = {
    option: field.name for field in SBATCH_FIELDS for option in (field.option, field.negation, *field.aliases) if option
}
"""The field of `SlurmQueueConfig` for each option of sbatch that has one."""

_INHERITED = """
acctg-freq begin cluster-constraint deadline delay-boot dependency distribution export export-file get-user-env hint hold
ignore-pbs immediate kill-on-invalid-dep mcs-label nice no-kill oom-kill-step priority profile propagate time-min wckey
"""
INHERITED_OPTIONS = tuple(_INHERITED.split())
"""Options without a field that sbatch hands on to later components: those listed by "Heterogeneous Job Support" in Slurm's
documentation, and `hint`, `kill-on-invalid-dep` and `oom-kill-step`, which were seen in later components."""

_RESERVED = {
    "the runtime is the one task of each node; use cpus_per_node for its CPUs": (
        "ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket ntasks-per-tres tasks-per-node"
    ),
    "a SlurmResource is one cluster; use another one for another cluster": "cluster clusters",
    "with it sbatch submits nothing": "help test-only usage version",
    "what the job writes stands in its run directory": "chdir error open-mode output",
    "the job's script and its srun would run elsewhere": "batch container container-id het-group pack-group",
    "each run is one job": "array",
    "it names the Dagster run, step and partition": "comment",
    "the job reads nothing": "input",
    "the job is found again by its name": "job-name",
    "it is always on": "parsable",
    "results are followed without it": "wait",
    "the job starts the runtime": "wrap",
}
RESERVED_OPTIONS = {option: reason for reason, options in _RESERVED.items() for option in options.split()}
"""Options of sbatch that `SlurmQueueConfig.extra_sbatch` may not contain, each with the reason."""
