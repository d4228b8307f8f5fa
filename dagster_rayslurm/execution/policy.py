"""What the user decided about every run of a resource."""

from __future__ import annotations

from dataclasses import dataclass

from ..backends.rundir import Layout


@dataclass(frozen=True)
class Policy:
    """What the user decided about every run of a resource; see the fields of `ComputeResource`.

    Attributes:
        home: where things are on this machine, wherever payloads run.
    """

    mode: str
    require_messages: bool
    keep_run_dirs: str
    retention_days: float
    connection_loss_timeout: float
    runtime_start_timeout: float
    home: Layout

    def keeps(self, failed: bool) -> bool:
        """Whether a run directory stays."""
        return self.keep_run_dirs == "all" or (self.keep_run_dirs == "failed" and failed)
