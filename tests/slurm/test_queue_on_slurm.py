"""The queue, the reducer and accounting on a real Slurm."""

import contextlib
import shlex
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagster_rayslurm import SSHConnectionResource
from dagster_rayslurm.runtime.node.allocation import expand_nodelist
from dagster_rayslurm.slurm import states
from dagster_rayslurm.slurm.accounting import JobFacts, fetch_job_facts, memory_kill
from dagster_rayslurm.slurm.shared_queue import SharedQueue, fetch_queue
from dagster_rayslurm.slurm.states import JobPhase, JobStatus, JobWatch
from dagster_rayslurm.ssh.base import Connection
from dagster_rayslurm.ssh.pool import new_connection

from ..conftest import wait_until

PREFIX = "SLURM_EDGE_NODE_"
INTERVAL = 2.0
SECONDS = 13.0


@dataclass(frozen=True)
class Submission:
    """A job of a test."""

    job_id: int
    submitted: float
    requeue: bool = False


LOOKER = """
import sys, time
from tests.slurm.test_queue_on_slurm import INTERVAL, connection_of
from dagster_rayslurm.slurm.shared_queue import SharedQueue
directory, seconds = sys.argv[1], float(sys.argv[2])
fields = dict(word.split("=", 1) for word in sys.argv[3:])
with connection_of(fields) as connection:
    queue = SharedQueue(connection, directory, INTERVAL)
    end, seen = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        seen += queue.latest(queue.clock.now()) is not None
        time.sleep(0.05)
sys.exit(0 if seen and not queue.error else queue.error)
"""


def fields_of(stack: Any) -> dict[str, str]:
    return {key.removeprefix(PREFIX).lower(): value for key, value in stack.env.items() if key.startswith(PREFIX)}


@contextlib.contextmanager
def connection_of(fields: dict[str, str]) -> Iterator[Connection]:
    connection = new_connection(SSHConnectionResource(**{**fields, "port": int(fields["port"])}))
    try:
        yield connection
    finally:
        connection.close()


@contextlib.contextmanager
def connection_with(edge: Connection, directory: str, fields: dict[str, str], variable: str) -> Iterator[Connection]:
    """A connection whose commands have an environment variable, given as "NAME=value"."""
    edge.write(f"{directory}/python", f'#!/bin/sh\nexec env {shlex.quote(variable)} python3 "$@"\n'.encode(), 0o700)
    with connection_of({**fields, "python": f"{directory}/python"}) as connection:
        yield connection


@pytest.fixture(scope="module")
def edge(stack: Any) -> Iterator[Connection]:
    with connection_of(fields_of(stack)) as connection:
        yield connection


@pytest.fixture
def directory(edge: Connection) -> Iterator[str]:
    path = f"{edge.home()}/test-{uuid.uuid4().hex[:12]}"
    edge.make_dir(path)
    yield path
    edge.remove(path)


@pytest.fixture
def submit(edge: Connection, directory: str) -> Iterator[Callable[..., Submission]]:
    jobs: list[int] = []

    def sbatch(script: str, *options: str) -> Submission:
        words = shlex.join(["sbatch", "--parsable", "--time=5", f"--chdir={directory}", *options])
        done = edge.run(["sh", "-c", f"{words} && date +%s.%N"], f"#!/bin/sh\n{script}\n".encode())
        assert done.returncode == 0, done.stderr
        number, stamp = done.stdout.split()
        jobs.append(int(number))
        return Submission(int(number), float(stamp), requeue="--requeue" in options)

    yield sbatch
    edge.run(["scancel", *map(str, jobs)])


def follow(
    edge: Connection, directory: str, submission: Submission, until: Callable[[JobStatus], bool], timeout: float = 120
) -> JobStatus:
    """The first view of a job that is as wanted, by way of a queue of the test's own."""
    queue = SharedQueue(edge, directory, 1)
    watch = JobWatch(submission.submitted, submission.requeue)

    def view() -> JobStatus | None:
        nonlocal watch
        snapshot = queue.latest(queue.clock.now())
        if snapshot:
            watch = watch.seen(snapshot.began, snapshot.job(submission.job_id))
        return watch.view if until(watch.view) else None

    found = wait_until(view, timeout)
    assert found, (watch, queue.error)
    return found


