"""What the run directories say of payloads and their Ray clusters. Paths are absolute."""

import json
import os

from . import files
from .sessions import JOB_ID, check_owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Files of a run directory.
_PAYLOAD, _STATUS, _CONTEXT, _CLUSTER, _COMPONENTS = (
    "payload.json",
    "status.json",
    "pipes_context.json",
    "cluster.json",
    "components",
)
_MOST_BYTES = 1024 * 1024


def payloads(base: str) -> "list[dict[str, Any]]":
    """The payloads below a base directory: name and time of each run directory, Dagster's names, the job, and its files' content.

    `state` and `access` are the content of the status file and of the file about its Ray cluster; None if there is none.
    """
    runs = os.path.join(base, "runs")
    if not os.path.isdir(runs):
        return []
    check_owner(base, runs)
    found = []
    for name in os.listdir(runs):
        found.append(_payload(runs, name, name))
        components = os.path.join(runs, name, _COMPONENTS)
        for each in os.listdir(components) if os.path.isdir(components) else ():
            found.append(_payload(runs, name, os.path.join(name, _COMPONENTS, each)))
    return [each for each in found if each is not None]


def _payload(runs: str, run: str, name: str) -> "dict[str, Any] | None":
    directory = os.path.join(runs, name)
    spec = _json(directory, _PAYLOAD)
    if spec is None:
        return None
    job = files.read(os.path.join(runs, run, JOB_ID), 0, 64).decode("utf-8", "replace").strip()
    return {
        "name": name,
        "at": files.modified(directory) or 0.0,
        "run_id": str(spec.get("run_id") or ""),
        "step": str(spec.get("step") or ""),
        "assets": [str(key) for key in (_json(directory, _CONTEXT) or {}).get("asset_keys") or ()],
        "job_id": job,
        "status": _json(directory, _STATUS),
        "access": _json(directory, _CLUSTER),
    }


def _json(directory: str, name: str) -> "dict[str, Any] | None":
    try:
        found = json.loads(files.read(os.path.join(directory, name), 0, _MOST_BYTES).decode("utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
