"""Kinds of reports that the process which runs Ray (`node_main`) sends to the runtime: JSON lines with an `event`."""

from __future__ import annotations

from enum import Enum


class Report(str, Enum):
    """The kind of a report, in its field `event`. The docstrings name the other fields."""

    ENVIRONMENT = "environment"
    """The Ray of this Python environment cannot be used; `message` says why."""
    VERSION = "version"
    """Ray was imported; its version is `ray_version`."""
    NODES = "nodes"
    """Ray's node table has changed; `nodes` is the new one."""
    ENTRYPOINT = "entrypoint"
    """`ray symmetric-run` has started its command, so the Ray cluster is up."""
    UNSCHEDULABLE = "unschedulable"
    """A task, actor or placement group waits for resources that no node can ever grant; `message` names it."""
    GCS_LOST = "gcs-lost"
    """Ray's control service (GCS) has ended."""
    WATCH_FAILED = "watch-failed"
    """The GCS cannot be asked for its nodes; `message` says why."""
    TABLES = "audit"
    """The answer to the query `id` of the leak check: `tables`, or None after an error."""

    def __str__(self) -> str:
        return self.value