def facts_of(edge: Connection, submission: Submission, complete: Callable[[JobFacts], bool] = lambda facts: True) -> JobFacts:
    facts = wait_until(lambda: (facts := fetch_job_facts(edge, submission.job_id)) and complete(facts) and facts)
    assert facts, fetch_job_facts(edge, submission.job_id)
    return facts


def over(view: JobStatus) -> bool:
    return view.over


def test_a_job_from_the_queue_to_its_end(stack: Any, edge: Connection, directory: str, submit: Any) -> None:
    job = submit("sleep 4; exit 3", "--no-requeue", "--mem=200M", "--hold", "--job-name=a\nb\x1fc|d")
    waits = follow(edge, directory, job, lambda view: view.phase != JobPhase.UNKNOWN)
    assert (waits.phase, waits.state, waits.reason) == (JobPhase.PENDING, "PENDING", "JobHeldUser")
    row = fetch_queue(edge).job(job.job_id)
    assert row is not None and row.name == "a\nb\x1fc|d" and abs((row.submit or 0) - job.submitted) < 5
    edge.run(["scontrol", "release", str(job.job_id)])
    follow(edge, directory, job, lambda view: view.phase == JobPhase.RUNNING)
    ended = follow(edge, directory, job, over)
    assert (ended.phase, ended.state, ended.reason) == (JobPhase.ENDED, "FAILED", "NonZeroExitCode")
    facts = facts_of(edge, job, lambda facts: facts.is_final)
    assert (facts.state, facts.exit_code) == ("FAILED", 3) and facts.nodes in (("c1",), ("c2",))


def test_an_expected_start_is_told(edge: Connection, directory: str, submit: Any) -> None:
    job = submit("true", "--begin=now+600")
    view = follow(edge, directory, job, lambda view: view.expected_start is not None)
    assert view.reason == "BeginTime"
    assert view.expected_start is not None and 590 < view.expected_start - job.submitted < 610


def test_a_cancelled_job_and_who_did_it(stack: Any, edge: Connection, directory: str, submit: Any) -> None:
    job = submit("sleep 100", "--no-requeue", "--mem=200M")
    follow(edge, directory, job, lambda view: view.phase == JobPhase.RUNNING)
    edge.run(["scancel", str(job.job_id)])
    ended = follow(edge, directory, job, over)
    assert (ended.phase, ended.state) == (JobPhase.ENDED, "CANCELLED")
    facts = facts_of(edge, job, lambda facts: facts.cancelled_by is not None or not stack.accounting)
    assert facts.cancelled_by == (int(edge.run(["id", "-u"]).stdout) if stack.accounting else None)


def test_a_requeued_job_is_not_over(edge: Connection, directory: str, submit: Any) -> None:
    job = submit("sleep 100", "--requeue", "--mem=200M")
    follow(edge, directory, job, lambda view: view.phase == JobPhase.RUNNING)
    edge.run(["scontrol", "requeue", str(job.job_id)])
    waits = follow(edge, directory, job, lambda view: view.phase == JobPhase.PENDING and view.state == "PENDING")
    assert not waits.over
    facts = facts_of(edge, job)
    assert (facts.state, facts.restarts) == ("PENDING", 1)
    watch = JobWatch(job.submitted, job.requeue).started(job.submitted + 1).exited(143)
    snapshot = fetch_queue(edge)
    assert watch.seen(snapshot.began, snapshot.job(job.job_id)).view.phase == JobPhase.PENDING
    edge.run(["scancel", str(job.job_id)])
    assert follow(edge, directory, job, over).state == "CANCELLED"


def test_a_memory_limit_that_slurmd_enforces(stack: Any, edge: Connection, directory: str, submit: Any) -> None:
    program = "x = bytearray(300 << 20); import time; time.sleep(60)"
    job = submit(f"srun python3 -c '{program}'; exit $?", "--no-requeue", "--mem=100M", f"--output={directory}/log")
    ended = follow(edge, directory, job, over)
    assert ended.state == "FAILED"
    facts = facts_of(edge, job, lambda facts: facts.max_rss is not None or not stack.accounting)
    assert facts.exit_code == 137
    line = memory_kill(edge.read(f"{directory}/log", 0, 100_000).decode())
    assert line is not None and "exceeded memory limit" in line


