"""Prepares a payload's environment variables and working directory, and finds a Ray cluster that a payload starts itself.

The preset for the network fabric is the set of environment variables that the launcher's field `fabric` stands for.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import zlib
from types import MappingProxyType
from typing import Any, Dict, Mapping, Optional

from ..node.resources import NodeResources
from ..process import processes
from ..protocol.record import CONTEXT
from ..protocol.spec import JOB_MARK, RAY_COORDINATES, PayloadSpec

# Prefixes of the environment variables that a payload must not inherit from its runtime.
_SCRUBBED = ("DAGSTER_PIPES_", "RAYSLURM_")

# The environment variable from which `ray.init` takes the configuration of a driver's Ray job.
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"

# Beginning of the argument that tells a raylet its resources; names and amounts follow as in "CPU,2,memory,1024" (Ray 2.60).
_RESOURCES = b"--static_resource_list="

Environment = Dict[str, str]  # Environment variables of a process, by name.


def pipes_param(params: Dict[str, Any]) -> str:
    """Returns `params` in the form in which Dagster Pipes passes parameters in environment variables: base64 of zlib of JSON.

    `dagster_pipes.encode_param` does the same, but Dagster need not be installed here.
    """
    return base64.b64encode(zlib.compress(json.dumps(params).encode("utf-8"))).decode("ascii")


def shared_variables(spec: PayloadSpec) -> Environment:
    """Returns the environment variables that Ray's daemons must have too, so that every Ray worker inherits them.

    This is RAYSLURM_DATA_DIR with the payload's data directory, or {} if the payload has none.
    """
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
    """Returns the environment variables of a payload's process, except for the secrets.

    Args:
        spec: The payload's start record, with the variables that the user has set.
        inherited: The variables on which the environment is based; those for Pipes, rayslurm and Ray's addresses are dropped.
        python: The path of the Python executable, whose directory comes first in PATH.
        run_dir: The payload's run directory.
        messages_path: The file to which the payload appends its Pipes messages.
        ray_env: The variables by which the payload reaches its Ray cluster; empty without a Ray cluster.
        worker_env: The variables that the cluster's Ray workers have already, so that the payload's Ray job need not set them.
    """
    env = {name: value for name, value in inherited.items() if not name.startswith(_SCRUBBED) and name not in RAY_COORDINATES}
    env["PATH"] = os.pathsep.join([os.path.dirname(python), env.get("PATH", os.defpath)])
    env["PYTHONUNBUFFERED"] = "1"
    env["RAYSLURM_RUN_DIR"] = run_dir
    env["DAGSTER_PIPES_CONTEXT"] = pipes_param({"path": os.path.join(run_dir, CONTEXT)})
    env["DAGSTER_PIPES_MESSAGES"] = pipes_param({"path": messages_path})
    own = {**chosen_defaults(spec, inherited), **spec.env, **shared_variables(spec)}
    if spec.uses_ray:
        env.update({"RAY_COLOR_PREFIX": "0", "RAY_DEDUP_LOGS": "0"})  # Ray's defaults suit a terminal, not a log.
        missing = {name: value for name, value in own.items() if worker_env.get(name) != value}
        if missing:
            env["RAY_OVERRIDE_JOB_RUNTIME_ENV"] = "1"  # The driver's own arguments of ray.init take precedence.
        env[JOB_CONFIG] = job_config(spec.nonce, missing)
    env.update(ray_env)
    env.update(own)
    return env


def chosen_defaults(spec: PayloadSpec, taken: Mapping[str, str]) -> Environment:
    """Returns those variables of the preset for the network fabric that take effect.

    A variable of the preset takes no effect if the user's configuration (`spec.env`) or `taken` has the variable. `taken` has the
    variables that the payload inherits.
    """
    return {name: value for name, value in spec.default_env.items() if name not in taken and name not in spec.env}


def fabric_in_words(spec: PayloadSpec, taken: Mapping[str, str]) -> str:
    """Returns text for the Dagster log: which variables the preset for the network fabric sets, and which it leaves as they are.

    Without a preset, the text is "". `taken` has the variables that the payload inherits.
    """
    chosen = chosen_defaults(spec, taken)
    kept = sorted(name for name in spec.default_env if name not in chosen)
    parts = ["sets " + " ".join("%s=%s" % item for item in sorted(chosen.items()))] if chosen else []
    return "; ".join(parts + (["leaves %s as it is set" % ", ".join(kept)] if kept else []))


def job_config(nonce: str, env: Mapping[str, str]) -> str:
    """Returns the JSON text of the configuration of a payload's Ray job, for the environment variable `JOB_CONFIG`.

    The job's metadata contain `nonce`, the payload's random name, by which its Ray jobs are found. `env` has the environment
    variables that Ray workers of this job need beyond those of the raylet. If `env` is not empty, Ray starts new workers for the
    job; otherwise Ray uses idle workers, which takes half the time (Ray 2.60).
    """
    job: Dict[str, Any] = {"metadata": {JOB_MARK: nonce}}
    if env:
        job["runtime_env"] = {"env_vars": dict(env)}
    return json.dumps(job)


def lay_out_work_dir(work_dir: str, spec: PayloadSpec) -> None:
    """Create the payload's data directory, and its working directory `work_dir` with symbolic links to its input files.

    The input files are the entries of `spec.working_dir`, and `spec.extra_files`, which replace entries of the same name. Because
    of the links nothing is copied, and new files of the payload do not land among the user's source files. Raises OSError if a
    directory or link cannot be created.
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
        with contextlib.suppress(FileExistsError):  # Before a requeue, the payload put a file of its own there.
            os.symlink(source, link)


