"""Base classes and validators of all configuration classes; each mistake of a user raises an error of one sentence.

The workarounds for enums, optional unions, subclasses, unknown keys and `EnvVar` were tested with Dagster 1.13.
"""

from __future__ import annotations

import difflib
import linecache
import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from keyword import iskeyword
from typing import Annotated, Any, Optional, TypeVar, get_args

import dagster as dg
from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic.fields import FieldInfo

from .runtime.protocol.messages import TextEnum
from .runtime.protocol.spec import RAY_COORDINATES, is_passable

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TIME_LIMIT = re.compile(r"^(UNLIMITED|INFINITE|\d+|\d+:\d{1,2}(:\d{1,2})?|\d+-\d{1,2}(:\d{1,2}){0,2})$", re.IGNORECASE)
_MEMORY = re.compile(r"^\d+[KMGT]?$", re.IGNORECASE)
_DESCRIBED = re.compile(r'^    (\w+): .*\n    """((?s:.+?))"""$', re.MULTILINE)  # A field of a class, and the text below it.
_SIGNAL = re.compile(r"^(?:(?P<name>[A-Z0-9]+)@)?(?P<seconds>[0-9]+)$")

# Prefixes of environment variables that users may not set: the runtime and Dagster Pipes set them for every payload.
_RESERVED = ("RAYSLURM_", "DAGSTER_PIPES_")

# Maximum bytes of one argument or environment variable of a process (MAX_ARG_STRLEN of Linux, which counts a final NUL).
MAX_BYTES = 2**17 - 1

# Classes of unresolved variables: `EnvVar`, and the class that `EnvVar.int` returns, which Dagster does not export.
_ENV_VARS = (dg.EnvVar, type(dg.EnvVar.int("HOME")))

_NO_PACKING = "use environment=UvEnvironment(…) or PackedEnvironment(…), which are sent when they have changed"
_ON_CLUSTER = 'for a file on the cluster write payload_path=["python", "/path/there.py"]'
_QUEUE = "use slurm=SlurmResource(queue=SlurmQueueConfig(…))"
# By class or method: field and argument names of other tools, mainly dagster-slurm, and what to write instead.
_INSTEAD = {
    "SlurmQueueConfig": {
        "cpus cpus_per_task ntasks": "use cpus_per_node",
        "gpus": "use gpus_per_node",
        "gres": "use gpus_per_node and gpu_type",
        "memory": "use mem",
        "nodes": "use num_nodes",
        "time": "use time_limit",
    },
    "SlurmResource": {
        "extra_slurm_opts": "use queue=SlurmQueueConfig(…), and its extra_sbatch for options without a field",
        "status_poll_interval_seconds status_poll_max_interval_seconds": "use poll_interval",
    },
    "SSHConnectionResource": {
        "extra_opts": 'use client="openssh", and write the options into ~/.ssh/config',
        "key": "use key_path",
        "post_login_command": "name what jobs need in SlurmResource(site={…}) or in the environment's activate.sh",
        "username": "use user",
    },
    "ComputeResource": {
        "allocation_scope run_allocation": 'use mode="slurm-session" with session=SessionConfig(scope="run")',
        "default_environment_name pack_on_remote pack_platform": _NO_PACKING,
        "cleanup_on_failure debug_mode": 'use keep_run_dirs="all", "failed" or "none"',
        "default_extra_files": "use run(extra_files=[…])",
        "extra_slurm_opts queue": _QUEUE,
        "launcher": "use default_launcher",
        "ssh": "use slurm=SlurmResource(ssh=…)",
    },
    "SessionConfig": {
        "max_concurrent_jobs": "use max_concurrent_payloads",
        "account constraint cpus_per_task gpus_per_node mem mem_per_cpu nodelist partition qos": _QUEUE,
    },
    "RayLauncher": {
        "activate_sh pre_start_commands": "use ComputeResource(pre_deployed_env_path=…), a directory with an activate.sh",
        "dashboard_host ray_start_args": 'use ray_args, such as ["--dashboard-host=…"]',
        "dashboard_port port_config port_strategy ray_port": "use port_range",
        "head_startup_timeout": "use startup_timeout",
        "node_ip_address_command use_head_ip": "use network_interface or head_node_address",
        "ray_address": "use BashLauncher for a payload that connects to a cluster of its own with ray.init(address=…)",
    },
    "run()": {
        "config": "use queue=, launcher=, extra_env= and extras= instead",
        "env": "use extra_env",
        "environment_name": "use environment=PreDeployedEnvironment(path=…)",
        "extra_slurm_opts resource_requirements": "use queue=SlurmQueueConfig(…); fields that it does not set stay as they are",
        "force_env_push": _NO_PACKING,
        "poll_timeout": "use ComputeResource(queue_timeout=…) for the wait in the queue, SlurmQueueConfig.time_limit for the run",
        "remote_payload_path skip_payload_upload": _ON_CLUSTER,
        "use_session": 'use ComputeResource(mode="slurm-session")',
    },
}

