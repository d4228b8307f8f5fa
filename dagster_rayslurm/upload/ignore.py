"""What of a directory stays here: as Ray's own `runtime_env` working_dir has it, and what no cluster has a use for."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

from pathspec import GitIgnoreSpec

IGNORE_FILES = (".gitignore", ".rayignore")
"""Files that list what stays here, in the syntax of gitignore(5). Ray 2.60 reads both, in every directory of the tree."""

_ALWAYS = frozenset(
    {
        # These four Ray 2.60 leaves out by default (RAY_RUNTIME_ENV_DEFAULT_EXCLUDES).
        ".git",
        ".venv",
        "venv",
        "__pycache__",
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
    }
)
_ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")
"""What a virtual environment and a conda environment have in their prefix, whatever they are called."""


@dataclass(frozen=True)
class _IgnoreFile:
    kind: str
    directory: str
    spec: GitIgnoreSpec


@dataclass(frozen=True)
class Rules:
    """The ignore files that hold in one directory: its own and those above it, up to the top of the tree.

    A file of either kind is left out if one of them says so. Among files of one kind the deepest that has a pattern for a
    name decides, as in git.
    """

    files: tuple[_IgnoreFile, ...] = ()

    def within(self, directory: str, path: str, names: Collection[str]) -> Rules:
        """The rules that hold in a directory further down.

        Args:
            directory: its name in the tree; "" for the top.
            path: where it is.
            names: what is in it.

        Raises:
            ValueError: an ignore file has a pattern that means nothing.
            OSError: one cannot be read.
        """
        found = []
        for kind in IGNORE_FILES:
            file = os.path.join(path, kind)
            if kind in names and os.path.isfile(file):
                found.append(_IgnoreFile(kind, directory, _read(file)))
        return Rules((*found, *self.files)) if found else self

    def ignores(self, name: str, is_dir: bool) -> bool:
        """Whether an entry of that directory stays here.

        Args:
            name: its name in the tree.
            is_dir: whether it is a directory, or a link to one; Ray looks through links as well.
        """
        base = name.rpartition("/")[2]
        return base in _ALWAYS or base.endswith(".pyc") or any(self._ignored_by(kind, name, is_dir) for kind in IGNORE_FILES)

    def _ignored_by(self, kind: str, name: str, is_dir: bool) -> bool:
        for file in self.files:
            if file.kind == kind:
                below = name[len(file.directory) + 1 :] if file.directory else name
                verdict = file.spec.check_file(f"{below}/" if is_dir else below).include
                if verdict is not None:
                    return bool(verdict)
        return False


def is_environment(names: Collection[str]) -> bool:
    """Whether a directory with these entries is a Python environment, which does not work anywhere else."""
    return any(mark in names for mark in _ENVIRONMENT_MARKS)


def _read(path: str) -> GitIgnoreSpec:
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="\n") as file:
        lines = [line.rstrip("\r\n") for line in file]
    try:
        return GitIgnoreSpec.from_lines(lines)
    except ValueError as error:
        raise ValueError(f"{path} has a pattern that means nothing: {error}") from None
