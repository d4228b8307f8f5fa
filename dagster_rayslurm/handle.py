"""`RunHandle`: the names and ids of a submitted run, by which any process finds the run again."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass

_RUN = re.compile(r"[A-Za-z0-9_.-]+-[0-9a-f]{12}")  # The name of a run directory, without a path.
TAG = "dagster-rayslurm/handle"  # Tag of a Dagster run that follows a submitted run: the handle as JSON.


@dataclass(frozen=True)
class RunHandle:
    """The names and ids of a run that `ComputeResource.submit` has submitted; any process can find the run by the handle.

    Attributes:
        run: the name of the run directory, by which the `rayslurm` commands find the run.
        job_id: Slurm's job id; "" before the submission.
        job_name: the name of the Slurm job, which no other job has.
        cluster_id: the id of the run's Ray cluster.
        asset_key: the key of the asset that the payload computes, in Dagster's notation with slashes; None for no asset.
        partition_key: the partition of the asset; None for an asset without partitions.
        key: the argument `key` of the submission, for which only one job is submitted; None for a submission without a key.
        uses_pipes: whether the payload opens Dagster Pipes.
        requeue: whether Slurm may requeue the job.
        submitted_at: when the job was submitted, in seconds since the epoch by the cluster's clock; 0 before the submission.
    """

    run: str
    job_id: str = ""
    job_name: str = ""
    cluster_id: str = ""
    asset_key: str | None = None
    partition_key: str | None = None
    key: str | None = None
    uses_pipes: bool = True
    requeue: bool = False
    submitted_at: float = 0.0

    def to_json(self) -> str:
        """Returns the handle as JSON text, for the cursor of a sensor, a tag or a database."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunHandle:
        """Returns the handle in `text`, a result of `to_json`; raises `ValueError` for any other text."""
        try:
            fields = json.loads(text)
            handle = cls(**{each.name: fields[each.name] for each in dataclasses.fields(cls) if each.name in fields})
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"handle: {text[:100]!r} is not the text of a RunHandle: {error}") from None
        if not isinstance(handle.run, str) or not _RUN.fullmatch(handle.run):
            raise ValueError(f"handle: {handle.run!r} is not the name of a run directory")
        return handle
