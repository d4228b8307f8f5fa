"""Warm and fresh Ray clusters on two nodes, both of which are this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dagster_rayslurm.archive import install_runtime
from dagster_rayslurm.runtime.node.network import control_ports
from dagster_rayslurm.runtime.process import scratch
from dagster_rayslurm.runtime.protocol.record import RUNTIME
from dagster_rayslurm.runtime.protocol.spec import RaySpec, RuntimeSpec, to_json

from .test_supervisor import NAP, Runtime

pytestmark = pytest.mark.ray

KEY = "cc" * 32
SMALL = RaySpec(num_cpus=1, object_store_memory=100 * 2**20, dashboard=False, ray_args=["--no-monitor"], startup_timeout=140.0)

SHOW = """
import json, os, ray, sys
ray.init(log_to_driver=False)
open(sys.argv[1], "w").write(json.dumps({
    "address": os.environ["RAY_ADDRESS"], "nodes": len(ray.nodes()), "cpus": ray.cluster_resources()["CPU"],
    "token": open(os.environ["RAY_AUTH_TOKEN_PATH"]).read(), "data": os.environ["RAYSLURM_DATA_DIR"],
    "worker": ray.get(ray.remote(lambda: os.environ.get("RAYSLURM_DATA_DIR")).remote()),
    "job": ray.get_runtime_context().runtime_env.get("env_vars"),
}))
"""


class Nodes(Runtime):
    """A session of two nodes; this machine is both of them."""

    def __init__(self, path: Path, **fields: Any) -> None:
        super().__init__(path)
        self.spec = RuntimeSpec(
            "c1", control_key=KEY, control_ports=control_ports(None, 1), worker_env={"RAYSLURM_DATA_DIR": str(path)}, **fields
        )
        (path / RUNTIME).write_text(to_json(self.spec))
        self.worker: subprocess.Popen[bytes] | None = None
        os.environ.update(self.task(0))

    def task(self, node_id: int) -> dict[str, str]:
        task = {"SLURM_JOB_ID": "12", "SLURM_NODEID": str(node_id), "SLURM_JOB_NODELIST": "localhost,n2"}
        task["SLURMD_NODENAME"] = ["localhost", "n2"][node_id]
        return {**task, "SLURM_STEP_NODELIST": "localhost,n2", "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"}

    def start_worker(self) -> None:
        command = [sys.executable, "-I", str(install_runtime(self.path)), "node", str(self.path)]
        with open(self.path / "node-1.log", "wb") as log:
            self.worker = subprocess.Popen(command, env={**os.environ, **self.task(1)}, stdout=log, stderr=log)

    def add_ray(self, name: str, code: str = "", **fields: Any) -> Path:
        """A payload that tells what it sees, and goes on with some code."""
        seen = self.path / f"{name}.json"
        self.add(name, SHOW.replace("sys.argv[1]", repr(str(seen))) + code, uses_ray=True, data_dir=str(self.path), **fields)
        return seen


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in Nodes.task(None, 0):  # type: ignore[arg-type]
        monkeypatch.setenv(name, "")
    made: list[Nodes] = []

    def make(**fields: Any) -> Nodes:
        made.append(Nodes(tmp_path, **{"idle_timeout": 60.0, **fields}))
        made[0].start_worker()
        return made[0]

    yield make
    for each in made:
        if each.worker is not None:
            each.worker.terminate()
            each.worker.wait(20)


SESSION = """
import dataclasses
from dagster_rayslurm.runtime.node import allocation
from dagster_rayslurm.runtime.protocol import spec as intake
from dagster_rayslurm.runtime.node import worker_nodes
machine.detect = lambda *_, **__: machine.NodeResources("here", 4, 0, 2**33, None)
spec = intake.load_spec(base)
runner = supervisor.Supervisor(loop, spec, scratch.Scratch(), allocation.from_environ(os.environ), base)
"""


def below(pid: int) -> list[str]:
    return [" ".join(process.cmdline()) for process in psutil.Process(pid).children(recursive=True)]


def test_two_clusters_at_once_on_the_same_nodes(nodes: Any) -> None:
    """Each ends with its payload on all nodes; one that does not start does not affect others. One that fails leaves its logs."""
    from dataclasses import replace

    pair = nodes(max_concurrent_payloads=3)
    # Both are up at once: each waits for the other's file.
    wait = "\nimport time\nwhile not os.path.exists(%r): time.sleep(0.05)"
    one = pair.add_ray("one", wait % str(pair.path / "two.json"), ray=SMALL, want_cpus=1, run_id="1")
    fail = "\nray.get(ray.remote(lambda: print('the last words')).remote()); time.sleep(0.5); sys.exit(3)"
    two = pair.add_ray("two", wait % str(pair.path / "one.json") + fail, ray=SMALL, want_cpus=1, run_id="2")
    pair.add_ray("ill", ray=replace(SMALL, health_check="echo unwell; false"), want_cpus=1, run_id="3")
    pair.add("three", NAP % 0.1, run_id="1")  # It needs all CPUs, and waits.
    assert pair.worker is not None
    said = pair.run(
        SESSION
        + f"""