C = TypeVar("C", bound=dg.Config)


class ExecutionMode(TextEnum):
    """Where payloads run: on this machine, or in one of three forms of Slurm jobs."""

    LOCAL = "local"
    SLURM = "slurm"
    SLURM_SESSION = "slurm-session"  # A warm allocation that many assets share.
    SLURM_HETJOB = "slurm-hetjob"


class Topology(TextEnum):
    """The Ray clusters of an allocation with components: one cluster and payload across all components, or one for each."""

    SPANNING = "spanning"
    SEPARATE = "separate"


def explain(owner: str, name: str, known: Iterable[str], noun: str = "field") -> str:
    """Returns an error message for an unknown field or argument: with the likely name, or else with all names that exist."""
    names = sorted(known)
    instead = next((text for others, text in _INSTEAD.get(owner, {}).items() if name in others.split()), None)
    if instead is None:
        close = difflib.get_close_matches(name, names, n=1)
        instead = f"did you mean {close[0]}?" if close else f"{noun}s are {', '.join(names)}"
    return f"{owner} has no {noun} {name!r}; {instead}"


class StrictModel(BaseModel):
    """Base class that refuses unknown fields, which Dagster would accept silently, and suggests the probable name.

    The description of a field is the text below it, also in Dagster's user interface.
    """

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True, defer_build=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        # pydantic could do this, too (`use_attribute_docstrings`), but would double the time to import the package.
        own = cls.__module__.startswith(f"{__package__}.")
        source = "".join(linecache.getlines(str(sys.modules[cls.__module__].__file__)) if own else ())
        body = source.partition(f"\nclass {cls.__name__}(")[2].partition("\nclass ")[0]
        for name, text in _DESCRIBED.findall(body):
            cls.model_fields[name].description = " ".join(text.split())

    def __init__(self, **values: Any) -> None:
        """Create the object from its fields; raises `ValueError` if a field gets a class, or an object of a wrong class."""
        # A validator would come too late: Dagster turns objects into dictionaries before validators see them.
        for name, value in values.items():
            field = type(self).model_fields.get(name)
            wrong = None if field is None else _wrong_object(field, value)
            if wrong:
                raise ValueError(f"{type(self).__name__}.{name}: {wrong}")
        super().__init__(**values)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, values: Any) -> Any:
        for name in values if isinstance(values, dict) else ():
            if name not in cls.model_fields:
                raise ValueError(explain(cls.__name__, str(name), cls.model_fields))
        return values


def _wrong_object(field: FieldInfo, value: object) -> str | None:
    """Returns the reason why a field cannot hold a value that is a class, or an object of the wrong class; else None."""
    cls = type(value)
    if isinstance(value, type):
        return f"{value.__name__} is a class; write {value.__name__}(…)"
    if cls.__module__.partition(".")[0] == "dagster_slurm":
        return f"{cls.__name__} of dagster_slurm cannot be used here; use the class of dagster_rayslurm"
    classes = get_args(field.annotation)
    if field.discriminator is None or value is None or isinstance(value, (Mapping, *classes)):
        return None
    return f"{value!r} cannot be used; write {' or '.join(f'{each.__name__}(…)' for each in classes)}"


class StrictConfig(StrictModel, dg.Config):
    """Base class of configuration objects, such as those inside a resource; refuses unknown fields."""


class StrictResource(StrictModel, dg.ConfigurableResource):
    """Base class of resources; refuses unknown fields."""

    model_config = ConfigDict(frozen=True)


def is_env_var(value: Any) -> bool:
    """Returns True if a value is an unresolved `EnvVar`. An unresolved `EnvVar.int` is also an int, which is equal to 0."""
    return isinstance(value, _ENV_VARS)


def checked(check: Callable[[Any], Any]) -> BeforeValidator:
    """Returns a pydantic validator that calls `check` for each value except None and an `EnvVar`, which has no value yet."""
    return BeforeValidator(lambda value: value if value is None or is_env_var(value) else check(value))


