"""Finds and reads the nearest `rayslurm.toml`, a file with the settings of Slurm clusters for the `rayslurm` commands."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = "rayslurm.toml"


def user_file() -> Path:
    """Returns the path of the `rayslurm.toml` in the user's configuration directory."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "rayslurm" / FILE


def find_file(directory: Path) -> Path | None:
    """Returns the path of the nearest `rayslurm.toml`; None if there is none.

    The function looks in `directory`, then in the parent directories of `directory`, then in the user's configuration directory.
    Raises `ValueError` if the file belongs neither to this user nor to root, because the file of another user could make commands
    log in to another host and run code there.
    """
    for path in (*(each / FILE for each in (directory, *directory.parents)), user_file()):
        if path.is_file():
            if path.stat().st_uid not in (0, os.geteuid()):
                raise ValueError(f"{path} belongs to another user and is not read; use another directory, or --from")
            return path
    return None


def read_file(path: Path) -> dict[str, Any]:
    """Returns a dict with the content of a `rayslurm.toml`: "default" (a name or None) and "clusters" (the tables by name).

    Raises `ValueError` if the file is not valid.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    unknown = [name for name in content if name not in ("default", "clusters")]
    if unknown:
        raise ValueError(f"{path}: {unknown[0]!r} is unknown; the file has `default` and tables [clusters.NAME]")
    clusters = content.get("clusters", {})
    if not isinstance(clusters, dict) or not clusters or not all(isinstance(each, dict) for each in clusters.values()):
        raise ValueError(f"{path} has no cluster; add a table [clusters.NAME] with the fields of ComputeResource")
    default = content.get("default")
    if default is not None and not isinstance(default, str):
        raise ValueError(f"{path}: `default` is {default!r}; write the name of a cluster there")
    return {"default": default, "clusters": clusters}
