"""The registry and the acquisition of sessions, on a real directory and with a Slurm of files."""

import json
import multiprocessing
import os
import shlex
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rayslurm import RayLauncher, RunFailure, SessionConfig, SlurmQueueConfig, SlurmResource
from dagster_rayslurm.backends import slurm_job
from dagster_rayslurm.backends.base import Step
from dagster_rayslurm.backends.sessions import acquire
from dagster_rayslurm.backends.sessions import backend as session_backend
from dagster_rayslurm.backends.sessions.acquire import Action, SessionAcquisition, next_action
from dagster_rayslurm.backends.sessions.backend import SessionBackend, SlurmSite
from dagster_rayslurm.backends.sessions.matching import Requirements, Target
from dagster_rayslurm.backends.sessions.registry import (
    Generation,
    LiveSession,
    SessionManifest,
    SessionRegistry,
    list_generations,
    parse_announcement,
    parse_manifest,
)
from dagster_rayslurm.backends.slurm_job import SlurmJob
from dagster_rayslurm.environments import Interpreter, PreDeployedEnvironment
from dagster_rayslurm.errors import StartError
from dagster_rayslurm.plan import make_plan
from dagster_rayslurm.runtime.protocol.spec import PROTOCOL_VERSION
from dagster_rayslurm.slurm.request import JobRequest, make_request
from dagster_rayslurm.slurm.shared_queue import ClusterClock, SharedQueue, SlurmUnanswered, fetch_queue
from dagster_rayslurm.slurm.submit import ClaimTaken, SubmissionRefused, SubmittedJob, submit
from dagster_rayslurm.ssh.base import ConnectionFailed
from dagster_rayslurm.ssh.local import LocalConnection

from ..conftest import wait_until
from ..fake_slurm import FakeSlurm
from .lines import Log

ANNOUNCED = {"protocol": PROTOCOL_VERSION, "hosts": ["n"], "port": 1, "key": "00", "pid": 1, "hostname": "n", "closing": None}


@dataclass
class Cluster:
    """A directory for sessions, and a Slurm whose jobs announce themselves at once."""

    path: Path
    slurm: FakeSlurm
    patience: float = 30.0

    @property
    def directory(self) -> Path:
        return self.path / "sessions" / "default-0"

    def announce(self, **fields: Any) -> None:
        """Change what jobs announce from now on."""
        content = {**ANNOUNCED, "cluster_id": "slurm-@JOB@", "job_id": "@JOB@", **fields}
        (self.path / "announcement").write_text(json.dumps(content))

    def jobs(self, *states: str) -> list[str]:
        return list(map(str, self.slurm.jobs(*states)))

    def acquire(self, after: int = 0, timeout: float | None = None, log: Any = None) -> LiveSession:
        return self.acquisition(timeout, log).acquire(after)[0]

    def acquisition(self, timeout: float | None = None, log: Any = None, commands: Any = None) -> SessionAcquisition:
        commands, log = commands or LocalConnection(), log or Log()
        target = Target("default-0", Requirements(None, ()))
        return SessionAcquisition(Jobs(self, commands, timeout, log), target)

    @property
    def registry(self) -> SessionRegistry:
        return SessionRegistry(LocalConnection(), str(self.path), "default-0")


class Jobs(SlurmSite):
    """Creates and watches jobs without the files of a payload."""

    def __init__(self, cluster: Cluster, commands: Any, timeout: float | None, log: Any) -> None:
        self.connection, self.base, self.start_timeout, self.patience = commands, str(cluster.path), 10, cluster.patience
        self.plan: Any = SimpleNamespace(payload=SimpleNamespace(nonce=os.urandom(6).hex()))
        self.step = Step("run", "step", None, log)
        self._queue = SharedQueue(commands, str(cluster.path / "queue"), 0.2)
        self._timeout, self._log = timeout, log

    def create(self, registry: SessionRegistry, target: Target, number: int, hold: Any) -> bool:
        asked, directory = request(f"rayslurm-session-default-{os.urandom(6).hex()}"), registry.generation_dir(number)
        content = files(number, asked.job_name)
        try:
            submitted = submit(self.connection, directory, content, asked, self._queue.clock, self._log.warning, claim=True)
        except ClaimTaken:
            return False
        hold(self.watched(asked, submitted, directory))
        return True

    def watch(self, target: Target, newest: Generation) -> SlurmJob:
        submitted = SubmittedJob(str(newest.job_id), self._queue.clock.now() - newest.age)
        return self.watched(request(newest.job_name), submitted, newest.directory)

    def watched(self, asked: JobRequest, submitted: SubmittedJob, directory: str) -> SlurmJob:
        return SlurmJob(
            commands=self.connection,
            queue=self._queue,
            request=asked,
            submitted=submitted,
            directory=directory,
            queue_timeout=self._timeout,
            log=self._log,
        )


