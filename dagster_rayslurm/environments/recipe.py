"""Recipes of environments: the files to send, and the commands that build a prefix from these files on the cluster.

A prefix is the directory of an installed environment; it has `bin/python`.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import COMMAND_FAILED

_FORMAT = "rayslurm environment 2"  # Part of the hash of each recipe; a change of this text gives all prefixes new names.

COMPILE = "--compile-bytecode"  # Option of uv that compiles modules.
COMPILE_ALL = "compileall"  # Module of Python that compiles modules.

# By path of a file: the state of the file when this process read the file, and the SHA-256.
_digests: dict[str, tuple[object, str]] = {}


@dataclass(frozen=True)
class Piece:
    """A file to send to the cluster; `get` fetches or builds the file if need be, and returns the path on this machine."""

    digest: str  # Hash of the content, or of what the file is built from.
    name: str  # Name of the file on the cluster, without directories.
    get: Callable[[], str]

    @property
    def place(self) -> str:
        """The path of the file on the cluster, relative to the base directory."""
        return f"files/{self.digest[:32]}/{self.name}"


@dataclass(frozen=True)
class Recipe:
    """The commands that build a prefix on the cluster.

    A word of a command is a text, or a `Piece` that stands for the path of a sent file on the cluster. The text `PREFIX` of
    `edge.environment` in a word stands for the path of the prefix. The recipe was made from files on this machine; `inputs` is a
    function whose result changes if one of these files changes.
    """

    commands: Sequence[Sequence[str | Piece]]
    inputs: Callable[[], object]
    # The `srun` words to put before each command, so that it runs on a compute node; () if the edge node can run the commands.
    runner: Sequence[str] = ()
    node_local: bool = False  # Whether each node of a job makes a copy of the prefix on its own disk and runs from there.

    @property
    def pieces(self) -> list[Piece]:
        """The files that the commands need, without duplicates."""
        return list({word.place: word for command in self.commands for word in command if isinstance(word, Piece)}.values())

    def words(self, base: str) -> list[list[str]]:
        """Return the commands for a cluster with the base directory `base`; the path of the file replaces each `Piece`."""
        return [
            [posixpath.join(base, each.place) if isinstance(each, Piece) else each for each in words] for words in self.commands
        ]

    def words_for_copy(self, base: str) -> list[list[str]]:
        """Return the commands that build a copy of the prefix on a node's own disk. `base` is the base directory on the cluster.

        The commands compile no modules, because compilation would take most of the time. Python compiles a module at the first
        import.
        """
        return [[word for word in words if word != COMPILE] for words in self.words(base) if COMPILE_ALL not in words]

    def path(self, base: str) -> str:
        """Return the path of the prefix on a cluster with the base directory `base`."""
        return posixpath.join(base, "prefixes", self.key)

    @property
    def key(self) -> str:
        """The name of the prefix: a hash of the commands and of the files that they need."""
        what = [_FORMAT, self.words(""), *(["node-local"] if self.node_local else [])]
        return hashlib.sha256(json.dumps(what).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def digest_of(path: str) -> str:
    """Return the SHA-256 of a file, as hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(2**20):
            digest.update(data)
    return digest.hexdigest()


def local_piece(path: str) -> tuple[Piece, Callable[[], object]]:
    """Return a `Piece` for a file on this machine, and a function whose result changes when the file changes.

    `path` is the path of the file. Raises `OSError` if the file cannot be read.
    """

    def state() -> object:
        found = os.stat(path)
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    known, digest = _digests.get(path, (None, ""))
    if known != state():
        now, digest = state(), digest_of(path)
        _digests[path] = now, digest
    return Piece(digest, os.path.basename(path), lambda: path), state


_ACTIVATE = f"""\
# As a login shell does (bash(1)).
[ ! -r /etc/profile ] || . /etc/profile
for _rayslurm in ~/.bash_profile ~/.bash_login ~/.profile; do [ ! -r "$_rayslurm" ] || {{ . "$_rayslurm"; break; }}; done
_rayslurm() {{ _rayslurm=$?; printf '{COMMAND_FAILED}%s\\n' "$1" >&2; return $_rayslurm; }}
"""


def activate_script(commands: Sequence[str]) -> str:
    """Return the text of an `activate.sh` that reads bash's login files and runs `commands`.

    If a command fails, the script ends with the exit code of the command, and prints the command to the error output.
    """
    lines = [f"{{ {command}\n}} || _rayslurm {shlex.quote(command)} || return" for command in commands]
    return _ACTIVATE + "\n".join([*lines, ""])
