"""Paths as users write them for the place behind a connection, where "~" is the home directory of the login."""

from __future__ import annotations

import os
import posixpath
import re

from .base import Connection

_VARIABLE = re.compile(r"(^|/)\$(\w+|\{\w+\})(/|$)")


def check_no_variable(path: str, field: str) -> None:
    """Refuse a path of which a part is a variable, since nobody expands it.

    Raises:
        ValueError: naming the field.
    """
    found = _VARIABLE.search(path)
    if found:
        raise ValueError(
            f'{field}: {path!r}: variables such as ${found[2]} are not expanded; write the value, or begin with "~/"'
        )


def is_rooted(path: str) -> bool:
    """Whether a path says where it is: it is absolute, or begins with "~/"."""
    return os.path.isabs(path) or path == "~" or path.startswith("~/")


def expand_home(connection: Connection, path: str) -> str:
    """The path with the home directory in the place of a "~" at its beginning.

    Raises:
        OSError: the home directory has to be asked for, and that does not work.
    """
    return posixpath.join(connection.home(), path[2:]) if path == "~" or path.startswith("~/") else path
