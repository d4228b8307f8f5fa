"""Asks Slurm for the energy that a job's step has consumed, where Slurm measures energy (`AcctGatherEnergyType` in slurm.conf).

Slurm measures whole nodes, so the energy of a step includes the energy of other jobs on the same nodes (sstat(1)).
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
    """Return whether Slurm measures energy, given `config`, the output of `scontrol show config`.

    None (no output) means False.
    """
    match = re.search(r"^AcctGatherEnergyType *= *(?:acct_gather_energy/)?(\S+)", config or "", re.MULTILINE)
    return match is not None and match.group(1) not in ("none", "(null)")


def parse_joules(text: Optional[str]) -> Optional[int]:
    """Return the joules in `text`, the output of `sstat --format=ConsumedEnergyRaw` for one step.

    The result is None if `text` has no measurement, or if `text` is None because sstat failed.
    """
    match = re.fullmatch(r"\s*([0-9]+)\s*", text or "")
    return int(match.group(1)) if match is not None and int(match.group(1)) not in _NO_VALUES else None


def own_step(environ: Mapping[str, str]) -> Optional[str]:
    """Return the id of this task's Slurm step, such as "17.0", for queries of energy.

    The result is None, and energy is not queried, in three cases: outside of a step; in a heterogeneous job, because its steps
    have several ids; and in an element of a job array, because thousands of elements would each send a query to slurmctld.
    """
    job, step = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID")
    left_out = environ.get("SLURM_HET_SIZE") or environ.get("SLURM_ARRAY_JOB_ID")
    return "%s.%s" % (job, step) if job and step and not left_out else None


@dataclass(eq=False)
class StepEnergy:
    """Queries the energy that the Slurm step `step`, such as "17.0", has consumed.

    Some seconds after its creation, the object asks Slurm once whether Slurm measures energy. Before the answer, or if Slurm does
    not measure energy, `query` returns False.
    """

    loop: Loop
    step: str

    def __post_init__(self) -> None:
        self._measured = False
        self.loop.call_later(_DELAY, lambda: self._run(("scontrol", "show", "config"), self._configured))

    def query(self, on_answer: Callable[[Optional[int]], None]) -> bool:
        """Start a query of the energy that the step has consumed so far, without waiting; return whether an answer will come.

        If the result is True, `on_answer` is called once within about `_TIMEOUT` seconds, with joules, or with None if there is
        no measurement. If the result is False, `on_answer` is never called.
        """
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
        """Start a program of Slurm; return whether the program was started.

        The result is False if this node, or the container on this node, does not have the program. Otherwise, `on_answer` is
        called later with the program's output, or with None if the program failed or took longer than `_TIMEOUT` seconds.
        """
        try:
            query_program(self.loop, words, _TIMEOUT, on_answer)
        except OSError:
            return False
        return True