def request(name: str) -> JobRequest:
    return make_request(SlurmQueueConfig(), (), job_name=name, comment="")


def manifest(number: int) -> SessionManifest:
    return SessionManifest(number, Requirements(None, ()).capacity(reuse=False), ("python", "ask"))


def files(number: int, job_name: str = "rayslurm-session-x") -> dict[str, bytes]:
    script = f"#!/bin/sh\n#SBATCH --job-name={job_name}\n".encode()
    return {"job.sh": script, "offer.json": manifest(number).to_json(), "session.json": b"", "exit": b""}


@pytest.fixture
def cluster(tmp_path: Path, fake_slurm: FakeSlurm) -> Cluster:
    made = Cluster(tmp_path, fake_slurm)
    made.announce()
    announce = f'sed "s/@JOB@/$SLURM_JOB_ID/g" {shlex.quote(str(tmp_path))}/announcement >session.json'
    fake_slurm.set(runs=False, instead=f'{announce}; echo "rayslurm: the last words" >node-0.log')
    return made


def test_only_one_of_many_processes_creates_the_session(cluster: Cluster) -> None:
    cluster.slurm.fault("sbatch", code=None, delay=0.3, times=-1)

    def acquire_all(results: Any) -> None:
        with ThreadPoolExecutor(5) as pool:
            for session in pool.map(lambda _: cluster.acquire(), range(5)):
                results.put((session.manifest.generation, session.announcement.job_id))

    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=acquire_all, args=(results,)) for _ in range(6)]
    for process in processes:
        process.start()
    found = {results.get(timeout=60) for _ in range(30)}
    for process in processes:
        process.join(10)
    assert found == {(1, "1")} and cluster.jobs() == ["1"]


def test_a_known_session_is_acquired_without_a_command(cluster: Cluster) -> None:
    commands = LocalConnection()
    assert not cluster.acquisition(commands=commands).acquire(0)[1]
    acquisition = cluster.acquisition(commands=commands)
    commands.run = None  # type: ignore[method-assign,assignment]
    session, reused = acquisition.acquire(0)
    assert reused and session.manifest == manifest(1) and session.announcement.job_id == "1"


