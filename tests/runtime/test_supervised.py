"""One payload under its runtime, without Ray: the time limit warning, and defects of the runtime."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm.runtime.process.processes import signal_name
from dagster_rayslurm.runtime.protocol.record import JOURNAL, PAYLOAD, LineReader
from dagster_rayslurm.runtime.protocol.spec import PayloadSpec, to_json
from dagster_rayslurm.runtime.supervisor.time_limit import signal_number

from .test_supervisor import STUB_CLUSTER

BEGIN = (
    """
import sys
from dataclasses import replace
from dagster_rayslurm.runtime.process import processes
from dagster_rayslurm.runtime.process import scratch
from dagster_rayslurm.runtime.supervisor import supervisor
from dagster_rayslurm.runtime.supervisor import time_limit
from dagster_rayslurm.runtime.protocol.messages import End
from dagster_rayslurm.runtime.process.loop import Loop
from dagster_rayslurm.runtime.protocol.spec import RuntimeSpec
processes.become_subreaper()
loop, run_dir = Loop(), sys.argv[1]
runner = supervisor.Supervisor(loop, RuntimeSpec("c", None), scratch.Scratch())
"""
    + STUB_CLUSTER
)


def supervised(run_dir: Path, program: str, argv: list[str], **env: str) -> tuple[list[dict[str, Any]], str]:
    """The records of a payload whose runtime is a program, and what that program says."""
    (run_dir / PAYLOAD).write_text(to_json(PayloadSpec(argv=argv, nonce="n", grace_period=1.0, uses_ray=True)))
    command = [sys.executable, "-c", BEGIN + textwrap.dedent(program), str(run_dir)]
    said = subprocess.run(command, env={**os.environ, **env}, stderr=subprocess.PIPE, text=True, timeout=60).stderr
    return LineReader().feed((run_dir / JOURNAL).read_bytes()), said


@pytest.fixture
def squeue(tmp_path: Path) -> str:
    """A PATH with a `squeue` that says that 30 s are left."""
    directory = tmp_path / "bin"
    directory.mkdir()
    (directory / "squeue").write_text("#!/bin/sh\nsleep 0.3\necho 0:30\n")
    (directory / "squeue").chmod(0o755)
    return f"{directory}:{os.environ['PATH']}"


WARN = """
runner.cluster = StubCluster()
runner.spec = replace(runner.spec, warn_before_limit=60, warn_signal=%r)
payload = runner.submit(run_dir)
time_limit.watch(runner, "12")
def up():
    runner.cluster.ready = True
    runner.schedule()
