"""Fair order and admission of payloads. Pure."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rayslurm.runtime.node.resources import NodeResources
from dagster_rayslurm.runtime.protocol.spec import PayloadSpec, RaySpec
from dagster_rayslurm.runtime.supervisor.admission import (
    Claim,
    claim_of,
    fits,
    misfit,
    time_known,
    time_needed,
    too_little_time,
)
from dagster_rayslurm.runtime.supervisor.queue import FairQueue

Item = tuple[str, int, Claim]
"""Run, number within the run, claim."""

CAPACITY = Claim(4, 2)
CLAIMS = st.builds(Claim, st.integers(0, 4), st.integers(0, 2))
STEPS = st.lists(st.one_of(st.tuples(st.sampled_from("abcd"), CLAIMS), st.just("end"), st.just("cancel")), max_size=60)


@given(STEPS, st.integers(1, 4))
def test_no_payload_is_lost_and_each_run_is_served_in_order(steps: list, limit: int) -> None:  # type: ignore[type-arg]
    """Payloads come, end and are cancelled in any order."""
    queue: FairQueue[Item] = FairQueue(lambda item: item[0])
    running: list[Item] = []
    started: list[Item] = []
    came: dict[str, int] = defaultdict(int)
    cancelled: list[Item] = []

    def pump() -> None:
        while True:
            item = queue.take(lambda each: fits(each[2], [one[2] for one in running], CAPACITY, limit))
            if item is None:
                return
            running.append(item)
            started.append(item)
            assert len(running) <= limit
            assert sum(one[2].cpus for one in running) <= CAPACITY.cpus
            assert sum(one[2].gpus for one in running) <= CAPACITY.gpus

    for step in steps:
        if step == "end":
            if running:
                running.pop(0)
        elif step == "cancel":
            waiting = list(queue)
            if waiting:
                cancelled.append(waiting[-1])
                assert queue.remove(waiting[-1]) and not queue.remove(waiting[-1])
        else:
            run, claim = step
            came[run] += 1
            queue.add((run, came[run], claim))
        pump()
        assert not len(queue) or running  # A payload alone always runs.
    while running:
        running.pop(0)
        pump()
    assert len(queue) == 0 and list(queue) == []
    assert sorted([*started, *cancelled]) == sorted({*started, *cancelled}) and len(started) + len(cancelled) == sum(
        came.values()
    )
    for run in came:
        numbers = [number for name, number, _ in started if name == run]
        assert numbers == sorted(numbers)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), CLAIMS)
def test_no_run_waits_for_more_than_one_turn_of_each_other(sizes: list[int], large: Claim) -> None:
    """Even if other runs have many payloads, and this one needs more than theirs."""
    queue: FairQueue[Item] = FairQueue(lambda item: item[0])
    for run, size in enumerate(sizes):
        for number in range(size):
            queue.add((str(run), number, Claim()))
    queue.add(("mine", 0, large))
    expected, taken = list(queue), []
    while True:
        item = queue.take(lambda _: True)
        if item is None:
            break
        taken.append(item)
    assert taken == expected
    assert taken.index(("mine", 0, large)) <= len(sizes)


def test_a_run_keeps_its_turn_until_there_is_room() -> None:
    """Small payloads do not overtake one that needs the whole node."""
    queue: FairQueue[Item] = FairQueue(lambda item: item[0])
    running = [Claim(1, 0), Claim(1, 0)]
    queue.add(("large", 0, CAPACITY))
    queue.add(("small", 0, Claim(1, 0)))
    assert queue.take(lambda item: fits(item[2], running, CAPACITY, 9)) is None
    running.clear()
    assert queue.take(lambda item: fits(item[2], running, CAPACITY, 9)) == ("large", 0, CAPACITY)


def test_payloads_that_wait_for_their_cluster_are_skipped_and_keep_their_place() -> None:
    queue: FairQueue[Item] = FairQueue(lambda item: item[0])
    for number in range(3):
        queue.add(("a", number, Claim()))
    queue.add(("b", 0, Claim()))
    assert queue.take(lambda _: True, lambda item: item[:2] == ("a", 1)) == ("a", 1, Claim())
    assert queue.take(lambda _: True, lambda _: False) is None
    assert [item[:2] for item in queue] == [("b", 0), ("a", 0), ("a", 2)]


def test_claims_with_and_without_a_fresh_cluster() -> None:
    spec = PayloadSpec(["x"], "n", want_cpus=1)
    assert claim_of(spec, False, CAPACITY) == Claim(1, 0)
    assert claim_of(spec, True, CAPACITY) == Claim(1, 2)
    assert claim_of(PayloadSpec(["x"], "n"), True, CAPACITY) == CAPACITY and claim_of(spec, False, CAPACITY).gpus == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"want_cpus": 5}, ["num_cpus=5", "n1", "4 CPUs"]),
        ({"ray": RaySpec(num_gpus=3), "want_gpus": 3}, ["RayLauncher.num_gpus_per_node=3", "n1", "2 GPUs"]),
        ({"want_cpus": 4, "want_gpus": 2, "ray": RaySpec()}, None),
    ],
)
def test_the_misfit_of_a_payload_names_the_field_and_the_node(fields: dict[str, object], words: list[str] | None) -> None:
    node = NodeResources("n1", num_cpus=4, num_gpus=2, memory=2**30, memory_limit=None)
    problem = misfit(PayloadSpec(["x"], "n", **fields), [node])  # type: ignore[arg-type]
    assert problem is None if words is None else problem is not None and all(word in problem for word in words)


@pytest.mark.parametrize(
    ("limit", "durations", "known", "needed"),
    [
        (30.0, {"s": 90.0}, 30.0, 30.0),
        (None, {"s": 90.0}, 90.0, 90.0),
        (None, {"s": 9.0}, 9.0, 60.0),
        (None, {"other": 90.0}, 0.0, 60.0),
    ],
)
def test_the_time_that_a_payload_may_take(limit: float | None, durations: dict[str, float], known: float, needed: float) -> None:
    """Payloads ahead count with what is known of them; only the own need is at least the margin."""
    spec = PayloadSpec(["x"], "n", step="s", time_limit=limit)
    assert time_known(spec, durations) == known and time_needed(spec, durations, 60.0) == needed


def test_too_little_time_is_explained() -> None:
    assert too_little_time(60, [], 1, None) is None and too_little_time(60, [], 1, 60) is None
    assert too_little_time(60, [], 1, 59.9) == "its time limit comes in 59 s, and the payload may take 60 s"
    assert too_little_time(60, [60, 60], 2, 121) is None
    assert "may wait 60 s" in str(too_little_time(60, [60, 60], 2, 119))
