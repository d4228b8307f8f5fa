"""Ignore rules: which files of a directory are not uploaded.

These are the files that Ray leaves out of a `runtime_env` working_dir, and files that no cluster needs, such as caches.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

from pathspec import GitIgnoreSpec

IGNORE_FILES = (".gitignore", ".rayignore")
"""Files with patterns in the syntax of gitignore(5). Ray 2.60 reads both, in every directory of the tree."""

_RAY_EXCLUDES = frozenset((".git", ".venv", "venv", "__pycache__"))
"""Names that Ray 2.60 leaves out by default (RAY_RUNTIME_ENV_DEFAULT_EXCLUDES)."""
_CACHES = frozenset(
    [
        ".DS_Store",
        ".dagster_home",
        ".hg",
        ".hypothesis",
        ".ipynb_checkpoints",
        ".mypy_cache",
        ".nox",
        ".pixi",
        ".pytest_cache",
        ".ruff_cache",
        ".svn",
        ".tox",
        "node_modules",
    ]
)
"""Names of further files and directories that no cluster needs; Ray would send them."""
_ENVIRONMENT_MARKERS = ("pyvenv.cfg", "conda-meta")
"""Entries by which the prefix of a virtual environment or of a conda environment is recognised."""


@dataclass(frozen=True)
class _IgnoreFile:
    """One ignore file: its name (`kind`), its directory in the tree, and its patterns."""

    kind: str
    directory: str
    spec: GitIgnoreSpec


@dataclass(frozen=True)
class Rules:
    """The ignore files that count for one directory: its own and those of its parents, up to the top of the tree.

    An entry is left out if the .gitignore files or the .rayignore files say so. Among the files of one name, the deepest with
    a matching pattern decides, as in git.
    """

    files: tuple[_IgnoreFile, ...] = ()

    def within(self, directory: str, path: str, names: Collection[str]) -> Rules:
        """The rules for a subdirectory.

        Args:
            directory: the subdirectory's name in the tree; "" for the top.
            path: the subdirectory's path on this machine.
            names: the names of the subdirectory's entries.

        Raises:
            ValueError: an ignore file has an invalid pattern.
            OSError: an ignore file cannot be read.
        """
        found = []
        for kind in IGNORE_FILES:
            file = os.path.join(path, kind)
            if kind in names and os.path.isfile(file):
                found.append(_IgnoreFile(kind, directory, _read(file)))
        return Rules((*found, *self.files)) if found else self

    def ignores(self, name: str, is_dir: bool) -> bool:
        """Whether an entry of the directory is left out.

        Args:
            name: the entry's name in the tree.
            is_dir: whether the entry is a directory or a link to one; Ray treats both in the same way.
        """
        base = name.rpartition("/")[2]
        return (
            base in _RAY_EXCLUDES | _CACHES
            or base.endswith(".pyc")
            or any(self._ignored_by(kind, name, is_dir) for kind in IGNORE_FILES)
        )

    def _ignored_by(self, kind: str, name: str, is_dir: bool) -> bool:
        """Whether the ignore files of one name, such as .gitignore, leave an entry out."""
        for file in self.files:
            if file.kind == kind:
                below = name[len(file.directory) + 1 :] if file.directory else name
                verdict = file.spec.check_file(f"{below}/" if is_dir else below).include
                if verdict is not None:
                    return bool(verdict)
        return False


def is_environment(names: Collection[str]) -> bool:
    """Whether a directory with these entries is a Python environment, which would not work on another machine."""
    return any(mark in names for mark in _ENVIRONMENT_MARKERS)


def _read(path: str) -> GitIgnoreSpec:
    """The patterns of an ignore file."""
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="\n") as file:
        lines = [line.rstrip("\r\n") for line in file]
    try:
        return GitIgnoreSpec.from_lines(lines)
    except ValueError as error:
        raise ValueError(f"{path} has a pattern that means nothing: {error}") from None
