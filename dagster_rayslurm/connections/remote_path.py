"""Paths as users write them for the place behind a connection, where "~" is the home directory of the login."""

from __future__ import annotations

import os
import posixpath

from .base import Connection


def is_rooted(path: str) -> bool:
    """Whether a path says where it is: it is absolute, or begins with "~/"."""
    return os.path.isabs(path) or path == "~" or path.startswith("~/")


def expand_home(connection: Connection, path: str) -> str:
    """The path with the home directory in the place of a "~" at its beginning.

    Raises:
        OSError: the home directory has to be asked for, and that does not work.
    """
    return posixpath.join(connection.home(), path[2:]) if path == "~" or path.startswith("~/") else path
