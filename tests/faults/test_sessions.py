"""Tests: faults of sessions. Each payload gets a true verdict, none runs twice or is lost, and nothing is left."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_rayslurm import ComputeResource, SlurmQueueConfig, SSHConnectionResource

from ..conftest import Ran, pipes_script, run_asset, small_ray, wait_until
from ..slurm.fixtures import Elsewhere, Running, Site
from .breaking import docker
from .test_clocks import on_nodes

pytestmark = pytest.mark.timeout(240)

Make = Callable[..., ComputeResource]
Begin = Callable[..., Running]

STEP = pipes_script("""
import os, pathlib, time
data, name = pathlib.Path(os.environ["RAYSLURM_DATA_DIR"]), os.environ["NAME"]
with open(data / "ran", "a") as file:
    file.write(name + "\\n")
if os.environ.get("RAY_ADDRESS"):
    import ray
    ray.init()
(data / ("up-" + name.replace("/", "_"))).write_text("x")
until = time.monotonic() + float(os.environ.get("UP_FOR", "0"))
while time.monotonic() < until and not (data / ("go-" + name.replace("/", "_"))).exists():
    time.sleep(0.05)
metadata = {"name": name, "job": os.environ["SLURM_JOB_ID"], "ray": os.environ.get("RAY_ADDRESS", "")}
pipes.report_asset_materialization(metadata=metadata)
""")
"""Payload that records that it runs, and runs for UP_FOR seconds or until the test lets it end."""

TWO_NODES = {"num_nodes": 2, "mem": "2500M", "cpus_per_node": 2}


@pytest.fixture
def step(script: Callable[..., Path]) -> Path:
    return script(STEP)


@pytest.fixture
def begin(site: Site, step: Path, start: Callable[..., Running]) -> Begin:
    """A function that starts a named step in a thread. The step runs for `up_for` seconds or until the test lets it end."""

    def named(compute: ComputeResource, name: str, up_for: float = 0, **arguments: Any) -> Running:
        return start(compute, step, extra_env={"NAME": name, "UP_FOR": str(up_for)}, **arguments)

    return named


@pytest.fixture
def once(site: Site, step: Path) -> Callable[..., Ran]:
    """A function that runs a named step to its end."""

    def named(compute: ComputeResource, name: str, **arguments: Any) -> Ran:
        return run_asset(compute, step, extra_env={"NAME": name}, **arguments)

    return named


def job_of(ran: Ran) -> str:
    assert not ran.failures, ran.failures[0].description
    assert ran.metadata["job"] == ran.completed[0].job_id
    return str(ran.metadata["job"])


def let_go(site: Site, name: str) -> None:
    site.sh('touch "$1/data/go-$2"', site.base, name)


def queued(site: Site, count: int) -> None:
    """Wait until a number of payloads have been handed to the session, and a moment longer."""
    assert wait_until(lambda: int(site.sh('ls "$1/runs" | wc -l', site.base)) >= count)
    time.sleep(1)


def node_of(site: Site, job_id: str) -> str:
    return site.sh(f"squeue --noheader --jobs={job_id} --format=%N").strip()


def never_ran(failure: Any) -> None:
    """Checks that Dagster may retry a payload that a session accepted and never started, unless it was cancelled."""
    assert failure.allow_retries or failure.kind == "cancelled", (failure.kind, failure.description)
    assert failure.kind in ("allocation", "cancelled", "runtime"), (failure.kind, failure.description)


# ---- The allocation goes


def test_the_head_node_dies(
    back_to_idle: None, session_compute: Make, begin: Begin, once: Callable[..., Ran], site: Site
) -> None:
    compute = session_compute()
    running = begin(compute, "a", 120)
    job_id = running.up("up-a")
    waiting = begin(compute, "b")
    queued(site, 2)
    node = node_of(site, job_id)
    site.killed = True
    # Frozen, not killed: without its name in the network's DNS, slurmctld itself would not answer for a while.
    docker("pause", site.stack.container(node))
    try:
        site.stack.exec("slurmctld", ["scontrol", "update", f"nodename={node}", "state=down", "reason=test"])
        failure = running.result(60).failure
        second = waiting.result(60)
        third = once(compute, "c")
    finally:
        docker("unpause", site.stack.container(node))
        docker("restart", "--time=0", site.stack.container(node))
        site.stack.exec("slurmctld", ["scontrol", "update", f"nodename={node}", "state=resume"], check=False)
    assert failure.kind == "allocation" and failure.allow_retries, failure.description
    assert "NODE_FAIL" in (failure.description or "") and job_id in (failure.description or "")
    if second.failures:
        never_ran(second.failure)
    assert job_of(third) != job_id
    assert site.lines("ran") == (["a", "c"] if second.failures else ["a", "b", "c"])


def test_a_worker_node_dies(
    back_to_idle: None,
    session_compute: Make,
    begin: Begin,
    once: Callable[..., Ran],
    site: Site,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """What runs is told of it and goes on, the session drains, and the next payload gets one that is whole."""
    compute = session_compute(queue=TWO_NODES, default_launcher=small_ray(), enable_cluster_reuse=True)
    running = begin(compute, "a", 120)
    job_id = running.up("up-a")
    announced = json.loads(site.sh('cat "$1"/sessions/*/*/session.json', site.base))
    worker = "c1" if announced["hostname"] == "c2" else "c2"
    assert not announced["closing"]
    site.killed = True
    docker("kill", site.stack.container(worker))
    try:
        # A node that is silent may yet be heard of for ten seconds; Slurm takes thirty to miss it, and ends the job then.
        assert wait_until(lambda: json.loads(site.sh('cat "$1"/sessions/*/1/session.json', site.base))["closing"])
        assert f"node-lost: node {worker} is lost" in capfd.readouterr().err
        let_go(site, "a")
        assert job_of(running.result(15)) == job_id
    finally:
        docker("start", site.stack.container(worker))
    assert job_of(once(compute, "b")) != job_id
    assert site.lines("ran") == ["a", "b"]


@pytest.mark.thorough
def test_the_slurmstepd_of_a_session_is_killed(session_compute: Make, begin: Begin, once: Callable[..., Ran], site: Site) -> None:
    """Its keeper has the job cancelled, whose srun waits for ever; Slurm takes its time with that."""
    compute = session_compute()
    running = begin(compute, "a", 120)
    job_id = running.up("up-a")
    node = node_of(site, job_id)
    pid = site.stack.exec(node, ["pgrep", "-f", rf"^slurmstepd: \[{job_id}\.0\]"]).strip()
    site.killed = True
    site.stack.exec(node, ["kill", "-9", pid])
    failure = running.result(60).failure
    assert failure.kind == "runtime" and failure.allow_retries, (failure.kind, failure.description)
    assert job_of(once(compute, "b")) != job_id
    assert wait_until(lambda: job_id not in site.sh("squeue --me --noheader --states=RUNNING --format=%A").split(), 60)
    assert site.lines("ran") == ["a", "b"]


def test_somebody_cancels_the_session(session_compute: Make, begin: Begin, once: Callable[..., Ran], site: Site) -> None:
    compute = session_compute()
    running = begin(compute, "a", 120)
    job_id = running.up("up-a")
    waiting = begin(compute, "b")
    queued(site, 2)
    site.stack.exec("slurmctld", ["scancel", job_id])
    failure = running.result(60).failure
    assert failure.kind == "cancelled", failure.description
    by = " by user id 0" if site.stack.accounting else ""
    assert f"Slurm job {job_id} was cancelled{by}" in (failure.description or ""), failure.description
    second = waiting.result(60)
    if second.failures:
        never_ran(second.failure)
    assert job_of(once(compute, "c")) != job_id
    assert site.lines("ran") == (["a", "c"] if second.failures else ["a", "b", "c"])


def test_the_time_limit(session_compute: Make, begin: Begin, once: Callable[..., Ran], site: Site) -> None:
    """What still runs near the end is ended and told why; the next one gets a session of its own time."""
    compute = session_compute(queue={"time_limit": "00:02:00"})
    running = begin(compute, "a", 200)
    job_id = running.up("up-a")
    failure = running.result(150).failure
    sentence = failure.description or ""
    assert "time limit" in sentence and not failure.allow_retries, (failure.kind, sentence)
    assert job_of(once(compute, "b")) != job_id
    assert site.lines("ran") == ["a", "b"]


def test_a_payload_that_cannot_end_in_time_gets_another_session(
    session_compute: Make, once: Callable[..., Ran], site: Site
) -> None:
    compute = session_compute(queue={"time_limit": "00:03:00"})
    first = job_of(once(compute, "a"))
    time.sleep(2)
    long = SlurmQueueConfig(partition="compute", time_limit="00:02:59")
    second = job_of(once(compute, "b", queue=long))
    assert second != first
    assert job_of(once(compute, "c")) == second
    assert site.lines("ran") == ["a", "b", "c"]


def test_a_payload_exceeds_the_memory(
    session_compute: Make, begin: Begin, once: Callable[..., Ran], start: Callable[..., Running], script: Any, site: Site
) -> None:
    """Slurm kills the session's step with all that runs there: told with numbers, and nobody else is blamed or held up."""
    compute = session_compute(queue={"mem": "300M", "nodelist": "c1"})
    hog = script(STEP.replace("metadata =", "hog = bytearray(700 * 2**20); time.sleep(60); metadata ="), "hog.py")
    running = start(compute, hog, extra_env={"NAME": "a", "UP_FOR": "60"})
    job_id = running.up("up-a")
    waiting = begin(compute, "b")
    queued(site, 2)
    site.killed = True
    let_go(site, "a")
    failure = running.result(60).failure
    assert failure.kind == "allocation" and not failure.allow_retries, (failure.kind, failure.description)
    said = failure.description or ""
    assert f"OUT_OF_MEMORY: Slurm job {job_id} " in said and "300 MiB" in said and "SlurmQueueConfig.mem" in said, said
    second = waiting.result(60)
    if second.failures:
        never_ran(second.failure)
    assert job_of(once(compute, "c")) != job_id
    assert site.lines("ran") == (["a", "c"] if second.failures else ["a", "b", "c"])


