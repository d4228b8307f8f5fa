"""The base class of configuration objects, and validators of fields. The import of this module does not import Dagster.

Parts of this module work around limits of Dagster's handling of enums, optional unions, unknown keys and `EnvVar`. They were
tested with Dagster 1.13.
"""

from __future__ import annotations

import difflib
import linecache
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic.fields import FieldInfo

BASE = "~/.dagster_rayslurm"  # The default base directory, on this machine and on a cluster.
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_DESCRIBED = re.compile(r'^    (\w+): .*\n    """((?s:.+?))"""$', re.MULTILINE)  # A field, and the text below the field.

_NO_PACKING = "use environment=UvEnvironment(…) or PackedEnvironment(…), which are sent when they have changed"
_ON_CLUSTER = 'for a file on the cluster write payload_path=["python", "/path/there.py"]'
_QUEUE = "use slurm=SlurmResource(queue=SlurmQueueConfig(…))"
_METADATA = "leave it out; each run has such figures as metadata"
_RUN_SCOPE = 'use mode="slurm-session" with session=SessionConfig(scope="run")'
_LOGIN = 'use SSHConnectionResource(certificate_path=…), or client="openssh" with a login of your own'
# By module, class or method: names of other tools, mainly dagster-slurm, and what to write instead.
_INSTEAD = {
    "dagster_rayslurm": {
        "ComputeLauncher": "use Launcher",
        "SlurmSessionResource": "use SessionConfig, as session= of the ComputeResource",
        "SlurmAllocation SlurmAllocationScope SlurmRunAllocationConfig": _RUN_SCOPE,
        "SlurmWorkerAllocationConfig": 'use mode="slurm-hetjob" with a HetComponent for each kind of node',
        "SlurmRunConfig": "set the run tag dagster-rayslurm/config, or arguments of run()",
        "RayPortConfig": "use RayLauncher(port_range=…)",
        "SparkLauncher": "write a Launcher whose command is spark-submit",
        "LocalPipesClient SlurmPipesClient": "use ComputeResource, which is the Pipes client",
        "SlurmMetric SlurmMetricsCallback SlurmMetricsContext": _METADATA,
        "StepOIDCAuthProvider": _LOGIN,
        "build_slurm_orphan_reconcile_sensor reconcile_orphaned_slurm_runs": (
            "leave it out; the next attempt at a step reattaches to the job that still runs"
        ),
        "run_with_ray_reserve_topup wait_for_stable_ray_resources": (
            "leave it out; a payload starts when all nodes are in the Ray cluster, or RayLauncher(min_nodes=…) of them"
        ),
    },
    "SlurmQueueConfig": {
        "cpus cpus_per_task ntasks": "use cpus_per_node",
        "gpus": "use gpus_per_node",
        "gres": "use gpus_per_node and gpu_type",
        "memory": "use mem",
        "nodes": "use num_nodes",
        "time": "use time_limit",
        "extra_sbatch_directives": "use extra_sbatch",
        "time_min": 'use extra_sbatch, as ["--time-min=…"]',
    },
    "SlurmResource": {
        "extra_slurm_opts": "use queue=SlurmQueueConfig(…), and its extra_sbatch for options without a field",
        "from_env from_env_slurm": "use ssh=SSHConnectionResource.from_env() and queue=SlurmQueueConfig(…)",
        "set_auth_provider": _LOGIN,
        "status_poll_backoff_factor status_poll_interval_seconds status_poll_max_interval_seconds": "use poll_interval",
    },
    "SSHConnectionResource": {
        "batch_mode force_tty": "leave it out; a login that needs a terminal is opened by hand, with require_existing_master",
        "extra_opts": 'use client="openssh", and write the options into ~/.ssh/config',
        "key": "use key_path",
        "post_login_command": "name what jobs need in SlurmResource(site={…}) or in the environment's activate.sh",
        "username": "use user",
    },
    "ComputeResource": {
        "allocation_scope run_allocation": _RUN_SCOPE,
        "cleanup_deferred_run_dir": "leave it out; keep_run_dirs says what is kept",
        "get_pipes_client": "use run(), as a ComputeResource is the Pipes client",
        "register_cluster": "use enable_cluster_reuse=True, which finds clusters that run",
        "run_hetjob": 'use mode="slurm-hetjob" with components=[HetComponent(…)], and run()',
        "cache_inject_globs default_environment_name pack_on_remote pack_platform remote_pack_timeout": _NO_PACKING,
        "project_setup_cmd project_setup_env project_setup_input_globs": _NO_PACKING,
        "cluster_reuse_tolerance": "use SessionConfig(on_misfit=…), which says what becomes of a payload that does not fit",
        "cleanup_on_failure debug_mode": 'use keep_run_dirs="all", "failed" or "none"',
        "default_extra_files": "use run(extra_files=[…])",
        "default_skip_payload_upload": _ON_CLUSTER,
        "extra_slurm_opts queue": _QUEUE,
        "launcher": "use default_launcher",
        "ssh": "use slurm=SlurmResource(ssh=…)",
    },
    "SessionConfig": {
        "max_concurrent_jobs": "use max_concurrent_payloads",
        "account constraint cpus_per_task gpus_per_node mem mem_per_cpu nodelist partition qos reservation": _QUEUE,
        "signal_before_timeout": _QUEUE,
        "enable_health_checks": "use RayLauncher(health_check=…)",
        "enable_session": 'use ComputeResource(mode="slurm-session")',
        "slurm": "use ComputeResource(slurm=…)",
    },
    "RayLauncher": {
        "activate_sh pre_start_commands": "use ComputeResource(pre_deployed_env_path=…), a directory with an activate.sh",
        "dashboard_host ray_start_args": 'use ray_args, such as ["--dashboard-host=…"]',
        "dashboard_port port_config port_strategy ray_port": "use port_range",
        "head_startup_timeout": "use startup_timeout",
        "node_ip_address_command use_head_ip": "use network_interface or head_node_address",
        "ray_resources": "use resources",
        "redis_password": "use auth, which is Ray's token authentication unless set",
        "rejoin_timeout worker_cpu_bind worker_startup_delay": "leave it out; one srun starts Ray on all nodes at once",
        "ray_address": "use BashLauncher for a payload that connects to a cluster of its own with ray.init(address=…)",
    },
    "run()": {
        "config": "use queue=, launcher=, extra_env= and extras= instead",
        "defer_cleanup": "leave it out; ComputeResource(keep_run_dirs=…) says what is kept",
        "env": "use extra_env",
        "environment_name": "use environment=PreDeployedEnvironment(path=…)",
        "extra_slurm_opts resource_requirements": "use queue=SlurmQueueConfig(…); fields that it does not set stay as they are",
        "force_env_push": _NO_PACKING,
        "metrics_collector slurm_metrics": "leave it out; each run has such figures as metadata",
        "poll_timeout": "use ComputeResource(queue_timeout=…) for the wait in the queue, SlurmQueueConfig.time_limit for the run",
        "remote_payload_path skip_payload_upload": _ON_CLUSTER,
        "use_session": 'use ComputeResource(mode="slurm-session")',
    },
}


