"""The life of a payload as a state machine. Pure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rayslurm.runtime.payload.life import Awaited, Do, Life, Phase
from dagster_rayslurm.runtime.protocol.messages import End, EndReason

CANCEL, TIMEOUT, TERMINATED = (End(reason, str(reason)) for reason in (EndReason.CANCEL, EndReason.TIMEOUT, EndReason.TERMINATED))
RECORD = End(EndReason.RECORD, "disk full")
GOOD, BAD, KILLED = End(EndReason.EXIT, exit_code=0), End(EndReason.EXIT, exit_code=3), End(EndReason.EXIT, signal=9)
RUNS = Life(Phase.RUNNING)
OUTPUT = frozenset({Awaited.OUTPUT})


@pytest.mark.parametrize("phase", [Phase.QUEUED, Phase.STARTING])
def test_a_payload_that_has_no_process_yet_ends_at_once(phase: Phase) -> None:
    life, orders = Life(phase).end_early(CANCEL, 5.0, 0.0)
    assert (life.phase, life.result, life.exit_code, orders) == (Phase.FINISHING, CANCEL, 1, [Do.FINISH])


def test_a_second_reason_can_shorten_the_grace_period_but_never_lengthen_it() -> None:
    life, orders = RUNS.end_early(CANCEL, 10.0, 0.0)
    assert (life.kill_at, orders) == (10.0, [Do.TERMINATE, Do.KILL])
    assert life.end_early(TIMEOUT, 10.0, 5.0) == (life, [])
    shorter, orders = life.end_early(TIMEOUT, 2.0, 5.0)
    assert (shorter.kill_at, shorter.result, orders) == (7.0, CANCEL, [Do.KILL])
    assert RUNS.end_early(CANCEL, 0.0, 1.0)[1] == [Do.KILL]


def test_a_successful_payload_keeps_its_end_unless_its_record_fails() -> None:
    life, orders = RUNS.exited(GOOD, OUTPUT)
    assert orders == [] and life.end_early(CANCEL, 0.0, 0.0) == (life, [])
    assert life.received(Awaited.SIGNAL) == (life, [])
    done, orders = life.received(Awaited.OUTPUT)
    assert orders == [Do.FINISH] and done.ran_to_exit and done.exit_code == 0
    assert life.end_early(RECORD, 0.0, 0.0)[0].result == RECORD


@pytest.mark.parametrize(("end", "code"), [(BAD, 3), (KILLED, 137)])
def test_the_end_of_a_failed_payload_waits_for_a_signal_to_the_runtime(end: End, code: int) -> None:
    life, orders = RUNS.exited(end, frozenset())
    assert orders == [] and life.exit_code == code
    signalled, orders = life.end_early(TERMINATED, 5.0, 0.0)
    assert orders == [Do.FINISH] and signalled.terminated and not signalled.ran_to_exit
    later, orders = life.received(Awaited.SIGNAL)
    assert orders == [Do.FINISH] and later.result == end
    assert RUNS.end_early(CANCEL, 1.0, 0.0)[0].exited(end, frozenset())[1] == [Do.FINISH]  # Nothing to learn from a signal.


def test_only_a_reason_that_is_no_failed_record_stops_the_search_for_outputs() -> None:
    life = replace(RUNS.exited(GOOD, frozenset())[0], phase=Phase.SEARCHING)
    assert life.end_early(RECORD, 0.0, 0.0) == (life, [])
    stopped, orders = life.end_early(TIMEOUT, 0.0, 0.0)
    assert (stopped.result, orders) == (TIMEOUT, [Do.CONCLUDE])
    ended = replace(stopped, phase=Phase.ENDED)
    assert ended.end_early(CANCEL, 0.0, 0.0) == (ended, [])


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from([CANCEL, TIMEOUT, RECORD]), st.floats(0, 9)),
            st.sampled_from(Awaited),
            st.sampled_from([GOOD, BAD, KILLED]),
        )
    ),
    st.frozensets(st.sampled_from([Awaited.OUTPUT, Awaited.USAGE, Awaited.LEAKS])),
)
def test_every_life_finishes_once_and_keeps_its_first_reason(events: list, awaited: frozenset) -> None:  # type: ignore[type-arg]
    life, done = RUNS, []
    for now, event in enumerate([*events, GOOD, *Awaited]):
        before = life
        if isinstance(event, Awaited):
            life, orders = life.received(event)
        elif isinstance(event, tuple):
            life, orders = life.end_early(*event, float(now))
        elif life.exit is None:
            life, orders = life.exited(event, awaited)
        else:
            continue
        done += orders
        assert before.phase <= life.phase and (before.forced is None or life.forced == before.forced)
        assert before.kill_at is None or (life.kill_at is not None and life.kill_at <= before.kill_at)
        if Do.FINISH in orders:
            life = replace(life, phase=Phase.SEARCHING)
        if Do.CONCLUDE in orders:
            life = replace(life, phase=Phase.ENDED)
    assert done.count(Do.FINISH) == 1 and done.count(Do.CONCLUDE) <= 1 and done.count(Do.TERMINATE) <= 1
