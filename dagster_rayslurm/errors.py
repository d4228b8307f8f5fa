"""The result of a run that succeeded, the exceptions of failed runs, and the kinds of failure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import dagster as dg
from pydantic import ValidationError

from .runtime.protocol.messages import TextEnum

_ESCAPE_CODES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\))")


class FailureKind(TextEnum):
    """The kinds of failure, which are the values of `RunFailure.kind`: each names the part of a run that failed."""

    CONFIGURATION = "configuration"
    CONNECTION = "connection"
    SUBMISSION = "submission"
    ALLOCATION = "allocation"
    CLUSTER_START = "cluster-start"
    CLUSTER_LOST = "cluster-lost"
    ENVIRONMENT = "environment"
    PAYLOAD = "payload"
    PIPES = "pipes"
    RECORD = "record"
    RUNTIME = "runtime"
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"


# Kinds of failure after which a retry of the whole step cannot succeed.
_FINAL = ("configuration", "submission", "environment", "record", "cancelled", "superseded")


_NEVER = ("cancelled", "superseded")  # Kinds that nobody can want to retry.


def may_retry(kind: FailureKind | None, retry: bool | None = None) -> bool:
    """Returns True if a `RetryPolicy` may retry the step: `retry` if that is a bool, else the default for the kind of failure."""
    return kind is not None and kind not in _FINAL if retry is None else retry


def without_colours(text: str) -> str:
    """Returns the text without the escape codes of terminals, such as colours."""
    return _ESCAPE_CODES.sub("", text)


def one_sentence(error: ValueError) -> str:
    """Returns the message of an error in one line; a pydantic error becomes a list of fields and their problems."""
    if not isinstance(error, ValidationError):
        return str(error)
    problems = [(".".join([error.title, *map(str, each["loc"])]), each["msg"]) for each in error.errors(include_input=False)]
    return "; ".join(f"{field}: {problem.removeprefix('Value error, ')}" for field, problem in problems)


class UnhealthyNode(NamedTuple):
    """A node that failed a health check: its name in Slurm, the name of the check, and the check's result in words."""

    node: str
    check: str
    found: str

    def __str__(self) -> str:
        return f"{self.node} ({self.check}: {self.found})"


class RunFailure(dg.Failure):
    """Raised when a run did not succeed.

    Attributes:
        kind: the part of the run that failed; compares equal to its name, as in `error.kind == "payload"`.
        unhealthy: the nodes whose failed health checks are the cause; empty for any other cause.
    """

    def __init__(
        self,
        kind: FailureKind,
        sentence: str,
        metadata: Mapping[str, Any] | None = None,
        retry: bool | None = None,
        unhealthy: Sequence[UnhealthyNode] = (),
    ) -> None:
        """Create a failure; `retry` says whether a `RetryPolicy` may retry the step, None for the default of the kind."""
        self.kind = FailureKind(kind)
        self.unhealthy = tuple(unhealthy)
        if unhealthy:
            metadata = {"Unhealthy nodes": "; ".join(map(str, unhealthy)), **(metadata or {})}
        super().__init__(
            description=without_colours(sentence),
            metadata={"Failure kind": self.kind.value, **(metadata or {})},
            allow_retries=may_retry(self.kind, retry),
        )


class _RetryPolicyForKinds(dg.RetryPolicy):
    """A `RetryPolicy` for some kinds of `RunFailure`. Dagster does not know these kinds; `apply_retry_policy` reads them."""

    kinds: frozenset[FailureKind]


def retry_policy_for(
    *kinds: str,
    max_retries: int = 1,
    delay: float | None = None,
    backoff: dg.Backoff | None = None,
    jitter: dg.Jitter | None = None,
) -> dg.RetryPolicy:
    """Returns a `RetryPolicy` that retries a `RunFailure` only if it is of these kinds. Other exceptions are retried as usual.

    A failure after which another attempt cannot succeed, such as one of the kind `allocation` for a time limit, is not retried. A
    kind that no policy retries by default, such as `submission`, is retried if it is named.

    Example:
        ```python
        import dagster as dg
        from dagster_rayslurm import retry_policy_for


        @dg.asset(retry_policy=retry_policy_for("allocation", "cluster-lost", max_retries=3, delay=60))
        def model(): ...
        ```

    Args:
        kinds: values of `RunFailure.kind`.
        max_retries: as for `RetryPolicy`, like `delay`, `backoff` and `jitter`.

    Raises:
        ValueError: no kind is given, a kind does not exist, or it is "cancelled" or "superseded", which are never retried.
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
    """Set `failure.allow_retries` by the step's retry policy if `retry_policy_for` returned that policy; else do nothing."""
    if isinstance(policy, _RetryPolicyForKinds):
        failure.allow_retries = failure.kind in policy.kinds and (failure.allow_retries or not may_retry(failure.kind))


class StartError(RuntimeError):
    """Raised when a runtime cannot be started; users see a `RunFailure` instead, with the same kind and `retry`."""

    def __init__(self, kind: FailureKind, message: str, retry: bool | None = None) -> None:
        super().__init__(message)
        self.kind, self.retry = kind, retry


class CompletedRun(dg.PipesClientCompletedInvocation):
    """The result of a payload that succeeded.

    `get_results()`, `get_materialize_result()`, `get_asset_check_result()` and `get_custom_messages()` return what the payload
    reported; Dagster results also have the run's `metadata`.

    Attributes:
        cluster_id: id of the Ray cluster, for `ComputeResource.cleanup_cluster`.
        job_id: Slurm's job id; None in local mode.
        outputs: paths on this machine of the files that `outputs=` selected.
    """

    def __init__(
        self, session: Any, metadata: Mapping[str, Any], cluster_id: str, job_id: str | None, outputs: list[Path]
    ) -> None:
        super().__init__(session, metadata=metadata)
        self.cluster_id, self.job_id, self.outputs = cluster_id, job_id, outputs
