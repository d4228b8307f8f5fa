"""Base classes and validators of all configuration classes; each mistake of a user raises an error of one sentence."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Mapping
from dataclasses import fields
from keyword import iskeyword
from typing import Annotated, Any, Optional, TypeVar

import dagster as dg
from pydantic import ConfigDict

from .fields import CONTROL, StrictModel, at_least, check_text, checked, choice, is_env_var, read_variable
from .runtime.protocol.messages import TextEnum
from .runtime.protocol.spec import RAY_COORDINATES, RuntimeSpec, is_passable

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TIME_LIMIT = re.compile(r"^(UNLIMITED|INFINITE|\d+|\d+:\d{1,2}(:\d{1,2})?|\d+-\d{1,2}(:\d{1,2}){0,2})$", re.IGNORECASE)
_MEMORY = re.compile(r"^\d+[KMGT]?$", re.IGNORECASE)
_SIGNAL = re.compile(r"^(?:(?P<name>[A-Z0-9]+)@)?(?P<seconds>[0-9]+)$")

# Prefixes of environment variables that users may not set: the runtime and Dagster Pipes set such variables.
_RESERVED = ("RAYSLURM_", "DAGSTER_PIPES_")

# Maximum bytes of one argument or environment variable of a process (MAX_ARG_STRLEN of Linux, which counts a final NUL).
MAX_BYTES = 2**17 - 1

C = TypeVar("C", bound=dg.Config)


class ExecutionMode(TextEnum):
    """Where payloads run: on this machine, in a Slurm job, in a heterogeneous Slurm job, or in a session.

    A session is a Slurm job that keeps running between payloads.
    """

    LOCAL = "local"
    SLURM = "slurm"
    SLURM_SESSION = "slurm-session"  # A warm allocation that many assets share.
    SLURM_HETJOB = "slurm-hetjob"


class Topology(TextEnum):
    """The Ray clusters of an allocation with components.

    With SPANNING, one Ray cluster and one payload span all components. With SEPARATE, each component has a Ray cluster and a
    payload of its own.
    """

    SPANNING = "spanning"
    SEPARATE = "separate"


class StrictConfig(StrictModel, dg.Config):
    """Base class of configuration objects, such as launchers and queues; refuses unknown fields."""


class StrictResource(StrictModel, dg.ConfigurableResource):
    """Base class of Dagster resources; refuses unknown fields."""

    model_config = ConfigDict(frozen=True)


def check_list(value: object, of: str) -> list[Any]:
    """Returns `value`, a list or tuple, as a list; raises `ValueError` for any other value.

    `of` is the name of the expected items in the error message.
    """
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise ValueError(f"write a list of {of}")
    return list(value)


def check_modules(value: object) -> list[str]:
    """Returns the list `value` of names of Python modules, such as "torch.nn", with repeated names removed.

    Raises `ValueError` if `value` is not a list of such names.
    """
    names = check_list(value, 'modules, such as ["ray", "torch"]')
    for name in names:
        if not all(part.isidentifier() and not iskeyword(part) for part in check_text(name).split(".")):
            raise ValueError(f'{name!r} is not the name of a module, such as "torch" or "torch.nn"')
    return list(dict.fromkeys(names))


def check_time_limit(value: object) -> str:
    """Returns a time limit as text; raises `ValueError` if `value` has none of the formats of sbatch(1), Slurm 22.05.

    `value` is a text, such as "01:00:00", or an integer number of minutes. A limit of 0 is refused, because Slurm takes 0 for no
    limit.
    """
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else check_text(value)
    if not _TIME_LIMIT.match(text):
        raise ValueError(
            f"{text!r} is not a Slurm time limit; write minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS or UNLIMITED"
        )
    if not text.isalpha() and time_limit_seconds(text) is None:
        raise ValueError(f'{text!r} means no time limit to Slurm; write a limit, such as "01:00:00", or "UNLIMITED"')
    return text


def check_memory(value: object) -> str:
    """Returns `value` unchanged if it is a text with a memory size for sbatch, such as "16G"; otherwise raises `ValueError`."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise ValueError(f'{value!r} has no unit; write "{value:g}G" for GiB or "{value:g}M" for MiB')
    if not _MEMORY.match(check_text(value)):
        raise ValueError(f'{value!r} is not a Slurm memory size; write a number with K, M, G or T, such as "16G"')
    return str(value)


