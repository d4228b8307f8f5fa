"""The result of a run that succeeded, the exception of a failed run, and retry policies for kinds of failure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg

from .errors import TROUBLES, FailureKind, UnhealthyNode, may_retry, without_colours

_NEVER = ("cancelled", "superseded")  # Kinds of failure that are never retried.


class RunFailure(dg.Failure):
    """Raised when a run did not succeed.

    Attributes:
        kind (FailureKind): the kind of failure, mostly the part that failed; equals its text, as in `error.kind == "payload"`.
        unhealthy (tuple[UnhealthyNode, ...]): the nodes whose failed health checks are the cause; empty for any other cause.
    """

    def __init__(
        self,
        kind: FailureKind,
        sentence: str,
        metadata: Mapping[str, Any] | None = None,
        retry: bool | None = None,
        unhealthy: Sequence[UnhealthyNode] = (),
    ) -> None:
        """Create a failure with the description `sentence`, and with `metadata` for Dagster.

        `retry` says whether a `RetryPolicy` may retry the step; None stands for the default of `kind`. `unhealthy` has the nodes
        whose failed health checks are the cause.
        """
        self.kind = FailureKind(kind)
        self.unhealthy = tuple(unhealthy)
        if unhealthy:
            metadata = {"Unhealthy nodes": "; ".join(map(str, unhealthy)), **(metadata or {})}
        page = dg.MetadataValue.url(f"{TROUBLES}#{self.kind.value}")
        super().__init__(
            description=without_colours(sentence),
            metadata={"Failure kind": self.kind.value, "Troubleshooting": page, **(metadata or {})},
            allow_retries=may_retry(self.kind, retry),
        )


class _RetryPolicyForKinds(dg.RetryPolicy):
    """A `RetryPolicy` for some kinds of `RunFailure`. Dagster ignores the field `kinds`; `apply_retry_policy` reads the field."""

    kinds: frozenset[FailureKind]


def retry_policy_for(
    *kinds: str,
    max_retries: int = 1,
    delay: float | None = None,
    backoff: dg.Backoff | None = None,
    jitter: dg.Jitter | None = None,
) -> dg.RetryPolicy:
    """Returns a `RetryPolicy` that retries a `RunFailure` only if the failure's kind is in `kinds`.

    Exceptions other than `RunFailure` are retried as usual. A `RetryPolicy` of Dagster does not retry most failures of some
    kinds, such as `submission`. If you name such a kind here, all its failures are retried. A `RetryPolicy` of Dagster does retry
    the other kinds, such as `allocation`, except single failures after which another attempt cannot succeed. An example is a job
    that reached its time limit. The policy of this function does not retry these single failures, either.

    Example:
        ```python
        import dagster as dg
        from dagster_rayslurm import retry_policy_for


        @dg.asset(retry_policy=retry_policy_for("allocation", "cluster-lost", max_retries=3, delay=60))
        def model(): ...
        ```

    Args:
        kinds: values of `RunFailure.kind`.
        max_retries: the same as for `RetryPolicy`, as are `delay`, `backoff` and `jitter`.

    Raises:
        ValueError: no kind is given, a kind does not exist, or a kind is "cancelled" or "superseded", which are never retried.
    """
    known = [kind.value for kind in FailureKind if kind not in _NEVER]
    if not kinds:
        raise ValueError(f"retry_policy_for: name at least one kind of failure, of {', '.join(known)}")
    for kind in kinds:
        if kind not in known:
            close = difflib.get_close_matches(str(kind), known, n=1)
            instead = f"did you mean {close[0]!r}?" if close else f"kinds are {', '.join(known)}"
            raise ValueError(f"retry_policy_for: {str(kind)!r} is no kind of failure that can be retried; {instead}")
    policy = _RetryPolicyForKinds(max_retries=max_retries, delay=delay, backoff=backoff, jitter=jitter)
    policy.kinds = frozenset(map(FailureKind, kinds))
    return policy


def apply_retry_policy(failure: RunFailure, policy: dg.RetryPolicy | None) -> None:
    """Set `failure.allow_retries` to whether `policy`, the retry policy of the step, retries this kind of failure.

    Do nothing unless `policy` comes from `retry_policy_for`.
    """
    if isinstance(policy, _RetryPolicyForKinds):
        failure.allow_retries = failure.kind in policy.kinds and (failure.allow_retries or not may_retry(failure.kind))


class CompletedRun(dg.PipesClientCompletedInvocation):
    """The result of a payload that succeeded, which `ComputeResource.run` returns.

    Methods:
        get_materialize_result: returns a `MaterializeResult` with what the payload reported and the run's metadata. An asset
            returns this result. If the payload reported no materialization, Dagster makes one.
        get_results: returns a list with the results of all assets and asset checks that the payload reported.
        get_asset_check_result: returns the `AssetCheckResult` of a payload that reported a single asset check and no more.
        get_custom_messages: returns a list with the values that the payload passed to `pipes.report_custom_message`.

    Attributes:
        metadata (Mapping[str, Any]): figures of the run, such as the elapsed time; the results above contain them too.
        cluster_id (str): id of the Ray cluster, for `ComputeResource.cleanup_cluster`.
        job_id (str | None): Slurm's job id; None in local mode.
        outputs (list[Path]): paths on this machine of the files that `outputs=` selected.
    """

    def __init__(
        self, session: Any, metadata: Mapping[str, Any], cluster_id: str, job_id: str | None, outputs: list[Path]
    ) -> None:
        super().__init__(session, metadata=metadata)
        self.cluster_id, self.job_id, self.outputs = cluster_id, job_id, outputs
