"""What stands in a job's log: which task of srun ended first, and the lines that tell a user something. Pure.

The wording is that of srun and slurmstepd of Slurm 22.05 and 24.11.
"""

from __future__ import annotations

import re

_NOISE = re.compile(
    r"^(srun: (cluster configuration lacks support for cpu binding|launch/slurm: |Job step aborted|forcing job termination"
    r"|got SIGCONT|Terminating |Force Terminated |Waiting up to )"
    r"|slurmstepd[^:]*: error: \*\*\* (STEP|JOB) .* CANCELLED )"
)
_TASKS = re.compile(r"^srun: error: (?P<nodes>\S+): tasks? (?P<tasks>[0-9,-]+): (?P<how>.+)$")


def telling_lines(log: str) -> list[str]:
    """The lines of a log without those in which Slurm comments on its own doing."""
    return [line.strip() for line in log.splitlines() if line.strip() and not _NOISE.match(line.strip())]


def failed_tasks(log: str) -> list[tuple[str, int, str]]:
    """Tasks that srun calls failed, in its order: node, number, and how it ended ("Exited with exit code 3").

    Where one line tells of several nodes, all of them ended alike, and the first stands for them.
    """
    found = []
    for line in log.splitlines():
        match = _TASKS.match(line.strip())
        if match:
            nodes, task = match["nodes"], int(re.split("[,-]", match["tasks"])[0])
            first = re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes.split(",")[0] if "[" not in nodes else nodes)
            found.append((first, task, match["how"].strip()))
    return found
