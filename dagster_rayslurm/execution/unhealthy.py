"""Remembers nodes that failed a health check, and decides whether the run is started once more without them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..backends.base import Backend, CanExclude
from ..compute_fields import EXCLUDE_AND_RETRY
from ..errors import UnhealthyNode
from ..failures import RunFailure


def remember(nodes: Sequence[UnhealthyNode], backend: Backend, log: Any) -> str | None:
    """Store unhealthy nodes for all runs of this user. If that fails, logs the reason and returns it; else returns None."""
    if nodes and isinstance(backend, CanExclude):
        try:
            backend.remember_unhealthy(nodes)
        except OSError as error:
            problem = f"nodes that failed a health check cannot be noted: {error}"
            log.warning(f"[rayslurm] {problem}")
            return problem
    return None


def second_try(failure: RunFailure, plan: Any, backend: Backend, policy: str, log: Any) -> bool:
    """Remembers the unhealthy nodes of a failed run; returns True if the run is to be started once more without them.

    `policy` is the resource's `on_unhealthy`. The log says that the run is started again. If that
    is not possible although `policy` asks for it, the failure's description gets the reason.
    """
    nodes = failure.unhealthy
    problem = remember(nodes, backend, log)
    if not nodes or policy != EXCLUDE_AND_RETRY or not isinstance(backend, CanExclude):
        return False
    try:
        problem = problem or backend.exclusion_for_plan(plan).problem(nodes)
    except OSError as error:
        problem = f"the cluster does not say which nodes are left: {error}"
    if problem:
        failure.description = f"{failure.description}; the run is not started again: {problem}"
        return False
    log.warning(
        f"[rayslurm] {failure.description}; the run is started once more without {', '.join(each.node for each in nodes)}"
    )
    return True