[submit(name) for name in ("one", "two", "ill", "three")]
def command(pid):
    try:
        return open("/proc/%d/cmdline" % pid).read()
    except OSError:
        return ""  # It has just ended.
def count():
    return sum("ray-node" in command(p.pid) for p in processes.descendants({pair.worker.pid}))
def go(looks=20):
    if looks and (count() or processes.descendants(os.getpid()) or len(os.listdir(runner.scratch.path)) > 1):
        return loop.call_later(0.5, lambda: go(looks - 1))
    said["after"] = count()
    said["scratch"] = [name for name in os.listdir(runner.scratch.path)]
    said["here"] = len([p for p in processes.descendants(os.getpid())])
    said["orders"] = [list(m.commands) for m in runner.workers.members.values()]
    said["draining"] = runner.queue.closing
    loop.stop()
when_done(go)
"""
    )
    first, second = (json.loads(path.read_text()) for path in (one, two))
    assert first["address"] != second["address"] and first["token"] != second["token"]
    for each in (first, second):
        assert (each["nodes"], each["cpus"], each["job"]) == (2, 2.0, None)
        assert each["data"] == each["worker"] == str(pair.path)
    assert pair.overlap("one", "two") and not pair.overlap("two", "three")
    ends = {name: pair.end(name) for name in ("one", "two", "ill", "three")}
    assert [ends[name]["exit_code"] for name in ("one", "two", "three")] == [0, 3, 0]
    assert ends["two"]["context"]["ray_logs"] == ["ray-logs-localhost.tar.gz", "ray-logs-n2.tar.gz"]
    logs = ""
    for name in ends["two"]["context"]["ray_logs"]:
        with tarfile.open(pair.path / "two" / name) as archive:
            assert any(each.startswith("ray-logs/raylet") for each in archive.getnames()), archive.getnames()
            logs += "".join(archive.extractfile(each).read().decode() for each in archive if "/worker-" in each.name)  # type: ignore
    assert "the last words" in logs and ends["ill"]["context"]["ray_logs"] == []
    assert not list((pair.path / "one").glob("ray-logs*")) and "ray_logs" not in ends["one"]["context"]
    assert ends["ill"]["reason"] == "cluster-start" and "unwell" in ends["ill"]["message"]
    assert (
        len(ends["one"]["usage"]["nodes"]) == 2 and ends["one"]["context"]["ray_version"] and not ends["one"]["context"]["warm"]
    )
    assert ends["one"]["usage"]["shared"] == 1 and ends["three"]["usage"]["shared"] == 0
    assert (said["after"], said["here"], said["orders"], said["draining"]) == (0, 0, [[]], None)
    assert said["scratch"] == [".rayslurm-scratch"]


def test_a_lost_node_drains_the_session(nodes: Any) -> None:
    """Running payloads go on; later ones are refused."""
    pair = nodes(ray=SMALL)
    pair.add_ray("one", "\nimport time; time.sleep(6)")
    pair.add("two", NAP % 0.1, uses_ray=True)
    pair.add("three", NAP % 0.1)
    assert pair.worker is not None
    said = pair.run(
        SESSION
        + f"""
