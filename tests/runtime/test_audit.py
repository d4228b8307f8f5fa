"""What is left in a cluster, in sentences; and an answer that does not come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dagster_rayslurm.runtime.ray.leak_check import LeakQuery, leaks, not_back, still_left
from dagster_rayslurm.runtime.supervisor.leak_watch import LeakWatch

ACTOR = {"job": "01", "name": "model", "namespace": "mine", "class": "Model"}
GROUP = {"job": "02", "name": "", "namespace": "", "id": "ab12"}


def tables(**fields: Any) -> dict[str, Any]:
    found = {"jobs": {"01": "n1", "02": "n2"}, "actors": [], "groups": [], "submitted": [], "available": {}, "total": {}}
    return {**found, **fields}


def test_what_is_left_belongs_to_the_payload_whose_job_made_it() -> None:
    left = tables(actors=[ACTOR], groups=[GROUP])
    assert leaks(left, "n1") == [
        "detached actor 'model' (Model, namespace 'mine') is still alive; end it with "
        "ray.kill(ray.get_actor('model', namespace='mine')) before the payload ends"
    ]
    [group] = leaks(left, "n2")
    assert group.startswith("placement group ab12 still") and "ray.util.remove_placement_group(group)" in group
    assert leaks(left, "n3") == [] and len(leaks(left)) == 2


def test_a_submitted_job_is_told_by_the_payloads_that_may_have_submitted_it() -> None:
    left = tables(submitted=[{"id": "raysubmit_1", "since": 100.0}])
    [job] = leaks(left, "n1", since=99.0)
    assert "raysubmit_1" in job and "`ray job stop raysubmit_1`" in job
    assert leaks(left, "n1", since=101.0) == [] and leaks(left) == [job]
    # It works although no payload runs, whether Ray counts any resources for it or not.
    assert not_back(left) == [job] and not_back(still_left(left, tables())) == []


def test_resources_that_are_not_back() -> None:
    total = {"CPU": 8.0, "GPU": 2.0, "disk": 1.0, "memory": 5.0, "object_store_memory": 5.0, "node:10.0.0.1": 1.0}
    available = {"CPU": 8.0 - 1e-5, "GPU": 1.0, "memory": 1.0, "object_store_memory": 1.0, "node:10.0.0.1": 0.9}
    found = not_back(tables(total=total, available=available, actors=[ACTOR]))
    assert found[:2] == [
        "GPU: 1 of 2 are not free although no payload runs",
        "disk: 1 of 1 are not free although no payload runs",
    ]
    assert "'model'" in found[2] and len(found) == 3
    # What takes no resources is in nobody's way.
    assert not_back(tables(total=total, available=total, actors=[ACTOR])) == []


def test_an_answer_that_comes_too_late_is_nobodys() -> None:
    timers: list[tuple[float, Callable[[], None]]] = []
    answers: list[Any] = []
    auditor = LeakQuery(lambda _: True, lambda delay, call: timers.append((delay, call)))
    auditor.ask(0.3, answers.append)
    auditor.ask(0.3, answers.append)
    auditor.take(2, tables())
    timers[0][1]()
    auditor.take(1, tables())
    timers[1][1]()
    assert answers == [tables(), None] and timers[0][0] == 0.3
    nobody = LeakQuery(lambda _: False, lambda delay, call: timers.append((delay, call)))
    nobody.ask(0.3, answers.append)
    assert timers[2][0] == 0.0


def test_what_is_gone_is_left_no_more() -> None:
    """And what others hold now was not left then."""
    before = tables(total={"CPU": 4.0}, available={"CPU": 2.0}, actors=[ACTOR], groups=[GROUP])
    other = {**ACTOR, "name": "other"}
    now = still_left(before, tables(total={"CPU": 4.0}, available={"CPU": 1.0}, actors=[other], groups=[GROUP]))
    assert not_back(now) == ["CPU: 2 of 4 are not free although no payload runs", *leaks(tables(groups=[GROUP]))]
    now = still_left(now, tables(total={"CPU": 4.0}, available={"CPU": 3.0}, groups=[GROUP]))
    assert not_back(now)[0] == "CPU: 1 of 4 are not free although no payload runs"
    assert not_back(still_left(now, tables(total={"CPU": 4.0}, available={"CPU": 4.0}))) == []


class Clock:
    """A loop's timers, and a cluster that tells what it is told to."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.knows: Any = None

    def call_later(self, delay: float, call: Callable[[], None]) -> Any:
        self.timers.append((delay, call))
        return self

    def cancel(self) -> None:
        pass

    def audit(self, _: float, done: Callable[[Any], None]) -> None:
        done(self.knows)


def test_a_session_that_is_never_idle_forgets_what_was_mended() -> None:
    clock = Clock()
    leftovers = LeakWatch(clock, lambda: clock)  # type: ignore[arg-type, return-value]
    clock.knows = tables(total={"CPU": 2.0}, available={"CPU": 1.0}, actors=[ACTOR])
    leftovers.look_when_idle(lambda: True)
    clock.timers.pop()[1]()
    assert len(leftovers.found) == 2
    ended: list[list[str]] = []
    clock.knows = tables(total={"CPU": 2.0}, available={}, actors=[])
    leftovers.of("n2")(ended.append)
    assert leftovers.found == ["CPU: 1 of 2 are not free although no payload runs"]
    leftovers.of("n3")(ended.append)
    [(delay, again)] = clock.timers  # Ray takes a moment to give it back.
    clock.knows = tables(total={"CPU": 2.0}, available={"CPU": 2.0})
    again()
    assert delay == 2.0 and leftovers.found == [] and ended == [[], []]
    leftovers.of("n4")(ended.append)
    assert len(clock.timers) == 1
