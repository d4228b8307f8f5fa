"""Why jobs wait, component by component, and which jobs of a name exist."""

from dataclasses import replace
from typing import Any

import pytest

from dagster_rayslurm.slurm.pending import most_informative_row, waiting_text
from dagster_rayslurm.slurm.refusals import (
    component_request,
    never_starts,
    partition_too_small,
    pending_reason,
    with_requested_values,
)
from dagster_rayslurm.slurm.request import JobRequest
from dagster_rayslurm.slurm.shared_queue import QueueRow, QueueSnapshot
from dagster_rayslurm.slurm.submit import parse_jobs_found

from ..fake_slurm import job_request


def with_queue(request: JobRequest, **values: Any) -> JobRequest:
    return replace(request, queue=request.queue.having(**values))


GPU = job_request("job", "why", partition="gpu", num_nodes=2, time_limit="9-0", component_id="gpu")
REQUEST = job_request("job", "why", partition="compute", time_limit="9-0", component_id="cpu", further=(GPU,))


def row(number: int, reason: str = "None", start: float | None = None, **fields: object) -> QueueRow:
    partition = "gpu" if number else "compute"
    plain = QueueRow(7 + number, f"7+{number}", "PENDING", reason, start, 1.0, number + 1, "", partition, "job")
    return replace(plain, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "tells"),
    [
        ([row(0), row(1)], None),
        ([row(0, "Resources", 5.0), row(1, "Resources", 5.0)], None),
        ([row(0, "Resources"), row(1, "Resources", 5.0)], 1),
        ([row(0, "Resources", 9.0), row(1, "Priority", 5.0)], 0),
        ([row(0, "ReqNodeNotAvail", 1.0), row(1, "Resources", 5.0)], 0),
        ([row(0, "ReqNodeNotAvail"), row(1, "PartitionTimeLimit")], 1),
        ([], None),
    ],
)
def test_the_most_informative_component(rows: list[QueueRow], tells: int | None) -> None:
    assert most_informative_row(rows) == (None if tells is None else rows[tells])


def test_why_a_job_waits() -> None:
    assert pending_reason("Priority", (), REQUEST) == "Priority"
    assert pending_reason("Resources", [row(0, "Resources", 5.0), row(1, "Resources", 5.0)], REQUEST) == "Resources"
    held = [row(0, "Resources"), row(1, "ReqNodeNotAvail")]
    assert pending_reason("Resources", held, REQUEST) == "ReqNodeNotAvail (component gpu)"


def test_a_job_that_can_never_start_names_the_component_and_its_values() -> None:
    said = never_starts([row(0, "Resources"), row(1, "PartitionTimeLimit")], REQUEST)
    assert said is not None and said.startswith("component 'gpu': ") and said.endswith("time_limit='9-0')")
    assert never_starts([row(0, "Resources"), row(1, "ReqNodeNotAvail")], REQUEST) is None


@pytest.mark.parametrize("requested", ["gpu,fat", "auto", None])
def test_a_job_in_several_partitions_may_start_in_another(requested: str | None) -> None:
    """Also if the partitions come from a plugin of the site, an earlier attempt, or the process that submitted the job."""
    either = replace(REQUEST, further_components=(with_queue(GPU, partition=requested),))
    assert never_starts([row(0), row(1, "PartitionTimeLimit", partition="gpu,fat")], either) is None


def test_components_without_names_are_shown_by_label() -> None:
    part = component_request(row(1), job_request("job", ""))
    assert (part.component_id, part.queue.partition) == ("7+1", "gpu")
    alone = replace(row(0), label="7")
    assert component_request(alone, REQUEST) is REQUEST


def test_components_share_no_nodes() -> None:
    both = [row(0), row(1, partition="compute")]
    said = partition_too_small(both, REQUEST, {"compute": 2})
    assert said is not None and "'cpu' and 'gpu' ask for 3 nodes of partition compute in all, and it has 2" in said
    assert partition_too_small(both, REQUEST, {"compute": 3}) is None and partition_too_small(both, REQUEST, {}) is None
    assert partition_too_small([row(0), row(1)], REQUEST, {"compute": 1, "gpu": 2}) is None