import signal
one, two = submit("one"), submit("two")
def look():
    if not os.path.exists(os.path.join(base, "one.json")):
        return loop.call_later(0.1, look)
    for p in processes.descendants({pair.worker.pid}):
        if "raylet" in open("/proc/%d/comm" % p.pid).read():
            os.kill(p.pid, signal.SIGKILL)
    def wait():
        if runner.queue.closing is None:
            return loop.call_later(0.1, wait)
        submit("three")
    wait()
look()
"""
    )
    assert said["three"].startswith("Closing: node ") and said["three"].endswith(" is lost")
    assert pair.end("one")["exit_code"] == 0 and pair.end("two")["exit_code"] == 0


def test_a_session_goes_on_when_a_fresh_cluster_loses_a_node(runtime: Runtime) -> None:
    """The next cluster may have it again."""
    runtime.add("one", NAP % 0.5, uses_ray=True, ray=SMALL)
    said = runtime.run("""
        from dagster_rayslurm.runtime.ray.membership import NodeLost, Ready
        class Cluster(supervisor.RayCluster):
            def start(self):
                self.tell(self, NodeLost("n2"))
                self.tell(self, Ready({}))
        supervisor.RayCluster = Cluster
        session()
        submit("one")
        when_done(lambda: (said.update(closing=runner.queue.closing), loop.stop()))
    """)
    assert said == {"closing": None} and runtime.end("one")["exit_code"] == 0


def test_cluster_directories_are_removed_once_the_processes_are_gone(tmp_path: Path) -> None:
    from dagster_rayslurm.runtime.ray import ray_node

    due: list[tuple[float, Any]] = []

    class Timers:
        def call_later(self, delay: float, call: Any) -> None:
            due.append((delay, call))

    private = scratch.Scratch()
    try:
        place = ray_node.ClusterDir(private)
        os.mkdir(place.ray_temp_dir)
        remove = place.remove
        left = ["a process that still writes"]
        place.remove = lambda: left.pop() if left else remove()  # type: ignore[assignment, func-returns-value]
        place.remove_later(Timers())  # type: ignore[arg-type]
        due.pop()[1]()
        assert os.path.exists(place.path) and due[0][0] == 10.0
        due.pop()[1]()
        assert not os.path.exists(place.path) and not os.path.exists(place.ray_temp_dir) and due == []
    finally:
        private.remove()


def test_a_lost_node_drains_a_session_without_a_cluster(nodes: Any) -> None:
    pair = nodes()
    pair.add("one", NAP % 4)
    pair.add("two", NAP % 0.1)
    assert pair.worker is not None
    said = pair.run(
        SESSION
        + f"""
worker_nodes.RECONNECT_GRACE = 1.0
submit("one")
def look():
    if not all(m.here for m in runner.workers.members.values()):
        return loop.call_later(0.1, look)
    for p in [p for p in processes.descendants({pair.worker.pid})] + [processes.Process({pair.worker.pid}, 0, 0)]:
        os.kill(p.pid, 9)
    loop.call_later(0.5, lambda: said.update(early=runner.queue.closing))
    loop.call_later(2.0, lambda: submit("two"))
look()
"""
    )
    assert said == {"early": None, "two": "Closing: node n2 is lost"} and pair.end("one")["exit_code"] == 0
    scratch.sweep()  # Nothing else cleans up after a killed node.


def test_the_loss_of_the_head_ends_the_session(nodes: Any) -> None:
    pair = nodes(ray=SMALL)
    pair.add_ray("one", "\nimport time; time.sleep(60)")
    pair.add("two", NAP % 0.1, uses_ray=True)
    pair.run(
        SESSION
        + """
import signal
submit("one"), submit("two")
def look():
    if not os.path.exists(os.path.join(base, "one.json")):
        return loop.call_later(0.1, look)
    for p in processes.descendants(os.getpid()):
        if "gcs_server" in open("/proc/%d/comm" % p.pid).read():
            os.kill(p.pid, signal.SIGKILL)
look()
"""
    )
    assert pair.end("one")["reason"] == "cluster-lost"
    two = pair.end("two")
    assert two["reason"] == "cluster-lost" and two["message"].startswith("the payload never started: ") and not two["started_at"]


DAEMONS = """
import json, ray, subprocess, sys
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
ray.init(log_to_driver=False)
LEAVE = ["sh", "-c", "env -i setsid sleep 600 </dev/null >/dev/null 2>&1 & echo $!"]
leave = ray.remote(lambda: int(subprocess.check_output(LEAVE)))
pids = ray.get([leave.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote()
                for node in ray.nodes()])
