"""Make the plan of a payload: its command, its Ray cluster and its requirements, all checked.

Nothing is started or written; the file system is only asked whether named files exist.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType

from .components import Component, component_specs, ray_across, request_for
from .config import check_length
from .launchers import Launcher, RayLauncher
from .payload_command import parse_payload, script_of
from .runtime.node.resources import Footprint
from .runtime.payload.environment import JOB_CONFIG, job_config, shared_variables
from .runtime.protocol.spec import PROTOCOL_VERSION, ComponentSpec, PayloadSpec, RaySpec, is_passable

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class Plan:
    """What a backend needs to start one payload: the specifications of the payload and its Ray cluster.

    Attributes:
        ray: None for a payload without Ray.
        footprint: what the payload or its Ray cluster requires of each node.
        secret_env: variables for the payload's driver process only.
        script: the script on this machine that the payload's command runs; None for other commands.
        components: components of the allocation in the job's order, which local mode simulates; empty where all nodes are
            alike.
    """

    payload: PayloadSpec
    ray: RaySpec | None
    footprint: Footprint
    secret_env: dict[str, str] = field(default_factory=dict, repr=False)
    uses_pipes: bool = True
    script: str | None = None
    components: tuple[ComponentSpec, ...] = ()


def relocate(plan: Plan, script: str | None, working_dir: str | None, extra_files: Sequence[str], data_dir: str) -> Plan:
    """The plan with other paths: those that the script, directories and files have on the machine where the payload runs."""
    payload = plan.payload
    argv = [script if script is not None and word == plan.script else word for word in payload.argv]
    moved = replace(payload, argv=argv, working_dir=working_dir, extra_files=list(extra_files), data_dir=data_dir)
    return replace(plan, payload=moved)


def existing_directory(path: str | None, what: str) -> str | None:
    """The absolute path of a directory, which must exist; None if `path` is None.

    Raises:
        ValueError: the directory does not exist; the sentence names it as `what`.
    """
    if path is None:
        return None
    full = os.path.abspath(os.path.expanduser(path))
    if not os.path.isdir(full):
        raise ValueError(f"{what}: there is no directory {full!r}")
    return full


def existing_files(paths: Sequence[str | os.PathLike[str]] | None, what: str) -> list[str]:
    """The absolute paths of files and directories, which must exist.

    Raises:
        ValueError: a file does not exist, or two files have the same name; the sentence names the argument as `what`.
    """
    if isinstance(paths, (str, os.PathLike)):
        raise ValueError(f"{what}: write a list, such as [{os.fspath(paths)!r}]")
    full = [os.path.abspath(os.path.expanduser(os.fspath(path))) for path in paths or []]
    for path in full:
        if not os.path.exists(path):
            raise ValueError(f"{what}: there is no file {path!r}")
    names = [os.path.basename(path) for path in full]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{what}: two files are called {name!r}; they would stand in the same directory")
    return full


def check_outputs(patterns: Sequence[str] | None) -> list[str]:
    """Check patterns of output files; returns the patterns as a list.

    Raises:
        ValueError: a pattern is invalid, or leads out of the payload's directory.
    """
    if isinstance(patterns, str):
        raise ValueError(f"outputs: write a list, such as [{patterns!r}]")
    for pattern in patterns or []:
        if not isinstance(pattern, str) or not pattern or not is_passable(pattern):
            raise ValueError(f"outputs: {pattern!r} is not a pattern")
        if os.path.isabs(pattern) or ".." in pattern.split("/"):
            raise ValueError(f"outputs: {pattern!r} leaves the payload's directory; write a pattern relative to it")
    return list(patterns or [])


def make_plan(
    *,
    payload_path: str | os.PathLike[str] | Sequence[str],
    launcher: Launcher,
    nonce: str,
    max_output_bytes: int,
    max_stdio_bytes: int,
    env: Mapping[str, str] = MappingProxyType({}),
    secret_env: Mapping[str, str] = MappingProxyType({}),
    data_dir: str | None = None,
    extra_files: Sequence[str | os.PathLike[str]] | None = None,
    outputs: Sequence[str] | None = None,
    uses_pipes: bool = True,
    components: Sequence[Component] = (),
) -> Plan:
    """The plan of a payload, from the arguments of `run()` and the fields of the resource.

    Args:
        nonce: a random text that tells this payload from all others.
        components: in the job's order, merged with the launcher; empty where all nodes are alike.

    Raises:
        ValueError: an argument is invalid; the sentence names it.
    """
    both = sorted(set(env) & set(secret_env))
    if both:
        raise ValueError(f"secret_env: {both[0]} is in extra_env too; Ray workers would see it there")
    ray = ray_across(launcher, components)
    # Backends make this request again, with the job's name. Making it here reports mistakes early, and in local mode too.
    parts = component_specs(request_for(components, job_name="rayslurm", comment="")) if components else []
    payload = PayloadSpec(
        argv=launcher.command(parse_payload(payload_path)),
        nonce=nonce,
        env=dict(env),
        data_dir=data_dir,
        working_dir=existing_directory(launcher.working_dir, "working_dir"),
        extra_files=existing_files(extra_files, "extra_files"),
        outputs=check_outputs(outputs),
        max_output_bytes=max_output_bytes,
        max_stdio_bytes=max_stdio_bytes,
        grace_period=launcher.grace_period,
        uses_ray=ray is not None,
        preload=launcher.preload if isinstance(launcher, RayLauncher) else [],
    )
    if payload.uses_ray:
        config = job_config(nonce, {**payload.env, **shared_variables(payload)})
        check_length(f"{JOB_CONFIG}={config}", "extra_env: what Ray gets of all variables together")
    return Plan(payload, ray, launcher.footprint(), dict(secret_env), uses_pipes, script_of(payload_path), tuple(parts))


def fingerprint(ray: RaySpec, python: Sequence[str]) -> str:
    """A short hash of a warm Ray cluster's configuration; payloads share a warm cluster only if their hashes are equal."""
    # Clusters that differ only in their startup timeout are interchangeable.
    shape = asdict(replace(ray, startup_timeout=0.0))
    text = json.dumps([PROTOCOL_VERSION, list(python), shape], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:12]


def run_dir_name(run_id: str, step_key: str, nonce: str) -> str:
    """The name of a run directory: parts of the Dagster run id and the step, for readers, and the unique nonce."""
    step = _UNSAFE.sub("_", step_key)[:40]
    return f"{run_id[:8]}-{step}-{nonce}"


def nonce_of(name: str) -> str:
    """The nonce of a payload, from the name of its run directory."""
    return name.rpartition("-")[2]
