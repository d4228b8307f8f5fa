"""Failures that users see: a `dg.Failure` of a named kind, with the sentence that helps and whether to try again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import dagster as dg
from pydantic import ValidationError

KINDS = (
    "configuration",
    "connection",
    "submission",
    "allocation",
    "cluster-start",
    "cluster-lost",
    "environment",
    "payload",
    "pipes",
    "record",
    "runtime",
    "cancelled",
    "superseded",
)
"""What can go wrong, from before anything starts to the very end."""

RETRYABLE = frozenset({"connection", "allocation", "cluster-start", "cluster-lost", "runtime"})
"""Kinds in which the infrastructure failed, not the request: another attempt may succeed."""

_PAYLOAD_KINDS = frozenset({"payload", "pipes"})
"""Kinds that the user's own code decides; a `RetryPolicy` of the asset may retry them."""


_COLOURS = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\))")


def without_colours(text: str) -> str:
    """A text without the escape codes of terminals."""
    return _COLOURS.sub("", text)


def may_retry(kind: str, retry: bool | None = None) -> bool:
    """Whether another attempt may succeed: what is known of this failure, else what its kind says."""
    return kind in RETRYABLE or kind in _PAYLOAD_KINDS if retry is None else retry


def one_sentence(error: ValueError) -> str:
    """What is wrong with a value, in one line: of what pydantic says in many, the fields and what is wrong with each."""
    if not isinstance(error, ValidationError):
        return str(error)
    problems = [(".".join([error.title, *map(str, each["loc"])]), each["msg"]) for each in error.errors(include_input=False)]
    return "; ".join(f"{where}: {what.removeprefix('Value error, ')}" for where, what in problems)


class RunFailure(dg.Failure):
    """A run that did not succeed.

    Attributes:
        kind: one of `KINDS`.
    """

    def __init__(self, kind: str, sentence: str, metadata: Mapping[str, Any] | None = None, retry: bool | None = None) -> None:
        """See the class.

        Args:
            kind: one of `KINDS`.
            sentence: what is wrong, where, and what to do.
            metadata: more than "Failure kind".
            retry: whether a `RetryPolicy` may try again; None for what the kind says.
        """
        self.kind = kind
        super().__init__(
            description=without_colours(sentence),
            metadata={"Failure kind": kind, **(metadata or {})},
            allow_retries=may_retry(kind, retry),
        )


class StartError(RuntimeError):
    """A runtime cannot be had; the message says why.

    Attributes:
        kind: one of `KINDS`.
        retry: whether another attempt may succeed; None for what the kind says.
    """

    def __init__(self, kind: str, message: str, retry: bool | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry = retry
