"""Computes the paths of directories below a base directory and absolute paths on a cluster, and parses run directory names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import FailureKind, StartError
from ..ssh.base import Connection, ConnectionFailed, expand_home


@dataclass(frozen=True)
class Layout:
    """The paths of the directories below a base directory. This machine and a cluster have the same names of directories."""

    base: Path

    runs = property(lambda self: self.base / "runs")
    outputs = property(lambda self: self.base / "outputs")
    runtimes = property(lambda self: self.base / "runtime")
    data = property(lambda self: self.base / "data")
    queue = property(lambda self: self.base / "queue")
    environments = property(lambda self: self.base / "environments")

    @classmethod
    def here(cls, local_base: str) -> Layout:
        """Returns the layout below `local_base`, a directory of this machine; a tilde means the home directory."""
        return cls(Path(os.path.abspath(os.path.expanduser(local_base))))


def absolute(connection: Connection, path: str) -> str:
    """Returns the absolute form of `path` on the cluster; a leading "~" stands for the home directory on the cluster."""
    return os.path.normpath(expand_home(connection, path))


def nonce_of(name: str) -> str:
    """Returns a payload's nonce (a random hexadecimal text): the part after the last "-" in the name of its run directory."""
    return name.rpartition("-")[2]


@contextmanager
def remote_base_errors(base: object) -> Iterator[None]:
    """Context manager: turn an OSError of the block into a StartError that says that the base directory cannot be used.

    `base` is the base directory on the cluster. ConnectionFailed passes unchanged.
    """
    try:
        yield
    except ConnectionFailed:
        raise
    except OSError as error:
        raise StartError(
            FailureKind.CONFIGURATION,
            f"remote_base: {base} cannot be used: {error}; choose a directory of your own that the edge and the "
            "compute nodes share",
        ) from None