@pytest.mark.parametrize("change", [{"closing": "its time is over"}, {"protocol": 99}])
def test_a_closing_or_incompatible_session_is_replaced(cluster: Cluster, change: dict[str, Any]) -> None:
    first = cluster.acquire()
    path = Path(first.directory, "session.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert cluster.acquire().manifest.generation == 2
    assert cluster.acquire().manifest.generation == 2 and cluster.jobs() == ["1", "2"]


def test_an_ended_session_is_replaced(cluster: Cluster) -> None:
    """Its script has ended although its announcement says nothing; or the caller knows that it does not answer."""
    first = cluster.acquire()
    assert cluster.acquire(after=1).manifest.generation == 2
    Path(first.directory).parent.joinpath("2", "exit").write_text("2 0 0\n")
    assert cluster.acquire().manifest.generation == 3


def test_other_names_in_the_directory_are_ignored(cluster: Cluster) -> None:
    cluster.directory.mkdir(parents=True)
    for name in ("x", "007", "1x", "12345678901", "-1", " 4"):
        (cluster.directory / name).mkdir()
    (cluster.directory / "3").write_text("a file")
    (cluster.directory / "5").symlink_to("nowhere")
    assert cluster.acquire().manifest.generation == 6


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_an_old_claim_without_a_job_expires(cluster: Cluster) -> None:
    """A claim without a job name, and one whose job does not exist."""
    (cluster.directory / "1").mkdir(parents=True)
    age(cluster.directory / "1", 61)
    assert cluster.acquire().manifest.generation == 2
    (cluster.directory / "3").mkdir()
    creator = cluster.directory / "3" / "creator"
    creator.write_text("rayslurm-session-x-aaaaaaaaaaaa\n")
    age(creator, 61)
    assert cluster.acquire().manifest.generation == 4
    assert cluster.directory.joinpath("1", "abandoned").exists() and cluster.directory.joinpath("3", "abandoned").exists()


def test_a_job_whose_creator_was_cut_off_is_cancelled(cluster: Cluster) -> None:
    """Its id was not written."""
    place = cluster.directory / "1"
    place.mkdir(parents=True)
    for name, content in files(1).items():
        place.joinpath(name).write_bytes(content)
    place.joinpath("creator").write_text("rayslurm-session-x-aaaaaaaaaaaa\n")
    age(place / "creator", 61)
    cluster.slurm.job(7, "rayslurm-session-x-aaaaaaaaaaaa", "PENDING")
    assert cluster.acquire().manifest.generation == 2
    assert place.joinpath("abandoned").exists() and cluster.jobs("CANCELLED") == ["7"]


def test_a_young_claim_delays_the_next_one(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acquire, "CLAIM_TIMEOUT", 2.0)
    (cluster.directory / "1").mkdir(parents=True)
    began = time.monotonic()
    assert cluster.acquire().manifest.generation == 2
    assert 1 < time.monotonic() - began < 15


def test_a_slow_creator_cancels_its_job(cluster: Cluster) -> None:
    cluster.slurm.fault("sbatch", code=None, delay=2.0)
    cluster.slurm.set(starts=False)
    registry = cluster.registry
    with ThreadPoolExecutor(1) as pool:
        arguments = (
            LocalConnection(),
            registry.generation_dir(1),
            files(1, "rayslurm-session-x-bbbbbbbbbbbb"),
            request("rayslurm-session-x-bbbbbbbbbbbb"),
        )
        slow = pool.submit(submit, *arguments, ClusterClock(LocalConnection()), print, claim=True)
        deadline = time.monotonic() + 10
        while not cluster.directory.joinpath("1", "creator").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        registry.abandon(1)
        with pytest.raises(ClaimTaken):
            slow.result(20)
    assert cluster.jobs("CANCELLED") == ["1"]
    cluster.slurm.set(starts=True)
    assert cluster.acquire().manifest.generation == 2


def test_the_last_waiter_cancels_a_pending_session(cluster: Cluster) -> None:
    cluster.slurm.set(starts=False)
    log = Log()
    with ThreadPoolExecutor(2) as pool:
        patient = pool.submit(cluster.acquire, timeout=8, log=log)
        time.sleep(1.5)
        with pytest.raises(RunFailure, match="queue_timeout=1 s"):
            cluster.acquire(timeout=1)
        assert cluster.jobs("PENDING") == ["1"]  # Another one waits for it still.
        with pytest.raises(RunFailure, match="queue_timeout=8 s"):
            patient.result(40)
    assert cluster.jobs("CANCELLED") == ["1"] and any("no step waits" in line for line in log.lines)
    cluster.slurm.set(starts=True)
    assert cluster.acquire().manifest.generation == 2


def test_a_waiter_counts_even_if_its_first_record_fails(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system gives no answer once, and then shows late that another process has made the directory."""
    cluster.slurm.set(starts=False)
    waiting, made, tries = cluster.directory / "1" / "waiting", os.path.isdir, list[str]()

    def stale(path: str) -> bool:
        if path != str(waiting):
            return made(path)
        tries.append(path)
        if len(tries) == 1:
            raise OSError("Input/output error")
        waiting.mkdir(exist_ok=True)
        return False

    with ThreadPoolExecutor(1) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(os.path, "isdir", stale)
            acquiring = pool.submit(cluster.acquire)
            recorded = wait_until(lambda: waiting.exists() and len(list(waiting.iterdir())) == 1)
        abandoned = cluster.registry.stop_waiting(1, "another")
        cluster.slurm.release(1)
        assert recorded and not abandoned
        assert acquiring.result(40).announcement.job_id == "1"


def test_killed_waiters_do_not_count(cluster: Cluster) -> None:
    registry = cluster.registry
    cluster.acquire()
    registry.wait_for(1, "one")
    registry.wait_for(1, "two")
    Path(registry.generation_dir(1), "session.json").write_text("")
    assert not registry.stop_waiting(1, "one")
    registry.wait_for(1, "one")
    age(Path(registry.generation_dir(1), "waiting", "two"), 200)
    assert registry.stop_waiting(1, "one") and registry.newest().abandoned


def test_a_live_session_is_never_abandoned(cluster: Cluster) -> None:
    cluster.acquire()
    cluster.registry.wait_for(1, "one")
    assert not cluster.registry.stop_waiting(1, "one") and not cluster.registry.newest().abandoned


def test_a_damaged_announcement_is_awaited(cluster: Cluster) -> None:
    """The job lives, so the session repairs its announcement."""
    found = cluster.acquire()
    path = Path(found.directory, "session.json")
    whole = path.read_text()
    path.write_text(whole[:20])
    threading.Timer(1.0, lambda: path.write_text(whole)).start()
    assert cluster.acquire().manifest.generation == 1 and cluster.jobs() == ["1"]


def test_a_session_whose_job_ended_silently_is_replaced(cluster: Cluster) -> None:
    found = cluster.acquire()
    Path(found.directory, "session.json").write_text("{")
    age(Path(found.directory, "creator"), 100)
    cluster.slurm.end(1, "NODE_FAIL")
    assert cluster.acquire().manifest.generation == 2


def closed(cluster: Cluster, served: int) -> None:
    cluster.announce(closing="it has 1 CPU, not 2", served=served)


def test_a_new_session_that_serves_nothing_fails_the_step(cluster: Cluster) -> None:
    closed(cluster, 0)
    with pytest.raises(RunFailure, match="it ended before it took anything: it has 1 CPU, not 2") as caught:
        cluster.acquire()
    assert caught.value.kind == "cluster-start" and cluster.jobs() == ["1"]
    assert "the last words" in str(caught.value.metadata)


@pytest.mark.parametrize("said", ["its nodes are gone", None], ids=["it says why", "it says nothing"])
def test_a_session_that_ends_before_the_request_fails_only_its_waiter(cluster: Cluster, said: str | None) -> None:
    cluster.announce(served=0)
    acquisition, other = cluster.acquisition(), cluster.acquisition()
    found, _ = acquisition.acquire(0)
    assert other.acquire(0)[1]
    path = Path(found.directory, "session.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "closing": said}))
    other.on_refused(1, "nobody answers")  # It was there before that one came.
    with pytest.raises(RunFailure, match=said or "nobody answers"):
        acquisition.on_refused(1, "nobody answers")


def foreign(path: Path) -> None:
    """Make another user the owner of a directory."""
    if os.geteuid() == 0:
        return os.chown(path, 65534, 65534)
    path.rename(path.with_name("own"))
    path.symlink_to("/usr")


@pytest.mark.parametrize("level", [0, 1, 2])
def test_directories_of_other_users_are_refused(cluster: Cluster, level: int) -> None:
    """The owner of a parent directory could put a command there that the finders of the session run."""
    base = cluster.path / "base"
    mine = Cluster(base, cluster.slurm)
    mine.directory.mkdir(parents=True)
    mine.acquire()
    foreign((mine.directory, mine.directory.parent, base)[level])
    cluster.slurm.set(starts=False)
    with pytest.raises(
        StartError, match=r"belongs to .*, who could change what runs there; choose a directory of your own"
    ) as caught:
        mine.acquire()
    assert caught.value.kind == "configuration" and cluster.jobs() == ["1"]
    connection = LocalConnection()
    arguments = (connection, mine.registry.generation_dir(2), files(2), request("rayslurm-session-x-cccccccccccc"))
    with pytest.raises(SubmissionRefused, match="belongs to"):
        submit(*arguments, ClusterClock(connection), print, claim=True)
    assert cluster.jobs() == ["1"]
    if level:
        with pytest.raises(PermissionError, match="belongs to"):
            list_generations(connection, str(base))


class Flaky(LocalConnection):
    """A cluster that is out of reach while `error` is set."""

    def __init__(self) -> None:
        self.error: OSError | None = None

    def attempt(self, *arguments: Any, **options: Any) -> Any:
        if self.error is not None:
            raise self.error
        return super().attempt(*arguments, **options)


GONE = ConnectionFailed("dev@edge:22 does not answer", temporary=True)


@pytest.mark.parametrize("error", [GONE, OSError("Stale file handle")], ids=["connection", "file system"])
def test_waiting_goes_on_while_the_cluster_is_out_of_reach(cluster: Cluster, error: OSError) -> None:
    cluster.slurm.set(starts=False)
    connection, log = Flaky(), Log()
    with ThreadPoolExecutor(1) as pool:
        acquiring = pool.submit(cluster.acquisition(log=log, commands=connection).acquire, 0)
        place = cluster.directory / "1"
        assert wait_until(lambda: (place / "waiting").exists())
        connection.error = error
        time.sleep(2)
        assert not acquiring.done() and cluster.jobs("PENDING") == ["1"]
        assert any(str(error) in line and "trying again" in line for line in log.lines)
        place.joinpath("session.json").write_text(json.dumps({**ANNOUNCED, "cluster_id": "slurm-1", "job_id": "1"}))
        connection.error = None
        assert acquiring.result(20)[0].announcement.job_id == "1"


def test_waiting_ends_when_patience_does(cluster: Cluster) -> None:
    cluster.slurm.set(starts=False)
    cluster.patience = 1.5
    connection, log = Flaky(), Log()
    with ThreadPoolExecutor(1) as pool:
        acquiring = pool.submit(cluster.acquisition(log=log, commands=connection).acquire, 0)
        assert wait_until(lambda: (cluster.directory / "1" / "waiting").exists())
        connection.error = GONE
        with pytest.raises(ConnectionFailed):
            acquiring.result(20)
    assert any("`scancel 1`" in line for line in log.lines)


def test_an_unanswered_query_does_not_end_the_wait(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The query fails when the queue timeout has passed."""
    cluster.slurm.set(starts=False)
    asked: list[float] = []

    def silent(_: Any) -> Any:
        asked.append(time.monotonic())
        if len(asked) < 3:
            raise SlurmUnanswered("edge: squeue did not answer")
        return fetch_queue(LocalConnection())

    monkeypatch.setattr(slurm_job, "fetch_queue", silent)
    with pytest.raises(RunFailure, match="queue_timeout=1 s"):
        cluster.acquire(timeout=1)
    assert len(asked) >= 3 and cluster.jobs("CANCELLED") == ["1"]


def test_an_interrupt_after_the_submission_cancels_the_job(cluster: Cluster) -> None:
    cluster.slurm.set(starts=False)
    acquisition = cluster.acquisition()
    create = acquisition.site.create

    def interrupted(*arguments: Any) -> bool:
        create(*arguments)
        raise KeyboardInterrupt

    acquisition.site.create = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        acquisition.acquire(0)
    assert cluster.jobs("CANCELLED") == ["1"] and cluster.registry.newest().abandoned


@pytest.mark.parametrize("other", [True, False])
def test_an_interrupt_during_the_submission_gives_up_only_the_own_generation(
    other: bool, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm, environment = SlurmResource(remote_base=str(cluster.path)), PreDeployedEnvironment(path="/env")
    usual: dict[str, Any] = {"own_queue": None, "launcher": RayLauncher(), "reuse": True, "session": SessionConfig(name="ours")}
    backend = SessionBackend(slurm=slurm, environment=environment, **usual)
    plan = make_plan(payload_path=["true"], launcher=RayLauncher(), nonce="n", max_output_bytes=1, max_stdio_bytes=1)
    monkeypatch.setattr(session_backend, "check_environment_on", lambda *_: Interpreter("/env/bin/python"))
    claimed: list[Path] = []

    def interrupted(_: Any, directory: str, files: Any, request: JobRequest, *__: Any, **___: Any) -> None:
        """Another process claims the generation, or this one does."""
        claimed.append(Path(directory))
        claimed[0].mkdir(parents=True)
        (claimed[0] / "creator").write_text("rayslurm-session-ours-aaaaaaaaaaaa\n" if other else f"{request.job_name}\n")
        raise KeyboardInterrupt

    monkeypatch.setattr(session_backend, "submit", interrupted)
    context: Any = {"extras": {}}
    with pytest.raises(KeyboardInterrupt):
        backend.start(plan, str(cluster.path / "runs" / "r-s-n"), context, Step("r", "s", None, Log()), print)
    assert claimed[0].joinpath("abandoned").exists() is not other


def test_a_young_claim_with_a_live_session_is_joined_at_once(cluster: Cluster) -> None:
    """The creator was cut off before it wrote down the job."""
    cluster.acquire()
    place = cluster.directory / "1"
    place.joinpath("job_id").unlink()
    offer = place.joinpath("offer.json").read_bytes()
    place.joinpath("offer.json").unlink()
    threading.Timer(1.0, lambda: place.joinpath("offer.json").write_bytes(offer)).start()
    path = place / "session.json"
    announced = path.read_text()
    path.write_text("")
    threading.Timer(1.5, lambda: path.write_text(announced)).start()
    began = time.monotonic()
    assert cluster.acquire().announcement.job_id == "1" and time.monotonic() - began < 15


@pytest.mark.parametrize("text", ["\u00b2", "\u0663", "1" * 5000, "-1", "x", ""])
def test_only_ascii_numbers_are_job_ids(cluster: Cluster, text: str) -> None:
    (cluster.directory / "1").mkdir(parents=True)
    (cluster.directory / "1" / "job_id").write_text(text)
    assert cluster.registry.newest().job_id is None


@pytest.mark.parametrize(
    "damage",
    [
        {"protocol": None},
        {"generation": "x"},
        {"ask": 1},
        {"offer": {"queues": [[None, {"num_nodes": "many"}]]}},
        {"offer": {"ray": 3}},
    ],
    ids=str,
)
def test_a_damaged_manifest_is_none(damage: dict[str, Any]) -> None:
    whole = json.loads(manifest(1).to_json())
    assert parse_manifest(json.dumps({**whole, **damage, "offer": {**whole["offer"], **damage.get("offer", {})}})) is None


@given(st.binary())
def test_any_bytes_are_a_manifest_or_none(data: bytes) -> None:
    assert parse_manifest(data) is None
    assert parse_manifest(manifest(3).to_json()) == manifest(3)


SAID = parse_announcement(json.dumps({**ANNOUNCED, "cluster_id": "x", "job_id": "5"}))


@pytest.mark.parametrize(
    ("number", "newest", "action"),
    [
        (0, {}, Action.CREATE),
        (1, {"announcement": SAID}, Action.CREATE),
        (2, {"announcement": SAID, "ended": True}, Action.SKIP),
        (2, {"announcement": SAID}, Action.USE),
        (2, {"announcement": SAID, "age": 99, "abandoned": True}, Action.USE),
        (2, {"job_id": 5}, Action.JOIN),
        (2, {"job_id": 5, "age": 99}, Action.JOIN),
        (2, {"job_id": 5, "abandoned": True}, Action.SKIP),
        (2, {}, Action.WAIT),
        (2, {"abandoned": True}, Action.SKIP),
        (2, {"age": 99}, Action.EXPIRE),
    ],
    ids=str,
)
def test_the_next_action(number: int, newest: dict[str, Any], action: Action) -> None:
    """The step has been refused by generation 1."""
    assert next_action(Generation("x", number, "/", **newest), 1) is action
