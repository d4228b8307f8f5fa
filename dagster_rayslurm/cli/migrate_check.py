"""`rayslurm migrate-check` says what to change in Python files that use dagster-slurm, without importing the files."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import click

from ..fields import explain
from .common import COMMANDS, json_option, print_json, see_troubles

_THEIRS, _OURS = "dagster_slurm", "dagster_rayslurm"
# Classes of dagster-slurm that have another name here.
_RENAMED = {"ComputeLauncher": "Launcher", "SlurmSessionResource": "SessionConfig"}
# Methods of dagster-slurm that are missing here, with the class that had them.
_METHODS = {
    **dict.fromkeys(("cleanup_deferred_run_dir", "get_pipes_client", "register_cluster", "run_hetjob"), "ComputeResource"),
    **dict.fromkeys(("from_env_slurm", "set_auth_provider"), "SlurmResource"),
}
_AS_ARGUMENT = "this asset metadata has no effect here; give run() the argument"
# Keys of asset metadata of dagster-slurm, with advice.
_TEXTS = {
    "force_slurm_env_push": f"{_AS_ARGUMENT} environment=",
    "skip_slurm_payload_upload": f"{_AS_ARGUMENT} payload_path=",
    "slurm_environment_name": f"{_AS_ARGUMENT} environment=",
    "slurm_extra_files": f"{_AS_ARGUMENT} extra_files=",
    "slurm_pack_cmd": f"{_AS_ARGUMENT} environment=",
    "slurm_payload_path": f"{_AS_ARGUMENT} payload_path=",
    "slurm_pre_deployed_env_path": f"{_AS_ARGUMENT} environment=",
}
Finding = tuple[int, str, str]  # Line, text in the file, and advice ("" if the name is the same here).


@click.command()
@click.argument("files", metavar="FILE…", nargs=-1, required=True, type=click.Path(path_type=Path))
@json_option
def migrate_check(files: tuple[Path, ...], as_json: bool) -> None:
    """Say what to change in Python files that use dagster-slurm.

    The command reads the given files, and all Python files below the given directories, without importing the files. Exits with 0
    if there is nothing to change, 1 if there is something to change, and 2 if a file cannot be read.
    """
    counts: Counter[str] = Counter()
    for path in files:
        for each in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            try:
                found = sorted(dict.fromkeys(_findings(ast.parse(each.read_bytes(), str(each)))), key=itemgetter(0))
            except (OSError, SyntaxError, ValueError) as error:
                counts["unread"] += 1
                click.echo(f"Error: {each} cannot be read: {error}{see_troubles(COMMANDS)}", err=True)
                continue
            counts["same"] += sum(not advice for _, _, advice in found)
            for line, name, advice in found:
                if advice:
                    counts["to change"] += 1
                    row = {"file": str(each), "line": line, "found": name, "advice": advice}
                    print_json(row) if as_json else click.echo(f"{each}:{line}: {name} → {advice}")
    if not as_json:
        click.echo(f"{counts['to change']} to change, {counts['same']} names are the same", err=True)
    click.get_current_context().exit(2 if counts["unread"] else int(counts["to change"] > 0))


def _findings(tree: ast.Module) -> Iterator[Finding]:
    """Yields a finding (line, text in the file, advice) for each use of a name of dagster-slurm in the parsed file `tree`."""
    names: dict[str, str] = {}  # By name in the file, the name in dagster_slurm; "" for the module itself.
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == _THEIRS:
                    names[alias.asname or _THEIRS] = ""
                    yield node.lineno, f"import {alias.name}", f"import {_OURS}"
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] == _THEIRS:
            there = [alias.name for alias in node.names]
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
            here = [_RENAMED.get(name, name) for name in there if name == "*" or _public(_RENAMED.get(name, name))]
            advice = f"from {_OURS} import {', '.join(here)}" if here else "leave it out"
            yield node.lineno, f"from {node.module} import {', '.join(there)}", advice
            for name in there:
                yield node.lineno, name, _becomes(name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = _name(node.value, names)
            if owner == "":
                yield node.lineno, node.attr, _becomes(node.attr)
            elif owner == "ExecutionMode":
                modes = [each.name for each in _public(owner)]
                yield node.lineno, f"{owner}.{node.attr}", "" if node.attr in modes else explain(owner, node.attr, modes, "mode")
        elif isinstance(node, ast.Call):
            yield from _call(node, names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in _TEXTS:
            yield node.lineno, repr(node.value), _TEXTS[node.value]


def _call(node: ast.Call, names: dict[str, str]) -> Iterator[Finding]:
    """Yields findings for a call: one for the called method if this package lacks the method, otherwise one for each keyword.

    Yields nothing if the call does not look like a call of dagster-slurm. `names` maps a name in the file to the name in
    dagster-slurm, or to "" for the module itself.
    """
    called = _name(node.func, names) or ""
    owner = _RENAMED.get(called, called)
    method, on = (node.func.attr, _name(node.func.value, names)) if isinstance(node.func, ast.Attribute) else ("", None)
    keywords = [each.arg for each in node.keywords]
    if (method in _METHODS and (names or method == "run_hetjob")) or (on, method) == ("SlurmResource", "from_env"):
        yield node.lineno, f".{method}()", explain(_METHODS.get(method, "SlurmResource"), method, (), "method")
    elif method == "run" and "payload_path" in keywords:
        known = inspect.signature(_public("ComputeResource").run).parameters
        yield from _keywords(node, "run()", known, "argument")
    elif hasattr(_public(owner), "model_fields"):
        yield from _keywords(node, owner, _public(owner).model_fields, "field")


def _keywords(node: ast.Call, owner: str, known: Mapping[str, Any], noun: str) -> Iterator[Finding]:
    """Yields a finding for each keyword of the call `node`, and for each unknown key of a dict in the keyword `extra_slurm_opts`.

    `owner` is the name of the called class or method. The keys of `known` are the keywords that exist in this package; the
    finding of such a keyword has the advice "". `noun` is the word for a keyword in the advice, such as "field".
    """
    queue = _public("SlurmQueueConfig").model_fields
    for each in node.keywords:
        if each.arg is None:
            yield each.value.lineno, f"{owner} with **", "compare the keys with docs/configuration.md; they are not seen here"
            continue
        yield each.value.lineno, f"{each.arg}=", "" if each.arg in known else explain(owner, each.arg, known, noun)
        if each.arg == "extra_slurm_opts" and isinstance(each.value, ast.Dict):
            for key in each.value.keys:
                if isinstance(key, ast.Constant) and key.value not in queue:
                    yield key.lineno, repr(key.value), explain("SlurmQueueConfig", str(key.value), queue)


def _becomes(name: str) -> str:
    """Returns advice about the name `name` of a class or function of dagster-slurm; "" if the name is the same here."""
    import dagster_rayslurm

    return "" if name == "*" or _public(name) else explain(_OURS, name, dagster_rayslurm.__all__, "name")


def _name(node: ast.AST, names: dict[str, str]) -> str | None:
    """Returns the name in dagster-slurm that an expression stands for: "" for the module, and None for anything else.

    `names` maps a name in the file to the name in dagster-slurm, or to "" for the module itself.
    """
    if isinstance(node, ast.Attribute):
        return node.attr if _name(node.value, names) == "" else None
    return names.get(node.id) if isinstance(node, ast.Name) else None


def _public(name: str) -> Any:
    """Returns the public class or function `name` of this package; None if this package has no such name."""
    import dagster_rayslurm

    return getattr(dagster_rayslurm, name, None) if name in dagster_rayslurm.__all__ else None
