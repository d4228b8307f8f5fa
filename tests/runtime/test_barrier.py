"""The separate topology: runtimes of components, as processes on this machine, start and end together."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dagster_rayslurm.archive import install_runtime
from dagster_rayslurm.runtime.node.allocation import from_environ, select_component
from dagster_rayslurm.runtime.node.network import control_ports
from dagster_rayslurm.runtime.process.loop import Loop
from dagster_rayslurm.runtime.protocol.record import CANCEL, JOURNAL, PAYLOAD, RUNTIME, SECRETS, STATUS, LineReader, component_dir
from dagster_rayslurm.runtime.protocol.spec import BarrierSpec, ComponentSpec, PayloadSpec, RaySpec, RuntimeSpec, to_json
from dagster_rayslurm.runtime.separate.barrier import ComponentAddress, Ended, RunState
from dagster_rayslurm.runtime.separate.participant import Guest, Host

from ..conftest import wait_until
from .test_rpc import turn

KEY = "ab" * 32
SAY = "import os; print(os.environ['RAYSLURM_COMPONENT'], os.environ['RAYSLURM_COMPONENTS'])"
SLEEP = "import time; time.sleep(600)"


class Job:
    """A heterogeneous job of which this machine is all the nodes."""

    def __init__(self, path: Path, **payloads: str) -> None:
        self.path = path
        self.nodes = dict.fromkeys(payloads, 1)
        self.tasks: dict[int, subprocess.Popen[bytes]] = {}
        self.payloads = payloads
        self.ray: dict[str, RaySpec] = {}
        self.patience = 60.0
        self.grace = 1.0
        self.reconnect_grace = 10.0
        self.ports = control_ports(None)
        self.guest_ports: list[int] = []
        """Other ports for the guests, of a proxy."""

    def lay_out(self) -> None:
        parts = [ComponentSpec(name, count) for name, count in self.nodes.items()]
        (self.path / RUNTIME).write_text(to_json(RuntimeSpec("c1", components=parts)))
        for name, code in self.payloads.items():
            directory = self.directory(name)
            directory.mkdir(parents=True)
            spec = RuntimeSpec(
                "c1",
                self.ray.get(name),
                control_key=name.encode().hex().ljust(64, "0"),
                control_ports=control_ports(None),
                token_key=KEY,
                meeting=BarrierSpec(
                    name,
                    list(self.payloads),
                    KEY,
                    self.ports if name == next(iter(self.payloads)) else self.guest_ports or self.ports,
                    ["localhost"],
                    self.patience,
                    self.reconnect_grace,
                ),
            )
            (directory / RUNTIME).write_text(to_json(spec))
            payload = PayloadSpec(argv=["python", "-c", code], nonce="n", grace_period=self.grace, uses_ray=name in self.ray)
            (directory / PAYLOAD).write_text(to_json(payload))
            (directory / CANCEL).write_text("")

    def directory(self, name: str) -> Path:
        return Path(component_dir(str(self.path), name))

    def start(self, *places: int) -> None:
        """Start the tasks in these places; all if none is named."""
        groups = {f"SLURM_JOB_NODELIST_HET_GROUP_{k}": ",".join(["localhost"] * n) for k, n in enumerate(self.nodes.values())}
        numbers = {f"SLURM_JOB_ID_HET_GROUP_{k}": str(17 + k) for k in range(len(self.nodes))}
        command = [sys.executable, "-I", str(install_runtime(self.path)), "part", str(self.path)]
        for place in places or range(sum(self.nodes.values())):
            task = {"SLURM_JOB_ID": "17", "SLURM_NODEID": str(place), "SLURM_STEP_NODELIST": "localhost"}
            if len(self.nodes) > 1:
                task.update({"SLURM_HET_SIZE": str(len(self.nodes)), **groups, **numbers})
            env = {**os.environ, **task, "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"}
            with open(self.path / f"node-{place}.log", "wb") as log:
                self.tasks[place] = subprocess.Popen(command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def records(self, name: str, kind: str) -> list[dict[str, Any]]:
        journal = self.directory(name) / JOURNAL
        return (
            [record for record in LineReader().feed(journal.read_bytes()) if record["type"] == kind] if journal.exists() else []
        )

    def end(self, name: str) -> dict[str, Any]:
        found = wait_until(lambda: self.records(name, "end"), 40)
        assert len(found) == 1, [(self.path / f"node-{place}.log").read_text() for place in self.tasks]
        return dict(found[0])

    def runs(self, name: str) -> bool:
        return any(record["phase"] == "running" for record in self.records(name, "phase"))

    def codes(self) -> list[int]:
        return [task.wait(20) for task in self.tasks.values()]

    def output(self, name: str) -> str:
        return "".join(record["d"] for record in LineReader().feed((self.directory(name) / "stdio.jsonl").read_bytes()))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Any]:
    made: list[Job] = []

    def make(**payloads: str) -> Job:
        made.append(Job(tmp_path, **payloads))
        return made[0]

    yield make
    for each in made:
        for task in each.tasks.values():
            if task.poll() is None:
                task.terminate()
                task.wait(20)


def test_payloads_start_together_and_know_each_other(job: Any) -> None:
    """Nobody starts alone; a node that leads nothing helps its own component."""
    three = job(cpu=SAY, gpu=SAY, io=SAY)
    three.nodes["gpu"] = 2
    three.lay_out()
    three.start(0, 1, 2)
    os.utime(three.path, (1, 1))
    wait_until(lambda: three.records("cpu", "phase"))
    assert wait_until(lambda: three.path.stat().st_mtime > 1)  # Cleanup finds no old run directory.
    assert not three.runs("cpu") and not three.runs("gpu")
    three.start(3)
    assert [three.end(name)["exit_code"] for name in ("cpu", "gpu", "io")] == [0, 0, 0]
    assert three.codes() == [0, 0, 0, 0]
    name, _, places = three.output("gpu").partition(" ")
    assert name == "gpu" and list(json.loads(places)) == ["cpu", "gpu", "io"]
    assert json.loads(places)["gpu"]["nodes"] == ["localhost", "localhost"]
    assert json.loads(places)["cpu"]["host"] == socket.gethostname() and json.loads(places)["io"]["ray_address"] is None
    start = three.records("gpu", "start")[0]
    assert start["allocation"]["job_id"] == "18" and start["allocation"]["nodes"] == ["localhost", "localhost"]


@pytest.mark.parametrize(("failing", "codes"), [("cpu", [3, 0]), ("gpu", [3, 0])])
def test_the_first_failure_ends_all_and_is_the_jobs(job: Any, failing: str, codes: list[int]) -> None:
    """An exit code other than 0 has srun end the step, so it is the host's, which is the last to go."""
    other = "gpu" if failing == "cpu" else "cpu"
    two = job(**{name: "import sys; sys.exit(3)" if name == failing else SLEEP for name in ("cpu", "gpu")})
    two.lay_out()
    two.start()
    assert two.end(failing)["exit_code"] == 3
    end = two.end(other)
    assert end["reason"] == "other-component"
    assert end["message"] == f"component {failing!r}: its payload ended with exit code 3"
    assert two.codes() == codes


