"""Labels of elements, limits of a site and an account, the size of the next array, and what the batch script of one has."""

from dataclasses import replace
from pathlib import Path

import pytest

from dagster_rayslurm.edge import elements
from dagster_rayslurm.slurm.accounting import parse_sacct_elements
from dagster_rayslurm.slurm.arrays import (
    Room,
    array_option,
    by_element,
    count_jobs,
    elements_of,
    parse_largest,
    parse_submit_limit,
    ranges,
)
from dagster_rayslurm.slurm.request import render_script
from dagster_rayslurm.slurm.shared_queue import QueueRow
from dagster_rayslurm.slurm.submit import parse_jobs_found

from ..fake_slurm import job_request


def row(label: str, state: str, job_id: int = 7) -> QueueRow:
    return QueueRow(job_id, label, state, "None", None, None, 1, "", "compute", "x")


@pytest.mark.parametrize(
    ("label", "found"),
    [
        ("12_3", (12, [3])),
        ("12_[4,6-8%2]", (12, [4, 6, 7, 8])),
        ("12_[0-1]", (12, [0, 1])),
        ("12", None),
        ("12+1", None),
        ("12_[4,...]", None),
    ],
)
def test_labels(label: str, found: object) -> None:
    assert elements_of(label) == found


def test_an_element_that_runs_again_has_the_row_of_its_own() -> None:
    rows = [row("12_[1-2%1]", "PENDING", 12), row("12_1", "RUNNING", 13), row("12_0", "COMPLETED", 14), row("9", "RUNNING", 9)]
    found = by_element((row.label, row) for row in rows)
    assert {key: each.state for key, each in found.items()} == {(12, 0): "COMPLETED", (12, 1): "RUNNING", (12, 2): "PENDING"}
    assert count_jobs([*rows[::2], rows[3]]) == 3  # Two that wait, and a job of another kind.


def test_a_large_journal_of_an_element_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "array-1" / "0").mkdir(parents=True)
    (tmp_path / "array-1" / "0.ended").touch()
    (tmp_path / "array-1" / "0" / "journal.jsonl").write_bytes(bytes(20 * 2**20) + b"the end")
    _, [row], data = elements.ended(str(tmp_path), {"1": [[0, 0]]}, {}, 1)
    assert row[:3] == [1, 0, 20 * 2**20 + 7] and data.endswith(b"the end")


def test_limits() -> None:
    config = "MaxArraySize            = {}\nSchedulerParameters     = bf_interval=2{}\n"
    assert [parse_largest(config.format(1001, "")), parse_largest(config.format(4000001, ",max_array_tasks=500"))] == [1001, 500]
    assert parse_largest("") == 1001
    lines = "physics||30\nphysics|gpu|5\nchemistry||\n"
    assert parse_submit_limit(lines, "physics", "compute") == 30 == parse_submit_limit(lines, None, None)
    assert parse_submit_limit(lines, "chemistry", None) is None is parse_submit_limit("", None, None)


def test_sizes() -> None:
    free = Room(1000)
    assert [free.next_size(waiting, 0, 0) for waiting in (10_000, 1000, 3)] == [1000, 1000, 3]
    limited = Room(1000, 20)
    assert limited.next_size(100, 0, 0) == 20 and limited.next_size(100, 0, 15) == 5
    assert limited.next_size(100, 20, 20) == 0 == limited.next_size(100, 12, 12)  # A smaller array than half waits.
    assert limited.next_size(100, 8, 8) == 12 and limited.next_size(3, 17, 17) == 3
    assert limited.next_size(100, 0, 30) == 1  # The jobs of others; Slurm may count them elsewhere.
    refused = free.refused(1000)
    assert refused.next_size(5000, 0, 0) == 500 and refused.refused(500).refused(1).next_size(5000, 0, 0) == 1
    assert refused.taken(500).next_size(5000, 0, 0) == 1000 and free.taken(1000) == free


def test_ranges() -> None:
    assert ranges([5, 0, 1, 2, 7]) == [[0, 2], [5, 5], [7, 7]] and ranges([]) == []
    assert array_option(10, 3) == "0-9%3" and array_option(1, None) == "0-0"


def test_the_script_of_an_array() -> None:
    request = job_request("rayslurm-step-1-nonce", "comment")
    plain, array = (render_script(each, ["run"], "/base/a%b", {}) for each in (request, replace(request, array="0-9%3")))
    assert "--array" not in plain and "SLURM_ARRAY" not in plain
    assert "\n#SBATCH --array=0-9%3\n" in array and "\n#SBATCH --output=%a.log\n" in array
    assert '\nmkdir -p "$SLURM_ARRAY_TASK_ID" && cd "$SLURM_ARRAY_TASK_ID" || exit\n' in array
    assert array.index(">>exit") < array.index('.ended"\nexit "$code"')


def test_the_accounting_of_elements() -> None:
    """As Slurm 22.05 prints it after `scancel` of one that waited, and then of the array."""
    text = "".join(
        f"{line}\n"
        for line in (
            "1_0|COMPLETED|0:0|None|3|5|1|c1|50M|",
            "1_0.batch|COMPLETED|0:0||3||1|c1||4096K",
            "1_4|CANCELLED by 1001|0:0|JobArrayTaskLimit|2|5|1|c1|50M|",
            "1_[5,7-8%2]|CANCELLED by 1001|0:0|JobArrayTaskLimit|0|5|1|None assigned|50M|",
        )
    )
    found = parse_sacct_elements(text)
    assert {number: each.state for (_, number), each in found.items()} == {
        0: "COMPLETED",
        4: "CANCELLED",
        5: "CANCELLED",
        7: "CANCELLED",
        8: "CANCELLED",
    }
    assert found[1, 0].max_rss == 4096 * 1024 and found[1, 4].cancelled_by == 1001 and found[1, 7].job_id == "1_7"


def test_an_array_is_found_as_one_job() -> None:
    assert parse_jobs_found("12_[4-11%2]|PENDING|None\n12_3|RUNNING|None\n") == ["12"]
