"""Make the plan of a payload: its command, its Ray cluster and its requirements, all checked.

Nothing is started or written; the file system is only asked whether named files exist.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from .components import Component, component_specs, ray_across, request_for
from .config import check_length
from .launchers import Launcher, RayLauncher
from .runtime.node.resources import Footprint
from .runtime.payload.environment import JOB_CONFIG, job_config, shared_variables
from .runtime.protocol.spec import ComponentSpec, PayloadSpec, RaySpec, is_passable

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")

_QUOTED = re.compile(r"\\.|'[^']*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
_WORD = re.compile(rf"(?:{_QUOTED.pattern}|[^\s'\"\\])+", re.DOTALL)
_OPERATOR = re.compile(r"\|\|?|&&?|[({})]|(\d*|&)(>>?|<<?<?)\S*|.*[;&]")
_VARIABLE = re.compile(r"\$[A-Za-z_({]|`")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_MODULES = frozenset({".", "ml", "module", "source"})
"""Shell commands that load modules or scripts; `activate.sh` of the environment can do that instead."""
_BUILTINS = _MODULES | {"alias", "cd", "eval", "exec", "export", "set", "ulimit", "umask", "unset"}
"""Shell commands that are not programs, so that no payload can begin with them."""


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

    The `nonce` is a random text that tells this payload from all others; `components` are in the job's order, merged with the
    launcher.

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
        working_dir=_existing_directory(launcher.working_dir),
        extra_files=existing_files(extra_files),
        outputs=_checked_outputs(outputs),
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


def _existing_directory(path: str | None) -> str | None:
    if path is None:
        return None
    full = os.path.abspath(os.path.expanduser(path))
    if not os.path.isdir(full):
        raise ValueError(f"working_dir: there is no directory {full!r}")
    return full


def existing_files(paths: Sequence[str | os.PathLike[str]] | None) -> list[str]:
    """The absolute paths of `extra_files`; raises `ValueError` if one does not exist, or two have the same name."""
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


def parse_payload(payload_path: str | os.PathLike[str] | Sequence[str]) -> list[str]:
    """The command of a payload as a list of words.

    An existing file is a script, even with spaces in its path. Other text is split like a shell does, and is a script with
    arguments if its first word is an existing `.py` file. A list is used unchanged.

    Raises:
        ValueError: `payload_path` is empty, contains a NUL, cannot be split, needs a shell, or names a missing file.
    """
    if isinstance(payload_path, (str, os.PathLike)):
        argv = _parse_text(os.fspath(payload_path), is_path=isinstance(payload_path, os.PathLike))
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
    return argv


def _parse_text(text: str, is_path: bool) -> list[str]:
    """The words of a command from text; `is_path` means that the text is one path and is not split."""
    if "\0" in text:
        raise ValueError(f"payload_path: {text!r} contains a NUL character; remove it")
    script = script_of(text)
    if script is not None and script == _existing_file(text):
        return ["python", script]
    argv = [text]
    if not is_path:
        try:
            argv = shlex.split(text)
        except ValueError as error:
            raise ValueError(f"payload_path: {text!r} cannot be split into words: {error}; pass a list instead") from None
        _refuse_shell(text)
    if script is not None:
        return ["python", script, *argv[1:]]
    if not argv:
        return []
    is_file = is_path or (argv[0].endswith(".py") and "/" not in argv[0]) or (len(argv) == 1 and "/" in argv[0])
    if is_file and not os.access(argv[0], os.X_OK):
        command = ["python", *argv] if argv[0].endswith(".py") else argv
        remedy = f"; if it is on the cluster only, write a list: {command}" if os.path.isabs(argv[0]) else ""
        raise ValueError(f"payload_path: there is no file {argv[0]!r} (looked in {os.getcwd()}){remedy}")
    return argv


def script_of(payload_path: str | os.PathLike[str] | Sequence[str]) -> str | None:
    """The absolute path of the script that a payload runs; None if the payload runs no script of this machine."""
    if not isinstance(payload_path, (str, os.PathLike)):
        return None
    whole = _existing_file(os.fspath(payload_path))
    if whole is not None or isinstance(payload_path, os.PathLike):
        return whole
    try:
        words = shlex.split(payload_path)
    except ValueError:
        return None
    return _existing_file(words[0]) if words and words[0].endswith(".py") else None


def _existing_file(text: str) -> str | None:
    path = os.path.expanduser(text)
    # Path.is_file raises for a text that is too long for a file name; os.path.isfile raises for a NUL in some Python versions.
    return os.path.abspath(path) if "\0" not in path and os.path.isfile(path) else None


def _refuse_shell(text: str) -> None:
    """Raise `ValueError` for text with shell syntax, as no shell runs it; lists are not checked, and may contain anything."""
    for index, word in enumerate(_WORD.findall(text)):
        bare = _QUOTED.sub(_without_quotes, word)
        first = index == 0 and (bare in _BUILTINS or _ASSIGNMENT.match(bare))
        if first or _OPERATOR.fullmatch(bare) or _VARIABLE.search(bare):
            other = ", or load modules in the environment's activate.sh" if bare in _MODULES else ""
            if _ASSIGNMENT.match(bare) or bare == "export":
                other = ", or pass variables with extra_env"
            raise ValueError(
                f'payload_path: {word!r} needs a shell, and no shell runs the payload; write ["bash", "-lc", {text!r}]{other}'
            )


def _without_quotes(piece: re.Match[str]) -> str:
    """A placeholder for a quoted part of a word, in which only variables in double quotes are special."""
    quoted = piece.group()
    return "_$_" if quoted[0] == '"' and _VARIABLE.search(re.sub(r"\\.", "", quoted)) else "_"


def run_dir_name(run_id: str, step_key: str, nonce: str) -> str:
    """The name of a run directory: parts of the Dagster run id and the step, for readers, and the unique nonce."""
    return f"{run_id[:8]}-{_UNSAFE.sub('_', step_key)[:40]}-{nonce}"


def nonce_of(name: str) -> str:
    """The nonce of a payload, from the name of its run directory."""
    return name.rpartition("-")[2]