def test_a_component_that_has_ended_waits_for_the_others(job: Any) -> None:
    """Its cluster serves them until then, and the host's end would be theirs."""
    two = job(cpu="pass", gpu="import os, time\nwhile not os.path.exists('../go'): time.sleep(0.05)")
    two.lay_out()
    two.start()
    assert two.end("cpu")["exit_code"] == 0
    wait_until(lambda: two.runs("gpu"))
    assert two.tasks[0].poll() is None
    (two.directory("gpu") / "go").write_text("")
    assert two.end("gpu")["exit_code"] == 0 and two.codes() == [0, 0]


def test_a_component_that_does_not_come_is_named(job: Any) -> None:
    two = job(cpu=SLEEP, gpu=SLEEP, io=SLEEP)
    two.patience = 3.0
    two.lay_out()
    two.start(0, 1)
    end = two.end("cpu")
    assert end["reason"] == "cluster-start" and "within 3 s, missing: 'io' (no word from its runtime)" in end["message"]
    end = two.end("gpu")
    assert end["reason"] == "other-component" and "component 'cpu'" in end["message"] and "'io'" in end["message"]
    assert two.codes() == [1, 0]


@pytest.mark.parametrize("victim", ["cpu", "gpu"])
def test_a_killed_runtime_fails_the_other_components(job: Any, victim: str) -> None:
    """srun would end the others at once; without it they find out by themselves, after the time in which it could be back."""
    other = "gpu" if victim == "cpu" else "cpu"
    two = job(cpu=SLEEP, gpu=SLEEP)
    two.reconnect_grace = 1.0
    two.lay_out()
    two.start()
    assert wait_until(lambda: two.runs("cpu") and two.runs("gpu"))
    os.kill(json.loads((two.directory(victim) / STATUS).read_text())["runtime_pid"], signal.SIGKILL)
    end = two.end(other)
    assert end["reason"] == "other-component" and f"component {victim!r}: its runtime" in end["message"]
    assert two.records(victim, "end") == [] and sorted(two.codes())[-1] == 137


