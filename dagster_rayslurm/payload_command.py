"""Parse `payload_path`, the text or list that names a payload, into the words of a command.

No shell runs a payload, so text with shell syntax is refused.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence

from .config import check_length
from .runtime.protocol.spec import is_passable

_QUOTED = re.compile(r"\\.|'[^']*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
_WORD = re.compile(rf"(?:{_QUOTED.pattern}|[^\s'\"\\])+", re.DOTALL)
_OPERATOR = re.compile(r"\|\|?|&&?|[({})]|(\d*|&)(>>?|<<?<?)\S*|.*[;&]")
_VARIABLE = re.compile(r"\$[A-Za-z_({]|`")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_MODULES = frozenset({".", "ml", "module", "source"})
"""Shell commands that load modules or scripts; `activate.sh` of the environment can do that instead."""
_BUILTINS = _MODULES | {"alias", "cd", "eval", "exec", "export", "set", "ulimit", "umask", "unset"}
"""Shell commands that are not programs, so that no payload can begin with them."""


def parse_payload(payload_path: str | os.PathLike[str] | Sequence[str]) -> list[str]:
    """The command of a payload as a list of words.

    Args:
        payload_path: an existing file is a script, even with spaces in its path. Other text is split like a shell does, and
            is a script with arguments if its first word is an existing `.py` file. A list is used unchanged.

    Raises:
        ValueError: `payload_path` is empty, contains a NUL, cannot be split, needs a shell, or names a missing file.
    """
    if isinstance(payload_path, (str, os.PathLike)):
        argv = _parse_text(os.fspath(payload_path), is_path=isinstance(payload_path, os.PathLike))
    else:
        argv = list(payload_path)
    for index, word in enumerate(argv):
        if not isinstance(word, str) or not is_passable(word):
            raise ValueError(
                f"payload_path: {word!r} is not a word of a command; use strings without NUL characters and lone surrogates"
            )
        check_length(word, f"payload_path: word {index}")
    if not argv or not argv[0]:
        raise ValueError("payload_path: it is empty; name a script or a command")
    return argv


def _parse_text(text: str, is_path: bool) -> list[str]:
    """The words of a command from text; `is_path` means that the text is one path and is not split."""
    if "\0" in text:
        raise ValueError(f"payload_path: {text!r} contains a NUL character; remove it")
    script = script_of(text)
    if script is not None and script == existing_file(text):
        return ["python", script]
    argv = [text] if is_path else _split(text)
    if not is_path:
        _refuse_shell(text)
    if script is not None:
        return ["python", script, *argv[1:]]
    if not argv:
        return []
    is_file = is_path or (argv[0].endswith(".py") and "/" not in argv[0]) or (len(argv) == 1 and "/" in argv[0])
    if is_file and not os.access(argv[0], os.X_OK):
        raise ValueError(f"payload_path: there is no file {argv[0]!r} (looked in {os.getcwd()}){_on_cluster(argv)}")
    return argv


def _on_cluster(argv: list[str]) -> str:
    """The end of an error message: what to write for a file that is only on the Slurm cluster; "" for a relative path."""
    if not os.path.isabs(argv[0]):
        return ""
    command = ["python", *argv] if argv[0].endswith(".py") else argv
    return f"; if it is on the cluster only, write a list: {command}"


def script_of(payload_path: str | os.PathLike[str] | Sequence[str]) -> str | None:
    """The absolute path of the script that a payload runs; None if the payload runs no script of this machine."""
    if not isinstance(payload_path, (str, os.PathLike)):
        return None
    whole = existing_file(os.fspath(payload_path))
    if whole is not None or isinstance(payload_path, os.PathLike):
        return whole
    try:
        words = shlex.split(payload_path)
    except ValueError:
        return None
    return existing_file(words[0]) if words and words[0].endswith(".py") else None


def existing_file(text: str) -> str | None:
    """The absolute path of a file; None if it does not exist."""
    path = os.path.expanduser(text)
    # Path.is_file raises for a text that is too long for a file name; os.path.isfile raises for a NUL in some Python versions.
    return os.path.abspath(path) if "\0" not in path and os.path.isfile(path) else None


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"payload_path: {text!r} cannot be split into words: {error}; pass a list instead") from None


def _refuse_shell(text: str) -> None:
    """Raise `ValueError` for text with shell syntax; lists are not checked, as they may contain anything."""
    for index, word in enumerate(_WORD.findall(text)):
        bare = _QUOTED.sub(_without_quotes, word)
        first = index == 0 and (bare in _BUILTINS or _ASSIGNMENT.match(bare))
        if first or _OPERATOR.fullmatch(bare) or _VARIABLE.search(bare):
            other = ", or load modules in the environment's activate.sh" if bare in _MODULES else ""
            if _ASSIGNMENT.match(bare) or bare == "export":
                other = ", or pass variables with extra_env"
            raise ValueError(
                f'payload_path: {word!r} needs a shell, and no shell runs the payload; write ["bash", "-lc", {text!r}]{other}'
            )


def _without_quotes(piece: re.Match[str]) -> str:
    """A placeholder for a quoted part of a word, in which only variables in double quotes are special."""
    quoted = piece.group()
    return "_$_" if quoted[0] == '"' and _VARIABLE.search(re.sub(r"\\.", "", quoted)) else "_"
