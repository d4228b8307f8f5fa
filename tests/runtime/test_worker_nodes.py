"""Worker nodes of an allocation: connections to the head, commands, events, and Slurm's environment."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rayslurm.runtime.node import allocation, resources, worker_nodes
from dagster_rayslurm.runtime.node.allocation import head_address
from dagster_rayslurm.runtime.node.network import choose_ports, control_ports, is_loopback, join_host_port, route_address
from dagster_rayslurm.runtime.node.resources import footprint_error, runtime_footprint
from dagster_rayslurm.runtime.node.usage import merge_usage
from dagster_rayslurm.runtime.node.worker_nodes import WorkerNode, WorkerNodes
from dagster_rayslurm.runtime.process import scratch
from dagster_rayslurm.runtime.process.loop import Loop
from dagster_rayslurm.runtime.protocol.messages import ClusterError
from dagster_rayslurm.runtime.protocol.rpc import Channel, Listener, Role, listen
from dagster_rayslurm.runtime.protocol.spec import RaySpec, RuntimeSpec
from dagster_rayslurm.runtime.ray.agent import NodeAgent
from dagster_rayslurm.runtime.ray.cluster import RayCluster
from dagster_rayslurm.runtime.ray.membership import Action, Say, nodes_expected
from dagster_rayslurm.runtime.ray.ray_node import start_arguments, symmetric_arguments
from dagster_rayslurm.runtime.supervisor.time_limit import parse_time_left

KEY, OTHER_KEY = "aa" * 32, "bb" * 32

TASK = {
    "SLURM_JOB_ID": "12",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "n[1-9]",
    "SLURM_STEP_NODELIST": "n[1-2,7]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    "SLURM_JOB_PARTITION": "gpu",
}


def test_an_allocation_is_read_from_the_environment_of_a_task() -> None:
    here = allocation.from_environ(TASK)
    assert here is not None and (here.node_id, here.nodes, here.partition) == (1, ["n1", "n2", "n7"], "gpu")
    assert here.head_addresses == ["10.0.0.1", "n1"] and here.restarts == 0
    assert allocation.from_environ({}) is None
    assert allocation.from_environ({**TASK, "SLURM_RESTART_COUNT": "2"}).restarts == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("loopback", ["127.0.1.1", "127.0.0.1", "::1"])
def test_a_loopback_address_is_not_announced_to_other_nodes(loopback: str) -> None:
    """/etc/hosts of some distributions maps a node's own name to 127.0.1.1."""
    task = {**TASK, "SLURM_LAUNCH_NODE_IPADDR": loopback}
    here = allocation.from_environ(task)
    assert here is not None and here.head_addresses == ["n1"]
    # The names here mean nothing, so it is the address on the default route, or the name if there is none.
    default = route_address("192.0.2.1")
    assert head_address(here) == ("n1" if default is None else default) and not is_loopback(head_address(here))
    neighbour = allocation.from_environ({**task, "SLURM_STEP_NODELIST": f"n1,{default or 'n2'}"})
    assert neighbour is not None and head_address(neighbour) == (default or "n1")
    mapped = allocation.from_environ({**task, "SLURM_STEP_NODELIST": "n1,localhost"})
    assert mapped is not None and not is_loopback(head_address(mapped))
    alone = allocation.from_environ({**task, "SLURM_STEP_NODELIST": "n1"})
    assert alone is not None and head_address(alone) == loopback
    told = allocation.from_environ(TASK)
    assert told is not None and head_address(told) == "10.0.0.1"


@pytest.mark.parametrize(
    ("granted", "count"), [(None, os.cpu_count()), ("", os.cpu_count()), ("0", os.cpu_count()), ("1", 1), ("7", 7)]
)
def test_cpus_are_what_slurm_granted_where_nothing_confines(granted: str | None, count: int) -> None:
    if len(os.sched_getaffinity(0)) != os.cpu_count():
        pytest.skip("this process is confined to some CPUs")
    assert resources.count_cpus({} if granted is None else {"SLURM_CPUS_ON_NODE": granted}) == count


