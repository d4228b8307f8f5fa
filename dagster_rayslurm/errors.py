"""Failures that users see: a `dg.Failure` of a named kind."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

import dagster as dg
from pydantic import ValidationError

_ESCAPE_CODES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\))")


class FailureKind(str, Enum):
    """What went wrong, in the order in which it can happen to a run."""

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

    def __str__(self) -> str:
        return self.value


RETRYABLE = frozenset(
    {
        # The infrastructure failed, not the request.
        FailureKind.CONNECTION,
        FailureKind.ALLOCATION,
        FailureKind.CLUSTER_START,
        FailureKind.CLUSTER_LOST,
        FailureKind.RUNTIME,
        # The user's code failed; the user's `RetryPolicy` decides.
        FailureKind.PAYLOAD,
        FailureKind.PIPES,
    }
)
"""Kinds of failure after which another attempt may succeed."""


def may_retry(kind: FailureKind | None, retry: bool | None = None) -> bool:
    """Whether another attempt may succeed: `retry` if this failure says so itself, else the default of its kind."""
    return kind in RETRYABLE if retry is None else retry


def without_colours(text: str) -> str:
    """Remove the escape codes of terminals."""
    return _ESCAPE_CODES.sub("", text)


def one_sentence(error: ValueError) -> str:
    """The error in one line; for an error of pydantic, each field with its problem."""
    if not isinstance(error, ValidationError):
        return str(error)
    problems = [(".".join([error.title, *map(str, each["loc"])]), each["msg"]) for each in error.errors(include_input=False)]
    return "; ".join(f"{field}: {problem.removeprefix('Value error, ')}" for field, problem in problems)


class RunFailure(dg.Failure):
    """A run that did not succeed.

    Attributes:
        kind: what went wrong; equal to its name, as in `error.kind == "payload"`.
    """

    def __init__(
        self, kind: FailureKind, sentence: str, metadata: Mapping[str, Any] | None = None, retry: bool | None = None
    ) -> None:
        """Create a failure.

        Args:
            kind: what went wrong.
            sentence: what is wrong, where, and what to do.
            metadata: more than "Failure kind".
            retry: whether a `RetryPolicy` may try again; None for the default of the kind.
        """
        self.kind = FailureKind(kind)
        super().__init__(
            description=without_colours(sentence),
            metadata={"Failure kind": self.kind.value, **(metadata or {})},
            allow_retries=may_retry(self.kind, retry),
        )


class StartError(RuntimeError):
    """A runtime cannot be started; becomes a `RunFailure`.

    Attributes:
        kind: what went wrong.
        retry: whether another attempt may succeed; None for the default of the kind.
    """

    def __init__(self, kind: FailureKind, message: str, retry: bool | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry = retry
