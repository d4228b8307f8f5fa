"""Several payloads under one runtime, without Ray: fair order, claims, time, isolation."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm.archive import install_runtime
from dagster_rayslurm.runtime.protocol.record import JOURNAL, PAYLOAD, LineReader
from dagster_rayslurm.runtime.protocol.spec import PayloadSpec, to_json

STUB_CLUSTER = '''
class StubCluster:
    """A warm Ray cluster; it is up when `ready` is set."""
    ready, environment, key, leaks, dashboard_port, token = False, {}, "", {}, None, ""
    def start(self): pass
    def end(self): pass
    def prestart(self): pass
    def leak_check(self, _): return lambda done: done([])
    def check_when_idle(self, _): pass
    def archive_logs(self, _, names, done): done()
    def facts(self): return {}
'''

BEGIN = (
    """
import json, os, sys, time
from dagster_rayslurm.runtime.node import resources as machine
from dagster_rayslurm.runtime.process import processes
from dagster_rayslurm.runtime.process import scratch
from dagster_rayslurm.runtime.supervisor import supervisor
from dagster_rayslurm.runtime.process.loop import Loop
from dagster_rayslurm.runtime.protocol.messages import End
from dagster_rayslurm.runtime.protocol.spec import RaySpec, RuntimeSpec
from dagster_rayslurm.runtime.supervisor.facts import describe
from dagster_rayslurm.runtime.supervisor.queue import Closing, Misfit
machine.detect = lambda *_, **__: machine.NodeResources("n1", 4, 0, 2**33, None)
processes.become_subreaper()
loop, base, said = Loop(), sys.argv[1], {}

def session(**fields):
    global runner
    runner = supervisor.Supervisor(loop, RuntimeSpec("c1", idle_timeout=60.0, **fields), scratch.Scratch())
    return runner

def submit(name):
    try:
        return runner.submit(os.path.join(base, name))
    except (Closing, Misfit) as error:
        said[name] = type(error).__name__ + ": " + str(error)

def when_done(call):
    def look():
        if not runner.payloads:
            return call()
        loop.call_later(0.02, look)
    look()

def end():
    loop.stop()
"""
    + STUB_CLUSTER
)


class Runtime:
    """Payloads in a directory, and a program that is their runtime."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, name: str, code: str, **fields: Any) -> None:
        (self.path / name).mkdir()
        spec = PayloadSpec(["python", "-c", code], name, **{"grace_period": 1.0, **fields})
        (self.path / name / PAYLOAD).write_text(to_json(spec))

    def run(self, program: str) -> dict[str, Any]:
        # What it starts of its own is started as ever, from the archive.
        begin = BEGIN + f"sys.argv[0] = {str(install_runtime(self.path))!r}\n"
        code = begin + textwrap.dedent(program) + "\nrunner.run()\nprint(json.dumps(said))\n"
        command = [sys.executable, "-c", code, str(self.path)]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=250, env={**os.environ, "PYTHONPATH": os.getcwd()}
        )
        assert done.returncode == 0
        return dict(json.loads(done.stdout))

    def records(self, name: str) -> list[dict[str, Any]]:
        return LineReader().feed((self.path / name / JOURNAL).read_bytes())

    def end(self, name: str) -> dict[str, Any]:
        [end] = [record for record in self.records(name) if record["type"] == "end"]
        return end

    def started(self, *names: str) -> list[str]:
        """Names in the order in which they were started."""
        at = {name: self.end(name)["started_at"] for name in names}
        return sorted(names, key=lambda name: at[name])

    def overlap(self, one: str, other: str) -> bool:
        first, second = self.end(one), self.end(other)
        return bool(first["started_at"] < second["ended_at"] and second["started_at"] < first["ended_at"])


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    return Runtime(tmp_path)


NAP = "import time; time.sleep(%g)"