def test_a_cancelled_component_ends_the_others(job: Any) -> None:
    two = job(cpu=SLEEP, gpu=SLEEP)
    two.lay_out()
    two.start()
    assert wait_until(lambda: two.runs("cpu") and two.runs("gpu"))
    (two.directory("gpu") / CANCEL).write_text('{"op": "cancel"}')
    assert two.end("gpu")["reason"] == "cancel" and two.end("cpu")["reason"] == "other-component"
    assert two.codes() == [1, 0]


def test_a_cluster_that_does_not_start_ends_the_others(job: Any) -> None:
    two = job(cpu=SLEEP, gpu=SLEEP)
    two.ray["gpu"] = RaySpec(num_cpus=1, dashboard=False, health_check="echo unwell; false")
    two.lay_out()
    two.start()
    assert two.end("gpu")["reason"] == "cluster-start" and two.end("cpu")["reason"] == "other-component"
    assert not two.runs("cpu") and two.codes()[0] == 1


def test_a_component_without_the_key_is_rejected(job: Any) -> None:
    """Neither one that calls itself a component, nor another service on the host's first port."""
    two = job(cpu=SAY, gpu=SAY)
    two.lay_out()
    meeting = BarrierSpec(
        "gpu", ["cpu", "gpu"], "cd" * 32, json.loads((two.directory("gpu") / RUNTIME).read_text())["meeting"]["ports"]
    )
    right = (two.directory("gpu") / RUNTIME).read_text()
    spec = json.loads(right)
    spec["meeting"] = dataclasses.asdict(dataclasses.replace(meeting, hosts=["localhost"], patience=60.0))
    with socket.socket() as squatter:
        squatter.bind(("0.0.0.0", meeting.ports[0]))
        squatter.listen()
        (two.directory("gpu") / RUNTIME).write_text(json.dumps(spec))
        two.start()
        wait_until(lambda: two.records("gpu", "phase"))
        assert not two.runs("cpu") and not two.runs("gpu")
        two.tasks[1].terminate()
        two.tasks[1].wait(20)
        for path in (two.directory("gpu") / JOURNAL, two.directory("gpu") / "stdio.jsonl"):
            path.unlink()
        (two.directory("gpu") / RUNTIME).write_text(right)
        two.start(1)
        assert two.end("gpu")["exit_code"] == 0 and two.end("cpu")["exit_code"] == 0


def test_a_given_up_component_records_its_end(job: Any) -> None:
    """It hears of its own loss when it is back, and no payload is left without an end."""
    told = "import os, signal, sys, time\nsignal.signal(15, lambda *_: (print('told', flush=True), {}))\ntime.sleep(600)"
    slow = told.format("[time.sleep(0.05) for _ in iter(lambda: os.path.exists('../go'), True)], sys.exit(0)")
    two = job(cpu=slow, gpu=told.format("sys.exit(0)"))
    two.grace, two.reconnect_grace = 60.0, 1.0
    between = Proxy(two.ports[0])
    two.guest_ports = [between.port]
    two.lay_out()
    two.start()
    assert wait_until(lambda: two.runs("cpu") and two.runs("gpu"))
    runtime = json.loads((two.directory("gpu") / STATUS).read_text())["runtime_pid"]
    os.kill(runtime, signal.SIGSTOP)
    between.cut()
    assert wait_until(lambda: two.output("cpu")) == "told\n"
    os.kill(runtime, signal.SIGCONT)
    end = two.end("gpu")
    (two.directory("cpu") / "go").write_text("")
    assert end["reason"] == "runtime" and "given this one up: its runtime is lost" in end["message"]
    assert two.end("cpu")["reason"] == "other-component" and two.codes() == [1, 0]
    assert two.output("gpu") == "told\n"
    between.close()


