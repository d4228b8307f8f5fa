"""What stands in a job's log: the lines that tell a user something, and which tasks failed. Pure.

The wording is that of srun and slurmstepd of Slurm 22.05 and 24.11.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..runtime.protocol.slurm_text import expand_nodelist

_NOISE = re.compile(
    r"srun: (cluster configuration lacks support for cpu binding|launch/slurm: |Job step aborted|forcing job termination"
    r"|got SIGCONT|Terminating |Force Terminated |error: Timed out waiting for job step to complete)"
    # It says what follows "DUE TO" if Slurm itself did it, such as TIME LIMIT.
    r"|slurmstepd[^:]*: error: \*\*\* (STEP|JOB) \S+ ON \S+ CANCELLED AT \S+ \*\*\*"
)
_TASKS = re.compile(r"srun: error: (?P<nodes>\S+): tasks? (?P<tasks>[0-9,-]+): (?P<how>.*\S)")


def relevant_lines(log: str) -> list[str]:
    """The lines of a log without empty ones, and without those in which Slurm comments on its own doing."""
    return [line for line in map(str.strip, log.splitlines()) if line and not _NOISE.match(line)]


def failed_tasks(log: str) -> list[tuple[str, int, str]]:
    """Tasks that srun calls failed, in its order: node, number, and how each ended ("Exited with exit code 3", "Killed").

    Those that srun ended itself, once one had failed, come after that one as "Terminated" or "Killed".
    """
    return [each for match in map(_TASKS.fullmatch, map(str.strip, log.splitlines())) if match for each in _tasks(match)]


def node_number(node: str, task: int, nodes: Sequence[str] | None) -> int | None:
    """The number of the node on which a task failed, by which its log is called; None if that is not known.

    Args:
        node: its name.
        task: its number, as srun has it.
        nodes: all nodes of a job of several components, by number, as srun counts the tasks of each component from 0; none
            if they are not known. None for any other job.
    """
    if nodes is None:
        return task
    return nodes.index(node) if node in nodes else None


def _tasks(match: re.Match[str]) -> list[tuple[str, int, str]]:
    try:
        nodes = expand_nodelist(match["nodes"])
        numbers = [int(each[1:]) for each in expand_nodelist(f"t[{match['tasks']}]")]
    except ValueError:
        return []
    if len(nodes) != len(numbers):  # More than one task on a node, which ours never have: it is not said where which ran.
        nodes = [match["nodes"]] * len(numbers)
    return [(node, number, match["how"]) for node, number in zip(nodes, numbers, strict=True)]
