"""The kinds of failure, the error of a runtime that cannot be started, and texts of errors; imports no Dagster."""

from __future__ import annotations

import re
from typing import NamedTuple

from pydantic import ValidationError

from .runtime.protocol.messages import TextEnum

# The page with messages and remedies; each kind of failure is a heading there.
TROUBLES = "https://github.com/dagster-rayslurm/dagster-rayslurm/blob/main/docs/troubleshooting.md"
# What installs an extra of this package, as the documentation says it; the package is on no index yet.
INSTALL = "run in the checkout of dagster-rayslurm: pip install -e '.[{extra}]'"
_ESCAPE_CODES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\))")


class FailureKind(TextEnum):
    """A kind of failure, which is the value of `RunFailure.kind`: the part of a run that failed."""

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


def may_retry(kind: FailureKind | None, retry: bool | None = None) -> bool:
    """Returns whether a `RetryPolicy` may retry a step that failed with a failure of this kind.

    If `retry` is not None, the result is `retry`: it says so for one failure, whatever its kind is. Otherwise, the result is True
    for a kind of failure after which another attempt may succeed, and False for any other kind, and for None (no failure).
    """
    return kind is not None and kind not in _FINAL if retry is None else retry


def without_colours(text: str) -> str:
    """Returns the text without the escape codes of terminals, such as colours."""
    return _ESCAPE_CODES.sub("", text)


def one_sentence(error: ValueError) -> str:
    """Returns the message of an error; for a pydantic error, one line with the name and the problem of each invalid field."""
    if not isinstance(error, ValidationError):
        return str(error)
    sentences = []
    for each in error.errors(include_input=False):
        field, problem = ".".join([error.title, *map(str, each["loc"])]), each["msg"].removeprefix("Value error, ")
        sentences.append(problem if problem.startswith(f"{field} ") else f"{field}: {problem}")
    return "; ".join(sentences)


class UnhealthyNode(NamedTuple):
    """A node that failed a health check: the node's name in Slurm, the name of the check, and the check's result in words."""

    node: str
    check: str
    found: str

    def __str__(self) -> str:
        return f"{self.node} ({self.check}: {self.found})"


class StartError(RuntimeError):
    """Raised when a runtime (this package's program on the nodes) cannot be started.

    Users see a `RunFailure` instead, with the same kind and `retry`. `retry` says whether a `RetryPolicy` may retry the step;
    None stands for the default of `kind`.
    """

    def __init__(self, kind: FailureKind, message: str, retry: bool | None = None) -> None:
        super().__init__(message)
        self.kind, self.retry = kind, retry
