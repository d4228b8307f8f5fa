"""Reads the run directories of many elements of job arrays in one call. Paths are absolute.

An element is one task of a Slurm job array; the number of the element is Slurm's array task id. Each element runs a chunk, which
is one or more Dagster partitions.
"""

import contextlib
import json
import os

from . import files
from .sessions import JOB_ID

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ARRAY = "array-"  # The directories of arrays in the run directory of their step have names of this text and a number.
_ENDED, _LOG, _NODE_LOG = ".ended", ".log", "node-0.log"
_JOURNAL, _OUTPUT = "journal.jsonl", "stdio.jsonl"
_MOST_JOURNAL = 64 * 1024 * 1024  # Most bytes of the journal of one element. A journal that is cut off here shows no end.
MOST_OUTPUT = 256 * 1024  # Most bytes of the output of one element.
_MOST_LOG = 16 * 1024


def arrays(run_dir: str) -> "list[dict[str, Any]]":
    """Return the job arrays of a step, in the order of their numbers. `run_dir` is the run directory of the step.

    Each array is a dict with these keys:
        number: the number N in the name `array-N` of the array's directory.
        job_id: the id of the array's job; "" if the file with the id is missing.
        chunks: a list with a list of partition keys for each element: `chunks[0]` has the keys of element 0. [] if the file with
            the keys is missing or damaged.
    """
    found = []
    for name in os.listdir(run_dir):
        number = name[len(ARRAY) :]
        if name.startswith(ARRAY) and number.isdigit():
            path = os.path.join(run_dir, name)
            chunks = []  # type: list[list[str]]
            with contextlib.suppress(FileNotFoundError, ValueError, KeyError), open(path + "/pipes_context.json", "rb") as file:
                chunks = [list(chunk) for chunk in json.loads(file.read().decode())["partitions"]]
            job_id = files.read(os.path.join(path, JOB_ID), 0, 64).decode().strip()
            found.append({"number": int(number), "job_id": job_id, "chunks": chunks})
    return sorted(found, key=lambda array: array["number"])


def ended(
    run_dir: str, wanted: "dict[str, list[list[int]]]", over: "dict[str, list[int]]", limit: int
) -> "tuple[list[str], list[list[int]], bytes]":
    """Return the journals (files of events, see `runtime.protocol.record`), outputs and logs of array elements that have ended.

    Args:
        run_dir: the run directory of the step. The directory `array-N` there belongs to the array with the number N.
        wanted: ranges of elements, by the number of the array as text. A range is a pair of the first and the last number. An
            element in a range is returned only if the array's directory has the file `ELEMENT.ended`.
        over: elements to return even if the file `ELEMENT.ended` is missing, by the number of the array as text. The array must
            be in `wanted`. The logs are returned only for these elements; the logs of all other elements are empty.
        limit: a number of bytes. Once the returned texts are longer, no more elements are returned.

    Returns three values: the names of the entries of `run_dir`; a list with one row for each element; and one bytes object with
    the texts of all elements, in the order of the rows. The texts of an element are the journal, the first `MOST_OUTPUT` bytes of
    the output, and the logs. A row has the number of the array, the number of the element, and four lengths in bytes: of the
    journal, of the returned output, of the whole output, and of the logs.
    """
    rows, texts, size = [], [], 0
    for array, spans in wanted.items():
        directory = os.path.join(run_dir, ARRAY + array)
        forced = set(over.get(array, ()))
        unread = {number for first, last in spans for number in range(first, last + 1)}
        marked = set()  # type: set[int]
        with contextlib.suppress(FileNotFoundError):
            names = os.listdir(directory)
            marked.update(int(name[: -len(_ENDED)]) for name in names if name.endswith(_ENDED) and name[0].isdigit())
        for number in sorted(forced | (marked & unread)):
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
    """Set the modification time of a directory to now."""
    os.utime(path)


def _tail(path: str) -> bytes:
    """Return the last `_MOST_LOG` bytes of a log; b"" if the log cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_LOG))
            return file.read()
    except OSError:
        return b""