def test_values_of_each_component() -> None:
    said = with_requested_values("lower time_limit or num_nodes", REQUEST)
    assert said.endswith(" (asked for: num_nodes=1, time_limit='9-0' of 'cpu'; num_nodes=2, time_limit='9-0' of 'gpu')")
    assert with_requested_values("lower num_nodes", GPU) == "lower num_nodes (asked for: num_nodes=2)"
    typed = with_queue(GPU, gpus_per_node=1, gpu_type="a100")
    assert with_requested_values("lower gpus_per_node", typed).endswith("(asked for: gpus_per_node=1, gpu_type='a100')")


def test_login_variables_do_not_override_a_component() -> None:
    assert "SBATCH_PARTITION" not in with_queue(REQUEST, partition=None).login_variables
    assert "SBATCH_QOS" in REQUEST.login_variables


def test_components_of_a_job_in_the_queue() -> None:
    other = QueueRow(70, "70", "PENDING", "None", None, 1.0, 1, "", "gpu", "other")
    snapshot = QueueSnapshot(1.0, (row(1), other, row(0)))
    assert [each.job_id for each in snapshot.components(7)] == [7, 8] and snapshot.components(70) == (other,)
    assert snapshot.components(9) == () and [each.is_leader for each in snapshot.rows] == [False, True, True]


def test_components_that_outlive_the_first_one_in_the_queue() -> None:
    other = QueueRow(70, "70", "PENDING", "None", None, 1.0, 1, "", "gpu", "other")
    left = QueueSnapshot(1.0, (row(1, state="RUNNING"), other))
    assert [each.job_id for each in left.components(7)] == [8] == [each.job_id for each in left.components(8)]
    array = replace(other, job_id=71, label="7_1")
    assert QueueSnapshot(1.0, (array,)).components(7) == ()


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["12|PENDING|None"], ["12"]),
        (["13+1|PENDING|None", "13+0|PENDING|None"], ["13"]),
        (["13+0|RUNNING|None", "13+1|RUNNING|None", "13+0|RUNNING|None"], ["13"]),
        (["12|FAILED|BadConstraints"], []),
        # As slurmctld and accounting show a job whose third component was refused.
        (["42+0|CANCELLED|None", "42+1|CANCELLED|None", "44|FAILED|BadConstraints"], []),
        (
            ["44|FAILED|BadConstraints", "42+0|CANCELLED|None", "42+1|CANCELLED|None", "42|CANCELLED|None", "43|CANCELLED|None"],
            [],
        ),
        (["41+0|CANCELLED|None", "41+1|CANCELLED|None"], ["41"]),
        (["41|RUNNING|None", "42|FAILED|BadConstraints"], ["41"]),
        (["slurm_load_jobs error", "", "x|y"], []),
    ],
)
def test_refused_jobs_of_a_name_do_not_count(lines: list[str], found: list[str]) -> None:
    assert parse_jobs_found("\n".join(lines)) == found


NOON = 1795348800.0


@pytest.mark.parametrize(
    ("reason", "start", "text"),
    [
        ("", None, ""),
        ("Resources", None, "waiting for Resources"),
        (
            "Resources (component gpu)",
            NOON,
            "waiting for Resources (component gpu); Slurm expects a start at 12:00 UTC at the latest",
        ),
        ("JobHeldUser", None, "waiting: JobHeldUser"),
        ("", NOON, "waiting; Slurm expects a start at 12:00 UTC at the latest"),
        ("Priority", NOON + 86400, "waiting for Priority; Slurm expects a start at 2026-11-23 12:00 UTC at the latest"),
    ],
)
def test_what_a_job_waits_for_in_words(reason: str, start: float | None, text: str) -> None:
    assert waiting_text(reason, start, NOON - 60) == text


def test_a_job_with_more_nodes_than_its_partition_has_can_never_start() -> None:
    """Slurm says `PartitionNodeLimit` of it, as it does of nodes that are down."""
    large, waits = job_request("job", "", num_nodes=5), row(0, "PartitionNodeLimit", label="7", num_nodes=5)
    said = partition_too_small([waits], large, {"compute": 2, "gpu": 9})
    assert said is not None and "partition compute has 2 nodes" in said and said.endswith("num_nodes=5)"), said
    assert [partition_too_small([waits], large, sizes) for sizes in ({"compute": 5}, {})] == [None, None]
