"""Asks Slurm for the energy that a job's step has consumed, where Slurm measures energy (`AcctGatherEnergyType` in slurm.conf).

Slurm measures whole nodes, so the figure is the step's own only if the job does not share its nodes (sstat(1)).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Callable, Mapping, Optional, Sequence

from ..process.loop import Loop
from ..process.processes import query_program

_DELAY = 2.0  # Seconds after which Slurm's configuration is asked for: the start comes first, and short jobs ask nothing.
_TIMEOUT = 3.0  # Seconds in which Slurm's programs must answer; the `end` of a payload waits that long at most.
_NO_VALUES = (0, 2**32 - 2, 2**64 - 2)  # No measurement yet, and Slurm's NO_VAL and NO_VAL64.


def is_measured(config: Optional[str]) -> bool:
    """Return whether Slurm measures energy, according to the output of `scontrol show config`; False if there is no output."""
    match = re.search(r"^AcctGatherEnergyType *= *(?:acct_gather_energy/)?(\S+)", config or "", re.MULTILINE)
    return match is not None and match.group(1) not in ("none", "(null)")


def parse_joules(text: Optional[str]) -> Optional[int]:
    """Return the joules in the output of `sstat --format=ConsumedEnergyRaw` for one step; None if it has no figure."""
    match = re.fullmatch(r"\s*([0-9]+)\s*", text or "")
    return int(match.group(1)) if match is not None and int(match.group(1)) not in _NO_VALUES else None


def own_step(environ: Mapping[str, str]) -> Optional[str]:
    """Return the step of this task, such as "17.0"; None outside of a step, and in jobs that are not asked for their energy.

    Steps of a heterogeneous job have several ids. The thousands of elements of an array would each ask slurmctld.
    """
    job, step = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID")
    left_out = environ.get("SLURM_HET_SIZE") or environ.get("SLURM_ARRAY_JOB_ID")
    return "%s.%s" % (job, step) if job and step and not left_out else None


@dataclass(eq=False)
class StepEnergy:
    """The energy of one step. Slurm is asked once whether it measures energy; where it does not, nothing else is asked."""

    loop: Loop
    step: str

    def __post_init__(self) -> None:
        self._measured = False
        self.loop.call_later(_DELAY, lambda: self._run(("scontrol", "show", "config"), self._configured))

    def query(self, on_answer: Callable[[Optional[int]], None]) -> bool:
        """Ask for the energy so far; returns True if `on_answer` will be called, with joules or None, in `_TIMEOUT` seconds."""
        waiting = [on_answer]

        def answered(text: Optional[str]) -> None:
            if waiting:
                waiting.pop()(parse_joules(text))

        words = ("sstat", "--jobs=" + self.step, "--format=ConsumedEnergyRaw", "--noheader", "--parsable2")
        if not self._measured or not self._run(words, answered):
            return False
        self.loop.call_later(_TIMEOUT, lambda: answered(None))  # A killed program may still hang in the kernel.
        return True

    def _configured(self, config: Optional[str]) -> None:
        self._measured = is_measured(config)

    def _run(self, words: Sequence[str], on_answer: Callable[[Optional[str]], None]) -> bool:
        """Start a program of Slurm, whose output `on_answer` gets; returns False if this node, or its container, has none."""
        try:
            query_program(self.loop, words, _TIMEOUT, on_answer)
        except OSError:
            return False
        return True
