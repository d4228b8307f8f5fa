"""The leak check: what is left in a cluster, as sentences, and answers that do not come."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from dagster_rayslurm.runtime.node.resources import NodeResources
from dagster_rayslurm.runtime.node.worker_nodes import WorkerNodes
from dagster_rayslurm.runtime.protocol.spec import RaySpec, RuntimeSpec
from dagster_rayslurm.runtime.ray.agent import NodeAgent
from dagster_rayslurm.runtime.ray.cluster import RayCluster, left_when_idle

ACTOR = {"kind": "actor", "id": "a1", "job": "01", "name": "model", "namespace": "mine", "class": "Model", "since": 0.0}
GROUP = {"kind": "group", "id": "ab12", "job": "02", "title": "ab12", "since": 0.0}


def tables(*living: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"jobs": {"01": "n1", "02": "n2"}, "living": living, "available": {}, "total": {}, **fields}


def idle(tables: dict[str, Any]) -> list[str]:
    return [leak.message for leak in left_when_idle(tables)]


class Clock:
    """A loop's timers, and a cluster with tables that a test sets."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.tables: Any = None

    def now(self) -> float:
        return 0.0

    def call_later(self, delay: float, call: Callable[[], None]) -> Any:
        self.timers.append((delay, call))
        return self

    def cancel(self) -> None:
        pass


def cluster_of(clock: Clock) -> RayCluster:
    machine, scratch = NodeResources("n1", 1, 0, 2**30, None), SimpleNamespace(join=lambda name: name)
    agent = NodeAgent(clock, RuntimeSpec("c", RaySpec()), machine, scratch)  # type: ignore[arg-type]
    return RayCluster(agent, WorkerNodes(agent.loop, {}, lambda *_: None), None, lambda *_: None)


def with_tables(clock: Clock) -> RayCluster:
    """A cluster that answers each query at once with the tables that the clock has then."""
    cluster = cluster_of(clock)
    cluster.query_tables = lambda timeout, done: done(clock.tables)  # type: ignore[method-assign]
    return cluster


def left_by(clock: Clock, nonce: str) -> list[str]:
    """What a payload that starts now leaves in the tables, as it is told at its end."""
    told: list[str] = []
    with_tables(clock).leak_check(nonce)(told.extend)
    return told


def test_a_leak_belongs_to_the_payload_whose_job_made_it() -> None:
    clock = Clock()
    clock.tables = tables(ACTOR, GROUP)
    assert left_by(clock, "n1") == [
        "detached actor 'model' (Model, namespace 'mine') is still alive; end it with "
        "ray.kill(ray.get_actor('model', namespace='mine')) before the payload ends"
    ]
    [group] = left_by(clock, "n2")
    assert group.startswith("placement group ab12 still") and "ray.util.remove_placement_group(group)" in group
    assert left_by(clock, "n3") == []


def test_a_submitted_job_is_told_by_the_payloads_that_may_have_submitted_it() -> None:
    clock = Clock()
    clock.tables = tables({"kind": "job", "id": "raysubmit_1", "job": "", "since": time.time() + 10})
    [job] = left_by(clock, "n1")
    assert "raysubmit_1" in job and "`ray job stop raysubmit_1`" in job
    assert idle(clock.tables) == [job]  # It works although no payload runs, whether Ray counts any resources for it or not.
    clock.tables["living"][0]["since"] -= 60
    assert left_by(clock, "n1") == []


def test_resources_that_are_not_free() -> None:
    total = {"CPU": 8.0, "GPU": 2.0, "disk": 1.0, "memory": 5.0, "object_store_memory": 5.0, "node:10.0.0.1": 1.0}
    available = {"CPU": 8.0 - 1e-5, "GPU": 1.0, "memory": 1.0, "object_store_memory": 1.0, "node:10.0.0.1": 0.9}
    found = idle(tables(ACTOR, total=total, available=available))
    assert found[:2] == [
        "GPU: 1 of 2 are not free although no payload runs",
        "disk: 1 of 1 are not free although no payload runs",
    ]
    assert "'model'" in found[2] and len(found) == 3
    # An actor without resources disturbs nobody.
    assert idle(tables(ACTOR, total=total, available=total)) == []


def test_an_answer_that_comes_too_late_is_ignored() -> None:
    clock = Clock()
    answers: list[Any] = []
    cluster = cluster_of(clock)
    not_started, cluster._ray = cluster._ray, SimpleNamespace(request=lambda **_: True)  # type: ignore[assignment]
    for _ in range(2):
        cluster.query_tables(0.3, answers.append)
    cluster.on_event({"event": "tables", "id": 2, "tables": tables()})
    clock.timers[0][1]()
    cluster.on_event({"event": "tables", "id": 1, "tables": tables()})
    clock.timers[1][1]()
    assert answers == [tables(), None] and clock.timers[0][0] == 0.3
    cluster._ray = not_started
    cluster.query_tables(0.3, answers.append)
    assert clock.timers[2][0] == 0.0


def test_a_session_forgets_leaks_that_a_later_payload_has_removed() -> None:
    clock = Clock()
    cluster = with_tables(clock)
    clock.tables = tables(ACTOR, GROUP, total={"CPU": 4.0}, available={"CPU": 2.0})
    cluster.check_when_idle(lambda: True)
    clock.timers.pop()[1]()
    assert len(cluster.leaks) == 3 and next(iter(cluster.leaks)) == "CPU: 2 of 4 are not free although no payload runs"
    ended: list[list[str]] = []
    other = {**ACTOR, "id": "a2", "name": "other"}  # A running payload's.
    clock.tables = tables(other, GROUP, total={"CPU": 4.0}, available={"CPU": 1.0})
    cluster.leak_check("n3")(ended.append)
    assert [message.split()[0] for message in cluster.leaks] == ["CPU:", "placement"]
    clock.tables = tables(total={"CPU": 4.0}, available={"CPU": 4.0})
    cluster.leak_check("n3")(ended.append)
    assert cluster.leaks == {} and ended == [[], []]
    clock.tables = None
    cluster.leak_check("n3")(ended.append)
    assert ended[-1] == []
