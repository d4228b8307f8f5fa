"""What a payload finds around it: its environment, and a working directory of its own."""

from __future__ import annotations

import base64
import json
import os
import zlib
from types import MappingProxyType
from typing import Any, Dict, Mapping

from ..protocol.record import CONTEXT
from ..protocol.spec import JOB_MARK, RAY_COORDINATES, PayloadSpec

_SCRUBBED = ("DAGSTER_PIPES_", "RAYSLURM_")
"""Prefixes of variables of the runtime's own environment that must not leak into a payload's."""

JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""The variable that tells Ray of a job before its driver says anything."""

Environment = Dict[str, str]


def pipes_param(params: Dict[str, Any]) -> str:
    """A Pipes bootstrap parameter as `dagster_pipes.encode_param` writes it: base64 of zlib of JSON."""
    return base64.b64encode(zlib.compress(json.dumps(params).encode("utf-8"))).decode("ascii")


def shared_variables(spec: PayloadSpec) -> Environment:
    """What all payloads of a kind have in common, and Ray's daemons may therefore hand to every worker."""
    return {} if spec.data_dir is None else {"RAYSLURM_DATA_DIR": spec.data_dir}


def payload_environment(
    spec: PayloadSpec,
    inherited: Environment,
    python: str,
    run_dir: str,
    messages: str,
    ray: Environment,
    worker_env: Mapping[str, str] = MappingProxyType({}),
) -> Environment:
    """The environment of a payload: what the runtime inherited, Ray's coordinates, and what the user asked for.

    Args:
        spec: the payload.
        inherited: what it is made from.
        python: the environment's Python.
        run_dir: the run directory.
        messages: where its Pipes messages go.
        ray: how it reaches its cluster.
        worker_env: variables that its cluster's workers have anyway.
    """
    env = {name: value for name, value in inherited.items() if not name.startswith(_SCRUBBED) and name not in RAY_COORDINATES}
    env["PATH"] = os.pathsep.join([os.path.dirname(python), env.get("PATH", os.defpath)])
    env["PYTHONUNBUFFERED"] = "1"
    env["RAYSLURM_RUN_DIR"] = run_dir
    env["DAGSTER_PIPES_CONTEXT"] = pipes_param({"path": os.path.join(run_dir, CONTEXT)})
    env["DAGSTER_PIPES_MESSAGES"] = pipes_param({"path": messages})
    everywhere = {**spec.env, **shared_variables(spec)}
    if spec.uses_ray:
        env.update({"RAY_COLOR_PREFIX": "0", "RAY_DEDUP_LOGS": "0"})  # Ray's defaults suit a terminal, not a log.
        missing = {name: value for name, value in everywhere.items() if worker_env.get(name) != value}
        if missing:
            env["RAY_OVERRIDE_JOB_RUNTIME_ENV"] = "1"  # What the driver itself gives to ray.init wins over that.
        env[JOB_CONFIG] = job_config(spec.nonce, missing)
    env.update(ray)
    env.update(everywhere)
    return env


def job_config(nonce: str, env: Mapping[str, str]) -> str:
    """What Ray is told of a payload as its job.

    Workers inherit the raylet's environment, not the driver's; the job's runtime_env reaches them, but has each of them
    started anew, where one that idles would do in half the time (Ray 2.60).

    Args:
        nonce: of the payload.
        env: variables that the cluster's workers lack.
    """
    job: Dict[str, Any] = {"metadata": {JOB_MARK: nonce}}
    if env:
        job["runtime_env"] = {"env_vars": dict(env)}
    return json.dumps(job)


def lay_out_work_dir(work_dir: str, spec: PayloadSpec) -> None:
    """Make the directories: data, and the payload's own with links to the entries of `working_dir` and the extra files.

    Links, so that the payload's own new files never land in the user's source tree and nothing is copied.
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
            os.unlink(link)  # An extra file stands in for the entry of the same name.
        os.symlink(source, link)