def test_a_confined_process_has_no_more_than_its_affinity() -> None:
    code = (
        "import os; os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1]); "
        "from dagster_rayslurm.runtime.node import resources as machine; print(machine.count_cpus({'SLURM_CPUS_ON_NODE': '64'}))"
    )
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("there is but one CPU")
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "1"


def test_a_node_that_grants_less_than_was_asked_for_is_named() -> None:
    node = resources.NodeResources("n7", num_cpus=2, num_gpus=0, memory=2**30, memory_limit=None)
    problem = footprint_error(runtime_footprint(RuntimeSpec("c", RaySpec(), asked_gpus=4)), node)
    assert problem is not None and "SlurmQueueConfig.gpus_per_node=4" in problem and "n7" in problem
    assert footprint_error(runtime_footprint(RuntimeSpec("c", RaySpec(num_cpus=2), asked_cpus=2)), node) is None
    assert resources.NodeResources(**json.loads(json.dumps(node.facts()))) == node


@pytest.mark.parametrize(("workers", "nodes", "expected"), [(None, 4, 4), (0, 4, 1), (2, 4, 3), (9, 4, 4)])
def test_the_size_of_a_cluster(workers: int | None, nodes: int, expected: int) -> None:
    assert nodes_expected(RaySpec(max_workers=workers), nodes) == expected


def test_what_a_worker_is_started_with() -> None:
    """`ray start --address` refuses the options of a head."""
    node = resources.NodeResources("n1", 4, 1, 64 * 2**30, memory_limit=None)
    words = start_arguments(RaySpec(labels={"a": "b"}), node, choose_ports(head=False), "/tmp/r", "10.0.0.2", "10.0.0.1:4567")
    assert {"--address=10.0.0.1:4567", "--node-ip-address=10.0.0.2", "--num-cpus=4", "--labels=a=b", "--block"} <= set(words)
    assert not [word for word in words if word.startswith(("--head", "--port=", "--include-dashboard", "--dashboard-port="))]
    words = symmetric_arguments(
        start_arguments(RaySpec(), node, choose_ports(), "/tmp/r", "10.0.0.1"), "10.0.0.1:4567", 2, ["hold", "x"]
    )
    assert words[:2] == ["--address=10.0.0.1:4567", "--min-nodes=2"] and words[-3:] == ["--", "hold", "x"]
    assert not [word for word in words if word.startswith(("--head", "--port=", "--block", "--node-ip-address"))]
    assert join_host_port("fe80::1", 80) == "[fe80::1]:80" and join_host_port("n1", 80) == "n1:80"
    assert route_address("127.0.0.1") == "127.0.0.1" and route_address("no.such.host.invalid") is None


@given(st.integers(0, 400), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_the_time_left_as_squeue_prints_it(days: int, hours: int, minutes: int, seconds: int) -> None:
    text = f"{days}-{hours:02}:{minutes:02}:{seconds:02}" if days else f"{hours}:{minutes:02}:{seconds:02}"
    assert parse_time_left(text + "\n") == ((days * 24 + hours) * 60 + minutes) * 60 + seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1:05", 65),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("", None),
        ("3:00\n3:00\n", 180),  # A line for each component.
        ("UNLIMITED\n3:00\n2:59", 179),
        ("UNLIMITED\nUNLIMITED", None),
    ],
)
def test_the_time_left_in_other_words(text: str, seconds: float | None) -> None:
    assert parse_time_left(text) == seconds


def test_usage_of_several_nodes() -> None:
    def usage(cpu: float, memory: int, gpu: float | None, points: list[list[float]]) -> dict[str, Any]:
        return {
            "elapsed": 10.0,
            "cpu_seconds": cpu,
            "peak_memory": memory,
            "gpu_utilization_mean": gpu,
            "gpu_utilization_max": gpu,
            "gpu_memory_max": None,
            "spilled_bytes": 5,
            "shared_cpu_seconds": None,
            "shared_peak_memory": None,
            "points": points,
        }

    merged = merge_usage({"a": usage(2, 100, None, [[1, 1, 10], [2, 2, 20]]), "b": usage(3, 300, 50.0, [[1.5, 1, 7]])})
    assert (merged["cpu_seconds"], merged["peak_memory"], merged["spilled_bytes"]) == (5, 300, 10)
    assert (merged["gpu_utilization_mean"], merged["gpu_memory_max"], merged["elapsed"]) == (50.0, None, 10.0)
    assert merged["points"] == [[1, 1, 10], [2, 3, 20]]
    assert merged["nodes"] == {"a": {"cpu_seconds": 2, "peak_memory": 100}, "b": {"cpu_seconds": 3, "peak_memory": 300}}


