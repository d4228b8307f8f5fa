"""Reads settings of Slurm on a node: from slurm.conf, or from slurmctld if slurm.conf cannot be read there."""

from __future__ import annotations

import re
from typing import Callable, Optional

from ..process.loop import Loop
from ..process.processes import query_program

# In each task, slurmd sets SLURM_CONF to the path of slurm.conf (tried with Slurm 22.05 and 24.11), so that most jobs spare
# slurmctld a query. A file that includes other files does not have all settings. Of a file, only the lines about accounting are
# printed, because a file may list thousands of nodes, and the output must fit into a pipe. Exit code 1 of grep means that no line
# matches; with another one, grep is missing or failed.
_QUERY = """
export LC_ALL=C
if [ -f "$SLURM_CONF" ]; then
    grep -q -i '^[[:space:]]*include[[:space:]]' "$SLURM_CONF"
    if [ $? = 1 ]; then
        grep -i AcctGather "$SLURM_CONF"
        [ $? -gt 1 ] || exit 0
    fi
fi
exec scontrol show config
"""


def query_config(loop: Loop, timeout: float, on_answer: Callable[[Optional[str]], None]) -> None:
    """Start a query of Slurm's settings about accounting, without waiting; the loop calls `on_answer` with the settings as text.

    `setting` finds a setting in the text. The loop calls `on_answer` with None if neither slurm.conf nor slurmctld can be read,
    or after `timeout` seconds. Raises OSError if no process can be started.
    """
    query_program(loop, ("sh", "-c", _QUERY), timeout, on_answer)


def setting(config: Optional[str], name: str) -> str:
    """Returns the value of the setting `name` in `config`, the lines of slurm.conf or the output of `scontrol show config`.

    The result is "" if the setting is missing or has no value, or if `config` is None. The last of several values counts.
    """
    pattern = r"^[^#\n]*?\b" + name + r"[ \t]*=[ \t]*\"?([^\s\"#]*)"
    values = re.findall(pattern, config or "", re.MULTILINE | re.IGNORECASE)
    return values[-1] if values and values[-1] != "(null)" else ""