def test_claims_are_summed_and_a_large_payload_is_not_starved(runtime: Runtime) -> None:
    for name, cpus in (("a", 2), ("b", 2), ("c", 3), ("d", 1), ("e", None)):
        runtime.add(name, NAP % 0.5, run_id=name, want_cpus=cpus)
    said = runtime.run("""
        session(max_concurrent_payloads=3)
        for name in "abcde":
            submit(name)
        loop.call_later(0.2, lambda: said.update(facts=describe(runner)))
        when_done(end)
    """)
    assert runtime.overlap("a", "b") and not runtime.overlap("a", "c") and not runtime.overlap("b", "c")
    assert runtime.overlap("c", "d") and runtime.overlap("d", "e")
    facts = said["facts"]
    assert (facts["running"], facts["waiting"], facts["served"], facts["draining"]) == (2, 3, 5, None)
    assert [(os.path.basename(each["run_dir"]), each["state"]) for each in facts["payloads"]] == [
        ("c", "waiting"),
        ("d", "waiting"),
        ("e", "waiting"),
        ("a", "running"),
        ("b", "running"),
    ]
    assert (
        facts["nodes"] == [{"name": "n1", "cpus": 4, "gpus": 0, "here": True, "component": None}]
        and 0 <= facts["payloads"][0]["age"] < 5
    )


def test_a_misfit_and_a_closing_runtime_say_why_and_leave_no_record(runtime: Runtime) -> None:
    for name, cpus in (("a", 5), ("b", 4), ("c", 1)):
        runtime.add(name, NAP % 0.5, want_cpus=cpus)
    said = runtime.run("""
        session()
        submit("a"); submit("b")
        runner.drain("it is Friday")
        said["closing"] = runner.queue.closing
        submit("c")
    """)
    assert said["a"] == "Misfit: num_cpus=5 asks for more than node n1 grants: 4 CPUs"
    assert said["c"] == "Closing: it is Friday" == "Closing: " + said["closing"]
    assert runtime.end("b")["exit_code"] == 0  # It was here already; then the runtime ended by itself.
    assert not (runtime.path / "a" / JOURNAL).exists() and not (runtime.path / "c" / JOURNAL).exists()


def test_a_cancel_affects_only_its_payload(runtime: Runtime) -> None:
    runtime.add("a", NAP % 60)
    runtime.add("b", NAP % 1.5)
    runtime.run("""
        session(max_concurrent_payloads=2)
        first, second = submit("a"), submit("b")
        loop.call_later(0.5, lambda: first.end_early(End("cancel", "not wanted")))
        when_done(end)
    """)
    assert runtime.end("a")["reason"] == "cancel" and runtime.end("b")["exit_code"] == 0
    assert runtime.end("a")["ended_at"] < runtime.end("b")["ended_at"]


def test_a_payload_has_a_time_limit_of_its_own(runtime: Runtime) -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: print('warned', flush=True)); time.sleep(60)"
    runtime.add("a", stubborn, time_limit=1.0)
    runtime.add("b", NAP % 3, time_limit=30.0)
    runtime.run("session(max_concurrent_payloads=2); submit('a'); submit('b'); when_done(end)")
    late = runtime.end("a")
    assert (late["reason"], late["message"]) == ("timeout", "the payload took longer than its time limit of 1 s")
    assert late["signal"] == 9 and late["ended_at"] - late["started_at"] < 30 and runtime.end("b")["exit_code"] == 0


def test_a_payload_that_cannot_end_in_time_is_refused(runtime: Runtime) -> None:
    runtime.add("first", NAP % 0.1, time_limit=500.0)
    runtime.add("fits", NAP % 0.1, time_limit=50.0)
    runtime.add("behind", NAP % 0.1, time_limit=80.0)
    runtime.add("after", NAP % 0.1, time_limit=20.0)
    said = runtime.run("""
        session(drain_margin=60.0)
        runner.time_left = lambda: 100.0
        submit("first")  # Nobody else would have more time for it.
        def go():
            submit("fits"); submit("behind"); submit("after")
            said["left"], said["closing"] = describe(runner)["time_left"], runner.queue.closing
            when_done(end)
        when_done(go)
    """)
    words = r"Closing: its time limit comes in 100 s, and the payload may take 80 s and may wait (50|49) s for its turn"
    assert re.fullmatch(words, said["behind"])
    assert "after" not in said and said["closing"] is None and said["left"] == 100.0  # Others may take less time.
    assert [runtime.end(name)["exit_code"] for name in ("first", "fits", "after")] == [0, 0, 0]