def mebibytes(size: str) -> float:
    """Returns the number of MiB in a memory size for `sbatch --mem`, such as "16G". A number without a unit is in MiB."""
    units = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}
    unit = size[-1].upper()
    return int(size[:-1]) * units[unit] if unit in units else int(size)


def time_limit_seconds(text: str) -> float | None:
    """Returns a time limit in seconds; None for a limit of "UNLIMITED", "INFINITE" or 0.

    `text` has one of the formats of sbatch(1), Slurm 22.05.
    """
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return None
    days, dash, rest = text.rpartition("-")
    numbers = [int(number) for number in rest.split(":")]
    # The first number means hours if days precede it or if there are three numbers; otherwise it means minutes.
    units = (3600, 60, 1) if dash or len(numbers) == 3 else (60, 1)
    return float(86400 * int(days or 0) + sum(number * unit for number, unit in zip(numbers, units, strict=False))) or None


def check_signal(value: object) -> str:
    """Returns `value`, a text "SECONDS" or "SIGNAL@SECONDS" for the signal that is sent before a job's time limit.

    Raises `ValueError` for any other value, for a signal that does not exist on this system, and for 0 seconds.
    """
    match = _SIGNAL.match(check_text(value))
    if not match:
        raise ValueError(f'{value!r} is not a signal before the time limit; write SECONDS or SIGNAL@SECONDS ("USR1@300")')
    name = (match["name"] or "TERM").removeprefix("SIG")
    known = int(name) in signal.valid_signals() if name.isdigit() else f"SIG{name}" in signal.Signals.__members__
    if not known:
        raise ValueError(
            f'{value!r}: there is no signal {match["name"]}; write a name or number of signal(7), such as "USR1@300"'
        )
    if not int(match["seconds"]):
        raise ValueError(f"{value!r} leaves no time before the time limit; write at least 1 second")
    return str(value)


