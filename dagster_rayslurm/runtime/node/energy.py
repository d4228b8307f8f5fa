"""Asks Slurm for the energy that a job's step has consumed, where Slurm measures energy (`AcctGatherEnergyType` in slurm.conf).

Slurm measures whole nodes, so the energy of a step includes the energy of other jobs on the same nodes (sstat(1)).
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import Callable, Mapping, Optional

from ..process.loop import Loop
from ..process.processes import query_program
from .slurm_config import query_config, setting

_DELAY = 2.0  # Seconds after which Slurm's configuration is asked for: the start comes first, and short jobs ask nothing.
_TIMEOUT = 3.0  # Seconds in which Slurm's programs must answer; the `end` of a payload waits that long at most.
_NO_VALUES = (0, 2**32 - 2, 2**64 - 2)  # No measurement yet, and Slurm's NO_VAL and NO_VAL64.


def is_measured(config: Optional[str]) -> bool:
    """Return whether Slurm measures energy, given Slurm's settings as text; None, for unknown settings, counts as no."""
    return setting(config, "AcctGatherEnergyType") not in ("", "none", "acct_gather_energy/none")


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
        self.loop.call_later(_DELAY, self._query_config)

    def query(self, on_answer: Callable[[Optional[int]], None]) -> bool:
        """Start a query of the energy that the step has consumed so far, without waiting; return whether an answer will come.

        If the result is True, `on_answer` is called once within about `_TIMEOUT` seconds, with joules, or with None if there is
        no measurement. If the result is False, `on_answer` is never called.
        """
        waiting = [on_answer]

        def answered(text: Optional[str]) -> None:
            if waiting:
                waiting.pop()(parse_joules(text))

        if not self._measured:
            return False
        words = ("sstat", "--jobs=" + self.step, "--format=ConsumedEnergyRaw", "--noheader", "--parsable2")
        try:
            query_program(self.loop, words, _TIMEOUT, answered)
        except OSError:  # This node, or the container on this node, does not have sstat.
            return False
        self.loop.call_later(_TIMEOUT, lambda: answered(None))  # A killed program may still hang in the kernel.
        return True

    def _query_config(self) -> None:
        with contextlib.suppress(OSError):
            query_config(self.loop, _TIMEOUT, self._configured)

    def _configured(self, config: Optional[str]) -> None:
        self._measured = is_measured(config)
