"""Error messages for unknown fields and arguments, with the name that was probably meant."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_NO_PACKING = "remove it, environments are not packed or sent; name one on the cluster with pre_deployed_env_path"
_ON_CLUSTER = 'for a file on the cluster write payload_path=["python", "/path/there.py"]'
_SESSION_QUEUE = "use slurm=SlurmResource(queue=SlurmQueueConfig(…)), which says what a session asks for"

_INSTEAD = {
    "SlurmQueueConfig": {
        "cpus cpus_per_task": "use cpus_per_node",
        "gpus": "use gpus_per_node",
        "gres": "use gpus_per_node and gpu_type",
        "memory": "use mem",
        "nodes": "use num_nodes",
        "ntasks": "remove it, the runtime is the one task of each node; use cpus_per_node for its CPUs",
        "time": "use time_limit",
    },
    "SlurmResource": {
        "extra_slurm_opts": "use queue=SlurmQueueConfig(…), and its extra_sbatch for options without a field",
        "status_poll_backoff_factor status_poll_interval_seconds status_poll_max_interval_seconds": "use poll_interval",
    },
    "SSHConnectionResource": {
        "batch_mode": "remove it, a login never asks questions",
        "extra_opts": 'use client="openssh", and write the options into ~/.ssh/config',
        "force_tty": "remove it, no terminal is needed",
        "key": "use key_path",
        "post_login_command": "remove it; name what jobs need in SlurmResource(site={…}) or in the environment's activate.sh",
        "username": "use user",
    },
    "ComputeResource": {
        "allocation_scope run_allocation": 'use mode="slurm-session" with session=SessionConfig(scope="run")',
        "cache_inject_globs default_environment_name pack_on_remote pack_platform remote_pack_timeout": _NO_PACKING,
        "project_setup_cmd project_setup_env project_setup_input_globs": _NO_PACKING,
        "cleanup_on_failure debug_mode": 'use keep_run_dirs="all", "failed" or "none"',
        "cluster_reuse_tolerance": "remove it; a payload shares a warm cluster if that has what the payload asks for",
        "default_extra_files": "use run(extra_files=[…])",
        "default_skip_payload_upload": _ON_CLUSTER,
        "extra_slurm_opts": "use slurm=SlurmResource(queue=SlurmQueueConfig(…))",
        "launcher": "use default_launcher",
        "queue": "use slurm=SlurmResource(queue=…)",
        "ssh": "use slurm=SlurmResource(ssh=…)",
    },
    "SessionConfig": {
        "max_concurrent_jobs": "use max_concurrent_payloads",
        "account constraint cpus_per_task gpus_per_node mem mem_per_cpu nodelist partition qos": _SESSION_QUEUE,
    },
    "RayLauncher": {
        "activate_sh": "use ComputeResource(pre_deployed_env_path=…), a directory with an activate.sh",
        "dashboard_host": 'use ray_args=["--dashboard-host=…"]',
        "dashboard_port port_config port_strategy ray_port": "use port_range",
        "head_startup_timeout": "use startup_timeout",
        "node_ip_address_command use_head_ip": "use network_interface or head_node_address",
        "pre_start_commands": "write them into the environment's activate.sh",
        "ray_address": "use BashLauncher for a payload that connects to a cluster of its own with ray.init(address=…)",
        "ray_start_args": "use ray_args",
        "redis_password": "remove it; auth protects the cluster",
        "worker_cpu_bind": "remove it, the runtime is one task with all CPUs of its node",
        "worker_startup_delay": "remove it, all nodes start at once",
    },
    "run()": {
        "config": "use queue=, launcher=, extra_env= and extras= instead",
        "defer_cleanup": 'use ComputeResource(keep_run_dirs="all")',
        "env": "use extra_env",
        "environment_name": "use ComputeResource(pre_deployed_env_path=…)",
        "extra_slurm_opts": "use queue=SlurmQueueConfig(…); fields that it does not set stay as the resource has them",
        "force_env_push": _NO_PACKING,
        "metrics_collector slurm_metrics": "remove it, figures of Slurm and Ray are in the metadata of each run",
        "poll_timeout": "use ComputeResource(queue_timeout=…) for the wait in the queue, SlurmQueueConfig.time_limit for the run",
        "remote_payload_path skip_payload_upload": _ON_CLUSTER,
        "resource_requirements": "use queue=SlurmQueueConfig(…) or launcher=",
        "use_session": 'use ComputeResource(mode="slurm-session")',
    },
}
"""By class or method: field and argument names of other tools, mainly dagster-slurm, and what to write instead."""
_REPLACEMENTS = {
    owner: {name: instead for names, instead in table.items() for name in names.split()} for owner, table in _INSTEAD.items()
}
_CLASSES = {"SlurmRunAllocationConfig": "SessionConfig", "SlurmSessionResource": "SessionConfig"}
"""Classes of dagster-slurm, and the classes of this package that replace them under another name."""


def explain(owner: str, name: str, known: Iterable[str], noun: str = "field") -> str:
    """An error message for an unknown field or argument, with what to write instead or the names that exist."""
    names = list(known)
    instead = _REPLACEMENTS.get(owner, {}).get(name)
    if instead is None:
        close = difflib.get_close_matches(name, names, n=1)
        instead = f"did you mean {close[0]}?" if close else f"{noun}s are {', '.join(sorted(names))}"
    return f"{owner} has no {noun} {name!r}; {instead}"


def explain_class(value: object) -> str | None:
    """An error message for an object of a class of dagster-slurm; None for any other object."""
    cls = type(value)
    if cls.__module__.partition(".")[0] != "dagster_slurm":
        return None
    return (
        f"{cls.__name__} of dagster_slurm cannot be used here; use {_CLASSES.get(cls.__name__, cls.__name__)} of dagster_rayslurm"
    )


def explain_arguments(method: Callable[P, R]) -> Callable[P, R]:
    """Decorator: the `TypeError` of the method for an unknown argument says what to write instead."""
    known = [name for name in inspect.signature(method).parameters if name != "self"]

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                raise TypeError(explain(f"{method.__name__}()", name, known, "argument"))
        return method(*args, **kwargs)

    return call
