"""Fair order and admission of payloads, and the end of a runtime. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rayslurm.runtime.node.resources import NodeResources
from dagster_rayslurm.runtime.protocol.messages import End, EndReason
from dagster_rayslurm.runtime.protocol.spec import PayloadSpec, RaySpec
from dagster_rayslurm.runtime.supervisor.queue import Claim, Next, Queue, claims_of, misfit

CAPACITY = Claim(4, 2)
NODE = {None: CAPACITY}
CLAIMS = st.builds(Claim, st.integers(0, 4), st.integers(0, 2))
STEPS = st.lists(st.one_of(st.tuples(st.sampled_from("abcd"), CLAIMS), st.just("end"), st.just("cancel")), max_size=60)


def item(run: str, number: int = 0, claim: Claim | None = None, **fields: Any) -> Any:
    """Something that the queue takes for a payload."""
    claim = claim or Claim()
    spec = PayloadSpec(["x"], f"{run}{number}", run_id=run, want_cpus=claim.cpus, want_gpus=claim.gpus, **fields)
    return SimpleNamespace(spec=spec, number=number, claim=claim)


def filled(*items: Any, limit: int = 9) -> Queue:
    queue = Queue(limit)
    for each in items:
        queue = queue.added(each, False, 0.0)
    return queue


def names(items: Any) -> list[str]:
    return [each.spec.nonce for each in items]


def may_start(_: Any) -> bool:
    return True


@given(STEPS, st.integers(1, 4))
def test_no_payload_is_lost_and_each_run_is_served_in_order(steps: list, limit: int) -> None:  # type: ignore[type-arg]
    """Payloads come, end and are cancelled in any order."""
    queue = Queue(limit)
    started: list[Any] = []
    came: dict[str, int] = defaultdict(int)
    cancelled: list[Any] = []

    def pump(queue: Queue) -> Queue:
        while True:
            queue, one = queue.start_next(NODE, may_start, 0.0)
            if one is None:
                return queue
            started.append(one)
            claims = [entry.payload.claim for entry in queue.running]  # type: ignore[attr-defined]
            assert len(claims) <= limit
            assert sum(one.cpus for one in claims) <= CAPACITY.cpus and sum(one.gpus for one in claims) <= CAPACITY.gpus

    for step in steps:
        if step == "end":
            if queue.running:
                queue = queue.removed(queue.running[0].payload, True, 0.0)
        elif step == "cancel":
            if queue.arrived:
                cancelled.append(queue.waiting[-1].payload)
                queue = queue.removed(cancelled[-1], False, 0.0)
        else:
            run, claim = step
            came[run] += 1
            queue = queue.added(item(run, came[run], claim), False, 0.0)
        queue = pump(queue)
        assert not queue.arrived or queue.running  # A payload alone always runs.
    while queue.running:
        queue = pump(queue.removed(queue.running[0].payload, True, 0.0))
    assert (queue.arrived, queue.running, queue.turns) == ((), (), ())
    assert len(set(names(started + cancelled))) == len(started) + len(cancelled) == sum(came.values()) == queue.served
    for run in came:
        numbers = [each.number for each in started if each.spec.run_id == run]
        assert numbers == sorted(numbers)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), CLAIMS)
def test_no_run_waits_for_more_than_one_turn_of_each_other(sizes: list[int], large: Claim) -> None:
    """Even if other runs have many payloads, and this one needs more than theirs."""
    others = [item(str(run), number) for run, size in enumerate(sizes) for number in range(size)]
    queue = filled(*others, item("mine", 0, large))
    expected, taken = names(entry.payload for entry in queue.waiting), []
    while queue.arrived:
        queue, one = queue.start_next(NODE, may_start, 0.0)
        assert one is not None
        taken.append(one.spec.nonce)
        queue = queue.removed(one, True, 0.0)
    assert taken == expected
    assert taken.index("mine0") <= len(sizes)


def test_a_run_keeps_its_turn_until_there_is_room() -> None:
    """Small payloads do not overtake one that needs the whole node."""
    first = item("first", 0, Claim(1, 0))
    queue, _ = filled(first, item("large", 0, CAPACITY), item("small", 0, Claim(1, 0))).start_next(NODE, may_start, 0.0)
    assert queue.start_next(NODE, may_start, 0.0) == (queue, None)
    _, one = queue.removed(first, True, 0.0).start_next(NODE, may_start, 0.0)
    assert one is not None and one.spec.run_id == "large"


def test_payloads_that_wait_for_their_cluster_are_skipped_and_keep_their_place() -> None:
    queue = filled(*(item("a", number) for number in range(3)), item("b"))
    queue, one = queue.start_next(NODE, lambda payload: payload.spec.nonce == "a1", 0.0)
    assert one is not None and one.spec.nonce == "a1"
    assert queue.start_next(NODE, lambda _: False, 0.0)[1] is None
    assert names(entry.payload for entry in queue.waiting) == ["b0", "a0", "a2"]


def test_claims_with_and_without_a_fresh_cluster() -> None:
    spec, nothing = PayloadSpec(["x"], "n", want_cpus=1, uses_ray=True), PayloadSpec(["x"], "n")
    assert claims_of(spec, False, NODE) == {None: Claim(1, 0)} and claims_of(spec, True, NODE) == {None: Claim(1, 2)}
    assert claims_of(nothing, True, NODE) == NODE and claims_of(nothing, False, NODE) == {None: Claim(0, 0)}


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
    ("limit", "durations", "left", "why"),
    [
        (30.0, {"s": 90.0}, 30.0, None),
        (30.0, {"s": 90.0}, 29.0, "may take 30 s"),
        (None, {"s": 90.0}, 89.0, "may take 90 s"),
        (None, {"s": 9.0}, 59.9, "its time limit comes in 59 s, and the payload may take 60 s"),
        (None, {"other": 90.0}, 60.0, None),
        (None, {}, None, None),
    ],
)
def test_the_time_that_a_payload_may_take(limit: float | None, durations: dict[str, float], left: Any, why: str | None) -> None:
    """Its own time limit, else what is known of its step, but at least the margin."""
    queue = Queue(2, margin=60.0, durations=durations, served=1)
    refused = queue.refusal(item("a", step="s", time_limit=limit).spec, left, 0.0)
    assert refused is None if why is None else why in str(refused)


def test_payloads_ahead_count_with_what_is_known_of_them() -> None:
    queue = replace(filled(item("a", time_limit=60.0), item("b", time_limit=60.0), item("c"), limit=2), margin=60.0)
    spec = item("d", time_limit=60.0).spec
    assert queue.refusal(spec, 120.0, 0.0) is None and "and may wait 60 s" in str(queue.refusal(spec, 119.0, 0.0))
    queue, _ = queue.start_next(NODE, may_start, 0.0)
    assert queue.refusal(spec, 119.0, 10.0) is None  # One runs since 10 s.
    assert [payload.spec.nonce for payload, _ in queue.late(50.0)] == ["b0", "c0"]


def test_the_longest_whole_run_of_a_step_is_its_expected_duration() -> None:
    """The time of a payload that was cut off says nothing about the next one, and a short queue is no long wait."""
    queue = Queue(1, margin=60.0)
    for came, took, whole in ((0.0, 90.0, True), (100.0, 80.0, True), (200.0, 900.0, False)):
        payload = item("a", step="s")
        queue, _ = queue.added(payload, False, came).start_next(NODE, may_start, came)
        queue = queue.removed(payload, whole, came + took)
    assert queue.durations == {"s": 90.0} and not queue.arrived and not queue.running
    for number in range(12):
        queue = queue.added(item("b", number, step=f"new{number}"), False, 0.0)
    assert queue.refusal(item("c", step="other").spec, 61.0, 0.0) is None


SESSION = Queue(idle_timeout=60.0, in_allocation=True, idle_since=0.0)
SERVED = replace(SESSION, served=1)


@pytest.mark.parametrize(
    ("queue", "then"),
    [
        (Queue(), None),  # Its only payload has not come yet.
        (replace(Queue(), served=1), (Next.FINISH, 0.0)),
        (SESSION, (Next.IDLE, 90.0)),  # The session may become visible late.
        (SERVED, (Next.IDLE, 60.0)),
        (SERVED.ended_by(End(EndReason.CANCEL, "x")), (Next.FINISH, 0.0)),
        (SESSION.ended_by(End(EndReason.CLUSTER_START, "x")), (Next.STOP, 5.0)),
        (SESSION.ended_by(End(EndReason.TERMINATED, "x")), (Next.FINISH, 0.0)),
        (replace(SESSION, draining="x"), (Next.STOP, 5.0)),
        (replace(SERVED, draining="x"), (Next.STOP, 0.5)),
        (filled(item("a")).ended_by(End(EndReason.CANCEL, "x")), None),
    ],
)
def test_when_a_runtime_ends(queue: Queue, then: Any) -> None:
    assert queue.settled(7.0)[1] == then


def test_only_an_idle_session_that_has_served_gives_way() -> None:
    assert SERVED.may_give_way(5.0) and not SERVED.may_give_way(4.0) and not SESSION.may_give_way(99.0)
    assert not SERVED.added(item("a"), False, 1.0).may_give_way(99.0)


def test_only_the_first_reason_for_the_end_counts() -> None:
    queue = SESSION.ended_by(End(EndReason.CLUSTER_LOST, "one")).ended_by(End(EndReason.CANCEL, "two"))
    assert (queue.closing, queue.failed) == ("one", "one")
    assert queue.added(item("a"), False, 3.0).start_next(NODE, may_start, 3.0)[1] is None
