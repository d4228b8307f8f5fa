"""Tests: the Ray cluster that a user's word names is found, reached, and its end is told in one sentence."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import pytest

from dagster_rayslurm.access.find import Found, NoCluster, choose, look_again
from dagster_rayslurm.access.head import ClusterEnded, Head
from dagster_rayslurm.access.watch import Snapshot
from dagster_rayslurm.backends.listing import Entry, Kind, list_here
from dagster_rayslurm.cli import ray as cli_ray
from dagster_rayslurm.cli.top import Screen, rows
from dagster_rayslurm.runtime.protocol.spec import ClusterAccess
from dagster_rayslurm.ssh.local import LocalConnection

HERE = LocalConnection()
RUN = "1a2b3c4d-5e6f-7081-92a3-b4c5d6e7f809"


def access(port: int | None = 8265, **fields: Any) -> ClusterAccess:
    known = {"cluster_id": f"local-{port}", "hostname": "n1", "dashboard_port": port, "token": "t0ken", "pid": os.getpid()}
    return ClusterAccess(**{**known, **fields})


def run_dir(base: Path, name: str, way: ClusterAccess | None = None, step: str = "train", run_id: str = RUN) -> Path:
    directory = base / "runs" / name
    directory.mkdir(parents=True)
    (directory / "payload.json").write_text(json.dumps({"run_id": run_id, "step": step}))
    (directory / "pipes_context.json").write_text(json.dumps({"asset_keys": [f"models/{step}"]}))
    state = {"state": "running", "message": "on n1"} if way else {"state": "ended", "message": "exit"}
    (directory / "status.json").write_text(json.dumps({**state, "runtime_pid": way.pid if way else 1}))
    if way is not None:
        (directory / "cluster.json").write_text(json.dumps(asdict(way)))
    return directory


def chosen(base: Path, word: str) -> Found:
    return choose(word, list_here(str(base)))


def found(base: Path, word: str) -> str:
    return chosen(base, word).entry.name


def refused(base: Path, word: str) -> str:
    with pytest.raises(NoCluster) as refusal:
        found(base, word)
    return str(refusal.value)


@pytest.mark.parametrize("word", ["1a2b3c4d-train-aa", "1a2b", RUN, "train", "models/train", "1a2b3c4d-train"])
def test_a_run_goes_by_its_names(tmp_path: Path, word: str) -> None:
    run_dir(tmp_path, "1a2b3c4d-train-aa", access())
    run_dir(tmp_path, "99999999-other-bb", step="other", run_id="99999999")
    assert found(tmp_path, word) == "1a2b3c4d-train-aa"


@pytest.mark.parametrize("word", ["", "1a", "trai", "471", "2b3c", "*"])
def test_a_part_of_a_name_names_nothing(tmp_path: Path, word: str) -> None:
    run_dir(tmp_path, "1a2b3c4d-train-aa", access())
    assert "is called" in refused(tmp_path, word) and "1a2b3c4d-train-aa" in refused(tmp_path, word)


def test_what_has_no_cluster_says_why(tmp_path: Path) -> None:
    run_dir(tmp_path, "1a2b3c4d-train-aa")
    assert refused(tmp_path, "train") == "the run 1a2b3c4d-train-aa has no Ray cluster now: ended: exit"
    run_dir(tmp_path, "1a2b3c4d-bare-bb", access(None), step="bare")
    assert "RayLauncher(dashboard=False)" in refused(tmp_path, "bare")
    assert "none runs there" in refused(tmp_path / "nothing", "x")


def test_a_name_of_several_clusters_is_refused_with_the_names_to_choose_from(tmp_path: Path) -> None:
    run_dir(tmp_path, "1a2b3c4d-train-aa", access(1))
    run_dir(tmp_path, "1a2b3c4d-train-bb", access(2))
    assert "1a2b3c4d-train-aa" in refused(tmp_path, "train") and "1a2b3c4d-train-bb" in refused(tmp_path, "train")
    assert found(tmp_path, "1a2b3c4d-train-bb") == "1a2b3c4d-train-bb"


def test_a_killed_runtime_and_a_damaged_file_count_as_no_cluster(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    run_dir(tmp_path, "1a2b3c4d-train-aa", access(pid=gone.pid))
    assert refused(tmp_path, "train").endswith("has no Ray cluster now: lost: its runtime was killed")
    (run_dir(tmp_path, "1a2b3c4d-torn-bb", step="torn") / "cluster.json").write_text('{"cluster_id": ')
    assert "has no Ray cluster now" in refused(tmp_path, "torn")


def test_a_command_waits_for_the_cluster_of_one_component(monkeypatch: pytest.MonkeyPatch) -> None:
    """RUN/COMPONENT names the run, which goes on, so that `--wait` waits for the cluster."""
    run = Entry(Kind.RUN, "1a2b3c4d-train-aa", "running", HERE, "/r/1a2b3c4d-train-aa")
    up = replace(run, clusters={"/r/1a2b3c4d-train-aa/learner/cluster.json": access()})
    looks = iter([[run], [run], [up]])
    monkeypatch.setattr(cli_ray, "entries", lambda _: next(looks))
    monkeypatch.setattr(cli_ray, "_WAIT_INTERVAL", 0.0)
    assert cli_ray.find_target("1a2b3c4d-train-aa/learner", wait=True).entry is up
    over = iter([[replace(run, state="ended")]])
    monkeypatch.setattr(cli_ray, "entries", lambda _: next(over))
    with pytest.raises(click.ClickException, match="has no Ray cluster now: ended"):
        cli_ray.find_target("1a2b3c4d-train-aa/learner", wait=True)


def test_a_session_goes_by_its_key_and_its_cluster(tmp_path: Path) -> None:
    way = access(cluster_id="slurm-abcd", job_id="17")
    session = Entry(Kind.SESSION, "default-0123", "up", HERE, "/s/2", job_id="17", cluster_id="slurm-abcd")
    there = [replace(session, clusters={"/s/2/session.json": way}), *list_here(str(tmp_path))]
    assert all(choose(word, there).entry.name == "default-0123" for word in ("default-0123", "slurm-abcd", "17", "default"))
    with pytest.raises(NoCluster, match="the session default-0123 has no Ray cluster now: up"):
        choose("17", [session])


def test_a_cluster_of_one_component_is_named_with_it(tmp_path: Path) -> None:
    directory = run_dir(tmp_path, "1a2b3c4d-train-aa", access(1))
    (directory / "cluster.json").unlink()
    for number, component in enumerate(("cpu", "gpu")):
        (directory / "components" / component).mkdir(parents=True)
        (directory / "components" / component / "cluster.json").write_text(json.dumps(asdict(access(number + 1))))
    assert "1a2b3c4d-train-aa/cpu, 1a2b3c4d-train-aa/gpu" in refused(tmp_path, "train")
    assert chosen(tmp_path, "1a2b3c4d-train-aa/gpu").access.dashboard_port == 2
    assert "has no Ray cluster now" in refused(tmp_path, "train/tpu")


def test_a_stream_that_was_lost_comes_again_and_the_end_is_told_once(tmp_path: Path) -> None:
    async def run() -> list[str]:
        served, said = 0, []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal served
            served += 1
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\nhello")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        way = access(server.sockets[0].getsockname()[1])
        path = run_dir(tmp_path, "1a2b3c4d-train-aa", way)
        head = Head(HERE, way, look_again(chosen(tmp_path, "train")), said.append, way.dashboard_port or 0)
        running = asyncio.ensure_future(head.run())

        async def ask() -> bytes:
            ours, theirs = socket.socketpair()
            reader, writer = await asyncio.open_connection(sock=theirs)
            client, other = await asyncio.open_connection(sock=ours)
            assert await head.forward(b"GET / HTTP/1.1\r\n\r\n", reader, writer)
            other.close()
            return await client.read()

        await head.until_ready(10)
        assert (await ask()).endswith(b"hello")
        assert head._multiplexer is not None
        head._multiplexer._writer.close()  # The link is lost.
        lost = head._multiplexer
        while head._multiplexer is lost:
            await asyncio.sleep(0.01)
        await head.until_ready(10)
        assert (await ask()).endswith(b"hello") and served == 2
        (path / "cluster.json").unlink()
        (path / "status.json").write_text(json.dumps({"state": "ended", "message": "exit"}))
        head._multiplexer._writer.close()
        with pytest.raises(ClusterEnded) as end:
            await asyncio.wait_for(running, 20)
        server.close()
        return [str(end.value), *said]

    assert asyncio.run(run()) == ["the Ray cluster of the run 1a2b3c4d-train-aa has ended (ended: exit)"]


# ---- top


def node(name: str, state: str, gpus: int = 0, head: bool = False) -> dict[str, Any]:
    total = {"CPU": 4.0, "memory": 60.0, "objectStoreMemory": 20.0, "myThing": 2.0, **({"GPU": 1.0} if gpus else {})}
    store = {"objectStoreUsedMemory": 5, "objectStoreAvailableMemory": 15}
    gpu = {"name": "H200", "utilizationGpu": 70, "memoryUsed": 10, "memoryTotal": 100}
    row = {"hostname": name, "ip": "10.0.0.1", "cpu": 50.0, "mem": [100, 60], "cgroupMem": [30, 100], "gpus": [gpu] * gpus}
    return {**row, "raylet": {"state": state, "isHeadNode": head, "resourcesTotal": total, **store}}


ALL = [node("n10", "ALIVE", gpus=1), node("n9", "ALIVE"), node("n11", "ALIVE", head=True), node("n1", "DEAD", gpus=1)]
NODES = {"data": {"summary": ALL}}


def listed(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"data": {"result": {"result": list(rows)}}}


def test_nodes_are_listed_the_head_first_and_totals_are_of_living_ones() -> None:
    snapshot = Snapshot().with_answer("nodes", NODES)
    assert [(node.name, node.alive, node.head) for node in snapshot.nodes] == [
        ("n11", True, True), ("n9", True, False), ("n10", True, False), ("n1", False, False)
    ]  # fmt: skip
    assert snapshot.totals["CPU"] == 12 and snapshot.totals["GPU"] == 1
    assert snapshot.nodes[0].memory == (30, 80) and snapshot.nodes[0].store == (5, 20)
    assert rows(snapshot, "nodes")[2][-1] == "70%"


def test_what_can_never_be_placed_is_named() -> None:
    snapshot = Snapshot().with_answer("nodes", NODES)
    tasks = [
        {"name": "big", "required_resources": {"GPU": 2.0}},
        {"name": "big", "required_resources": {"GPU": 2.0}},
        {"name": "waits", "required_resources": {"GPU": 1.0, "my_thing": 2.0}},
        {"name": "grouped", "required_resources": {"GPU": 9.0}, "placement_group_id": "ab"},
    ]
    snapshot = snapshot.with_answer("pending", listed(*tasks))
    bundles = [{"unit_resources": {"CPU": 4.0}}, {"unit_resources": {"CPU": 5.0}}]
    snapshot = snapshot.with_answer("groups", listed({"name": "", "placement_group_id": "0123456789abcdef", "bundles": bundles}))
    assert snapshot.never == [
        "2 big waits for GPU 2, which no node has",
        "placement group 0123456789ab waits for a bundle of CPU 5, which no node has",
    ]
    assert not Snapshot(pending=snapshot.pending).never, "as long as the nodes are unknown"


@pytest.mark.parametrize(
    ("count", "state", "named"),
    [(9, "NO_RESOURCES", "all nodes together"), (3, "INFEASIBLE", "strategy or labels"), (3, "NO_RESOURCES", "")],
)
def test_bundles_that_fit_only_one_by_one_are_named(count: int, state: str, named: str) -> None:
    """Nine bundles of 4 CPUs on three nodes of 4 CPUs; STRICT_PACK of three bundles, which Ray itself calls infeasible."""
    row = {"name": "many", "bundles": [{"unit_resources": {"CPU": 4.0}}] * count, "stats": {"scheduling_state": state}}
    snapshot = Snapshot().with_answer("nodes", NODES).with_answer("groups", listed(row))
    assert [
        f"placement group many waits for bundles ({count} of CPU 4)" in each and named in each for each in snapshot.never
    ] == [True] * bool(named)


def test_demands_that_the_dashboard_leaves_out_are_counted() -> None:
    answer = listed({"name": "f", "required_resources": {"CPU": 1.0}})
    assert not Snapshot().with_answer("pending", answer).unchecked
    answer["data"]["result"]["num_filtered"] = 1201
    assert Snapshot().with_answer("pending", answer).unchecked == [
        "1,200 more tasks that wait for a node are not listed, and not checked"
    ]


@pytest.mark.parametrize("query", ["nodes", "tasks", "pending", "groups", "actors"])
def test_an_answer_of_another_form_is_an_error_in_one_sentence(query: str) -> None:
    with pytest.raises(ValueError, match=f"answer about {query} has another form"):
        Snapshot().with_answer(query, {"data": {"summary": [{"mem": [1]}]}})


def test_the_keys_choose_view_and_row() -> None:
    screen = Screen()
    for key in "jjj":
        screen = screen.after(key, 3)
    assert screen.row == 2 and screen.after("k", 3).row == 1 and screen.after("\r", 3).details
    assert screen.after("\t", 3) == Screen("tasks") and screen.after("t", 3) == Screen("tasks") and screen.after("x", 3) == screen
    assert screen.after("q", 3).over and Screen().after("j", 0).row == 0
    states = (("a", "running"), ("b", "waiting"))
    payloads = [{"step": name, "run_id": "r" * 20, "state": state, "age": 61.0} for name, state in states]
    shown = rows(Snapshot(payloads=tuple(payloads)), "payloads")
    assert shown == [["a", "rrrrrrrr", "running", "1:01"], ["b", "rrrrrrrr", "place 1 in the queue", "1:01"]]
