"""The membership of a Ray cluster, as a state machine: which events make it ready, make it go on without a node, or fail it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rayslurm.runtime.node.worker_nodes import Identity
from dagster_rayslurm.runtime.protocol.messages import ClusterError, EndReason, NodeEvent
from dagster_rayslurm.runtime.protocol.spec import RaySpec
from dagster_rayslurm.runtime.ray.membership import Action, Event, Join, Member, Membership, NodeLost, Ready, Report, Say

STARTING = {"event": Report.STARTING, "gcs": "h0:1"}
DEADLINE = {"event": Report.DEADLINE}


def joined(node: int, problem: str | None = None) -> Event:
    return {"event": NodeEvent.JOINED, "node": node, "identity": Identity(f"h{node}", None), "here": True, "problem": problem}


def lost(node: int) -> Event:
    return {"event": NodeEvent.LOST, "node": node, "message": "its connection ended"}


def gone(node: int) -> Event:
    return {"event": NodeEvent.GONE, "node": node}


def failed(node: int, attempt: int = 1, reason: EndReason = EndReason.CLUSTER_START) -> Event:
    return {"event": NodeEvent.RAY_FAILED, "node": node, "attempt": attempt, "reason": reason, "message": f"Ray fails on h{node}"}


def table(*hosts: int, dead: int | None = None) -> Event:
    row = {"address": "10.0.0.1", "resources": {"CPU": 1.0}, "component": None}
    nodes = {str(each): {**row, "hostname": f"h{each}", "head": each == 0, "alive": each != dead} for each in hosts}
    return {"event": Report.NODES, "nodes": nodes, "ray_version": "2.60.0"}


def run(*events: Event, workers: int = 2, **spec: Any) -> tuple[Membership, list[Action]]:
    """The state after some events, and what followed from the last one."""
    members = {place: Member(f"n{place}") for place in range(1, workers + 1)}
    state, actions = Membership(RaySpec(**spec), "h0", members), []
    for event in events:
        before = repr(state)
        after, actions = state.step(event)
        assert repr(state) == before, "a step must not change its state"
        state = after
    return state, actions


def told(actions: list[Action]) -> list[str]:
    return [action.message if isinstance(action, Say) else str(action) for action in actions]


UP = (STARTING, joined(1), joined(2), table(0, 1, 2))


def test_a_cluster_is_ready_when_all_nodes_are_in_the_table() -> None:
    state, actions = run(STARTING)
    assert actions == [Join([1, 2])] and state.attempt == 1
    state, actions = run(*UP[:-1], table(0, 1))
    assert told(actions) == ["2/3 nodes joined"] and not state.ready
    state, actions = run(*UP)
    assert state.ready and told(actions[:1]) == ["3/3 nodes joined"]
    assert isinstance(actions[1], Ready)
    assert run(*UP, table(0, 1, 2))[1] == run(*UP, DEADLINE)[1] == run(*UP, gone(1))[1] == []


def test_a_cluster_is_ready_once() -> None:
    assert run(STARTING, joined(1), table(0, 1), min_nodes=2)[0].ready
    assert run(STARTING, joined(1), table(0, 1), joined(2), table(0, 1, 2), min_nodes=2)[1] == []


def test_symmetric_run_must_have_started_its_command() -> None:
    state, _ = run(*UP, launch_style="symmetric-run")
    assert not state.ready
    state, _ = run(*UP, {"event": Report.ENTRYPOINT}, launch_style="symmetric-run")
    assert state.ready
    _, actions = run(*UP, DEADLINE, launch_style="symmetric-run")
    assert "did not start its command within startup_timeout=300 s" in told(actions)[0]


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (failed(1), "Ray fails on h1"),
        (joined(1, "num_cpus=9 asks for more"), "num_cpus=9 asks for more"),
        (gone(1), "node n1 was lost while the cluster started"),
    ],
)
def test_a_node_that_fails_while_the_cluster_starts(event: Event, why: str) -> None:
    state, actions = run(STARTING, joined(1), event)
    [error] = actions
    assert isinstance(error, ClusterError) and str(error) == why and error.reason == EndReason.CLUSTER_START and state.failed
    state, actions = run(STARTING, joined(1), event, min_nodes=2)
    assert told(actions) == [f"the cluster starts without node n1: {why}"] and not state.failed
    assert run(STARTING, joined(1), event, event, min_nodes=2)[1] == []  # A node that reconnects repeats its failure.
    state, _ = run(STARTING, joined(1), event, joined(2), failed(2), min_nodes=2)
    assert state.failed and [member.given_up for member in state.members.values()] == [True, True]


def test_a_failure_of_an_earlier_attempt_is_none() -> None:
    assert run(STARTING, STARTING, joined(1), failed(1, attempt=1))[1] == []
    assert run(STARTING, STARTING, joined(1), failed(1, attempt=2))[0].failed


def test_a_connection_may_break_while_the_cluster_starts() -> None:
    _, actions = run(STARTING, joined(1), lost(1))
    assert actions == [Say("cluster-start", "node n1 is out of reach: its connection ended")]
    assert run(STARTING, joined(1), lost(1), joined(1), joined(2), table(0, 1, 2))[0].ready


def test_a_ready_cluster_goes_on_without_a_node() -> None:
    _, actions = run(*UP, lost(1))
    assert actions == [Say("node-lost", "node n1 is lost: its connection ended")]
    _, actions = run(*UP, failed(1, reason=EndReason.CLUSTER_LOST))
    assert actions == [NodeLost("n1"), Say("node-lost", "node n1: Ray fails on h1")]
    for after in (table(0, 1, 2, dead=2), table(0, 1)):
        state, actions = run(*UP, after)
        assert actions == [Say("node-lost", "Ray on node h2 is dead, the others go on"), NodeLost("h2")] and not state.failed


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (table(0, 1, 2, dead=0), "the GCS reports the head node as dead"),
        ({"event": Report.FAILED, "error": ClusterError(EndReason.CLUSTER_LOST, "gone")}, "gone"),
    ],
)
def test_the_head_is_needed(event: Event, why: str) -> None:
    state, [error] = run(*UP, event)
    assert isinstance(error, ClusterError) and (error.reason, str(error)) == (EndReason.CLUSTER_LOST, why)
    assert state.failed and state.step(event)[1] == []


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([], "the health check did not end on node h0"),
        ([STARTING], "Ray was not up on node h0"),
        ([STARTING, joined(1), joined(2), table(0, 1)], "2 of 3 nodes joined, missing: n2"),
        ([STARTING, joined(1), table(0, 1)], "2 of 3 nodes joined, missing: n2 (no word from the runtime on n2)"),
    ],
)
def test_the_deadline_says_what_is_missing(events: list[Event], why: str) -> None:
    state, [error] = run(*events, DEADLINE)
    assert str(error) == f"{why} within startup_timeout=300 s" and state.failed


@given(
    st.lists(
        st.one_of(
            st.sampled_from([STARTING, DEADLINE, table(0), table(0, 1), table(0, 1, 2), table(1, 2)]),
            st.builds(joined, st.integers(1, 3), st.sampled_from([None, "too small"])),
            st.builds(lost, st.integers(1, 3)),
            st.builds(gone, st.integers(1, 3)),
            st.builds(failed, st.integers(1, 3), st.integers(1, 2)),
        ),
        max_size=12,
    ),
    st.sampled_from([None, 1, 2]),
)
def test_any_order_of_events(events: list[Event], min_nodes: int | None) -> None:
    """A cluster gets ready once and fails once, says nothing after its failure, and is ready with enough nodes only."""
    state, ready, failures = Membership(RaySpec(min_nodes=min_nodes), "h0", {1: Member("n1"), 2: Member("n2")}), 0, 0
    for event in events:
        was = state
        state, actions = state.step(event)
        assert not (was.failed and actions) and not (was.ready and not state.ready)
        ready += sum(isinstance(action, Ready) for action in actions)
        failures += sum(isinstance(action, ClusterError) for action in actions)
        assert not (state.ready and not was.ready) or sum(node["alive"] for node in state.nodes.values()) >= state.needed
        assert state.failed == bool(failures)
    assert ready == state.ready and failures <= 1
