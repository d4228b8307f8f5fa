"""What `ComputeResource.run` returns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg

if TYPE_CHECKING:
    from .backends.base import RunningPayload


class CompletedRun(dg.PipesClientCompletedInvocation):
    """A payload that succeeded.

    `get_results()`, `get_materialize_result()`, `get_asset_check_result()` and `get_custom_messages()` give what it
    reported, each with the run's `metadata`.

    Attributes:
        cluster_id: name of the Ray cluster, for `ComputeResource.cleanup_cluster`.
        job_id: Slurm's job id; None in local mode.
        outputs: local paths of the files that `outputs=` asked for.
    """

    def __init__(self, session: Any, metadata: Mapping[str, Any], attempt: RunningPayload, outputs: list[Path]) -> None:
        super().__init__(session, metadata=metadata)
        self.cluster_id = attempt.cluster_id
        self.job_id = attempt.job_id
        self.outputs = outputs
