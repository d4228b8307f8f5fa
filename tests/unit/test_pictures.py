"""The advice, the timeline and the chart of nodes in the metadata: pure functions, read back from the pictures."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rayslurm.follow import Evidence
from dagster_rayslurm.outcome.metadata import run_metadata, timeline_metadata
from dagster_rayslurm.outcome.pictures import nodes_chart, timeline

from .test_plan_and_metadata import END, granted, picture

GIB = 2**30


def used(peak: float, limit: float | None = 64, mode: str = "slurm", **others: Any) -> str:
    """The sentence about a run with a peak in GiB on a node with a limit in GiB."""
    mib = None if limit is None else int(limit * 1024)
    usage = {**END["usage"], "peak_memory": int(peak * GIB), "spilled_bytes": 0, **others}
    context = {**END["context"], "warm": False, "granted": [granted("n1", mib)]}
    sentence = run_metadata({**END, "usage": usage, "context": context}, mode, "c1")["Granted and used"]
    return str(sentence)


def test_a_run_that_asked_for_far_too_much_is_told_what_would_do() -> None:
    assert used(3) == 'granted 2 CPUs, 64 GiB; used 2.0 CPUs, 3072 MiB: mem="4G" would do'
    assert used(25).endswith('used 2.0 CPUs, 25 GiB: mem="32G" would do')


@pytest.mark.parametrize(
    ("peak", "fields"),
    [
        (26, {}),
        (3, {"spilled_bytes": 1}),
        (3, {"mode": "slurm-session"}),
        (3, {"limit": None}),
        (0.1, {"limit": 1.9}),
        (0, {}),
    ],
    ids=["half is too little", "spilled", "others share the session", "no limit", "small anyway", "not measured"],
)
def test_there_is_no_advice_without_good_reason(peak: float, fields: dict[str, Any]) -> None:
    assert "would do" not in used(peak, **fields)


@given(st.floats(0.001, 1000), st.floats(0.001, 1000))
def test_advice_is_always_more_than_what_was_used(peak: float, limit: float) -> None:
    advice = re.search(r'mem="(\d+)G"', used(peak, limit))
    if advice:
        assert 1.2 * peak <= int(advice[1]) <= limit / 2


def bars(svg: str, start: str = "M") -> list[tuple[int, int]]:
    """Start and end of each horizontal bar."""
    return [(int(x), int(x) + int(width)) for x, width in re.findall(r"M(\d+) \d+h(\d+)", svg)]


def test_the_timeline_shows_each_phase_after_the_one_before() -> None:
    evidence = Evidence()
    for name, at in (("cluster-start", 1000.5), ("cluster-start", 1001.0), ("cluster-ready", 1010.0), ("queued", 1010.5)):
        evidence.add_record({"type": "phase", "phase": name, "message": "", "at": at}, "n")
    evidence.add_record({"type": "start", "at": 1000.0}, "n")
    assert not timeline_metadata(evidence, "slurm", 30.0)  # It has not ended.
    evidence.add_record({"type": "phase", "phase": "running", "message": "", "at": 1020.5}, "n")
    evidence.add_record({"type": "phase", "phase": "memory", "message": "", "at": 1030.5}, "n")
    evidence.add_record({"type": "end", "nonce": "n", "ended_at": 1070.5}, "n")
    svg = picture(timeline_metadata(evidence, "slurm", 30.0)["Timeline"].value)
    named = re.findall(r">([^<>]+): ([\d.]+) s<", svg)
    assert named == [
        ("waits for Slurm", "30.0"),
        ("runtime starts", "0.5"),
        ("Ray starts", "10.0"),
        ("waits for its turn", "10.0"),
        ("payload runs", "50.0"),
    ]
    found = bars(svg)
    assert [start for start, _ in found[1:]] == pytest.approx([end for _, end in found[:-1]], abs=1)
    widths = [end - start for start, end in found]
    assert widths[4] / widths[0] == pytest.approx(50 / 30, abs=0.05)


def test_a_single_phase_needs_no_picture() -> None:
    evidence = Evidence(end={"ended_at": 10.01}, started_at=10.0)
    assert not timeline_metadata(evidence, "slurm", 5.0) and not timeline_metadata(evidence, "slurm", None)


@given(st.lists(st.floats(0.1, 1e7), min_size=2, max_size=5))
def test_dagster_shows_the_timeline_in_place(seconds: list[float]) -> None:
    chart = timeline([("waits for its turn", each) for each in seconds])
    assert len(chart) < 1000
    assert max(end for _, end in bars(picture(chart))) <= 405


@pytest.mark.parametrize("count", [2, 7, 64, 1024])
def test_the_chart_of_nodes_names_the_extremes(count: int) -> None:
    shares = [(f"node-with-a-long-name-{number}.site.example", number / count, 0.2) for number in range(count)]
    chart = nodes_chart(shares)
    svg = picture(chart)
    assert len(chart) < 1000 and len(re.findall("v-", svg)) >= 2 * min(count, 10)
    assert "CPUs busy: 0 % (node-with-a-long-name-0." in svg and f" to {100 * (count - 1) / count:.0f} % (" in svg
    heights = [int(each) for each in re.findall(r"v-(\d+)", svg)]
    assert heights[0] == round(100 * (count - 1) / count) and set(heights[len(heights) // 2 :]) == {20}


def test_nodes_are_compared_by_what_each_was_granted() -> None:
    nodes = {"n1": {"cpu_seconds": 20.0, "peak_memory": 50 * 2**20}, "n2": {"cpu_seconds": 2.0, "peak_memory": 100 * 2**20}}
    usage = {**END["usage"], "nodes": nodes}
    context = {**END["context"], "granted": [granted("n1", 500), granted("n2", 400), granted("n3", 400)]}
    metadata = run_metadata({**END, "usage": usage, "context": context}, "slurm", "c1")
    svg = picture(metadata["Usage by node"].value)
    assert "CPUs busy: 10 % (n2) to 100 % (n1)" in svg and "peak memory: 10 % (n1) to 25 % (n2)" in svg
    alone = {**context, "granted": [granted("n1", 500)]}
    assert "Usage by node" not in run_metadata({**END, "usage": usage, "context": alone}, "slurm", "c1")