# ---- Whoever starts it goes


def test_a_creator_is_killed_after_it_submitted(
    session_compute: Make, once: Callable[..., Ran], elsewhere: Callable[..., Elsewhere], step: Path, site: Site
) -> None:
    """Nobody wrote down which job it was; it is found all the same, and there is no second one."""
    queue = {"extra_sbatch": ["--begin=now+12"]}
    creator = elsewhere(step, "a", queue=queue)
    assert wait_until(site.jobs, 60)
    creator.kill()
    site.sh('rm -f "$1"/sessions/*/*/job_id', site.base)
    job_id = job_of(once(session_compute(queue=queue), "b"))
    assert site.submitted() == [job_id]
    assert site.lines("ran") == ["b"]


def test_a_creator_is_killed_before_it_submitted(session_compute: Make, once: Callable[..., Ran], site: Site) -> None:
    """All that is there is the directory that it made."""
    compute = session_compute()
    first = once(compute, "a")
    compute.cleanup_cluster(first.completed[0].cluster_id)
    site.sh('cd "$1"/sessions/* && mkdir 2 && touch -d "55 seconds ago" 2', site.base)
    began = time.monotonic()
    second = job_of(once(compute, "b"))
    assert time.monotonic() - began < 60
    assert site.submitted() and set(site.submitted()) == {job_of(first), second}
    assert site.lines("ran") == ["a", "b"]


