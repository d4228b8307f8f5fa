"""Why there is no Ray cluster, or none any more."""

from __future__ import annotations


class ClusterError(Exception):
    """The cluster did not start or was lost.

    Attributes:
        reason: "environment", "cluster-start" or "cluster-lost", as in the `end` record.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
