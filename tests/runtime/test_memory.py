"""Memory that nears a Slurm job's limit: what is counted, who is warned, and which Ray worker goes."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rayslurm.runtime.node import memory, resources
from dagster_rayslurm.runtime.node.memory import KILL, WARN, Group, GroupKind, Sample, State, decide, pause
from dagster_rayslurm.runtime.node.usage import Shared, memory_of
from dagster_rayslurm.runtime.process import processes
from dagster_rayslurm.runtime.process.loop import Loop
from dagster_rayslurm.runtime.protocol.spec import RaySpec, RuntimeSpec
from dagster_rayslurm.runtime.ray.agent import NodeAgent

from .test_clusters import SESSION, Nodes

MIB = 2**20
HOG = Group(7, "ray::hog", 1945 * MIB, GroupKind.WORKER)
DRIVER = Group(5, "the payload's own process", 300 * MIB, GroupKind.DRIVER)
RAYLET = Group(3, "raylet", 2000 * MIB, GroupKind.SYSTEM)
IDLE = Group(8, "ray::IDLE", 60 * MIB, GroupKind.WORKER)
WARNED = State(warned=True)

# ---- The decision


def sample(percent: float, *groups: Group) -> Sample:
    return Sample(int(25 * percent * MIB), 2500 * MIB, groups)


@pytest.mark.parametrize(
    ("state", "seen", "may_kill", "warned", "said", "killed"),
    [
        (State(), sample(89), True, False, [], []),
        (State(), sample(91, HOG, DRIVER), True, True, ["c1 uses 91 % of 2500 MiB; largest: ray::hog, pid 7, 1.9 GiB"], [None]),
        (WARNED, sample(94, HOG, DRIVER), True, True, [], []),
        (WARNED, sample(86), True, True, [], []),
        (WARNED, sample(84), True, False, [], []),
        (State(), sample(97, HOG, DRIVER, RAYLET), True, True, ["c1 uses 97 % of 2500 MiB: killed the largest Ray worker"], [7]),
        (WARNED, sample(120, HOG), True, True, ["c1 uses 120 % of 2500 MiB: killed"], [7]),
        (WARNED, sample(97, HOG), False, True, [], []),
        (WARNED, sample(97, HOG, DRIVER._replace(memory=2000 * MIB)), True, True, [], []),
        (WARNED, sample(97, RAYLET, IDLE), True, True, [], []),
        (State(), sample(97, RAYLET, IDLE), True, True, ["c1 uses 97 % of 2500 MiB; largest: raylet, pid 3, 2.0 GiB"], [None]),
        (State(True, 7, 99.0), sample(97, HOG), True, True, [], []),
        (State(True, 7, 90.0), sample(97, HOG), True, True, ["killed"], [7]),
        (State(True, 6, 99.0), sample(97, HOG), True, True, ["killed"], [7]),
    ],
)
def test_actions_by_sample_and_state(
    state: State, seen: Sample, may_kill: bool, warned: bool, said: list[str], killed: list[int | None]
) -> None:
    after, action = decide("c1", state, seen, 100.0, may_kill)
    assert after.warned == warned and [each.kill for each in [action] if each] == killed
    assert all(words in each.message for words, each in zip(said, [action], strict=False) if each)


def test_a_kill_says_what_to_do() -> None:
    action = decide("c1", State(), sample(97, HOG), 0.0)[1]
    assert action and "SlurmQueueConfig.mem" in action.message and "num_cpus=" in action.message and "memory=" in action.message


GROUPS = st.builds(Group, st.integers(2, 9), st.just("p"), st.integers(0, 4000 * MIB), st.sampled_from(GroupKind))


@given(st.lists(st.tuples(st.floats(0, 1.3), st.lists(GROUPS, max_size=5), st.booleans()), max_size=30))
def test_the_guard_over_any_samples(course: list[tuple[float, list[Group], bool]]) -> None:
    """It kills workers alone, and only near the limit; it warns once while memory stays high."""
    state, told = State(), False
    for number, (share, groups, may_kill) in enumerate(course):
        seen = Sample(int(share * 2500 * MIB), 2500 * MIB, groups)
        state, action = decide("c1", state, seen, 0.25 * number, may_kill)
        if action:
            assert seen.used >= WARN * seen.limit and (action.kill is not None or not told)
        if action and action.kill is not None:
            assert may_kill and seen.used >= KILL * seen.limit
            chosen = max((each for each in groups if each.kind != GroupKind.SYSTEM), key=lambda each: each.memory)
            assert chosen.kind == GroupKind.WORKER and chosen.pid == action.kill
        told = (told or bool(action)) and share >= 0.85


@given(st.integers(0, 2**44), st.integers(2**20, 2**44))
def test_samples_are_closer_near_the_limit(used: int, limit: int) -> None:
    assert 0.1 <= pause(used, limit) <= 5.0
    assert pause(used, limit) >= pause(used + MIB, limit)


# ---- What is counted


@pytest.mark.parametrize(
    ("gather", "params", "shared", "enforced"),
    [
        ("jobacct_gather/linux", "OverMemoryKill", Shared.EACH, True),
        ("jobacct_gather/linux", "OverMemoryKill,NoShared", Shared.NEVER, True),
        ("jobacct_gather/linux", "UsePss,OverMemoryKill", Shared.ONCE, True),
        ("jobacct_gather/cgroup", "OverMemoryKill", Shared.NEVER, True),
        ("jobacct_gather/linux", "NoShared", Shared.NEVER, False),
        ("jobacct_gather/none", "(null)", Shared.NEVER, False),
    ],
)
def test_memory_is_counted_as_slurmd_does(gather: str, params: str, shared: Shared, enforced: bool) -> None:
    said = f"JobAcctGatherFrequency  = task=1\nJobAcctGatherType       = {gather}\nJobAcctGatherParams     = {params}\nX = y\n"
    assert memory.memory_accounting(said) == (shared, enforced)


def test_memory_is_counted_as_slurm_conf_says() -> None:
    assert memory.memory_accounting("JobAcctGatherType=cgroup JobAcctGatherParams=OverMemoryKill # both\n") == (
        Shared.NEVER,
        True,
    )
    assert memory.memory_accounting('jobacctgatherparams="overmemorykill,UsePss"\n') == (Shared.ONCE, True)
    assert memory.memory_accounting("#JobAcctGatherParams=OverMemoryKill\n") == (Shared.NEVER, False)


def test_slurm_that_does_not_answer_enforces_nothing() -> None:
    assert not memory.memory_accounting(None)[1]


def test_memory_of_processes() -> None:
    private, once, each = (memory_of([os.getpid(), os.getppid()], shared) for shared in (Shared.NEVER, Shared.ONCE, Shared.EACH))
    assert 0 < private < once < each
    assert memory_of([2**22 + 1], Shared.EACH) == memory_of([]) == 0


def cgroup(path: Path, current: str, used: int, **stat: int) -> str:
    path.mkdir(parents=True)
    (path / current).write_text(f"{used}\n")
    (path / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in stat.items()))
    return str(path)


def test_a_cgroup_counts_without_the_cache_that_the_kernel_frees(tmp_path: Path) -> None:
    job = cgroup(tmp_path / "job_7", "memory.current", 900, anon=500, shmem=100, inactive_file=200, active_file=90)
    step = cgroup(tmp_path / "job_7/step_0", "memory.current", 850, anon=500, inactive_file=150)
    old = cgroup(tmp_path / "v1/job_7", "memory.usage_in_bytes", 900, total_inactive_file=300, inactive_file=999)
    node = cgroup(tmp_path / "system.slice", "memory.current", 10**6)
    assert memory.job_cgroups([(job, 1000), (step, 800), (old, 2**63 - 4096), (node, 10**6)]) == [(job, 1000), (step, 800)]
    assert memory.fullest([(job, 1000), (step, 800)]) == (700, 800)
    assert memory.fullest([(old, 1000)]) == (600, 1000)
    assert memory.fullest([]) is None and memory.fullest([(str(tmp_path / "gone"), 1000)]) is None


# ---- Who is who


@pytest.fixture
def family() -> Iterator[Callable[..., int]]:
    """Starts a process that starts another one, each with so many MiB."""
    import subprocess

    started: list[subprocess.Popen[bytes]] = []
    code = """
    import os, subprocess, sys
    held = b"x" * (int(sys.argv[1]) << 20)
    if len(sys.argv) > 2:
        subprocess.Popen([sys.executable, "-c", os.environ["CODE"], *sys.argv[2:]])
    print(flush=True)
    sys.stdin.read()
    """

    def start(*sizes: int, **environ: str) -> int:
        text = textwrap.dedent(code)
        process = subprocess.Popen(
            [sys.executable, "-c", text, *map(str, sizes)],
            env={**os.environ, "CODE": text, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        started.append(process)
        assert process.stdout is not None
        for _ in sizes:
            process.stdout.readline()
        return process.pid

    yield start
    for process in started:
        process.communicate()


def test_processes_count_for_the_worker_or_payload_that_started_them(family: Callable[..., int]) -> None:
    raylet = {"RAY_RAYLET_PID": str(os.getpid())}
    worker = family(30, 40, RAY_JOB_ID="ffffffff", **raylet)
    agent, driver, other = family(1, **raylet), family(10, 20), family(5)
    found = memory.process_groups(processes.table(), [os.getpid()], [driver])
    by_pid = {group.pid: group for group in found}
    kinds = {pid: by_pid[pid].kind for pid in (worker, agent, driver, other)}
    assert kinds == {
        worker: GroupKind.WORKER,
        agent: GroupKind.SYSTEM,
        driver: GroupKind.DRIVER,
        other: GroupKind.SYSTEM,
    }
    assert 70 * MIB < by_pid[worker].memory < 150 * MIB and 30 * MIB < by_pid[driver].memory < 110 * MIB
    assert sum(group.kind == GroupKind.WORKER for group in found) == 1
    unguarded = memory.process_groups(processes.table(), [], [driver])
    assert not any(group.kind == GroupKind.WORKER for group in unguarded)


def test_a_cluster_may_be_left_alone() -> None:
    def ray(pid: int | None, **fields: Any) -> Any:
        return SimpleNamespace(cluster=RaySpec(**fields), pid=pid)

    nothing: Any = None
    here = NodeAgent(nothing, RuntimeSpec("c"), nothing, nothing)
    here.rays.update({"a": ray(1), "b": ray(2), "c": ray(3, memory_guard=False), "d": ray(None)})
    assert here.guarded_pids() == [1, 2]


# ---- On a node


def watched(environ: dict[str, str], seconds: float = 10.0) -> list[str]:
    """What a watch over this process says until it says something."""
    loop, said = Loop(), []

    def tell(message: str, killed: bool) -> None:
        said.append(f"{killed}: {message}")
        loop.stop()

    memory.MemoryWatch(loop, "n1", lambda: [os.getpid()], lambda: [os.getpid()], tell, environ)
    loop.call_later(seconds, loop.stop)
    loop.run()
    return said


def test_a_full_node_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # No scontrol.
    (said,) = watched({"SLURM_MEM_PER_NODE": "10"}, 60.0)
    assert said.startswith("False: n1 uses ") and " % of 10 MiB; largest: " in said


def test_nothing_is_watched_without_a_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "cgroup_limits", lambda: [("/sys/fs/cgroup/docker", 10 * MIB)])
    assert watched({}, 0.5) == []


EATER = """
import time, ray
ray.init(log_to_driver=False)