def test_a_signal_to_an_idle_host_ends_the_other_components(job: Any) -> None:
    """Its own payload has ended well; the job is ended all the same, and does not look like a success."""
    two = job(cpu="pass", gpu=SLEEP)
    two.lay_out()
    two.start()
    assert two.end("cpu")["exit_code"] == 0 and wait_until(lambda: two.runs("gpu"))
    two.tasks[0].terminate()
    end = two.end("gpu")
    assert end["reason"] == "other-component" and end["message"] == "component 'cpu': the runtime received SIGTERM"
    assert two.codes() == [143, 0]


def test_a_signal_to_an_idle_guest_is_no_failure(job: Any) -> None:
    """The others may do without its cluster."""
    two = job(cpu="import os, time\nwhile not os.path.exists('../go'): time.sleep(0.05)", gpu="pass")
    two.lay_out()
    two.start()
    assert two.end("gpu")["exit_code"] == 0 and wait_until(lambda: two.runs("cpu"))
    two.tasks[1].terminate()
    two.tasks[1].wait(20)
    (two.directory("cpu") / "go").write_text("")
    assert two.end("cpu")["exit_code"] == 0 and two.codes() == [0, 0]


def test_a_signalled_host_does_not_wait_for_an_absent_guest(job: Any) -> None:
    two = job(cpu=SLEEP, gpu=SLEEP)
    two.lay_out()
    two.start(0)
    wait_until(lambda: two.records("cpu", "phase"))
    two.tasks[0].terminate()
    assert two.end("cpu")["reason"] == "terminated" and two.codes() == [1]


@pytest.mark.parametrize("well", [True, False])
def test_secrets_are_deleted_when_no_other_attempt_needs_them(job: Any, well: bool) -> None:
    two = job(cpu="pass", gpu="pass" if well else SLEEP)
    two.lay_out()
    for name in two.payloads:
        spec = json.loads((two.directory(name) / RUNTIME).read_text())
        (two.directory(name) / RUNTIME).write_text(json.dumps({**spec, "requeue": True}))
        (two.directory(name) / SECRETS).write_text('{"PASSWORD": "hunter2"}')
    two.start()
    assert two.end("cpu")["exit_code"] == 0
    if not well:
        assert wait_until(lambda: two.runs("gpu"))
        two.tasks[1].terminate()
        assert two.end("gpu")["reason"] == "terminated"
    two.codes()
    assert [(two.directory(name) / SECRETS).exists() for name in two.payloads] == [not well] * 2


def test_a_single_component_waits_for_no_other(job: Any) -> None:
    """Slurm makes no heterogeneous job of it; nothing within it bears the component's name, nor waits for others."""
    step = {"SLURM_JOB_ID": "17", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_PARTITION": "p"}
    whole = select_component(dict(step), from_environ(step) or pytest.fail("this is a step"), ["only"])
    assert whole.component_of(1) == "only" and whole.of_own_group().component_of(1) is None
    assert whole.of_own_group().nodes == ["n1", "n2"]
    one = job(only=SAY)
    one.lay_out()
    one.start()
    assert one.end("only")["exit_code"] == 0 and one.codes() == [0]
    assert not [each for each in one.records("only", "phase") if each["phase"] in ("ready", "start")]


class Proxy:
    """Forwards connections to a port, in threads, and can cut them."""

    def __init__(self, target: int) -> None:
        self.open = True
        self._target = target
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.open = False
        self.cut()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._target)) if self.open else None
                except OSError:
                    far = None
                if far is None:
                    near.close()
                    continue
                self._sockets += [near, far]
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def loop() -> Iterator[Loop]:
    before = signal.getsignal(signal.SIGCHLD)
    yield Loop()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, before)