def check_identifier(value: object) -> str:
    """Returns the text `value` unchanged; raises `ValueError` unless it is a name such as "gpu-part_1" of at most 63 characters.

    Such a name can be a file name, a label value of Ray and a part of a Ray resource's name.
    """
    if not re.match(r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$", check_text(value)):
        raise ValueError(f"{value!r} is not a name: use up to 63 letters, digits, '-', '_' and '.'")
    return str(value)


def check_sbatch_options(value: object) -> list[str]:
    """Returns `value`, a list of long options of sbatch, such as ["--licenses=matlab:1"]; else raises `ValueError`."""
    options = check_list(value, 'options, such as ["--licenses=matlab:1"]')
    for option in options:
        if not is_env_var(option) and not check_text(option).startswith("--"):
            raise ValueError(f"{option!r} is not a long option of sbatch; write it as --NAME or --NAME=VALUE")
    return options


def check_line(value: str, what: str) -> str:
    """Returns the string `value`, which fits on one line of a script; raises `ValueError` for a string with control characters.

    `what` is the name of the string in the error message. The message does not show the string itself, which may be a secret.
    """
    if found := CONTROL.search(value):
        raise ValueError(f"{what}: the value contains the control character {found.group()!r}; remove it")
    return value


def check_length(text: str, what: str) -> None:
    """Raise `ValueError` if a text is too long for Linux to pass to a process.

    `text` is an argument of the process, or an environment variable as `NAME=VALUE`. `what` is the name of the text in the error
    message.
    """
    size = len(text.encode("utf-8", "surrogateescape"))
    if size > MAX_BYTES:
        raise ValueError(
            f"{what} has {size:,} bytes, and Linux passes at most {MAX_BYTES:,} at once to a process; write them into a file "
            "and name it in extra_files"
        )


slurm_time = checked(check_time_limit)
slurm_memory = checked(check_memory)
identifier = checked(check_identifier)


def has_variables(value: Any) -> bool:
    """Returns whether a value is or contains an unresolved `EnvVar`, at any depth of config objects, dictionaries and lists."""
    if isinstance(value, dg.Config):
        return any(has_variables(getattr(value, name)) for name in type(value).model_fields)
    if isinstance(value, dict):
        return any(map(has_variables, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(has_variables, value))
    return is_env_var(value)


def resolve_variables(config: C, where: str, skip: Collection[str] = ()) -> C:
    """Returns a copy of a config object in which the value of each environment variable replaces the `EnvVar`.

    Fields that were unset stay unset, and the fields in `skip` stay unresolved. `where` is the name of the object in error
    messages. Raises `ValueError` for an environment variable that is not set. Dagster replaces an `EnvVar` in resources and run
    config, but not in config objects that are arguments of `run()`.
    """
    names = [name for name in type(config).model_fields if name in config.model_fields_set]
    values = {name: getattr(config, name) for name in names}
    values.update({name: _resolve(value, f"{where}.{name}") for name, value in values.items() if name not in skip})
    return type(config)(**values)


def _resolve(value: Any, where: str) -> Any:
    """Returns a copy of `value` in which, at any depth, the value of each environment variable replaces the `EnvVar`.

    `where` is the name of `value` in error messages. Raises `ValueError` for an environment variable that is not set.
    """
    if is_env_var(value):
        return read_variable(value.env_var_name, where, integer=isinstance(value, int))
    if isinstance(value, dg.Config):
        return resolve_variables(value, where)
    if isinstance(value, dict):
        return {key: _resolve(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_resolve(item, f"{where}[{index}]") for index, item in enumerate(value)]
    return value


def check_environment(variables: Mapping[str, Any] | None, what: str) -> dict[str, str]:
    """Returns environment variables by name, with the variable's value in place of each `EnvVar`; {} if `variables` is None.

    `what` is the name of the argument `variables` in error messages. Raises `ValueError` if a name or a value is invalid.
    """
    checked_variables = {}
    for name, value in (variables or {}).items():
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            raise ValueError(f"{what}: {name!r} is not a name of an environment variable")
        if name.startswith(_RESERVED) or name in RAY_COORDINATES:
            raise ValueError(f"{what}: {name} is reserved, it is set for every payload; choose another name")
        resolved = _resolve(value, f"{what}[{name!r}]")
        if not isinstance(resolved, str):
            raise ValueError(f"{what}[{name!r}]: {type(resolved).__name__} is not a string; write str(…)")
        if not is_passable(resolved):
            wrong = "a NUL character" if "\0" in resolved else "a lone surrogate, which no system takes"
            raise ValueError(f"{what}[{name!r}]: the value contains {wrong}; remove it")
        check_length(f"{name}={resolved}", f"{what}[{name!r}]")
        checked_variables[name] = resolved
    return checked_variables


class SessionConfig(StrictConfig):
    """A session: a warm Slurm allocation (in local mode: a warm Ray cluster) that assets, processes and runs share.

    The job of a session is never requeued, even with `requeue=True`, because payloads of the session would run twice.
    """

    name: Annotated[Optional[str], identifier] = None
    """Name of the session. Resources with the same name share a session, even if their launchers and queues differ. If None,
    resources share a session only if their launcher, queue and settings agree."""
    num_nodes: Annotated[Optional[int], at_least(1)] = None
    """Nodes of the allocation; None for the queue's num_nodes. Not allowed with components, which have
    their own num_nodes."""
    time_limit: Annotated[Optional[str], slurm_time] = None
    """Time limit of the allocation in Slurm's format; None for the queue's time_limit."""
    idle_timeout: Annotated[int, at_least(1, "seconds")] = 600
    """Seconds without a payload after which the session ends itself; before its first payload at least 90."""
    yield_when_idle: bool = True
    """On Slurm, end a session that is idle for 5 seconds or more when a job or another session of the same user and remote_base
    waits for nodes of its partition; a session with a payload never ends for that reason."""
    carrier: Annotated[str, choice("auto", "direct", "srun")] = "auto"
    """How requests get to the session: "direct" by TCP from the edge node, "srun" by a step in its allocation, "auto": by
    TCP if TCP is not blocked, otherwise by a job step."""
    max_concurrent_payloads: Annotated[int, at_least(1)] = 1
    """Payloads that run at the same time; others queue."""
    scope: Annotated[str, choice("shared", "run")] = "shared"
    """"shared" between all runs, or "run" for a session of each Dagster run's own."""
    on_misfit: Annotated[str, choice("new-session", "error")] = "new-session"
    """What becomes of a payload that asks for more than the session has: "new-session" makes another one beside it, "error"
    refuses it."""

    def for_runtime(self) -> dict[str, Any]:
        """Returns the values of the fields that the session's runtime needs, by name: the fields that `RuntimeSpec` has, too."""
        return {each.name: getattr(self, each.name) for each in fields(RuntimeSpec) if each.name in type(self).model_fields}