@ray.remote(max_retries=0)
def hog():
    held = []
    for _ in range(200):
        held.append(b"x" * (20 << 20))
        time.sleep(0.05)

try:
    ray.get(hog.remote())
    print("survived")
except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError) as error:
    print(f"raised {type(error).__name__}")
print(ray.get(ray.remote(lambda: "goes on").remote()))
"""


@pytest.mark.ray
def test_a_task_that_grows_too_large_raises_and_the_payload_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho 'JobAcctGatherParams     = OverMemoryKill,NoShared'\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for name in Nodes.task(None, 0):  # type: ignore[arg-type]
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "1500")
    ray = RaySpec(num_cpus=1, object_store_memory=100 * MIB, dashboard=False, ray_args=["--no-monitor"], startup_timeout=100.0)
    node = Nodes(tmp_path, idle_timeout=60.0, ray=ray)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "localhost")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "localhost")
    node.add("one", EATER, uses_ray=True)
    node.run(SESSION + "\nsubmit('one')\nwhen_done(end)\n")
    end = node.end("one")
    said = "".join(record["message"] for record in node.records("one") if record.get("phase") == "memory")
    output = (tmp_path / "one/stdio.jsonl").read_text()
    assert end["exit_code"] == 0 and "goes on" in output, (said, output)
    assert "raised WorkerCrashedError" in output or "raised OutOfMemoryError" in output, (said, output)
    assert (
        "here uses 9" in said
        and "killed the largest Ray worker, ray::hog, pid " in said
        and end["context"]["workers_killed"] == 1
    )