def test_control_ports_lie_where_firewalls_allow() -> None:
    free = control_ports(None)
    assert len(set(free)) == 8 and all(10000 <= port < 32768 for port in free)
    assert sorted(control_ports("20000-20299")) == [20099, 20199, 20299]


# ---- The control channel, over real sockets


class Head:
    """A team on a loop of its own in this thread, which `until` turns."""

    def __init__(self, loop: Loop, ports: list[int]) -> None:
        self.loop = loop
        self.heard: list[tuple[str, str]] = []
        self.passed_on: Callable[[WorkerNode, dict[str, Any]], None] = lambda *_: None
        self.team = WorkerNodes(loop, {place: WorkerNode(place, f"n{place + 1}") for place in (1, 2)}, self._hear)
        self.team.listen(KEY, ports)
        self.port = ports[0]

    def _hear(self, member: WorkerNode, message: dict[str, Any]) -> None:
        self.heard.append((member.name, message["event"]))
        self.passed_on(member, message)

    def until(self, condition: Callable[[], Any], timeout: float = 5.0) -> None:
        deadline = time.monotonic() + timeout

        def look() -> None:
            if condition() or time.monotonic() > deadline:
                return self.loop.stop()
            self.loop.call_later(0.01, look)

        self.loop._stopping = False
        look()
        self.loop.run()
        assert condition()

    def worker(
        self, key: str = KEY, node_id: int = 1, said: dict[str, Any] | None = None
    ) -> tuple[Channel, list[dict[str, Any]], list[str]]:
        machine = resources.NodeResources(f"host{node_id}", 1, 0, 2**30, None).facts()
        end = WorkerEnd({"node_id": node_id, "machine": machine} if said is None else said)
        sock = socket.create_connection(("127.0.0.1", self.port))
        return Channel(self.loop, sock, key, Role.CLIENT, end), end.taken, end.events


class WorkerEnd(Listener):
    """A worker's end of a connection: introduces itself, and keeps what it is told."""

    def __init__(self, introduction: dict[str, Any]) -> None:
        self.introduction = introduction
        self.taken: list[dict[str, Any]] = []
        self.events: list[str] = []

    def authenticated(self, channel: Channel) -> None:
        self.events.append("proved")
        channel.send(**self.introduction)

    def received(self, channel: Channel, message: dict[str, Any]) -> None:
        self.taken.append(message)

    def closed(self, channel: Channel, why: str) -> None:
        self.events.append("gone")


@pytest.fixture
def head() -> Iterator[Head]:
    before = signal.getsignal(signal.SIGCHLD)
    made = Head(Loop(), control_ports(None, 3))
    yield made
    made.team.dismiss()
    for member in made.team.members.values():
        if member.channel is not None:
            member.channel.close()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, before)


def test_a_worker_joins_gets_commands_and_is_lost(head: Head) -> None:
    head.team.send_command([1], op="ray", attempt=1)
    channel, taken, _ = head.worker()
    head.until(lambda: taken)
    assert taken == [{"op": "ray", "attempt": 1}] and head.heard == [("n2", "joined")]
    assert [member.name for member in head.team.members.values() if not member.here] == ["n3"]
    channel.close()
    head.until(lambda: ("n2", "lost") in head.heard)
    channel, taken, _ = head.worker()  # Back again, it is told the same.
    head.until(lambda: taken)
    assert taken == [{"op": "ray", "attempt": 1}]
    channel.close()


def test_a_worker_without_the_key_is_rejected(head: Head) -> None:
    _, taken, events = head.worker(OTHER_KEY)
    head.until(lambda: "gone" in events)
    assert "proved" not in events and taken == [] and head.heard == []