loop.call_later(%g, up)
runner.run()
"""


def told(records: list[dict[str, Any]]) -> list[str]:
    return [record["message"] for record in records if record["type"] == "phase" and record["phase"] in ("time-limit", "running")]


def test_a_time_limit_warning_before_the_start_is_sent_at_the_start(tmp_path: Path, squeue: str) -> None:
    records, _ = supervised(tmp_path, WARN % ("USR1", 1.0), ["sleep", "20"], PATH=squeue)
    early, started, given = told(records)
    assert early == "30 s are left; the payload does not run yet, and gets SIGUSR1 when it starts"
    assert started.startswith("payload started") and given == "the payload gets SIGUSR1 now, which was due before it started"
    assert (records[-1]["type"], records[-1]["signal"]) == ("end", signal.SIGUSR1)


@pytest.mark.parametrize("source", ["squeue", "squeue of a heterogeneous job", "environment", "squeue beside a wrong clock"])
def test_a_running_payload_gets_the_time_limit_warning(tmp_path: Path, squeue: str, source: str) -> None:
    says = {"squeue of a heterogeneous job": "echo 0:30; echo 0:30", "environment": "echo 9:00"}.get(source)
    if says is not None:
        (tmp_path / "bin" / "squeue").write_text(f"#!/bin/sh\n{says}\n")
    starts = {"environment": 0, "squeue beside a wrong clock": -600}  # In seconds from now, by this node's clock.
    start = int(time.time()) + starts.get(source, 0)
    env = {"SLURM_JOB_START_TIME": str(start), "SLURM_JOB_END_TIME": str(start + 30)} if source in starts else {}
    records, _ = supervised(tmp_path, WARN % ("10", 0.0), ["sleep", "20"], PATH=squeue, **env)
    said = told(records)[0] + told(records)[1]
    assert re.search(r"(30|2\d) s are left; the payload", said) and records[-1]["signal"] == signal.SIGUSR1


@pytest.mark.parametrize(("answer", "again"), [("echo UNLIMITED; echo UNLIMITED", False), ("echo UNLIMITED; echo INVALID", True)])
def test_heterogeneous_jobs_without_a_time_limit(tmp_path: Path, answer: str, again: bool) -> None:
    """UNLIMITED is an answer, unless a component has none yet."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "squeue").write_text(f'#!/bin/sh\necho x >>"$0.asked"\n{answer}\n')
    (tmp_path / "bin" / "squeue").chmod(0o755)
    program = """
        time_limit._UNKNOWN = 0.1
        runner.submit(run_dir)
        limit = time_limit.TimeLimit(loop, "12")
        limit.start()
        runner.run()
    """
    supervised(tmp_path, program, ["sleep", "2"], PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert (len((tmp_path / "bin" / "squeue.asked").read_text().split()) > 1) == again


OTHERS = """
from dagster_rayslurm.runtime.protocol.spec import RaySpec
from dagster_rayslurm.runtime.node.worker_nodes import WorkerNode
class WorkerNodes:
    pids = []
    members = {place: WorkerNode(place, "n%d" % place) for place in (1, 2)}
    def measure(self, nonce, jobs): print("measured", nonce, file=sys.stderr)
    def collect(self, nonce, done):
        print("collected", nonce, file=sys.stderr)
        loop.call_later(0, lambda: done({}))
    def send_command(self, *_, **__): pass
    def dismiss(self): pass
    def wait_gone(self, _): pass
runner.workers = WorkerNodes()
"""


@pytest.mark.parametrize("where", ["process_exited", "_finish", "process_started", ""])
def test_a_defect_ends_the_measurement_on_other_nodes(tmp_path: Path, where: str) -> None:
    program = OTHERS + (
        f"""
from dagster_rayslurm.runtime.payload.payload import Payload
def broken(*args, **kwargs):
    raise KeyError("broken")
if {where!r}:
    Payload.{where or "x"} = broken
"""
        + WARN.partition("time_limit.")[0] % "USR1"
        + "runner.cluster.ready = True; runner.schedule(); runner.run()"
    )
    records, said = supervised(tmp_path, program, ["sh", "-c", "echo x"])
    assert (records[-1]["type"], records[-1]["reason"]) == ("end", "runtime" if where else "exit")
    assert said.count("measured n") == said.count("collected n") == 1


@pytest.mark.parametrize(("workers", "says"), [("None", "3 nodes: "), ("1", "2 nodes: "), ("0", "on ")])
def test_nodes_that_are_not_in_the_cluster_are_not_counted(tmp_path: Path, workers: str, says: str) -> None:
    program = OTHERS + f"runner.spec = replace(runner.spec, ray=RaySpec(max_workers={workers}))" + WARN % ("USR1", 0.1)
    records, _ = supervised(tmp_path, program, ["true"], PATH=f"{tmp_path}:{os.environ['PATH']}")
    [said] = [record["message"] for record in records if "starting the Ray cluster" in str(record.get("message"))]
    assert says in said and ("n2" in said, "n1" in said) == (workers == "None", workers != "0")


@pytest.mark.parametrize("name", ["99", "NOSUCH"])
def test_an_unknown_warning_signal_does_not_end_the_payload(tmp_path: Path, squeue: str, name: str) -> None:
    records, _ = supervised(tmp_path, WARN % (name, 0.2), ["true"], PATH=squeue)
    assert told(records)[0] == f"no warning ahead of the time limit: there is no signal '{name}' here"
    assert (records[-1]["type"], records[-1]["exit_code"]) == ("end", 0)


@pytest.mark.parametrize(
    ("name", "number"),
    [("USR1", 10), ("SIGUSR1", 10), ("usr1", 10), ("10", 10), ("64", 64), ("0", None), ("65", None), ("_IGN", None), ("²", None)],
)
def test_signals_by_name_and_number(name: str, number: int | None) -> None:
    assert signal_number(name) == number
    assert number is None or signal_name(number) == ("SIGUSR1" if number == 10 else "SIGRTMAX")


def test_a_signal_without_a_name() -> None:
    assert signal_name(40) == "signal 40"


def test_a_defect_of_the_runtime_ends_in_one_line_with_its_traceback_beside_it(tmp_path: Path) -> None:
    program = """
        def defect():
            raise RuntimeError("no\\nsuch thing")
        runner.submit(run_dir)
        loop.call_later(0.2, defect)
        runner.run()
    """
    records, said = supervised(tmp_path, program, ["sleep", "20"])
    end, tails = records[-1], [record for record in records if record["type"] == "tail"]
    assert (end["type"], end["reason"], end["message"]) == ("end", "runtime", "RuntimeError: no such thing")
    assert [tail["name"] for tail in tails] == ["runtime traceback"]
    assert "in defect" in tails[0]["text"] and "in defect" in said


UNWRITABLE = """
from dagster_rayslurm.runtime.protocol import record
write, away = record.RunRecord.write, [False]
def stale(self, *records):
    if away[0]:
        raise OSError(116, "Stale file handle")
    write(self, *records)
record.RunRecord.write = stale
def leave():
    away[0] = True
def come_back():
    away[0] = False
loop.call_later(0.3, leave)
"""


@pytest.mark.parametrize("outlives", [True, False])
def test_an_end_is_written_once_the_file_system_is_back(tmp_path: Path, outlives: bool) -> None:
    """Both in a session that lives on and at the end of the runtime."""
    program = UNWRITABLE + (
        """
runner.settle = lambda: None
loop.call_later(3.5, come_back)
loop.call_later(6.0, loop.stop)
runner.submit(run_dir)
runner.settle = lambda: None
loop.call_later(5.9, lambda: runner.unrecorded.clear())
runner.run()
"""
        if outlives
        else """
import threading
threading.Timer(4.0, come_back).start()
runner.submit(run_dir)
runner.run()
"""
    )
    records, _ = supervised(tmp_path, program, ["sleep", "1"])
    assert [record["type"] for record in records].count("end") == 1 and records[-1]["exit_code"] == 0
    assert not (tmp_path / "journal.reserve").exists()


@pytest.mark.parametrize("where", ["start", "process_started", "_copy_messages", "process_exited", "_finish"])
def test_a_defect_in_handling_one_payload_ends_only_that_payload(tmp_path: Path, where: str) -> None:
    program = f"""
        import os, shutil
        from dagster_rayslurm.runtime.payload.payload import Payload
        real, other = Payload.{where}, run_dir + "/other"
        def broken(self, *args, **kwargs):
            if self.run_dir == run_dir:
                raise KeyError("broken")
            return real(self, *args, **kwargs)
        Payload.{where} = broken
        os.mkdir(other)
        shutil.copy(run_dir + "/payload.json", other)
        text = open(other + "/payload.json").read().replace('"n"', '"m"')
        open(other + "/payload.json", "w").write(text)
        runner.submit(other)
        runner.submit(run_dir)
        def left():
            print("left:", [name for name in os.listdir(runner.scratch.path) if "messages" in name], file=sys.stderr)
            loop.stop()
        runner.on_finished = left
        runner.run()
    """
    records, said = supervised(tmp_path, program, ["sh", "-c", "echo x; sleep 1"])
    assert (records[-1]["type"], records[-1]["reason"]) == ("end", "runtime") and "broken" in records[-1]["message"]
    other = LineReader().feed((tmp_path / "other" / JOURNAL).read_bytes())[-1]
    assert (other["type"], other["exit_code"]) == ("end", 0) and "KeyError" in said and "left: []" in said


def test_endless_messages_do_not_delay_the_time_limit(tmp_path: Path) -> None:
    """A payload that writes messages faster than they are copied still has its time limit."""
    program = """
        from dagster_rayslurm.runtime.payload.payload import Payload
        copy = Payload.copy_chunk
        Payload.copy_chunk = lambda self: copy(self) or True
        payload = runner.submit(run_dir)
        loop.call_later(0.5, lambda: payload.end_early(End("timeout", "enough"), 0))
        runner.run()
    """
    records, _ = supervised(tmp_path, program, ["sleep", "20"])
    assert (records[-1]["type"], records[-1]["message"]) == ("end", "enough")


@pytest.mark.parametrize(
    "answer", ["exit 1", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("sleep 100", "true"))]
)
def test_without_an_answer_of_squeue_the_last_known_limit_counts(tmp_path: Path, answer: str) -> None:
    directory = tmp_path / "bin"
    directory.mkdir()
    (directory / "squeue").write_text(f'#!/bin/sh\n[ -e "$0.asked" ] && {{ {answer}; exit; }}\ntouch "$0.asked"; echo 0:22\n')
    (directory / "squeue").chmod(0o755)
    program = """
        payload = runner.submit(run_dir)
        told = []
        def known(left):
            told.append(left)
            limit.when(10.0, due)
        limit = time_limit.TimeLimit(loop, "12", known)
        def due(left):
            print("due", round(left), [round(left) for left in told], file=sys.stderr)
            payload.end_early(End("timeout"), 0)
        limit.start()
        runner.run()
    """
    _, said = supervised(tmp_path, program, ["sleep", "40"], PATH=f"{directory}:{os.environ['PATH']}")
    assert "due 10 [22]" in said