class Party:
    """A host and a guest on one loop, and a proxy between them whose connections can be cut."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.told: dict[str, list[RunState]] = {"cpu": [RunState()], "gpu": [RunState()]}
        self.ports = control_ports(None, 1)
        self.proxy = Proxy(self.ports[0])
        self.host = self.part(Host, "cpu", self.ports[0])
        self.guest: Guest | None = None

    def part(self, side: Any, component: str, port: int) -> Any:
        told = self.told[component]

        class Told(side):  # type: ignore[misc]
            def follow(self, state: RunState) -> None:
                self.told = state
                if state != told[-1]:
                    told.append(state)

        spec = BarrierSpec(component, ["cpu", "gpu"], KEY, [port], [], 60.0, 0.6)
        part = Told(SimpleNamespace(loop=self.loop, spec=SimpleNamespace(meeting=spec)), "/nowhere")
        part.payload = SimpleNamespace()
        return part

    def join(self) -> Guest:
        self.guest = self.part(Guest, "gpu", self.proxy.port)
        return self.guest

    def orders(self, component: str) -> str:
        """What a component was told so far."""
        last = self.told[component][-1]
        facts = [("start", last.places), ("fail", last.failed is not None), ("finish", last.finished)]
        return " ".join(word for word, fact in facts if fact)

    def close(self) -> None:
        self.proxy.close()
        self.host.close()
        if self.guest is not None:
            self.guest.close()


@pytest.fixture
def party(loop: Loop) -> Iterator[Party]:
    made = Party(loop)
    yield made
    made.close()


PLACE = ComponentAddress("h", "127.0.0.1", None, ["h"])
OK = Ended(None, 0, False)


def begin(party: Party) -> Guest:
    guest = party.join()
    party.host.tell(place=PLACE)
    guest.tell(place=PLACE)
    assert turn(party.loop, lambda: party.orders("cpu") == party.orders("gpu") == "start")
    return guest


def test_a_guest_that_reconnects_in_time_is_not_lost(party: Party) -> None:
    """Each loss has the whole of the time in which one that lives is back."""
    begin(party)
    until = party.loop.now() + 2.0
    while party.loop.now() < until:
        party.proxy.cut()
        turn(party.loop, lambda: False, 0.15)
    assert party.orders("cpu") == party.orders("gpu") == "start"


@pytest.mark.parametrize("back", [True, False])
def test_the_host_waits_for_a_guest_that_may_reconnect_before_it_finishes(party: Party, back: bool) -> None:
    """Nobody else would tell it."""
    guest = begin(party)
    guest.tell(ended=OK)
    turn(party.loop, lambda: False, 0.1)
    party.proxy.open = False
    party.proxy.cut()
    turn(party.loop, lambda: False, 0.1)
    party.host.tell(ended=OK)
    turn(party.loop, lambda: False, 0.1)
    assert party.orders("cpu") == "start"
    party.proxy.open = back
    expected = "start finish" if back else "start fail finish"
    assert turn(party.loop, lambda: party.orders("cpu") == "start finish" and party.orders("gpu") == expected)
    # A guest that has lost the host, but whose payload was a success, does not end the step.
    assert party.told["gpu"][-1].final == back and party.host.exit_code == guest.exit_code == 0


def test_a_given_up_guest_that_reconnects_is_waited_for(party: Party) -> None:
    guest = begin(party)
    party.proxy.open = False
    party.proxy.cut()
    guest.client.close()  # It stands still.
    assert turn(party.loop, lambda: party.orders("cpu") == "start fail")
    party.proxy.open = True
    again = party.join()
    assert turn(party.loop, lambda: party.orders("gpu") == "start fail")
    assert party.told["gpu"][-1].failed == "gpu"
    party.host.tell(ended=Ended("another one has failed", 1, False))
    turn(party.loop, lambda: False, 0.2)
    assert party.orders("cpu") == "start fail"
    again.tell(ended=Ended("it was given up", 1, False))
    assert turn(party.loop, lambda: party.orders("cpu") == party.orders("gpu") == "start fail finish")


def test_after_a_failure_an_absent_guest_is_soon_given_up(party: Party) -> None:
    party.host.tell(ended=Ended("it was cancelled", 1, False))
    assert turn(party.loop, lambda: party.orders("cpu") == "fail finish")