def choice(*options: str) -> BeforeValidator:
    """Returns a pydantic validator that accepts a string from `options` or an Enum member, and allows an `EnvVar` as well."""
    names = tuple(map(str, options))

    def check(value: object) -> str:
        text = value.value if isinstance(value, Enum) else value
        if text not in names:
            raise ValueError(f"{text!r} is not one of {', '.join(map(repr, names))}")
        return str(text)

    return checked(check)


def at_least(low: float, unit: str = "") -> BeforeValidator:
    """Returns a pydantic validator for numbers that are not smaller than `low`."""
    return checked(lambda value: check_at_least(value, low, unit))


def check_at_least(value: Any, low: float, unit: str = "") -> Any:
    """Returns the value if it is a finite number of at least `low`; else raises `ValueError`, as all checks of values here do."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value < float("inf"):
        raise ValueError(f"{value!r} is not a number of at least {low:g}{unit and ' ' + unit}")
    return value


def check_text(value: object) -> str:
    """Returns the value if it is a string that is safe in a script, a job name or a command; else raises `ValueError`."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{value!r} contains a lone surrogate, for which UTF-8 has no bytes; remove it") from None
    if found := _CONTROL.search(value):
        raise ValueError(f"{value!r} contains the control character {found.group()!r}; remove it")
    return value


def check_list(value: object, of: str) -> list[Any]:
    """Returns the value as a list, if it is a list or tuple; `of` names the items that it should have, for the error message."""
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise ValueError(f"write a list of {of}")
    return list(value)


def check_modules(value: object) -> list[str]:
    """Returns the given names of Python modules without repetitions; raises `ValueError` if one of them is invalid."""
    names = check_list(value, 'modules, such as ["ray", "torch"]')
    for name in names:
        if not all(part.isidentifier() and not iskeyword(part) for part in check_text(name).split(".")):
            raise ValueError(f'{name!r} is not the name of a module, such as "torch" or "torch.nn"')
    return list(dict.fromkeys(names))


def check_time_limit(value: object) -> str:
    """Returns a time limit in a format of sbatch(1), Slurm 22.05, as a string; refuses 0, which means no limit to Slurm."""
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else check_text(value)
    if not _TIME_LIMIT.match(text):
        raise ValueError(
            f"{text!r} is not a Slurm time limit; write minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS or UNLIMITED"
        )
    if not text.isalpha() and time_limit_seconds(text) is None:
        raise ValueError(f'{text!r} means no time limit to Slurm; write a limit, such as "01:00:00", or "UNLIMITED"')
    return text


def check_memory(value: object) -> str:
    """Returns a memory size for `sbatch --mem`, such as "16G"; refuses an int or float, which has no unit."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise ValueError(f'{value!r} has no unit; write "{value:g}G" for GiB or "{value:g}M" for MiB')
    if not _MEMORY.match(check_text(value)):
        raise ValueError(f'{value!r} is not a Slurm memory size; write a number with K, M, G or T, such as "16G"')
    return str(value)


def mebibytes(size: str) -> float:
    """Returns the number of MiB in a memory size for `sbatch --mem`, such as "16G"."""
    units = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}
    unit = size[-1].upper()
    return int(size[:-1]) * units[unit] if unit in units else int(size)


def time_limit_seconds(text: str) -> float | None:
    """Returns the seconds of a time limit in a format of sbatch(1), Slurm 22.05; None for no limit, which 0 means as well."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return None
    days, dash, rest = text.rpartition("-")
    numbers = [int(number) for number in rest.split(":")]
    # The first number means hours if days precede it or if there are three numbers; otherwise it means minutes.
    units = (3600, 60, 1) if dash or len(numbers) == 3 else (60, 1)
    return float(86400 * int(days or 0) + sum(number * unit for number, unit in zip(numbers, units, strict=False))) or None