def test_a_waiting_payload_without_enough_time_is_returned(runtime: Runtime) -> None:
    for name in "abc":
        runtime.add(name, NAP % 1, run_id=name)
    runtime.run("""
        session(drain_margin=5.0)
        left = [100.0]
        runner.time_left = lambda: left[0]
        submit("a"); submit("b"); submit("c")
        loop.call_later(0.3, lambda: left.__setitem__(0, 4.0))
        when_done(end)
    """)
    assert runtime.end("a")["exit_code"] == 0
    for name in "bc":
        end = runtime.end(name)
        assert end["reason"] == "returned" and "its time limit comes in 4 s" in end["message"] and end["started_at"] is None


def test_the_time_limit_ends_running_payloads_and_returns_waiting_ones(runtime: Runtime) -> None:
    runtime.add("a", NAP % 60)
    runtime.add("b", "pass")
    runtime.run("session(); submit('a'); submit('b'); loop.call_later(0.5, lambda: runner.close(End('timeout', 'time is up')))")
    assert runtime.end("a")["reason"] == "timeout"
    assert (runtime.end("b")["reason"], runtime.end("b")["message"]) == ("returned", "time is up before the payload's turn came")


def test_usage_is_each_payloads_own(runtime: Runtime) -> None:
    burn = "import time; until = time.time() + 1.5\nwhile time.time() < until: pass"
    runtime.add("busy", burn)
    runtime.add("idle", NAP % 1.5)
    runtime.add("alone", NAP % 0.3)
    runtime.run("""
        session(max_concurrent_payloads=2)
        submit("busy"); submit("idle")
        when_done(lambda: (submit("alone"), when_done(end)))
    """)
    busy, idle, alone = (runtime.end(name)["usage"] for name in ("busy", "idle", "alone"))
    assert busy["cpu_seconds"] > 0.4 and idle["cpu_seconds"] < 0.35 * busy["cpu_seconds"]
    assert (busy["shared"], idle["shared"], alone["shared"]) == (1, 1, 0)


def test_a_payload_without_ray_does_not_wait_for_the_cluster(runtime: Runtime) -> None:
    runtime.add("plain", "import os; assert 'RAY_ADDRESS' not in os.environ and 'RAY_AUTH_MODE' not in os.environ", run_id="a")
    runtime.add("ray", "import os; assert os.environ['RAY_ADDRESS'] == 'x:1'", run_id="a", uses_ray=True)
    runtime.add("other", NAP % 0.3, run_id="a")
    runtime.run("""
        session()
        runner.cluster = StubCluster()
        runner.cluster.environment = {"RAY_ADDRESS": "x:1"}
        for name in ("ray", "plain", "other"):
            submit(name)
        def up():
            runner.cluster.ready = True
            runner.schedule()
            when_done(end)
        loop.call_later(1.5, up)
    """)
    assert [runtime.end(name)["exit_code"] for name in ("plain", "ray", "other")] == [0, 0, 0]
    assert runtime.started("ray", "plain", "other") == ["plain", "other", "ray"]


@pytest.mark.parametrize("now", ["None", "'2'"])
def test_a_session_takes_no_payload_for_another_version_of_ray(runtime: Runtime, now: str) -> None:
    """A version that cannot be read, for instance because its file system is away, changes nothing."""
    runtime.add("a", "pass")
    runtime.add("b", "pass")
    said = runtime.run(f"""
        supervisor.installed_version = lambda: "1"
        session()
        submit("a")
        supervisor.installed_version = lambda: {now}
        submit("b")
        when_done(end)
    """)
    assert said == ({} if now == "None" else {"b": "Closing: the environment's Ray has changed"})
    assert runtime.end("a")["exit_code"] == 0


