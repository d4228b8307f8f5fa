"""The log of a job: the lines that matter to a user, and the tasks that failed. Pure; srun and slurmstepd of 22.05 and 24.11."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ..runtime.protocol.slurm_text import expand_nodelist

_NOISE = re.compile(
    r"srun: (cluster configuration lacks support for cpu binding|launch/slurm: |Job step aborted|forcing job termination"
    r"|got SIGCONT|Terminating |Force Terminated |error: Timed out waiting for job step to complete)"
    # If Slurm itself cancelled the job, the line goes on with the cause, such as "DUE TO TIME LIMIT".
    r"|slurmstepd[^:]*: error: \*\*\* (STEP|JOB) \S+ ON \S+ CANCELLED AT \S+ \*\*\*"
)
"""Lines in which Slurm comments on its own actions."""
_TASKS = re.compile(r"srun: error: (?P<nodes>\S+): tasks? (?P<tasks>[0-9,-]+): (?P<how>.*\S)")


class FailedTask(NamedTuple):
    """A task that srun reports as failed, and how it ended, such as "Exited with exit code 3" or "Killed"."""

    node: str
    number: int
    how: str


def relevant_lines(log: str) -> list[str]:
    """The lines of a log without empty ones and without Slurm's comments on its own actions."""
    return [line for line in map(str.strip, log.splitlines()) if line and not _NOISE.match(line)]


def failed_tasks(log: str) -> list[FailedTask]:
    """The tasks that srun reports as failed, in the order of the log.

    Once a task has failed srun ends the others, which follow as "Terminated" or "Killed".
    """
    return [task for match in map(_TASKS.fullmatch, map(str.strip, log.splitlines())) if match for task in _tasks(match)]


def node_number(node: str, task: int, nodes: Sequence[str] | None) -> int | None:
    """The number of the node on which a task failed, for the name of the node's log; None if it is not known.

    Args:
        node: the name of the node.
        task: the number of the task; srun counts from 0 in each component.
        nodes: all nodes of a heterogeneous job by number, empty if they are not known; None for a job without components.
    """
    if nodes is None:
        return task
    return nodes.index(node) if node in nodes else None


def _tasks(match: re.Match[str]) -> list[FailedTask]:
    try:
        nodes = expand_nodelist(match["nodes"])
        numbers = [int(each[1:]) for each in expand_nodelist(f"t[{match['tasks']}]")]
    except ValueError:
        return []
    if len(nodes) != len(numbers):  # Several tasks on one node, which jobs of this package never have: which node is not known.
        nodes = [match["nodes"]] * len(numbers)
    return [FailedTask(node, number, match["how"]) for node, number in zip(nodes, numbers, strict=True)]
