"""Reports of the process that runs Ray (`node_main`) to the runtime: JSON lines with an `event`."""

from __future__ import annotations

from enum import Enum


class Report(str, Enum):
    """The `event` of a report."""

    ENVIRONMENT = "environment"
    """The environment's Ray cannot be used; `message` says why."""
    VERSION = "version"
    """Ray was imported: `ray_version`."""
    NODES = "nodes"
    """The node table has changed: `nodes`."""
    ENTRYPOINT = "entrypoint"
    """`ray symmetric-run` has started its command."""
    UNSCHEDULABLE = "unschedulable"
    """No node can ever hold what is pending; `message` names it."""
    GCS_LOST = "gcs-lost"
    WATCH_FAILED = "watch-failed"
    """The GCS cannot be polled; `message` says why."""
    TABLES = "audit"
    """Answers a query of the leak check: `id` and `tables`."""

    def __str__(self) -> str:
        return self.value