def test_usage_of_the_nodes_that_answer_in_time(head: Head) -> None:
    one, taken, _ = head.worker(node_id=1)
    two, _, _ = head.worker(node_id=2)
    head.until(lambda: len(head.heard) == 2)
    head.team.measure("p", None)
    head.until(lambda: {"op": "measure", "id": "p", "jobs": None} in taken)
    figures: list[dict[str, Any]] = []
    head.team.collect("p", figures.append)
    head.until(lambda: {"op": "report", "id": "p"} in taken)
    one.send(event="usage", id="p", usage={"cpu_seconds": 1})
    head.until(lambda: figures)  # Without the other one, which does not answer.
    assert figures == [{"host1": {"cpu_seconds": 1}}]  # By the name that Ray's table of nodes has, too.
    one.close()
    two.close()


def test_payloads_are_measured_side_by_side(head: Head) -> None:
    """And who comes back is asked again for what it owes."""
    one, taken, _ = head.worker()
    head.until(lambda: len(head.heard) == 1)
    for nonce in "pq":
        head.team.measure(nonce, None)
    figures: dict[str, Any] = {}
    head.team.collect("p", lambda found: figures.update(p=found))
    head.until(lambda: {"op": "report", "id": "p"} in taken)
    head.team.collect("q", lambda found: figures.update(q=found))
    one.send(event="usage", id="q", usage={"cpu_seconds": 2})
    one.send(event="usage", id="x", usage={"cpu_seconds": 9})
    head.until(lambda: len(figures) == 2)
    assert figures == {"p": {}, "q": {"host1": {"cpu_seconds": 2}}}
    one.close()
    head.until(lambda: ("n2", "lost") in head.heard)
    again, taken, _ = head.worker()
    head.until(lambda: taken)
    assert taken == [{"op": "report", "id": "p"}]
    again.send(event="usage", id="p", usage=None)
    head.until(lambda: not head.team.members[1].commands)
    again.close()


def test_concurrent_clusters_end_independently(head: Head) -> None:
    """Who was not there hears of it later; who has obeyed, or never came, is told no more."""
    one, taken, _ = head.worker()
    head.until(lambda: len(head.heard) == 1)
    for key in ("p", "q"):
        head.team.send_command([1, 2], op="ray", cluster=key, attempt=1)
    head.until(lambda: len(taken) == 2)
    one.close()
    head.until(lambda: ("n2", "lost") in head.heard)
    head.team.send_command([1, 2], op="end-ray", cluster="p")
    again, taken, _ = head.worker()
    head.until(lambda: len(taken) == 2)
    assert [(order["op"], order["cluster"]) for order in taken] == [("end-ray", "p"), ("ray", "q")]
    again.send(event="ended", cluster="p")
    head.until(lambda: len(head.team.members[1].commands) == 1)
    late, told, _ = head.worker(node_id=2)
    head.until(lambda: told)
    assert told == [{"op": "ray", "cluster": "q", "attempt": 1}]
    again.close()
    late.close()


def test_usage_of_nodes_on_one_host_is_kept_apart(head: Head) -> None:
    """As on a test bed: neither replaces the other's, or the head's."""
    one, _, _ = head.worker(node_id=1)
    two, _, _ = head.worker(node_id=2)
    head.until(lambda: len(head.heard) == 2)
    for member, hostname in zip(head.team.members.values(), (socket.gethostname(), "other"), strict=True):
        member.machine = resources.NodeResources(hostname, 1, 0, 2**30, None)
    figures: list[dict[str, Any]] = []
    head.team.collect("p", figures.append)
    one.send(event="usage", id="p", usage={"cpu_seconds": 1})
    one.send(event="usage", id="p", usage={"cpu_seconds": 7})
    two.send(event="usage", id="p", usage={"cpu_seconds": 2})
    head.until(lambda: figures)
    assert figures == [{"n2": {"cpu_seconds": 1}, "other": {"cpu_seconds": 2}}]
    one.close()
    two.close()


def head_cluster(head: Head, private: scratch.Scratch, told: list[Action], spec: RaySpec) -> RayCluster:
    """A cluster with the head's workers, which tells a list what follows; its own Ray does not matter."""
    agent = NodeAgent(head.loop, RuntimeSpec("c", spec), resources.NodeResources("host0", 1, 0, 2**30, None), private)
    cluster = RayCluster(agent, head.team, "127.0.0.1", lambda _, action: told.append(action))
    head.passed_on = cluster.handle
    return cluster