def test_orphans_are_ended_once_nothing_runs(runtime: Runtime, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    child = ["env", "-i", "setsid", "sh", "-c", f"echo $$ > {pid}; sleep 60"]
    leave = f"import subprocess; subprocess.Popen({child}, stdout=-3, stderr=-3); "
    runtime.add("a", leave + NAP % 0.5)
    runtime.add("b", NAP % 2)
    said = runtime.run(f"""
        session(max_concurrent_payloads=2)
        template = loop.spawn(["sleep", "60"], lambda *_: None)  # A child of the runtime's own is no orphan.
        submit("a"); submit("b")
        def alive(pid):
            try:
                with open("/proc/%d/stat" % pid) as file:
                    return file.read().split()[2] != "Z"
            except OSError:
                return False
        loop.call_later(1.5, lambda: said.update(during=alive(int(open({str(pid)!r}).read()))))
        def after():
            time.sleep(0.2)
            said.update(after=alive(int(open({str(pid)!r}).read())), template=alive(template))
            loop.stop()
        when_done(lambda: loop.call_later(0.1, after))
    """)
    assert (said["during"], said["after"], said["template"]) == (True, False, True)


LARGE = "open('large.bin', 'wb').write(bytes(5 * 2**20)); open('small.txt', 'w').write('x')"
SLOW_SEARCH = """
from dagster_rayslurm.runtime.payload import results
run = results.OutputSearch.run
def slowly(search):
    until = loop.now() + %g
    while loop.now() < until:
        time.sleep(0.02)
        yield
    yield from run(search)
results.OutputSearch.run = slowly
ticks = []
def tick():
    ticks.append(loop.now())
    loop.call_later(0.02, tick)
tick()
def finish():
    said.update(gap=max(b - a for a, b in zip(ticks, ticks[1:])))
    loop.stop()
"""


def test_a_long_search_for_outputs_does_not_block_others(runtime: Runtime) -> None:
    runtime.add("a", LARGE, outputs=["*.bin", "*.txt", "*.csv"], max_output_bytes=2**23)
    runtime.add("b", "pass", run_id="other")
    said = runtime.run(SLOW_SEARCH % 3 + "session(max_concurrent_payloads=2); submit('a'); submit('b'); when_done(finish)")
    a, b = runtime.end("a"), runtime.end("b")
    assert (a["reason"], a["exit_code"], b["exit_code"]) == ("exit", 0, 0)
    assert a["outputs"] == [{"name": "small.txt", "size": 1}, {"name": "large.bin", "size": 5 * 2**20}]
    assert a["outputs_left_out"] == ["no file that the payload made matches '*.csv'"] and said["gap"] < 2


def test_ending_a_payload_ends_its_search_for_outputs(runtime: Runtime) -> None:
    for name in "ab":
        runtime.add(name, LARGE, outputs=["*"], run_id=name, grace_period=0.5, time_limit=30.0)
    runtime.run(
        SLOW_SEARCH % 60
        + """
session(max_concurrent_payloads=2)
payloads = [submit(name) for name in "ab"]
def cancel():
    if not all(payload.ending.exit is not None for payload in payloads):
        return loop.call_later(0.5, cancel)
    payloads[0].end_early(End("cancel", "not wanted"))
    payloads[1].abandon(End("runtime", "a defect"))
    when_done(finish)
cancel()
"""
    )
    ends = [runtime.end(name) for name in "ab"]
    assert [(end["reason"], end["outputs_left_out"]) for end in ends] == [
        ("cancel", ["all of them: not wanted while they were searched for"]),
        ("runtime", ["all of them: a defect while they were searched for"]),
    ]


def test_usage_without_ray_counts_no_cluster(runtime: Runtime) -> None:
    runtime.add("plain", NAP % 1.0)
    runtime.add("ray", NAP % 1.0, uses_ray=True)
    runtime.run("""
        session(max_concurrent_payloads=2)
        class Cluster(StubCluster):
            ready = True
            class scratch: ray_temp_dir = base
            pid = loop.spawn(["sh", "-c", "while :; do :; done"], lambda *_: None)
        runner.cluster = runner.agent.rays[""] = Cluster()
        submit("plain")
        when_done(lambda: (submit("ray"), when_done(end)))
    """)
    plain, ray = runtime.end("plain")["usage"], runtime.end("ray")["usage"]
    assert plain["cpu_seconds"] < 0.3 * ray["shared_cpu_seconds"] and ray["shared_cpu_seconds"] > 0.2
    assert ray["cpu_seconds"] < 0.5 * ray["shared_cpu_seconds"] and plain["shared_cpu_seconds"] is None


HANGS = """
from dagster_rayslurm.runtime.payload import preload_server
preload_server._TIMEOUT = 6.0  # Longer than a busy machine keeps the loop waiting.
def ticking(last=None):
    now = loop.now()
    said["gap"] = max(said.get("gap", 0.0), now - last if last is not None else 0.0)
    loop.call_later(0.02, lambda: ticking(now))

session(max_concurrent_payloads=3)
ticking()
"""


def add_preloading(runtime: Runtime, name: str, **fields: Any) -> None:
    """A payload that wants a module whose import hangs."""
    (runtime.path / "hanging.py").write_text("import time\ntime.sleep(60)")
    (runtime.path / "script.py").write_text("print('it ran')")
    (runtime.path / name).mkdir()
    argv, env = ["python", str(runtime.path / "script.py")], {"PYTHONPATH": str(runtime.path)}
    spec = PayloadSpec(argv, name, preload=["hanging"], env=env, grace_period=1.0, run_id=name, **fields)
    (runtime.path / name / PAYLOAD).write_text(to_json(spec))


def test_a_template_that_hangs_does_not_hold_up_other_payloads(runtime: Runtime) -> None:
    add_preloading(runtime, "a")
    runtime.add("b", "import time\nfor n in range(120): print(n, flush=True); time.sleep(0.02)", run_id="b")
    said = runtime.run(HANGS + "submit('b'); submit('a')\nwhen_done(end)")
    assert [runtime.end(name)["exit_code"] for name in "ab"] == [0, 0]
    phases = [record["message"] for record in runtime.records("a") if record["type"] == "phase"]
    assert "a fresh interpreter, because importing hanging is not done yet" in phases
    assert said["gap"] < 3.0


def test_a_payload_that_waits_for_its_template_can_be_ended(runtime: Runtime) -> None:
    add_preloading(runtime, "a")
    said = runtime.run(
        HANGS
        + """
payload = submit("a")
def cancel():
    said["pid"] = payload.pid
    payload.signal(15)
    payload.end_early(End("cancel", "not wanted"))
    before = len(os.listdir("/proc/self/fd"))
    loop.call_later(3.0, lambda: (said.update(fds=len(os.listdir("/proc/self/fd")) - before), when_done(end)))
loop.call_later(0.3, cancel)
"""
    )
    end = runtime.end("a")
    assert (end["reason"], end["message"], end["exit_code"]) == ("cancel", "not wanted", None)
    assert said["pid"] is None and said["fds"] <= 0
    assert not [record for record in runtime.records("a") if "it ran" in str(record) or "payload started" in str(record)]


@pytest.mark.ray
def test_a_payload_finds_its_cluster_announced(runtime: Runtime) -> None:
    announced = str(runtime.path / "session.json")
    runtime.add("a", f"import json; assert json.load(open({announced!r}))['access']", uses_ray=True)
    runtime.run("""
        from dagster_rayslurm.runtime.supervisor import request_server
        request_server._ANNOUNCEMENT_POLL = 600.0
        ray = RaySpec(num_cpus=1, object_store_memory=100 * 2**20, dashboard=False, startup_timeout=60.0)
        server = request_server.RequestServer(session(ray=ray), base, "ab" * 32, [])
        submit("a")
        when_done(end)
    """)
    assert runtime.end("a")["exit_code"] == 0