def test_twenty_at_once_submit_one_job(
    elsewhere: Callable[..., Elsewhere], session_compute: Make, step: Path, site: Site
) -> None:
    session_compute()
    names = [f"p{number:02}" for number in range(20)]
    told = elsewhere(step, *names, session={"max_concurrent_payloads": 4}).results(150)
    assert sorted(each["name"] for each in told) == names
    assert [each for each in told if "kind" in each] == []
    assert site.submitted() == list({each["job"] for each in told})
    assert sorted(site.lines("ran")) == names


def test_another_host_finds_the_session(
    session_compute: Make, once: Callable[..., Ran], elsewhere: Callable[..., Elsewhere], step: Path, site: Site, tmp_path: Path
) -> None:
    """Its home, its known hosts and its own base directory are its own."""
    known = tmp_path / "known"
    known.write_text(Path(site.ssh.known_hosts_file or "").read_text())
    first = job_of(once(session_compute(), "a"))
    (told,) = elsewhere(step, "b", ssh={"known_hosts_file": str(known)}).results()
    assert told.get("job") == first, told
    assert site.lines("ran") == ["a", "b"]


# ---- Clocks


@pytest.mark.parametrize("minutes", [-10, 10])
def test_clocks_of_nodes_are_off(minutes: int, session_compute: Make, once: Callable[..., Ran], site: Site) -> None:
    _twice_in_one_job(session_compute(**on_nodes(site, minutes)), once, site)


