"""Reads the labels of job array elements in squeue and sacct, and computes how many elements the next job array may have.

Slurm calls an element an array task. squeue and sacct list the waiting elements of an array in one row, "12_[4,6-11%2]", and
each other element in a row of its own, "12_3". If the only waiting element is cancelled, this element disappears from both lists
(tried on 22.05). Except for `ask_room`, the functions have no side effects.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from ..ssh.base import Connection
from .shared_queue import QueueRow, parse_count, run_slurm
from .states import TERMINAL

if TYPE_CHECKING:
    from .config import SlurmQueueConfig  # Imports Dagster, which takes longer than a listing of runs.

T = TypeVar("T")

_LABEL = re.compile(r"(?P<array>[0-9]+)_(?:(?P<one>[0-9]+)|\[(?P<many>[0-9,-]+)(?:%[0-9]+)?\])")
_DEFAULT_SIZE = 1001  # MaxArraySize unless slurm.conf sets it.
_LIMITS = 'exec sacctmgr --noheader --parsable2 show associations user="$(id -un)" format=account,partition,maxsubmit'


def elements_of(label: str) -> tuple[int, list[int]] | None:
    """Returns the array id and the element numbers in a label such as "12_3" or "12_[4,6-11%2]"; None for any other label."""
    match = _LABEL.fullmatch(label)
    if match is None:
        return None
    numbers: list[int] = []
    for part in (match["one"] or match["many"]).split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return int(match["array"]), numbers


def waits(row: QueueRow) -> bool:
    """Whether a row of squeue stands for elements that have not started: elements that wait, or were cancelled as they waited."""
    return "[" in row.label


def by_element(rows: Iterable[tuple[str, T]]) -> dict[tuple[int, int], T]:
    """Returns the row of squeue or sacct for each element, by array id and element number.

    `rows` has pairs of a label and a row; rows of jobs that are no arrays are left out. An element that Slurm runs again may be
    in two rows: in the row of all waiting elements, and in a row of its own. The result then has the element's own row.
    """
    found: dict[tuple[int, int], T] = {}
    for label, row in rows:
        array, numbers = elements_of(label) or (0, [])
        for number in numbers:
            # The element's own row says more than a row of several elements.
            if "[" not in label or (array, number) not in found:
                found[array, number] = row
    return found


def count_jobs(rows: Iterable[QueueRow]) -> int:
    """Returns the number of jobs in `rows` that are not over; each element of an array is one job, as in Slurm's limits."""
    alive = (row for row in rows if row.state not in TERMINAL)
    return sum(len((elements_of(row.label) or (0, [0]))[1]) for row in alive)


def ranges(numbers: Collection[int]) -> list[list[int]]:
    """Returns the numbers as ranges in ascending order, each as a list [first, last]: [[1, 3], [7, 7]] for 1, 2, 3 and 7."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


def parse_largest(config: str) -> int:
    """Returns the largest number of elements that an array may have; `config` is the output of `scontrol show config`.

    The result is MaxArraySize or, if smaller, `max_array_tasks` in SchedulerParameters. If the output has no MaxArraySize,
    Slurm's default of 1001 counts.
    """
    found = dict(re.findall(r"(?m)^(\w+)\s*= *(.*)$", config))
    sizes = [parse_count(found.get("MaxArraySize", "")) or _DEFAULT_SIZE]
    if match := re.search(r"max_array_tasks=([0-9]+)", found.get("SchedulerParameters", "")):
        sizes.append(int(match[1]))
    return max(1, min(sizes))


def parse_submit_limit(associations: str, account: str | None, partition: str | None) -> int | None:
    """Returns the largest number of jobs that a user may have in the queue at a time; None if no line sets a limit.

    Args:
        associations: output of `sacctmgr --noheader --parsable2 show associations user=USER format=account,partition,maxsubmit`,
            which has lines "ACCOUNT|PARTITION|LIMIT". Of several limits, the largest counts.
        account: the account of the next job; lines for other accounts are ignored. If None, the lines of all accounts count.
        partition: the partition of the next job; lines for other partitions are ignored. None for the default partition; then
            only lines without a partition count. Lines without a partition always count.
    """
    limits = []
    for line in associations.splitlines():
        own_account, own_partition, limit, *_ = [*line.split("|"), "", "", ""]
        applies = (account is None or own_account == account) and own_partition in ("", partition)
        if applies and limit.isdigit():
            limits.append(int(limit))
    return max(limits, default=None)


@dataclass(frozen=True)
class Room:
    """The limits on the size of the next job array, as far as known from Slurm's settings and its answers to earlier submissions.

    `refused` and `taken` return a copy that takes Slurm's answer to a submission into account.
    """

    largest: int  # Most elements of one array (see `parse_largest`).
    limit: int | None = None  # Most jobs that the user may have in the queue; None for no limit, or an unknown limit.
    attempt: int | None = None  # Most elements of the next array, after a refusal; None before the first refusal.

    def next_size(self, waiting: int, own: int, all_jobs: int) -> int:
        """Returns the number of elements for the next array; 0 if no array should be submitted now.

        If this step has elements in the queue, and the user's limit of jobs leaves room for only a small array, the result is 0:
        a larger array can follow later, so that a step has few arrays. An array is small if it has fewer elements than half of
        the user's limit, and fewer than it could have without this limit. If this step has no elements in the queue, the result
        is at least 1.

        Args:
            waiting: the number of elements that this step has yet to submit.
            own: the number of this step's elements in the queue that are not over.
            all_jobs: the number of this user's jobs in the queue that are not over; each element counts as a job.
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
        """Returns a copy whose next array has at most half as many elements as the `size` of an array that Slurm refused."""
        return replace(self, attempt=max(1, size // 2))

    def taken(self, size: int) -> Room:
        """Returns a copy whose next array has at most twice as many elements as the `size` of an array that Slurm accepted.

        Returns `self` if there was no refusal before.
        """
        return self if self.attempt is None else replace(self, attempt=2 * size)


def array_option(size: int, max_concurrent: int | None) -> str:
    """Returns the value of sbatch's `--array` for `size` elements, numbered from 0.

    At most `max_concurrent` elements run at once; None for no limit.
    """
    return f"0-{size - 1}" + (f"%{max_concurrent}" if max_concurrent is not None else "")


def ask_room(connection: Connection, queue: SlurmQueueConfig) -> Room:
    """Queries Slurm for its limits on job arrays and on this user's jobs; returns the limits for jobs with the settings `queue`.

    Raises OSError if the cluster is out of reach.
    """
    config = run_slurm(connection, ["scontrol", "show", "config"], timeout=60).stdout.decode("utf-8", "replace")
    # Without accounting, Slurm has no limit on a user's submitted jobs, or shows none.
    limits = run_slurm(connection, ["sh", "-c", _LIMITS], timeout=60).stdout.decode("utf-8", "replace")
    return Room(parse_largest(config), parse_submit_limit(limits, queue.account, queue.partition))
