"""The run directories of job arrays' elements, of which one call reads many. Paths are absolute."""

import contextlib
import json
import os

from . import files
from .sessions import JOB_ID

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

ARRAY = "array-"  # Beginning of the names of the arrays' directories in the run directory of their step, before a number.
_ENDED, _LOG, _NODE_LOG = ".ended", ".log", "node-0.log"
_JOURNAL, _OUTPUT = "journal.jsonl", "stdio.jsonl"
_MOST_JOURNAL = 16 * 1024 * 1024  # Most bytes of a journal, and of the output, of one element.
MOST_OUTPUT = 256 * 1024
_MOST_LOG = 16 * 1024


def arrays(run_dir: str) -> "list[dict[str, Any]]":
    """Return the number, job id ("" if it is not known) and partition keys of each array of a step, in order."""
    found = []
    for name in os.listdir(run_dir):
        number = name[len(ARRAY) :]
        if name.startswith(ARRAY) and number.isdigit():
            path = os.path.join(run_dir, name)
            keys = []  # type: list[str]
            with contextlib.suppress(OSError, ValueError), open(os.path.join(path, "pipes_context.json"), "rb") as file:
                keys = list(json.loads(file.read().decode())["partitions"])
            job_id = files.read(os.path.join(path, JOB_ID), 0, 64).decode().strip()
            found.append({"number": int(number), "job_id": job_id, "keys": keys})
    return sorted(found, key=lambda array: array["number"])


def ended(
    run_dir: str, wanted: "dict[str, list[list[int]]]", over: "dict[str, list[int]]", limit: int
) -> "tuple[list[str], list[list[int]], bytes]":
    """Return what is there of those elements that have ended.

    Args:
        run_dir: the run directory of the step, whose arrays have the directories `array-N`.
        wanted: by the number N of the array, ranges of elements whose records are returned if their ends are marked.
        over: by the number of the array, elements whose records and logs are returned in any case.
        limit: bytes after which no more elements are begun.

    Returns the names of the files in the run directory; a row for each element with the array's and its own number, the length of
    its journal, the length of its output, which is cut, the whole size of its output, and the length of its logs; and the bytes
    of all these texts, one after the other.
    """
    rows, texts, size = [], [], 0
    for array, spans in wanted.items():
        directory = os.path.join(run_dir, ARRAY + array)
        numbers = set(over.get(array, ()))
        forced = set(numbers)
        with contextlib.suppress(FileNotFoundError):
            names = os.listdir(directory)
            marked = sorted(int(name[: -len(_ENDED)]) for name in names if name.endswith(_ENDED) and name[0].isdigit())
            numbers.update(_within(marked, spans))
        for number in sorted(numbers):
            if size > limit:
                break
            path = os.path.join(directory, str(number))
            journal = files.read(os.path.join(path, _JOURNAL), 0, _MOST_JOURNAL)
            output = files.read(os.path.join(path, _OUTPUT), 0, MOST_OUTPUT)
            logs = b"" if number not in forced else b"\n".join([_tail(path + _LOG), _tail(os.path.join(path, _NODE_LOG))])
            whole = len(output)
            if whole == MOST_OUTPUT:
                whole = os.path.getsize(os.path.join(path, _OUTPUT))
            rows.append([int(array), number, len(journal), len(output), whole, len(logs)])
            texts += [journal, output, logs]
            size += len(journal) + len(output) + len(logs)
    return sorted(os.listdir(run_dir)), rows, b"".join(texts)


def touch(path: str) -> None:
    """Set the time of the last change of a directory to now."""
    os.utime(path)


def _within(numbers: "Sequence[int]", spans: "Sequence[Sequence[int]]") -> "list[int]":
    """Return those of the numbers that one of the ranges contains; both are sorted."""
    found, place = [], 0
    for number in numbers:
        while place < len(spans) and spans[place][1] < number:
            place += 1
        if place < len(spans) and spans[place][0] <= number:
            found.append(number)
    return found


def _tail(path: str) -> bytes:
    """Return the end of a log; b"" if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_LOG))
            return file.read()
    except OSError:
        return b""
