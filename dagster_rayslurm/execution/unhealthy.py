"""Stores nodes that failed a health check, and decides whether a failed run is started once more without these nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..backends.base import Backend, CanExclude
from ..compute_fields import EXCLUDE_AND_RETRY
from ..errors import UnhealthyNode
from ..failures import RunFailure


def remember(nodes: Sequence[UnhealthyNode], backend: Backend, log: Any) -> str | None:
    """Store nodes that failed a health check in the cluster's base directory, so that later jobs of this user can avoid them.

    Returns None, or the reason why the nodes cannot be stored, which is also logged. Does nothing if `nodes` is empty, or if the
    backend cannot avoid nodes.
    """
    if nodes and isinstance(backend, CanExclude):
        try:
            backend.remember_unhealthy(nodes)
        except OSError as error:
            problem = f"nodes that failed a health check cannot be noted: {error}"
            log.warning(f"[rayslurm] {problem}")
            return problem
    return None


def second_try(failure: RunFailure, plan: Any, backend: Backend, policy: str, log: Any) -> bool:
    """Returns whether a failed run is to be started once more without its unhealthy nodes. The caller starts it.

    Also stores the unhealthy nodes for later jobs. `failure` is the failure of the run. `policy` is `on_unhealthy` of the
    resource. If `policy` asks for a second start, but a second start is impossible, the function appends the reason to the
    description of `failure`, and returns False.
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