def explain(owner: str, name: str, known: Iterable[str], noun: str = "field") -> str:
    """Returns an error message for the unknown field or argument `name` of `owner`, the name of a class or method.

    If `name` is known from another tool, the message says what to write instead. Otherwise, the message has the most similar name
    in `known` or, without a similar name, all names in `known`. `noun` is the word "field" or "argument" in the message.
    """
    names = sorted(known)
    instead = next((text for others, text in _INSTEAD.get(owner, {}).items() if name in others.split()), None)
    if instead is None:
        close = difflib.get_close_matches(name, names, n=1)
        instead = f"did you mean {close[0]}?" if close else f"{noun}s are {', '.join(names)}"
    return f"{owner} has no {noun} {name!r}; {instead}"


class StrictModel(BaseModel):
    """Base class of configuration objects: refuses unknown fields with a message that suggests the right name.

    The text below a field in the source is the description of the field, also in Dagster's user interface. Without this class,
    Dagster would accept unknown fields silently.
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
        """Create the object from the values of fields; raises `ValueError` for an unknown field or an invalid value."""
        # A validator would come too late: Dagster turns objects into dictionaries before validators see them.
        for name, value in values.items():
            field = type(self).model_fields.get(name)
            wrong = None if field is None else _wrong_object(field, value)
            if wrong:
                raise ValueError(f"{_title(type(self))}.{name}: {wrong}")
        super().__init__(**values)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, values: Any) -> Any:
        for name in values if isinstance(values, dict) else ():
            if name not in cls.model_fields:
                raise ValueError(explain(_title(cls), str(name), cls.model_fields))
        return values


def _title(cls: type[BaseModel]) -> str:
    """Returns the name of a class for messages to users: the `title` in its `model_config`; without a title, the class name."""
    return cls.model_config.get("title") or cls.__name__


def _wrong_object(field: FieldInfo, value: object) -> str | None:
    """Returns an error message if `value`, a value for `field`, is a class or an object of a wrong class; otherwise None.

    Other mistakes in `value` are not found.
    """
    cls = type(value)
    if isinstance(value, type):
        return f"{value.__name__} is a class; write {value.__name__}(…)"
    if cls.__module__.partition(".")[0] == "dagster_slurm":
        return f"{cls.__name__} of dagster_slurm cannot be used here; use the class of dagster_rayslurm"
    classes = get_args(field.annotation)
    if field.discriminator is None or value is None or isinstance(value, (Mapping, *classes)):
        return None
    return f"{value!r} cannot be used; write {' or '.join(f'{each.__name__}(…)' for each in classes)}"


def is_env_var(value: Any) -> bool:
    """Returns True if a value is an unresolved `EnvVar`. An unresolved `EnvVar.int` is also an int with the value 0."""
    return "dagster" in sys.modules and isinstance(value, _env_vars())  # Without Dagster nobody can have made an EnvVar.


@cache
def _env_vars() -> tuple[type[Any], ...]:
    """Returns the classes of unresolved variables: `EnvVar`, and the hidden class of the objects that `EnvVar.int` returns."""
    import dagster as dg

    return dg.EnvVar, type(dg.EnvVar.int("HOME"))


def read_variable(name: str, where: str, integer: bool = False) -> Any:
    """Returns the value of the environment variable `name`: an int if `integer` is True, otherwise a string.

    `where` is the name, in error messages, of the field that needs the variable. Raises `ValueError` if the variable is not set,
    or if `integer` is True and the variable holds no integer.
    """
    text = os.environ.get(name)
    if text is None:
        raise ValueError(f"{where}: the environment variable {name} is not set")
    try:
        return int(text) if integer else text
    except ValueError:
        raise ValueError(f"{where}: the environment variable {name} is {text!r}, not an integer") from None


def checked(check: Callable[[Any], Any]) -> BeforeValidator:
    """Returns a pydantic validator that replaces a value by the result of `check`; None and an `EnvVar` stay unchecked."""
    return BeforeValidator(lambda value: value if value is None or is_env_var(value) else check(value))


def choice(*options: str) -> BeforeValidator:
    """Returns a pydantic validator that accepts a string in `options`, or an Enum member whose value is in `options`.

    The validator replaces an Enum member by the member's value. None and an `EnvVar` stay unchecked.
    """
    names = tuple(map(str, options))

    def check(value: object) -> str:
        text = value.value if isinstance(value, Enum) else value
        if text not in names:
            raise ValueError(f"{text!r} is not one of {', '.join(map(repr, names))}")
        return str(text)

    return checked(check)


def at_least(low: float, unit: str = "") -> BeforeValidator:
    """Returns a pydantic validator for finite numbers of at least `low`; None and an `EnvVar` stay unchecked.

    `unit` is the unit of `low` in error messages, such as "seconds".
    """
    return checked(lambda value: check_at_least(value, low, unit))


def check_at_least(value: Any, low: float, unit: str = "") -> Any:
    """Returns `value` unchanged; raises `ValueError` unless `value` is a finite number of at least `low`.

    `unit` is the unit of `low` in the error message, such as "seconds".
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value < float("inf"):
        raise ValueError(f"{value!r} is not a number of at least {low:g}{unit and ' ' + unit}")
    return value


def check_text(value: object) -> str:
    """Returns the string `value` unchanged; raises `ValueError` unless `value` is safe in a script, a job name or a command.

    A safe string has no control characters and no lone surrogates.
    """
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{value!r} contains a lone surrogate, for which UTF-8 has no bytes; remove it") from None
    if found := CONTROL.search(value):
        raise ValueError(f"{value!r} contains the control character {found.group()!r}; remove it")
    return value


plain_text = checked(check_text)