@pytest.mark.parametrize("minutes", [-10, 10])
def test_the_clock_of_the_dagster_host_is_off(
    minutes: int, session_compute: Make, once: Callable[..., Ran], site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_time = time.time
    monkeypatch.setattr(time, "time", lambda: true_time() + 60 * minutes)
    _twice_in_one_job(session_compute(), once, site)


def _twice_in_one_job(compute: ComputeResource, once: Callable[..., Ran], site: Site) -> None:
    first, second = once(compute, "a"), once(compute, "b")
    assert job_of(first) == job_of(second) and site.submitted() == [job_of(first)]
    assert first.metadata["Elapsed (s)"] < 60
    assert site.lines("ran") == ["a", "b"]


# ---- Files


@pytest.mark.parametrize("damage", ["empty", "garbage", "gone"])
@pytest.mark.parametrize("file", ["*/session.json", "*/job_id"])
def test_a_file_of_the_registry_is_damaged(
    file: str, damage: str, session_compute: Make, once: Callable[..., Ran], site: Site
) -> None:
    compute = session_compute()
    first = job_of(once(compute, "a"))
    harm = {"empty": ': >"$f"', "garbage": 'head -c 300 /dev/urandom >"$f"', "gone": 'rm "$f"'}[damage]
    site.sh(f'for f in "$1"/sessions/*/{file}; do {harm}; done', site.base)
    assert job_of(once(compute, "b")) == first
    assert site.lines("ran") == ["a", "b"]


def test_the_directory_of_a_session_is_removed(session_compute: Make, begin: Begin, site: Site) -> None:
    """What runs goes on, what comes is served by it or by another one, and of two sessions one ends by itself."""
    compute = session_compute()
    running = begin(compute, "a", 60)
    first = running.up("up-a")
    site.sh('rm -rf "$1"/sessions/*', site.base)
    other = begin(compute, "b")
    queued(site, 2)
    let_go(site, "a")
    assert job_of(running.result(60)) == first
    assert job_of(other.result(60))
    assert wait_until(lambda: len(site.jobs()) <= 1), site.jobs()
    assert site.lines("ran").count("a") == site.lines("ran").count("b") == 1


def test_an_older_protocol_is_left_alone(session_compute: Make, once: Callable[..., Ran], site: Site) -> None:
    compute = session_compute()
    first = once(compute, "a")
    compute.cleanup_cluster(first.completed[0].cluster_id)
    site.sh(
        """cd "$1"/sessions/* && mkdir 2 && cd 2 && echo 999999 >job_id &&
        echo '{"protocol": 1, "cluster_id": "slurm-0123456789ab", "job_id": "999999", "hosts": ["c1"], "port": 1, "key": "00"}' \\
            >session.json && touch -d "5 minutes ago" .""",
        site.base,
    )
    assert job_of(once(compute, "b")) != job_of(first)
    assert site.lines("ran") == ["a", "b"]


def test_a_run_directory_cannot_be_made(session_compute: Make, once: Callable[..., Ran], site: Site) -> None:
    compute = session_compute()
    first = job_of(once(compute, "a"))
    site.sh('chmod 500 "$1/runs"', site.base)
    failure = once(compute, "b").failure
    site.sh('chmod 700 "$1/runs"', site.base)
    assert failure.kind in ("record", "configuration"), (failure.kind, failure.description)
    sentence = failure.description or ""
    assert f"{site.base}/runs" in sentence and "Permission denied" in sentence
    assert job_of(once(compute, "c")) == first
    assert site.lines("ran") == ["a", "c"]


def test_there_is_no_space_for_output(
    session_compute: Make, once: Callable[..., Ran], script: Callable[..., Path], site: Site
) -> None:
    """What could not be recorded of one payload is counted; others have nothing to do with it."""
    compute = session_compute()
    first = job_of(once(compute, "a"))
    node = node_of(site, first)
    listed = site.stack.exec(node, ["ps", "-u", "dev", "-o", "pid=,args="]).splitlines()
    pids = [line.split()[0] for line in listed if ".pyz" in line]
    limit = 'for p in "$@"; do prlimit --pid "$p" --fsize=%s:unlimited; done'
    site.stack.exec(node, ["sh", "-c", limit % 200000, "sh", *pids], user="dev")
    text = 'for number in range(20000): print("x" * 50)\npipes.report_asset_materialization(metadata={"x": 1})'
    ran = run_asset(compute, script(pipes_script(text), "big.py"))
    site.stack.exec(node, ["sh", "-c", limit % "unlimited", "sh", *pids], user="dev")
    assert ran.metadata["x"] == 1 and ran.metadata["Output not recorded (characters)"] > 500_000
    assert job_of(once(compute, "c")) == first
    assert site.lines("ran") == ["a", "c"]


def test_the_registry_cannot_be_written(session_compute: Make, once: Callable[..., Ran], site: Site) -> None:
    site.sh('mkdir -p "$1/sessions" && chmod 500 "$1/sessions"', site.base)
    failure = once(session_compute(), "a").failure
    assert failure.kind in ("configuration", "record"), (failure.kind, failure.description)
    assert site.base in (failure.description or "") and "ermission denied" in (failure.description or "")
    assert not site.jobs()


# ---- Several of them


def test_two_sessions_on_one_node(session_compute: Make, begin: Begin, once: Callable[..., Ran], site: Site) -> None:
    """Each payload reaches the Ray cluster of its own session."""
    queue = {"nodelist": "c2", "mem": "1900M", "cpus_per_node": 2}
    one, two = (
        session_compute(queue=queue, session={"name": name}, default_launcher=small_ray(), enable_cluster_reuse=True)
        for name in ("one", "two")
    )
    started = begin(one, "a"), begin(two, "b")
    first, second = (each.result() for each in started)
    assert job_of(first) != job_of(second) and first.metadata["ray"] != second.metadata["ray"]
    again = once(one, "c")
    assert (job_of(again), again.metadata["ray"]) == (job_of(first), first.metadata["ray"])
    one.cleanup_cluster(first.completed[0].cluster_id)
    assert job_of(once(two, "d")) == job_of(second)
    assert sorted(site.lines("ran")) == ["a", "b", "c", "d"]


@pytest.fixture
def together(step: Path) -> Iterator[Callable[..., "Future[None]"]]:
    """A function that runs several steps in one Dagster run, started one after the other."""
    pool = ThreadPoolExecutor(4)

    def begin(compute: ComputeResource, *names: str) -> "Future[None]":
        @dg.asset
        def several(context: dg.AssetExecutionContext, compute: ComputeResource) -> dg.MaterializeResult:
            runs = []
            with ThreadPoolExecutor(len(names)) as threads:
                for name in names:
                    env = {"NAME": name}
                    runs.append(threads.submit(compute.run, context=context, payload_path=step, extra_env=env))
                    time.sleep(1)
            for run in runs:
                run.result()
            return dg.MaterializeResult()

        return pool.submit(lambda: dg.materialize([several], resources={"compute": compute}) and None)

    yield begin
    pool.shutdown()


def test_two_runs_take_turns(session_compute: Make, begin: Begin, together: Callable[..., "Future[None]"], site: Site) -> None:
    compute = session_compute(queue={"time_limit": "00:30:00"})
    running = begin(compute, "x", 60)
    running.up("up-x")
    runs = [together(compute, "a1", "a2", "a3")]
    time.sleep(0.5)
    runs.append(together(compute, "b1", "b2"))
    queued(site, 6)
    let_go(site, "x")
    for run in runs:
        run.result(60)
    running.result()
    assert site.lines("ran") == ["x", "a1", "b1", "a2", "b2", "a3"]


def test_one_of_two_at_once_is_cancelled(
    session_compute: Make,
    begin: Begin,
    once: Callable[..., Ran],
    elsewhere: Callable[..., Elsewhere],
    step: Path,
    site: Site,
) -> None:
    at_once = {"max_concurrent_payloads": 2}
    compute = session_compute(session=at_once)
    other = begin(compute, "b", 60)
    job_id = other.up("up-b")
    victim = elsewhere(step, "a", session=at_once, env={"UP_FOR": "60"})
    assert wait_until(lambda: site.connection.read(f"{site.base}/data/up-a", 0, 1), 60)
    victim.process.send_signal(2)
    (told,) = victim.results(30)
    assert "interrupt" in told["sentence"], told
    assert job_of(once(compute, "c")) == job_id
    let_go(site, "b")
    assert job_of(other.result(30)) == job_id
    assert sorted(site.lines("ran")) == ["a", "b", "c"]


# ---- What users write


def test_odd_names(session_compute: Make, step: Path, site: Site) -> None:
    odd = 'it\'s "$HOME"; `id` & é | \\ % * # ../x'
    compute = session_compute(session={"name": "A.b-C_1"}, slurm={"remote_base": f"{site.base}/{odd.replace('/', '')}"})
    jobs = []

    @dg.asset(name="s_" + "x" * 150, partitions_def=dg.StaticPartitionsDefinition([odd, "plain"]))
    def step_of_odd_name(context: dg.AssetExecutionContext, compute: ComputeResource) -> Any:
        run = compute.run(context=context, payload_path=step, extra_env={"NAME": context.partition_key})
        jobs.append(run.job_id)
        return run.get_materialize_result()

    for key in (odd, "plain"):
        dg.materialize([step_of_odd_name], resources={"compute": compute}, partition_key=key)
    assert len(set(jobs)) == 1
    found = site.connection.read(f"{site.base}/{odd.replace('/', '')}/data/ran", 0, 1000).decode().splitlines()
    assert found == [odd, "plain"]


@pytest.mark.parametrize("name", ["a/b", "..", "a b", "", "x" * 64])
def test_names_that_sessions_cannot_have(name: str, session_compute: Make) -> None:
    with pytest.raises(Exception, match="is not a name"):
        session_compute(session={"name": name})


def test_a_wrong_partition_harms_nobody_else(session_compute: Make, once: Callable[..., Ran], site: Site) -> None:
    """The name of a session that Slurm refused is free for whoever asks for the right thing."""
    failure = once(session_compute(queue={"partition": "nope"}, session={"name": "one"}), "a").failure
    assert failure.kind in ("submission", "configuration"), (failure.kind, failure.description)
    assert "nope" in (failure.description or "") and not failure.allow_retries
    assert job_of(once(session_compute(session={"name": "one"}), "b"))
    assert site.lines("ran") == ["b"]


def test_a_wrong_host(session_compute: Make, once: Callable[..., Ran], site: Site) -> None:
    ssh = SSHConnectionResource(**{**site.ssh.model_dump(), "port": 9, "connect_timeout": 3})
    failure = once(session_compute(slurm={"ssh": ssh}), "a").failure
    assert failure.kind == "connection" and "127.0.0.1" in (failure.description or ""), failure.description
