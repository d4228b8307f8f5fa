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

# Prefixes of the environment variables that a payload must not inherit from its runtime.
_SCRUBBED = ("DAGSTER_PIPES_", "RAYSLURM_")

# The environment variable from which `ray.init` takes the configuration of a driver's Ray job.
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"

Environment = Dict[str, str]  # Environment variables of a process, by name.


@dataclass(frozen=True)
class LaunchContext:
    """What the runtime provides for one payload: its Ray cluster, if it has one, and what measures its usage."""

    messages_path: str  # File for the payload's Pipes messages.
    gpus: GpuMonitor
    foreign_pids: Callable[[], Iterable[int]]  # Ids of processes that, with all below them, belong to other payloads.
    ray_env: Environment = field(default_factory=dict)  # Variables by which the payload reaches its Ray cluster.
    worker_env: Mapping[str, str] = field(default_factory=dict)  # Variables that the cluster's workers have anyway.
    ray_temp_dir: Optional[str] = None
    shared_ray_pid: Optional[Callable[[], Optional[int]]] = None  # Id of the process above a Ray cluster that payloads share.
    workers: Optional[WorkerNodes] = None  # The worker nodes of the Ray cluster, which measure usage as well.
    # Looks for what the payload leaves in a shared Ray cluster, and calls back with a sentence about each thing.
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

    The directory of `python`, the environment's Python, comes first in PATH. For the others see `LaunchContext`.
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
    their environment, but then Ray starts new workers for the job. Without it, idle ones do in half the time (Ray 2.60). So `env`
    should have only the variables that the workers lack. By `nonce`, the payload's random id, its Ray jobs are found.
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