def test_squeue_is_asked_again_after_a_failure(tmp_path: Path) -> None:
    directory = tmp_path / "bin"
    directory.mkdir()
    (directory / "squeue").write_text('#!/bin/sh\n[ -e "$0.asked" ] || { touch "$0.asked"; exit 1; }\necho 0:22\n')
    (directory / "squeue").chmod(0o755)
    program = """
        time_limit._UNKNOWN = 0.5
        payload = runner.submit(run_dir)
        limit = time_limit.TimeLimit(loop, "12", known=lambda left: payload.end_early(End("timeout", str(round(left))), 0))
        limit.start()
        runner.run()
    """
    records, _ = supervised(tmp_path, program, ["sleep", "20"], PATH=f"{directory}:{os.environ['PATH']}")
    assert records[-1]["message"] == "22"


def test_a_process_left_by_nvidia_smi_does_not_delay_the_end(tmp_path: Path) -> None:
    """The process keeps the pipe of nvidia-smi open."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\nsleep 20 &\necho 0, GPU-a, 50, 100\n")
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    program = "runner.submit(run_dir); runner.run()"
    records, _ = supervised(tmp_path, program, ["sleep", "1"], PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    end = records[-1]
    assert end["usage"]["gpu_utilization_mean"] == 50.0 and end["ended_at"] - end["started_at"] < 10


def test_a_defect_in_one_end_does_not_prevent_other_ends(tmp_path: Path) -> None:
    program = """
        import os, shutil
        from dagster_rayslurm.runtime.payload.payload import Payload
        write, other = Payload.end, run_dir + "/other"
        def broken(self, end):
            if self.run_dir == run_dir:
                raise KeyError("broken")
            write(self, end)
        Payload.end = broken
        os.mkdir(other)
        text = open(run_dir + "/payload.json").read().replace('"n"', '"m"')
        open(other + "/payload.json", "w").write(text)
        def defect():
            raise RuntimeError("no such thing")
        runner.submit(run_dir)
        runner.submit(other)
        loop.call_later(0.3, defect)
        runner.run()
    """
    records, _ = supervised(tmp_path, program, ["sleep", "20"])
    other = LineReader().feed((tmp_path / "other" / JOURNAL).read_bytes())[-1]
    assert records[-1]["type"] == "tail" and (other["type"], other["message"]) == ("end", "RuntimeError: no such thing")


@pytest.mark.parametrize("early", [False, True])
def test_a_payload_that_the_runtime_ends_does_not_wait_for_its_energy(tmp_path: Path, early: bool) -> None:
    program = """
        import os
        payload = runner.submit(run_dir)
        def query(on_answer):
            print("asked", file=sys.stderr)
            loop.call_later(0.05, lambda: on_answer(7200000))
            return True
        payload.query_energy = query
        if os.environ["EARLY"]:
            loop.call_later(0.3, lambda: payload.end_early(End("timeout", "enough"), 0))
        runner.run()
    """
    records, said = supervised(tmp_path, program, ["sleep", "20" if early else "0.1"], EARLY="1" * early)
    assert records[-1]["type"] == "end" and ("asked" in said) != early
    assert records[-1]["context"].get("energy_joules") == (None if early else 7200000)