open(%r, "w").write(json.dumps(pids))
"""


def test_daemons_of_tasks_end_with_their_payload_on_every_node(nodes: Any) -> None:
    pair = nodes(ray=SMALL)
    left = pair.path / "left.json"
    pair.add("one", DAEMONS % str(left), uses_ray=True)
    said = pair.run(
        SESSION
        + f"""
submit("one")
def living():
    return [pid for pid in json.load(open({str(left)!r})) if os.path.exists("/proc/%d" % pid)]
def look(until):
    said["left"] = len(living())
    said["closing"] = runner.queue.closing
    if said["left"] and loop.now() < until:
        return loop.call_later(0.1, lambda: look(until))
    loop.stop()
when_done(lambda: look(loop.now() + 30))
"""
    )
    assert len(json.loads(left.read_text())) == 2 and pair.end("one")["exit_code"] == 0
    assert said == {"left": 0, "closing": None}


LEAVE = """
@ray.remote(num_cpus=0.5)
class Model:
    def ready(self): return True
ray.get(Model.options(name="model", lifetime="detached").remote().ready.remote())
"""

GROUP = """
from ray.util.placement_group import placement_group
ray.get(placement_group([{"CPU": 0.25}], lifetime="detached", name="shelf").ready())
placement_group([{"CPU": 0.01}])
"""

CLEAN = """
ray.kill(ray.get_actor("model", namespace="mine"))
from ray.util.placement_group import get_placement_group
ray.util.remove_placement_group(get_placement_group("shelf"))
"""


DATA = """
ray.data.range(10).map_batches(lambda batch: batch).take_all()
ray.get_actor("AutoscalingCoordinator", namespace="AutoscalingCoordinator")
"""

SUBMIT = """
import subprocess, sys
ray_program = [sys.executable, "-m", "ray.scripts.scripts"]
subprocess.run([*ray_program, "job", "submit", "--submission-id", "mine", "--no-wait", "--", "sleep", "600"], check=True)
"""


def test_leaks_in_a_warm_cluster_are_reported(runtime: Runtime) -> None:
    """At the end of each payload for its own jobs; for the whole cluster once nothing runs. Ray's own actors are none."""
    codes = {"data": DATA, "one": LEAVE, "two": GROUP, "three": "", "four": CLEAN, "job": SUBMIT}
    for name, code in codes.items():
        runtime.add(name, "import ray; ray.init(log_to_driver=False, namespace='mine')" + code, uses_ray=True)
    said = runtime.run("""
        from dagster_rayslurm.runtime.ray import cluster
        cluster._IDLE = 1.0
        session(ray=RaySpec(num_cpus=2, object_store_memory=100 * 2**20))
        [submit(name) for name in ("data", "one", "two", "three")]
        def cleaned():
            said["cleaned"] = describe(runner)["leaks"]
            submit("job")
            when_done(loop.stop)
        def left():
            said["left"] = describe(runner)["leaks"]
            submit("four")
            when_done(lambda: loop.call_later(3.0, cleaned))
        when_done(lambda: loop.call_later(2.5, left))
    """)
    ends = {name: runtime.end(name) for name in codes}
    assert [end["exit_code"] for end in ends.values()] == [0] * 6
    [actor] = ends["one"]["context"]["leaks"]
    assert all(word in actor for word in ("'model'", "Model", "namespace 'mine'", "ray.kill"))
    [group] = ends["two"]["context"]["leaks"]
    assert "'shelf' (namespace 'mine')" in group and "remove_placement_group" in group
    [job] = ends["job"]["context"]["leaks"]
    assert "`ray job stop mine`" in job
    assert not [name for name in ("data", "three", "four") if "leaks" in ends[name]["context"]]
    assert said["left"][0] == "CPU: 0.75 of 2 are not free although no payload runs" and set(said["left"][1:]) == {actor, group}
    told = [record["message"] for record in runtime.records("four") if record.get("phase") == "leaks"]
    assert len(told) == 3 and told[0].endswith(said["left"][0]) and said["cleaned"] == []


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    return Runtime(tmp_path)