def test_a_worker_that_reconnects_in_time_is_not_gone(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each loss has the whole of the time in which one that lives is back."""
    monkeypatch.setattr(worker_nodes, "RECONNECT_GRACE", 0.4)
    for _ in range(4):
        channel, _, _ = head.worker()
        head.until(lambda: head.team.members[1].here)
        channel.close()
        head.until(lambda: not head.team.members[1].here)
        lull = head.loop.now() + 0.2
        head.until(lambda lull=lull: head.loop.now() > lull)  # type: ignore[misc]
    assert head.heard == [("n2", "joined"), ("n2", "lost")] * 4
    head.until(lambda: head.heard[-1] == ("n2", "gone"))
    assert head.team.members[1].gone


def test_a_worker_joins_a_cluster(head: Head, scratch_base: Any) -> None:
    private = scratch.Scratch()
    actions: list[Action] = []
    cluster = head_cluster(head, private, actions, RaySpec(min_nodes=2))
    cluster.start()
    cluster._ray.end()  # What Ray says is made up here.
    one, told, _ = head.worker()
    head.until(lambda: told)
    assert [(order["op"], order["cluster"], order["attempt"]) for order in told] == [("ray", "", 1)]
    common = {"alive": True, "address": "127.0.0.1", "resources": {}, "component": None}
    nodes = {name: {**common, "hostname": name, "head": name == "host0"} for name in ("host0", "host1")}
    cluster.on_event({"event": "nodes", "nodes": nodes, "ray_version": "2.60.0"})
    assert cluster.ready and "cluster-ready" in [action.phase for action in actions if isinstance(action, Say)]
    cluster.end()
    private.remove()
    one.close()


def test_ray_that_cannot_be_set_up_fails_in_one_sentence(head: Head, scratch_base: Any) -> None:
    private = scratch.Scratch()
    with open(private.ray_temp_dir, "w"):
        pass  # Where a directory is to be.
    told: list[Action] = []
    head_cluster(head, private, told, RaySpec()).start()
    [error] = told
    assert isinstance(error, ClusterError) and error.reason == "cluster-start"
    assert str(error).startswith("node host0: Ray cannot be started: [Errno 17] File exists")
    private.remove()


def test_a_failure_is_reported_again_after_a_reconnection(head: Head, scratch_base: Any) -> None:
    """The connection was lost just then, and the head repeats its command to a node that is back."""
    own = scratch.Scratch()
    node = resources.NodeResources("host1", 1, 0, 2**30, None)
    told: list[dict[str, Any]] = []
    spec = RuntimeSpec("c", RaySpec(health_check="echo unwell; false", min_nodes=1), control_key=KEY)

    worker = NodeAgent(head.loop, spec, node, own, send=lambda **event: told.append(event))
    order = {"op": "ray", "cluster": "", "gcs": "127.0.0.1:1", "attempt": 1, "nodes": 2}
    worker.handle(order)
    head.until(lambda: told)
    worker.handle(order)
    assert [said["event"] for said in told] == ["failed"] * 2 and told[0] == told[1] and "unwell" in told[0]["message"]
    worker.end()
    own.remove()


@contextlib.contextmanager
def node(path: Path, ports: list[int], patch: str = "", **fields: Any) -> Iterator[Any]:
    """The runtime of a worker node, in which some code runs first."""
    (path / "runtime.json").write_text(json.dumps({"cluster_id": "c", "control_key": KEY, "control_ports": ports, **fields}))
    code = "import os, sys\nfrom dagster_rayslurm.runtime.ray import agent\n" + textwrap.dedent(patch)
    code += "\nfrom dagster_rayslurm.runtime.__main__ import main\nsys.exit(main(['node', sys.argv[1]]))"
    env = {**os.environ, **TASK, "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "SLURM_STEP_NODELIST": "localhost,n2"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, str(path)], env=env, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


STUB = """
class Stub(agent.RayNode):
    def start(self, gcs):
        self._gcs = gcs
        self.write("address already in use")
    def write(self, text):
        with open(self._log, "a") as log:
            log.write(text)
        self.pid = self.loop.spawn(["sleep", "600"], self._exited)
        print(self.pid, os.getpid(), flush=True)
    def _start_ray(self):
        self.write("Ray runtime started.")
agent.RayNode = Stub
"""


def test_the_end_of_ray_is_a_loss_once_ray_was_up(head: Head, tmp_path: Path) -> None:
    """And its own end is none of the step's business, once the head knew it."""
    events: list[dict[str, Any]] = []
    head.passed_on = lambda _, message: events.append(message)
    head.team.send_command([1], op="ray", cluster="", gcs="127.0.0.1:1", attempt=1, nodes=2)
    with node(tmp_path, [head.port], STUB, ray={}) as process:
        head.until(lambda: events, 20)
        os.kill(int(process.stdout.readline().split()[0]), signal.SIGKILL)
        ray, runtime = map(int, process.stdout.readline().split())  # It was never up: other ports may help.
        os.kill(ray, signal.SIGKILL)
        head.until(lambda: events[-1]["event"] == "failed", 20)
        assert "signal 9" in events[-1]["message"] and "before" not in events[-1]["message"]
        os.kill(runtime, signal.SIGKILL)
        assert process.wait(20) == 0 and "the other nodes go on without it" in process.stderr.read()


def test_a_worker_that_never_joined_keeps_its_exit_code(tmp_path: Path) -> None:
    """Without its head, its end is the step's: nobody else would notice."""
    with node(tmp_path, control_ports(None, 1)) as process:
        assert "cannot be reached" in process.stderr.readline()
        [child] = psutil.Process(process.pid).children()
        child.kill()
        assert process.wait(20) == 128 + signal.SIGKILL


def test_a_worker_skips_a_foreign_port_and_ends_without_its_head(head: Head, tmp_path: Path) -> None:
    """Something else listens on the first port; then the head comes, and goes without a word."""
    stranger_port, quick = control_ports(None, 1)[0], "agent.HEARTBEAT_TIMEOUT, agent.HEARTBEAT_INTERVAL = 2.0, 0.2"
    with listen([stranger_port]), node(tmp_path, [stranger_port, head.port], quick) as process:
        head.until(lambda: head.heard, 20)
        channel = head.team.members[1].channel
        assert head.heard == [("n2", "joined")] and channel is not None
        channel.close()
        began = time.monotonic()
        assert process.wait(20) == 0 and time.monotonic() - began < 10
        assert "out of reach" in process.stderr.read()


def test_listen_skips_a_port_in_use() -> None:
    with listen(control_ports(None)) as taken:
        port = taken.getsockname()[1]
        free = control_ports(None, 1)
        with listen([port, *free]) as other:
            assert other.getsockname()[1] == free[0]
        with pytest.raises(OSError, match=str(port)):
            listen([port])


WRONG_WORDS: list[dict[str, Any]] = [
    {"event": "usage"},
    {"event": "usage", "id": [], "usage": {}},
    {"event": "ended"},
    {"event": []},
    {"event": "wrong"},
]


@pytest.mark.parametrize("word", WRONG_WORDS)
def test_an_invalid_event_closes_that_connection_only(head: Head, word: dict[str, Any]) -> None:
    def on_message(member: WorkerNode, message: dict[str, Any]) -> None:
        head.heard.append((member.name, message["event"]))
        if message["event"] == "wrong":
            raise KeyError("reason")

    head.team.on_event = on_message
    channel, _, events = head.worker()
    head.until(lambda: ("n2", "joined") in head.heard)
    channel.send(**word)
    head.until(lambda: "gone" in events or word["event"] == [])
    channel, taken, _ = head.worker()
    head.team.send_command([1], op="ray", attempt=1)
    head.until(lambda: taken)
    channel.close()


@pytest.mark.parametrize("words", [{"node_id": "x"}, {"node_id": []}, {"node_id": 1, "machine": {"other": 1}}, {"node_id": 1}])
def test_an_invalid_introduction_is_rejected(head: Head, words: dict[str, Any]) -> None:
    _, _, events = head.worker(said=words)
    head.until(lambda: "gone" in events)
    assert head.heard == []
