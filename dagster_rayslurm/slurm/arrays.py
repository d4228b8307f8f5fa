"""Job arrays: how Slurm names their elements, how many a site takes, and how large the next array of a step is. Pure.

squeue and sacct list elements that wait in one row, "12_[4,6-11%2]", and each other one in a row of its own, "12_3". An element
that is cancelled while it waits alone leaves both lists (tried on 22.05).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from .shared_queue import QueueRow, parse_count
from .states import TERMINAL

_LABEL = re.compile(r"(?P<array>[0-9]+)_(?:(?P<one>[0-9]+)|\[(?P<many>[0-9,-]+)(?:%[0-9]+)?\])")
_DEFAULT_SIZE = 1001  # MaxArraySize unless slurm.conf sets it.


def elements_of(label: str) -> tuple[int, list[int]] | None:
    """Returns the id of an array, and the numbers of its elements, in a label such as "12_3" or "12_[4,6-11%2]"; else None."""
    match = _LABEL.fullmatch(label)
    if match is None:
        return None
    numbers: list[int] = []
    for part in (match["one"] or match["many"]).split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return int(match["array"]), numbers


def waits(row: QueueRow) -> bool:
    """Whether the row is that of elements that have not started: they may wait, or have been cancelled while they waited."""
    return "[" in row.label


def rows_by_element(rows: Iterable[QueueRow]) -> dict[tuple[int, int], QueueRow]:
    """Returns the row of each element of all arrays, by array id and number."""
    found: dict[tuple[int, int], QueueRow] = {}
    for row in rows:
        array, numbers = elements_of(row.label) or (0, [])
        for number in numbers:
            # An element that Slurm runs again may be in two rows; the one of its own says more.
            if not waits(row) or (array, number) not in found:
                found[array, number] = row
    return found


def count_jobs(rows: Iterable[QueueRow]) -> int:
    """Returns the number of a user's jobs that are not over, as Slurm counts them for limits: each element is a job."""
    alive = (row for row in rows if row.state not in TERMINAL)
    return sum(len((elements_of(row.label) or (0, [0]))[1]) for row in alive)


def ranges(numbers: Collection[int]) -> list[list[int]]:
    """Returns the numbers as ranges, each with its first and last number, in order."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


def parse_largest(config: str) -> int:
    """Returns the most elements that an array may have, from the output of `scontrol show config`."""
    found = dict(re.findall(r"(?m)^(\w+)\s*= *(.*)$", config))
    sizes = [parse_count(found.get("MaxArraySize", "")) or _DEFAULT_SIZE]
    if match := re.search(r"max_array_tasks=([0-9]+)", found.get("SchedulerParameters", "")):
        sizes.append(int(match[1]))
    return max(1, min(sizes))


def parse_submit_limit(associations: str, account: str | None, partition: str | None) -> int | None:
    """Returns how many jobs a user may have submitted, from lines "ACCOUNT|PARTITION|LIMIT" of sacctmgr; None for any number."""
    limits = []
    for line in associations.splitlines():
        own_account, own_partition, limit, *_ = [*line.split("|"), "", "", ""]
        applies = (account is None or own_account == account) and own_partition in ("", partition)
        if applies and limit.isdigit():
            limits.append(int(limit))
    return max(limits, default=None)


@dataclass(frozen=True)
class Room:
    """How many elements Slurm takes at a time, as far as is known.

    `refused` and `taken` return a copy that knows the answer to a submission.
    """

    largest: int  # Most elements of one array.
    limit: int | None = None  # Most jobs that the user may have submitted; None for no limit, or an unknown one.
    attempt: int | None = None  # Most elements of the next attempt, after a refusal.

    def next_size(self, waiting: int, own: int, all_jobs: int) -> int:
        """Returns how many of the `waiting` elements the next array gets; 0 to wait until more of the others have ended.

        `own` counts the elements of this step, and `all_jobs` the jobs of this user, that are not over. While elements of this
        step are there, a small array waits, so that there are few arrays.
        """
        size = min(waiting, self.largest)
        if self.limit is not None:
            wanted = min(size, max(1, self.limit // 2))
            size = min(size, max(0, self.limit - all_jobs))
            size = 0 if size < wanted and own else max(1, size)
        if self.attempt is not None:
            size = min(size, self.attempt)
        return size

    def refused(self, size: int) -> Room:
        """Returns a copy that tries half of the size that was refused."""
        return replace(self, attempt=max(1, size // 2))

    def taken(self, size: int) -> Room:
        """Returns a copy that tries twice the size that was taken, if a refusal had lowered it."""
        return self if self.attempt is None else replace(self, attempt=2 * size)


def array_option(size: int, max_concurrent: int | None) -> str:
    """Returns the value of sbatch's `--array` for elements numbered from 0."""
    return f"0-{size - 1}" + (f"%{max_concurrent}" if max_concurrent is not None else "")
