"""Lists all run directories, sessions and Slurm jobs of this user, in one call for the `rayslurm` commands."""

import json
import os

from . import elements, sessions, slurm

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_SMALL = 4096
# Files of a run directory, and the most bytes of each.
_FILES = (("status.json", _SMALL), ("job_id", 64), ("exit", _SMALL), ("journal.jsonl", _SMALL))
_STATUS, _PAYLOAD, _CONTEXT, _CLUSTER, _COMPONENTS = (
    "status.json",
    "payload.json",
    "pipes_context.json",
    "cluster.json",
    "components",
)
_MOST_BYTES = 1024 * 1024


def listing(base: str, squeue: "Sequence[str]", timeout: float) -> "dict[str, Any]":
    """List the runs and sessions below the base directory `base`, and run the squeue command `squeue`.

    The command may take `timeout` seconds. Returns a dict with three keys:
        runs: the result of `runs`.
        sessions: the result of `sessions.generations` for all sessions.
        queue: the exit code, the output and the error output of the command.

    Raises PermissionError if a directory of sessions belongs to another user.
    """
    code, out, error = slurm.run(list(squeue), b"", timeout, [])
    return {
        "runs": runs(os.path.join(base, "runs")),
        "sessions": sessions.generations(base, "*", False),
        "queue": [code, out.decode("utf-8", "replace"), error.decode("utf-8", "replace")],
    }


def runs(directory: str) -> "list[dict[str, Any]]":
    """Return a dict for each run directory in `directory`, the oldest first; [] if `directory` cannot be listed.

    The dict has these keys:
        name: the name of the run directory.
        modified: the time of the last change, in seconds since the epoch.
        run_id, step, assets: the Dagster run, the step, and the keys of the assets; "" and [] if they are unknown.
        files: the beginnings of the files in `_FILES`, by name; "" for a missing file.
        components: the texts of the files status.json of the run's components, by the component's name; "" for a missing file.
            The dict is empty unless each component of the run has a payload and a directory of its own.
        has_arrays: whether the run has job arrays, whose elements each have a payload and a directory of their own.
        clusters: the texts of the files cluster.json, by path. Such a file has the address of a Ray cluster. A run has several
            such files if each component of the run has a Ray cluster.
    """
    found = []
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    for name in names:
        path = os.path.join(directory, name)
        try:
            if os.path.isdir(path):
                found.append(_run(path, name))
        except OSError:
            pass  # A sweep removes the directory meanwhile.
    return sorted(found, key=lambda run: run["modified"])


def _run(path: str, name: str) -> "dict[str, Any]":
    """Return the dict of one run directory, `path`; the docstring of `runs` lists its keys. `name` is the directory's name."""
    inside, components = os.listdir(path), os.path.join(path, _COMPONENTS)
    names = sorted(os.listdir(components)) if _COMPONENTS in inside else []
    parts = [os.path.join(components, each) for each in names]
    clusters = {os.path.join(each, _CLUSTER): _beginning(os.path.join(each, _CLUSTER), _MOST_BYTES) for each in [path, *parts]}
    assets = []  # type: list[str]
    for each in [path, *parts]:
        assets += map(str, _object(os.path.join(each, _CONTEXT)).get("asset_keys") or ())
    spec = next(filter(None, (_object(os.path.join(each, _PAYLOAD)) for each in [path, *parts])), {})  # type: dict[str, Any]
    return {
        "name": name,
        "modified": os.stat(path).st_mtime,
        "run_id": str(spec.get("run_id") or ""),
        "step": str(spec.get("step") or ""),
        "assets": assets,
        "files": {file: _beginning(os.path.join(path, file), size) for file, size in _FILES},
        "components": {each: _beginning(os.path.join(components, each, _STATUS), _SMALL) for each in names},
        "has_arrays": any(each.startswith(elements.ARRAY) for each in inside),
        "clusters": {file: text for file, text in clusters.items() if text},
    }


def _object(path: str) -> "dict[str, Any]":
    """Return the JSON object in a file; {} if the file is missing or contains anything else."""
    try:
        found = json.loads(_beginning(path, _MOST_BYTES))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _beginning(path: str, size: int) -> str:
    """Return the first `size` bytes of a file as text; "" if the file cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(size).decode("utf-8", "replace")
    except OSError:
        return ""
