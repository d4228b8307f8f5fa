"""Error messages for unknown fields and arguments, with the name that was probably meant."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_PORTS = "use port_range"
_NO_PACKING = "remove it, environments are not packed or sent; name one on the cluster with pre_deployed_env_path"
_KEPT = 'use keep_run_dirs="all", "failed" or "none"'
_RUN_SCOPE = 'use mode="slurm-session" with session=SessionConfig(scope="run")'
_ON_CLUSTER = 'for a file on the cluster write payload_path=["python", "/path/there.py"]'
_FIGURES = "remove it, figures of Slurm and Ray are in the metadata of each run"
_CPU_BINDING = "remove it, the runtime is one task with all CPUs of its node"

_REPLACEMENTS = {
    "SlurmQueueConfig": {
        "cpus": "use cpus_per_node",
        "cpus_per_task": "use cpus_per_node",
        "gpus": "use gpus_per_node",
        "gres": "use gpus_per_node and gpu_type",
        "memory": "use mem",
        "nodes": "use num_nodes",
        "ntasks": "remove it, the runtime is the one task of each node; use cpus_per_node for its CPUs",
        "time": "use time_limit",
    },
    "SlurmResource": {
        "extra_slurm_opts": "use queue=SlurmQueueConfig(…), and its extra_sbatch for options without a field",
        "status_poll_backoff_factor": "use poll_interval",
        "status_poll_interval_seconds": "use poll_interval",
        "status_poll_max_interval_seconds": "use poll_interval",
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
        "allocation_scope": _RUN_SCOPE,
        "cache_inject_globs": _NO_PACKING,
        "cleanup_on_failure": _KEPT,
        "cluster_reuse_tolerance": "remove it; a payload shares a warm cluster if that has what the payload asks for",
        "debug_mode": _KEPT,
        "default_environment_name": _NO_PACKING,
        "default_extra_files": "use run(extra_files=[…])",
        "default_skip_payload_upload": _ON_CLUSTER,
        "extra_slurm_opts": "use slurm=SlurmResource(queue=SlurmQueueConfig(…))",
        "launcher": "use default_launcher",
        "pack_on_remote": _NO_PACKING,
        "pack_platform": _NO_PACKING,
        "project_setup_cmd": _NO_PACKING,
        "project_setup_env": _NO_PACKING,
        "project_setup_input_globs": _NO_PACKING,
        "queue": "use slurm=SlurmResource(queue=…)",
        "remote_pack_timeout": _NO_PACKING,
        "run_allocation": _RUN_SCOPE,
        "ssh": "use slurm=SlurmResource(ssh=…)",
    },
    "SessionConfig": {
        "max_concurrent_jobs": "use max_concurrent_payloads",
        **dict.fromkeys(
            ("account", "constraint", "cpus_per_task", "gpus_per_node", "mem", "mem_per_cpu", "nodelist", "partition", "qos"),
            "use slurm=SlurmResource(queue=SlurmQueueConfig(…)), which says what a session asks for",
        ),
    },
    "RayLauncher": {
        "activate_sh": "use ComputeResource(pre_deployed_env_path=…), a directory with an activate.sh",
        "dashboard_host": 'use ray_args=["--dashboard-host=…"]',
        "dashboard_port": _PORTS,
        "head_startup_timeout": "use startup_timeout",
        "node_ip_address_command": "use network_interface or head_node_address",
        "port_config": _PORTS,
        "port_strategy": _PORTS,
        "pre_start_commands": "write them into the environment's activate.sh",
        "ray_address": "use BashLauncher for a payload that connects to a cluster of its own with ray.init(address=…)",
        "ray_port": _PORTS,
        "ray_start_args": "use ray_args",
        "redis_password": "remove it; auth protects the cluster",
        "use_head_ip": "use network_interface or head_node_address",
        "worker_cpu_bind": _CPU_BINDING,
        "worker_startup_delay": "remove it, all nodes start at once",
    },
    "run()": {
        "config": "use queue=, launcher=, extra_env= and extras= instead",
        "defer_cleanup": 'use ComputeResource(keep_run_dirs="all")',
        "env": "use extra_env",
        "environment_name": "use ComputeResource(pre_deployed_env_path=…)",
        "extra_slurm_opts": "use queue=SlurmQueueConfig(…); fields that it does not set stay as the resource has them",
        "force_env_push": _NO_PACKING,
        "metrics_collector": _FIGURES,
        "poll_timeout": "use ComputeResource(queue_timeout=…) for the wait in the queue, SlurmQueueConfig.time_limit for the run",
        "remote_payload_path": _ON_CLUSTER,
        "resource_requirements": "use queue=SlurmQueueConfig(…) or launcher=",
        "skip_payload_upload": _ON_CLUSTER,
        "slurm_metrics": _FIGURES,
        "use_session": 'use ComputeResource(mode="slurm-session")',
    },
}
"""By class or method: field and argument names of other tools, mainly dagster-slurm, and what to write instead."""
_CLASSES = {"SlurmRunAllocationConfig": "SessionConfig", "SlurmSessionResource": "SessionConfig"}
"""Classes of dagster-slurm, and the classes of this package that replace them under another name."""


def explain(owner: str, name: str, known: Iterable[str], noun: str = "field") -> str:
    """An error message for an unknown field or argument, with what to write instead or the names that exist.

    Args:
        owner: the class or method without such a field or argument.
        name: the unknown name.
        known: the known names.
        noun: "field" or "argument".
    """
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
