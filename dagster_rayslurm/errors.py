"""Defines the kinds of failure, the classes `Verdict` and `StartError`, and functions for error messages; imports no Dagster."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import ValidationError

from .runtime.protocol.messages import TextEnum

# The page with messages and remedies; each kind of failure is a heading there.
TROUBLES = "https://github.com/dagster-rayslurm/dagster-rayslurm/blob/main/docs/troubleshooting.md"
# What installs an extra of this package, as the documentation says it; the package is on no index yet.
INSTALL = "run in the checkout of dagster-rayslurm: pip install -e '.[{extra}]'"
_ESCAPE_CODES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\))")


class FailureKind(TextEnum):
    """A kind of failure, which is the value of `RunFailure.kind`: mostly the part of a run that failed."""

    CONFIGURATION = "configuration"  # A setting or an argument is wrong.
    CONNECTION = "connection"  # The edge node cannot be reached, or refuses the login.
    SUBMISSION = "submission"  # Slurm refused the job, or did not answer.
    ALLOCATION = "allocation"  # The Slurm job did not get its nodes, or ended before the payload.
    CLUSTER_START = "cluster-start"  # The Ray cluster did not start.
    CLUSTER_LOST = "cluster-lost"  # The Ray cluster ended while the payload ran.
    ENVIRONMENT = "environment"  # The Python environment cannot be made, or cannot run the payload.
    PAYLOAD = "payload"  # The payload (the user's script or command) failed.
    PIPES = "pipes"  # The payload ended with exit code 0, but did not report its results correctly through Dagster Pipes.
    RECORD = "record"  # Files of the run directory could not be read or written, or an output file could not be copied.
    RUNTIME = "runtime"  # The runtime (this package's program on the nodes) did not start, or ended too early.
    CANCELLED = "cancelled"  # A user or a program ended the run.
    SUPERSEDED = "superseded"  # A later attempt at the step has taken the payload over; only the later result counts.


# Kinds of failure after which a retry of the whole step cannot succeed.
_FINAL = ("configuration", "submission", "environment", "record", "cancelled", "superseded")


def may_retry(kind: FailureKind | None, retry: bool | None = None) -> bool:
    """Returns whether a `RetryPolicy` may retry a step that failed with a failure of this kind.

    `retry` is the answer for a single failure, and overrides the kind; None if the kind decides. If the kind decides, the result
    is True for a kind after which another attempt may succeed, and False for any other kind. If `kind` is None, there is no
    failure, and the result is False.
    """
    return kind is not None and kind not in _FINAL if retry is None else retry


@dataclass(frozen=True)
class Verdict:
    """The outcome of a payload or run: success, or a kind of failure with a sentence for the user."""

    kind: FailureKind | None  # None for success.
    sentence: str
    retry: bool | None = None  # Whether another attempt may succeed; None for the default of the kind.


def without_colours(text: str) -> str:
    """Returns the text without the escape codes of terminals, such as colours."""
    return _ESCAPE_CODES.sub("", text)


def one_sentence(error: Exception) -> str:
    """Returns the message of an error; for a pydantic error, one line with the name and the problem of each invalid field."""
    if not isinstance(error, ValidationError):
        return str(error)
    sentences = []
    for each in error.errors(include_input=False):
        field, problem = ".".join([error.title, *map(str, each["loc"])]), each["msg"].removeprefix("Value error, ")
        sentences.append(problem if problem.startswith(f"{field} ") else f"{field}: {problem}")
    return "; ".join(sentences)


@contextmanager
def named_errors(where: str) -> Iterator[None]:
    """Context manager that turns a TypeError or ValueError of the block into a ValueError with a message of one sentence.

    The message is `where`, a colon and the text of the original error. `where` names the configuration in which the error is,
    such as "cluster 'a' in rayslurm.toml".
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {one_sentence(error)}") from None


class UnhealthyNode(NamedTuple):
    """A node that failed a health check.

    Attributes:
        node: the name of the node in Slurm.
        check: the name of the check.
        found: the result of the check in words.
    """

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