def check_signal(value: object) -> str:
    """Validate a signal to send before the time limit, "SECONDS" or "SIGNAL@SECONDS"; returns the text.

    The signal must exist on this system.
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
    """Validate a name that can be part of a path, and of a label or a resource of Ray; returns the name."""
    if not re.match(r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$", check_text(value)):
        raise ValueError(f"{value!r} is not a name: use up to 63 letters, digits, '-', '_' and '.'")
    return str(value)


def check_sbatch_options(value: object) -> list[str]:
    """Validate a list of long options of sbatch, such as "--licenses=matlab:1"; returns the list."""
    options = check_list(value, 'options, such as ["--licenses=matlab:1"]')
    for option in options:
        if not is_env_var(option) and not check_text(option).startswith("--"):
            raise ValueError(f"{option!r} is not a long option of sbatch; write it as --NAME or --NAME=VALUE")
    return options


def check_line(value: str, what: str) -> str:
    """Validate a string that must fit on one line of a script; returns the string.

    `what` names the string in the error message, which does not show the string itself, as that may be a secret.
    """
    if found := _CONTROL.search(value):
        raise ValueError(f"{what}: the value contains the control character {found.group()!r}; remove it")
    return value


def check_length(text: str, what: str) -> None:
    """Raise `ValueError` for a text that Linux cannot pass to a process, as an argument or as `NAME=VALUE` of a variable.

    `what` names the text in the error message.
    """
    size = len(text.encode("utf-8", "surrogateescape"))
    if size > MAX_BYTES:
        raise ValueError(
            f"{what} has {size:,} bytes, and Linux passes at most {MAX_BYTES:,} at once to a process; write them into a file "
            "and name it in extra_files"
        )


plain_text = checked(check_text)
slurm_time = checked(check_time_limit)
slurm_memory = checked(check_memory)
identifier = checked(check_identifier)


def has_variables(value: Any) -> bool:
    """Whether a value, a config object or a resource contains an unresolved `EnvVar`."""
    if isinstance(value, dg.Config):
        return any(has_variables(getattr(value, name)) for name in type(value).model_fields)
    if isinstance(value, dict):
        return any(map(has_variables, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(has_variables, value))
    return is_env_var(value)


def resolve_variables(config: C, where: str, skip: Collection[str] = ()) -> C:
    """Returns a copy of a config object in which each `EnvVar` is replaced by its value; fields that were unset stay unset.

    Dagster replaces variables in resources and run config, but not in config objects that are arguments of `run()`. `where` names
    the object in error messages; the fields in `skip` stay unresolved. Raises `ValueError` for a variable that is not set.
    """
    names = [name for name in type(config).model_fields if name in config.model_fields_set]
    values = {name: getattr(config, name) for name in names}
    values.update({name: _resolve(value, f"{where}.{name}") for name, value in values.items() if name not in skip})
    return type(config)(**values)


def _resolve(value: Any, where: str) -> Any:
    """Returns a value in which each `EnvVar`, at any depth, is replaced by its value; `where` names `value` in errors."""
    if is_env_var(value):
        try:
            resolved = value.get_value()
        except ValueError:
            found = os.environ.get(value.env_var_name)
            raise ValueError(f"{where}: the environment variable {value.env_var_name} is {found!r}, not an integer") from None
        if resolved is None:
            raise ValueError(f"{where}: the environment variable {value.env_var_name} is not set")
        return resolved
    if isinstance(value, dg.Config):
        return resolve_variables(value, where)
    if isinstance(value, dict):
        return {key: _resolve(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_resolve(item, f"{where}[{index}]") for index, item in enumerate(value)]
    return value


def check_environment(variables: Mapping[str, Any] | None, what: str) -> dict[str, str]:
    """Returns the environment variables of a payload, with the value of every `EnvVar`; raises `ValueError` for an invalid one.

    `what` names the argument with the variables in error messages.
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

    The job of a session is never requeued, even with `requeue=True`: payloads that it had accepted would run twice.
    """

    name: Annotated[Optional[str], identifier] = None
    """Name of the session; None to tell sessions apart by their launcher, queue and settings."""
    num_nodes: Annotated[Optional[int], at_least(1)] = None
    """Nodes of the allocation; None for the queue's. Not with components, which have their own."""
    time_limit: Annotated[Optional[str], slurm_time] = None
    """Time limit of the allocation in Slurm's format; None for the queue's."""
    idle_timeout: Annotated[int, at_least(1, "seconds")] = 600
    """Seconds without a payload after which the session ends itself; before its first payload at least 90."""
    yield_when_idle: bool = True
    """On Slurm, end an idle session at once when a job or another session of the same user and remote_base waits for nodes of
    its partition; a session with a payload never ends for that."""
    carrier: Annotated[str, choice("auto", "direct", "srun")] = "auto"
    """How requests get to the session: "direct" by TCP from the edge node, "srun" by a step in its allocation, "auto" by TCP
    where that gets through, else by a step."""
    max_concurrent_payloads: Annotated[int, at_least(1)] = 1
    """Payloads that run at the same time; others queue."""
    scope: Annotated[str, choice("shared", "run")] = "shared"
    """"shared" between all runs, or "run" for a session of each Dagster run's own."""
    on_misfit: Annotated[str, choice("new-session", "error")] = "new-session"
    """What becomes of a payload that asks for more than the session has: "new-session" makes another one beside it, "error"
    refuses it."""