def test_a_job_that_is_gone_is_lost_and_one_that_nobody_can_ask_for_is_not(
    stack: Any, edge: Connection, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = Submission(99_999_999, 0)
    healthy = SharedQueue(edge, f"{directory}/healthy", 1)
    edge.write(f"{directory}/slurm.conf", b"ThisIsNoOption=1\n")
    misled = connection_with(edge, directory, fields_of(stack), f"SLURM_CONF={directory}/slurm.conf")
    with misled as connection:
        down = SharedQueue(connection, f"{directory}/down", 1)
        check_absence(healthy, down, gone, monkeypatch)
    assert fetch_job_facts(edge, gone.job_id) is None


def check_absence(healthy: SharedQueue, down: SharedQueue, gone: Submission, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "ABSENCE", 4.0)
    watches = {queue: JobWatch(gone.submitted) for queue in (healthy, down)}

    def lost() -> bool:
        for queue in watches:
            snapshot = queue.latest(queue.clock.now())
            if snapshot:
                watches[queue] = watches[queue].seen(snapshot.began, snapshot.job(gone.job_id))
        return watches[healthy].view.phase == JobPhase.LOST

    assert wait_until(lambda: lost() and down.error), watches
    assert watches[down].view == JobStatus(JobPhase.UNKNOWN)
    assert down.error is not None and "squeue did not answer" in down.error and healthy.error is None


def test_many_callers_and_processes_are_one_to_slurmctld(stack: Any, edge: Connection, directory: str) -> None:
    wrapper = f'#!/bin/sh\ndate +%s%3N >> {directory}/calls\nexec /usr/bin/squeue "$@"\n'
    edge.make_dir(f"{directory}/bin")
    edge.write(f"{directory}/bin/squeue", wrapper.encode(), 0o700)
    words = [f"{key}={value}" for key, value in fields_of(stack).items()]
    command = [sys.executable, "-c", LOOKER, directory, str(SECONDS), *words, f"python={directory}/python"]
    stale: list[float] = []

    def look() -> None:
        queue = SharedQueue(connection, directory, INTERVAL)
        began = time.monotonic()
        while time.monotonic() < began + SECONDS:
            snapshot = queue.latest(queue.clock.now())
            if time.monotonic() > began + 2 * INTERVAL:
                stale.append(queue.clock.now() - snapshot.began if snapshot else 1e9)
            time.sleep(0.05)

    path = f"PATH={directory}/bin:/usr/bin:/bin"
    with connection_with(edge, directory, fields_of(stack), path) as connection:
        others = [subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE) for _ in range(2)]
        threads = [threading.Thread(target=look) for _ in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for other in others:
            _, said = other.communicate(timeout=60)
            assert other.returncode == 0, said
    calls = [int(line) / 1000 for line in edge.read(f"{directory}/calls", 0, 100_000).split()]
    # The other processes start late on a busy machine and end as much later, so that the calls themselves tell how long
    # all of this took. Two calls may come close together: between a claim and its squeue, a shell has to get going.
    assert SECONDS / INTERVAL / 2 <= len(calls) <= (calls[-1] - calls[0]) / INTERVAL + 2, calls
    assert max(stale) < 2.5 * INTERVAL, max(stale)


numbers = st.tuples(st.integers(0, 120), st.integers(0, 12), st.integers(1, 4)).map(
    lambda each: f"{each[0]:0{each[2]}d}" if each[1] == 0 else f"{each[0]:0{each[2]}d}-{each[0] + each[1]:0{each[2]}d}"
)
brackets = st.lists(numbers, min_size=1, max_size=3).map(lambda parts: f"[{','.join(parts)}]")
letters = st.from_regex(r"[a-z][a-z-]{0,3}", fullmatch=True)
names = st.one_of(
    st.builds(str.__add__, letters, brackets),
    st.builds("{}{}{}{}".format, letters, brackets, letters, brackets),
    st.from_regex(r"[a-z][a-z0-9-]{0,6}[a-z0-9]", fullmatch=True),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(names, min_size=1, max_size=4))
def test_lists_of_nodes_are_what_slurm_takes_them_for(edge: Connection, words: list[str]) -> None:
    text = ",".join(words)
    done = edge.run(["scontrol", "show", "hostnames", text])
    assert done.returncode == 0, done.stderr
    assert expand_nodelist(text) == done.stdout.decode().split()
