"""Makes the plan of a payload from the arguments of a call and the fields of the resource, and checks arguments and fields.

The functions start and write nothing, but check whether named files exist. The functions raise `ValueError` for an invalid
argument or field.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

from .components import Component, component_specs, ray_across, request_for
from .config import ExecutionMode, SessionConfig, StrictConfig, Topology, check_length
from .fabric import fabric_variables
from .launchers import Launcher, RayLauncher
from .runtime.node.resources import Footprint
from .runtime.payload.environment import JOB_CONFIG, job_config, shared_variables
from .runtime.protocol.spec import ComponentSpec, PayloadSpec, RaySpec, is_passable
from .slurm.config import HetComponent, SlurmQueueConfig, SlurmResource
from .slurm.request import SBATCH_FIELDS, requests_gpus

C = TypeVar("C", bound=StrictConfig)
T = TypeVar("T")

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")
_WORD = re.compile(r"""(?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|[^\s'"\\])+""", re.DOTALL)
_QUOTED = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*\"""", re.DOTALL)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
# Words with a meaning to a shell: operators, redirections, words that end a command, and words with variables.
_SHELL = re.compile(r"\|\|?|&&?|[({})]|(\d*|&)(>>?|<<?<?)\S*|.*[;&]|.*(\$[A-Za-z_({]|`).*", re.DOTALL)
# Shell commands that load modules or scripts; `activate.sh` of the environment can load modules and scripts instead.
_MODULES = frozenset({".", "ml", "module", "source"})
_SHELL_SCRIPT = re.compile(rb"#!\s*(\S*/)?(env\s+(-S\s+)?)?(\S*/)?(ba|da|a|k|z|c|tc|fi)?sh(\s|$)")
# Shell commands that are not programs, so that no payload can begin with them.
_BUILTINS = _MODULES | {"alias", "cd", "eval", "exec", "export", "set", "ulimit", "umask", "unset"}


@dataclass(frozen=True)
class Plan:
    """Everything that a backend (the object that starts payloads in one mode) needs to start one payload."""

    payload: PayloadSpec
    ray: RaySpec | None  # The settings of the payload's Ray cluster; None for a payload without Ray.
    footprint: Footprint  # What the payload or its Ray cluster requires of each node.
    secret_env: dict[str, str] = field(default_factory=dict, repr=False)  # Variables for the payload's driver process only.
    uses_pipes: bool = True  # Whether the payload opens Dagster Pipes.
    script: str | None = None  # The script on this machine that the payload's command runs; None for other commands.
    # The components of the allocation, in the order of the Slurm job; () if there are none. Local mode simulates each component
    # by a node of Ray.
    components: tuple[ComponentSpec, ...] = ()
    fabric: str = "none"  # The launcher's preset for the network between the nodes.


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
    uses_pipes: bool | Mapping[str, bool] = True,
    components: Sequence[Component] = (),
    fails_infeasible: bool = False,
) -> Plan:
    """Returns the plan of a payload; raises `ValueError` for an invalid argument. Starts and writes nothing.

    `launcher` is the launcher with the settings of the call merged in. `nonce` is a random text that no other payload has. `env`
    has variables for the payload and the Ray workers, and `secret_env` has variables for the payload alone. `max_output_bytes`
    limits the size of all output files together, and `max_stdio_bytes` limits the size of the recorded stdout and stderr.
    `data_dir` is the directory that payloads share; None for the default on the cluster. `components` are the components of the
    job that one Ray cluster spans, as `spanning_components` returns them. If `fails_infeasible` is True, the run will fail when a
    task, actor or placement group waits for resources that no node of the Ray cluster can ever hold. `uses_pipes` must be True or
    False: a mapping is invalid here. The other arguments are those of `ComputeResource.run`.
    """
    both = sorted(set(env) & set(secret_env))
    if both:
        raise ValueError(f"secret_env: {both[0]} is in extra_env too; Ray workers would see it there")
    if isinstance(uses_pipes, Mapping):
        raise ValueError(f"uses_pipes: one for each component needs topology='{Topology.SEPARATE}'; pass a single one")
    if not isinstance(uses_pipes, bool):
        raise ValueError(f"uses_pipes: {uses_pipes!r} is neither True nor False")
    ray = ray_across(launcher, components)
    own = launcher if isinstance(launcher, RayLauncher) else None
    # Backends make this request again, with the job's name. Making it here reports mistakes early, and in local mode too.
    parts = component_specs(request_for(components, job_name="rayslurm", comment="")) if components else []
    argv, script = parse_payload(payload_path)
    if script is not None:
        _refuse_other_program(script)
    payload = PayloadSpec(
        argv=launcher.command(argv),
        nonce=nonce,
        env=dict(env),
        default_env=fabric_variables(own.fabric, own.network_interface) if own else {},
        data_dir=data_dir,
        working_dir=_existing_directory(launcher.working_dir),
        extra_files=existing_files(extra_files),
        outputs=_checked_outputs(outputs),
        max_output_bytes=max_output_bytes,
        max_stdio_bytes=max_stdio_bytes,
        grace_period=launcher.grace_period,
        uses_ray=ray is not None,
        preload=own.preload if own else [],
        fails_infeasible=fails_infeasible,
    )
    if payload.uses_ray:
        config = job_config(nonce, {**payload.default_env, **payload.env, **shared_variables(payload)})
        check_length(f"{JOB_CONFIG}={config}", "extra_env: what Ray gets of all variables together")
    return Plan(
        payload, ray, launcher.footprint(), dict(secret_env), uses_pipes, script, tuple(parts), own.fabric if own else "none"
    )


def run_dir_name(run_id: str, step_key: str, nonce: str) -> str:
    """Returns the name of a run directory: beginnings of the Dagster run id and the step's key, and `nonce`, joined by "-".

    `nonce` is a random text that no other payload has.
    """
    return f"{run_id[:8]}-{_UNSAFE.sub('_', step_key)[:40]}-{nonce}"


# ---- Files and commands


def _existing_directory(path: str | None) -> str | None:
    if path is None:
        return None
    full = os.path.abspath(os.path.expanduser(path))
    if not os.path.isdir(full):
        raise ValueError(f"working_dir: there is no directory {full!r}")
    return full


def existing_files(paths: Sequence[str | os.PathLike[str]] | None) -> list[str]:
    """Returns the absolute paths of the files and directories in `paths`, the argument `extra_files`; [] if `paths` is None.

    Raises `ValueError` if `paths` is a single path, a file does not exist, or two files have the same name.
    """
    if isinstance(paths, (str, os.PathLike)):
        raise ValueError(f"extra_files: write a list, such as [{os.fspath(paths)!r}]")
    full = [os.path.abspath(os.path.expanduser(os.fspath(path))) for path in paths or []]
    names = [os.path.basename(path) for path in full]
    for path, name in zip(full, names, strict=True):
        if not os.path.exists(path):
            raise ValueError(f"extra_files: there is no file {path!r}")
        if names.count(name) > 1:
            raise ValueError(f"extra_files: two files are called {name!r}; they would stand in the same directory")
    return full


def _checked_outputs(patterns: Sequence[str] | None) -> list[str]:
    if isinstance(patterns, str):
        raise ValueError(f"outputs: write a list, such as [{patterns!r}]")
    for pattern in patterns or []:
        if not isinstance(pattern, str) or not pattern or not is_passable(pattern):
            raise ValueError(f"outputs: {pattern!r} is not a pattern")
        if os.path.isabs(pattern) or ".." in pattern.split("/"):
            raise ValueError(f"outputs: {pattern!r} leaves the payload's directory; write a pattern relative to it")
    return list(patterns or [])


def parse_payload(payload_path: str | os.PathLike[str] | Sequence[str]) -> tuple[list[str], str | None]:
    """Returns two values: the words of a payload's command, and the absolute path of the script on this machine that it runs.

    If `payload_path` names a file, or its first word names a `.py` file, this file is the script, and the command is "python",
    the script and the other words. Any other text is split into words like in a shell. A list is used unchanged. The path is None
    for a list, and for a command without a script. Raises `ValueError` for an invalid command.
    """
    script = None
    if isinstance(payload_path, (str, os.PathLike)):
        argv, script = _parse_text(os.fspath(payload_path), is_path=isinstance(payload_path, os.PathLike))
    else:
        argv = list(payload_path)
    for index, word in enumerate(argv):
        if not isinstance(word, str) or not is_passable(word):
            raise ValueError(
                f"payload_path: {word!r} is not a word of a command; use strings without NUL characters and lone surrogates"
            )
        check_length(word, f"payload_path: word {index}")
    if not argv or not argv[0]:
        raise ValueError("payload_path: it is empty; name a script or a command")
    return argv, script


def _parse_text(text: str, is_path: bool) -> tuple[list[str], str | None]:
    """Returns the words of a payload's command that is given as text, and the absolute path of the script that it runs.

    The path is None for a command without a script on this machine. If `is_path` is True, `text` is a path and is not split into
    words. Raises `ValueError` for a file that does not exist, and for a text that cannot be split or needs a shell.
    """
    if "\0" in text:
        raise ValueError(f"payload_path: {text!r} contains a NUL character; remove it")
    argv, script = [text], _existing_file(text)
    if script is None and not is_path:
        try:
            argv = shlex.split(text)
        except ValueError as error:
            raise ValueError(f"payload_path: {text!r} cannot be split into words: {error}; pass a list instead") from None
        _refuse_shell(text)
        script = _existing_file(argv[0]) if argv and argv[0].endswith(".py") else None
    if script is not None:
        return ["python", script, *argv[1:]], script
    if not argv:
        return [], None
    is_file = is_path or (argv[0].endswith(".py") and "/" not in argv[0]) or (len(argv) == 1 and "/" in argv[0])
    if is_file and not os.access(argv[0], os.X_OK):
        command = ["python", *argv] if argv[0].endswith(".py") else argv
        remedy = f"; if it is on the cluster only, write a list: {command}" if os.path.isabs(argv[0]) else ""
        raise ValueError(f"payload_path: there is no file {argv[0]!r} (looked in {os.getcwd()}){remedy}")
    return argv, None


def _refuse_other_program(path: str) -> None:
    """Raise `ValueError` if the file `path` is a shell script or a binary, which Python cannot run."""
    with suppress(OSError), open(path, "rb") as file:
        start, name = file.read(256), os.path.basename(path)
        # Some of pip's scripts run in the shell and in Python: a line is a command to the one and a string to the other.
        if _SHELL_SCRIPT.match(start) and not re.search(rb"\n['\"]", start) and not name.endswith(".py"):
            raise ValueError(f'payload_path: {path} is a shell script; write ["bash", {name!r}] and extra_files=[{path!r}]')
        if start.startswith(b"\x7fELF"):
            raise ValueError(f"payload_path: {path} is a binary; write [{'./' + name!r}] and extra_files=[{path!r}]")


def _existing_file(text: str) -> str | None:
    path = os.path.expanduser(text)
    return os.path.abspath(path) if os.path.isfile(path) else None  # Path.is_file raises for too long a name.


def _without_literals(quoted: re.Match[str]) -> str:
    """Returns a quoted part of a command, in which "_" replaces the characters that cannot belong to shell syntax there.

    `quoted` is the match of the part with its quotes. In double quotes, `$`, backquotes, opening brackets and word characters
    stay, because they may form a variable or a command. For a part in single quotes, or a character after a backslash, the result
    is "_".
    """
    return re.sub(r"\\.|[^\w$`({]", "_", quoted.group(), flags=re.DOTALL) if quoted.group().startswith('"') else "_"


def _refuse_shell(text: str) -> None:
    """Raise `ValueError` for a command with shell syntax, such as a pipe, a redirection, a variable or a first word `cd`."""
    for index, word in enumerate(_WORD.findall(text)):
        bare = _QUOTED.sub(_without_literals, word)
        if _SHELL.fullmatch(bare) or (index == 0 and (bare in _BUILTINS or _ASSIGNMENT.match(bare))):
            # A login shell has `module`, but may put another Python first in PATH than that of the environment.
            other = ', with "-lc" for modules, or load them in the environment\'s activate.sh' if bare in _MODULES else ""
            if _ASSIGNMENT.match(bare) or bare == "export":
                other = ", or pass variables with extra_env"
            raise ValueError(
                f'payload_path: {word!r} needs a shell, and no shell runs the payload; write ["bash", "-c", {text!r}]{other}'
            )


# ---- The fields of a call, of a resource, and of both


def merge(base: C, own: C | None) -> C:
    """Returns a copy of `base`, a queue or launcher, in which the fields that are set in `own` have the values of `own`.

    Returns `own` unchanged if `own` and `base` have different classes, and `base` unchanged if `own` is None. If `base` is a
    queue, the copy lacks values of `base` that contradict a field that is set in `own`, such as `mem` and `mem_per_cpu`.
    """
    if own is None or type(own) is not type(base):
        return base if own is None else own
    fields = type(own).model_fields
    given = {name: getattr(own, name) for name in fields if name in own.model_fields_set - {"kind"}}
    changes = _without_contradictions(base, given) if isinstance(base, SlurmQueueConfig) else {}
    return type(own)(**{**{name: getattr(base, name) for name in fields}, **changes, **given})


def _without_contradictions(base: SlurmQueueConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of the queue `base` that must change before `given` overrides `base`, with their new values.

    `given` has the names and values of the fields that override `base`. For example, the result has `mem=None` if `given` sets
    `mem_per_cpu`, because a job cannot have both. The result always has `extra_sbatch`, without the options that contradict
    a field in `given`.
    """
    set_now = [each for each in SBATCH_FIELDS if given.get(each.name) is not None]
    changes: dict[str, Any] = {name: None for each in set_now for name in each.excludes}
    options = given.get("extra_sbatch", ())
    if any(map(requests_gpus, options)):
        changes |= {"gpus_per_node": None, "gpu_type": None}
    elif given.get("gpus_per_node", ...) in (0, None):
        changes["gpu_type"] = None
    if any(option.startswith("--exclusive=") for option in options):
        changes["exclusive"] = False
    gpus, exclusive = given.get("gpus_per_node") is not None, "exclusive" in given
    changes["extra_sbatch"] = [
        option
        for option in base.extra_sbatch
        if not (gpus and requests_gpus(option)) and not (exclusive and option.startswith("--exclusive="))
    ]
    return changes


def session_queue(queue: SlurmQueueConfig, session: SessionConfig) -> SlurmQueueConfig:
    """Returns the queue of a session's allocation: a copy of `queue`, the queue of the resource, changed for `session`.

    If `session` sets `num_nodes` or `time_limit`, the copy has the value of `session`.
    """
    changes: dict[str, Any] = {"num_nodes": session.num_nodes, "time_limit": session.time_limit}
    return merge(queue, SlurmQueueConfig(**{name: value for name, value in changes.items() if value is not None}))


def by_component(value: T | Mapping[str, T], names: Sequence[str], argument: str, default: T | None = None) -> dict[str, T]:
    """Returns a dictionary with the value of an argument of `run()` for each component in `names`.

    `value` is one value for all components, or a mapping from component ids to values. A component that the mapping leaves out
    gets the value `default`. Raises `ValueError` if the mapping has an unknown component, or if it leaves out a component and
    `default` is None. `argument` is the argument's name in the error message.
    """
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, value)
    known, values = ", ".join(map(repr, names)), {name: value.get(name, default) for name in names}
    if unknown := [name for name in value if name not in names]:
        raise ValueError(f"{argument}: there is no component {unknown[0]!r}; there are {known}")
    if missing := [name for name in names if values[name] is None]:
        raise ValueError(f"{argument}: there is none for component {missing[0]!r}; give one for each of {known}")
    return values  # type: ignore[return-value]


def check_slurm_mode(mode: str, slurm: SlurmResource | None, components: Sequence[HetComponent]) -> None:
    """Raise `ValueError` if `mode` is a Slurm mode and `slurm` is None, or if `mode` is "slurm" and there are components."""
    if mode != ExecutionMode.LOCAL and slurm is None:
        raise ValueError(f"slurm: mode {mode!r} needs a Slurm cluster; set slurm=SlurmResource(…)")
    if mode == ExecutionMode.SLURM and components:
        raise ValueError(
            f"components: a job of mode {mode!r} has none; use mode '{ExecutionMode.SLURM_HETJOB}', or remove components"
        )


def check_session(session: SessionConfig, components: Sequence[HetComponent]) -> None:
    """Raise `ValueError` if a session's configuration sets `num_nodes`, but the session's allocation has components."""
    if components and session.num_nodes is not None:
        raise ValueError(
            f"SessionConfig.num_nodes={session.num_nodes} says nothing of which component they are in; leave it out, and set "
            "SlurmQueueConfig.num_nodes in the queue of each component"
        )