def find_own_ray(run_dir: str, node: NodeResources, has_cluster: bool, max_age: float) -> Optional[str]:
    """Looks for a Ray cluster that a payload has started itself.

    Returns a warning about this Ray cluster; None if there is no such Ray cluster, or if no warning is needed. The sign of such a
    Ray cluster is a raylet on this node whose environment has the payload's run directory.

    Args:
        run_dir: The payload's run directory.
        node: The resources that are granted on this node.
        has_cluster: Whether the launcher gave the payload another Ray cluster.
        max_age: The greatest age, in seconds, of the process table in which the function looks for the raylet.
    """
    for process in processes.descendants(os.getpid(), processes.recent_table(max_age)[1]):
        if process.name == "raylet" and processes.has_environment(process.pid, "RAYSLURM_RUN_DIR=" + run_dir):
            message = own_ray_warning(raylet_resources(processes.command_line(process.pid)), node, has_cluster)
            if message is not None:
                return message
    return None


def raylet_resources(command: bytes) -> Dict[str, float]:
    """Returns the amounts of resources, by name, that a raylet's command line names, such as {"CPU": 2.0, "memory": 1024.0}.

    In `command`, NUL bytes separate the arguments. The result is empty if the command line names no resources.
    """
    listed = next((word for word in command.split(b"\0") if word.startswith(_RESOURCES)), _RESOURCES)
    words = listed[len(_RESOURCES) :].decode("utf-8", "replace").split(",")
    try:
        return {name: float(amount) for name, amount in zip(words[::2], words[1::2])}
    except ValueError:
        return {}


def own_ray_warning(resources: Dict[str, float], node: NodeResources, has_cluster: bool) -> Optional[str]:
    """Returns a warning about a Ray cluster that a payload has started itself; None if no warning is needed.

    A warning is needed if the Ray cluster counts more resources than `node` grants, or if the launcher's Ray cluster idles.

    Args:
        resources: The amounts of the Ray cluster's resources, by name; memory in bytes.
        node: The resources that are granted on the node.
        has_cluster: Whether the launcher gave the payload another Ray cluster, which idles now.
    """
    excess = []
    if resources.get("CPU", 0.0) > node.num_cpus:
        excess.append("it counts %g CPUs and node %s grants %d (num_cpus)" % (resources["CPU"], node.name, node.num_cpus))
    memory = resources.get("memory", 0.0) + resources.get("object_store_memory", 0.0)
    if node.memory_limit is not None and memory > node.memory_limit:
        figures = (memory / 2**30, node.name, node.memory_limit / 2**30)
        excess.append("it counts %.1f GiB of memory and node %s grants %.1f (object_store_memory)" % figures)
    if has_cluster:
        idle = "the payload has started a Ray of its own, so its launcher's cluster idles; call ray.init() without an address"
        return "; ".join([idle, *excess])
    limits = "the payload's own Ray takes more than is granted: %s; set the arguments of ray.init or `ray start`"
    return limits % " and ".join(excess) if excess else None
