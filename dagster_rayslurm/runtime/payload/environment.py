"""What a payload's process finds when it starts: environment variables, working directory and Ray cluster."""

from __future__ import annotations

import base64
import json
import os
import zlib
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional

from ..node.usage import GpuMonitor
from ..node.worker_nodes import WorkerNodes
from ..protocol.record import CONTEXT
from ..protocol.spec import JOB_MARK, RAY_COORDINATES, PayloadSpec

_SCRUBBED = ("DAGSTER_PIPES_", "RAYSLURM_")
"""Prefixes of the environment variables that a payload must not inherit from its runtime."""

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""The environment variable from which `ray.init` takes the configuration of a driver's Ray job."""

Environment = Dict[str, str]
"""Environment variables of a process, by name."""


@dataclass(frozen=True)
class LaunchContext:
    """What the runtime provides for one payload: its Ray cluster, and what measures its usage.

    Attributes:
        messages_path: file for the payload's Pipes messages.
        gpus: tells how busy the GPUs of this node are.
        ray_env: environment variables by which the payload reaches its Ray cluster.
        worker_env: environment variables that the workers of the Ray cluster have anyway.
        ray_temp_dir: Ray's temporary directory; None if the payload has no Ray cluster.
        shared_ray_pid: returns the id of the process below which a Ray cluster that payloads share runs; None if the cluster
            is the payload's own.
        workers: the worker nodes of the allocation, which measure usage as well.
        foreign_pids: returns the process ids that, with all processes below them, belong to other payloads.
        leak_check: starts a check for actors and other things that the payload leaves in its Ray cluster, and calls back
            with a description of each; None if the Ray cluster ends with the payload.
    """

    messages_path: str
    gpus: GpuMonitor
    ray_env: Environment = field(default_factory=dict)
    worker_env: Mapping[str, str] = field(default_factory=dict)
    ray_temp_dir: Optional[str] = None
    shared_ray_pid: Optional[Callable[[], Optional[int]]] = None
    workers: Optional[WorkerNodes] = None
    foreign_pids: Callable[[], Iterable[int]] = tuple
    leak_check: Optional[Callable[[Callable[[List[str]], None]], None]] = None


def pipes_param(params: Dict[str, Any]) -> str:
    """A Pipes bootstrap parameter as `dagster_pipes.encode_param` writes it: base64 of zlib of JSON."""
    return base64.b64encode(zlib.compress(json.dumps(params).encode("utf-8"))).decode("ascii")


def shared_variables(spec: PayloadSpec) -> Environment:
    """The environment variables that are the same for all payloads of a session; Ray's daemons hand them to every worker."""
    return {} if spec.data_dir is None else {"RAYSLURM_DATA_DIR": spec.data_dir}


def payload_environment(
    spec: PayloadSpec,
    inherited: Environment,
    python: str,
    run_dir: str,
    messages_path: str,
    ray_env: Environment,
    worker_env: Mapping[str, str] = MappingProxyType({}),
) -> Environment:
    """The environment of a payload: inherited variables, those for Ray and Dagster Pipes, and the variables of its configuration.

    Args:
        spec: the payload.
        inherited: variables to start from.
        python: the environment's Python, whose directory comes first in PATH.
        messages_path: file for Pipes messages.
        ray_env: variables by which the payload reaches its Ray cluster.
        worker_env: variables that the workers of the Ray cluster have anyway.
    """
    env = {name: value for name, value in inherited.items() if not name.startswith(_SCRUBBED) and name not in RAY_COORDINATES}
    env["PATH"] = os.pathsep.join([os.path.dirname(python), env.get("PATH", os.defpath)])
    env["PYTHONUNBUFFERED"] = "1"
    env["RAYSLURM_RUN_DIR"] = run_dir
    env["DAGSTER_PIPES_CONTEXT"] = pipes_param({"path": os.path.join(run_dir, CONTEXT)})
    env["DAGSTER_PIPES_MESSAGES"] = pipes_param({"path": messages_path})
    own = {**spec.env, **shared_variables(spec)}
    if spec.uses_ray:
        env.update({"RAY_COLOR_PREFIX": "0", "RAY_DEDUP_LOGS": "0"})  # Ray's defaults suit a terminal, not a log.
        missing = {name: value for name, value in own.items() if worker_env.get(name) != value}
        if missing:
            env["RAY_OVERRIDE_JOB_RUNTIME_ENV"] = "1"  # The driver's own arguments of ray.init take precedence.
        env[JOB_CONFIG] = job_config(spec.nonce, missing)
    env.update(ray_env)
    env.update(own)
    return env


def job_config(nonce: str, env: Mapping[str, str]) -> str:
    """The configuration of a payload's Ray job, as JSON for the variable `JOB_CONFIG`.

    Ray's workers inherit the environment of the raylet that starts them, not of the driver. The job's `runtime_env` changes
    their environment, but then Ray starts new workers for the job. Without it, idle ones do in half the time (Ray 2.60).

    Args:
        nonce: the random id of the payload, by which its Ray jobs are found.
        env: variables of the payload that the workers of the Ray cluster lack.
    """
    job: Dict[str, Any] = {"metadata": {JOB_MARK: nonce}}
    if env:
        job["runtime_env"] = {"env_vars": dict(env)}
    return json.dumps(job)


def lay_out_work_dir(work_dir: str, spec: PayloadSpec) -> None:
    """Make a payload's data directory, and its working directory with links to the entries of `working_dir` and the extra files.

    With links nothing is copied, and new files of the payload do not land among the source files in `working_dir`.
    """
    os.makedirs(work_dir, exist_ok=True)
    if spec.data_dir is not None:
        os.makedirs(spec.data_dir, exist_ok=True)
    sources = []
    if spec.working_dir:
        sources = [os.path.join(spec.working_dir, name) for name in os.listdir(spec.working_dir)]
    for source in [*sources, *spec.extra_files]:
        link = os.path.join(work_dir, os.path.basename(source))
        if os.path.islink(link):
            os.unlink(link)  # An extra file replaces the entry of the same name.
        os.symlink(source, link)
