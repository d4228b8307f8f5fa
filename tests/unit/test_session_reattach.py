"""A retry reattaches to the payload that an earlier attempt left in a session, if its requirements are the same."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dagster_rayslurm import RayLauncher, SessionConfig, SlurmQueueConfig, SlurmResource
from dagster_rayslurm.backends.base import Step
from dagster_rayslurm.backends.ownership import REQUEST_FILE
from dagster_rayslurm.backends.sessions import backend as session_backend
from dagster_rayslurm.backends.sessions.backend import SessionBackend
from dagster_rayslurm.backends.sessions.matching import Requirements
from dagster_rayslurm.backends.sessions.registry import SessionManifest
from dagster_rayslurm.environments import PreDeployedEnvironment
from dagster_rayslurm.errors import StartError
from dagster_rayslurm.plan import Plan, make_plan
from dagster_rayslurm.runtime.protocol.record import CANCEL, JOURNAL, PAYLOAD, encode
from dagster_rayslurm.runtime.protocol.spec import PROTOCOL_VERSION, Announcement, to_json
from dagster_rayslurm.slurm.shared_queue import QueueRow, QueueSnapshot

from .lines import Log

CLUSTER = "slurm-0123456789ab"


def asking(base: Path, **fields: Any) -> tuple[SessionBackend, Plan]:
    """A backend and its plan, for a session with a fixed name."""
    slurm = SlurmResource(queue=SlurmQueueConfig(partition="p", num_nodes=2), remote_base=str(base))
    environment, session = PreDeployedEnvironment(path="/env"), SessionConfig(name="ours")
    usual: dict[str, Any] = {"own_queue": None, "launcher": RayLauncher(), "reuse": True}
    backend = SessionBackend(**{"slurm": slurm, "environment": environment, "session": session, **usual, **fields})
    launcher = backend.own_launcher or backend.launcher
    plan = make_plan(payload_path=["true"], launcher=launcher, nonce="n", max_output_bytes=1, max_stdio_bytes=1)
    return backend, plan


def announce(base: Path, number: int, cluster_id: str, job_id: str, closing: str | None = None) -> Path:
    """Write the files of a generation of the session `ours-1`; returns the generation's directory."""
    directory = base / "sessions" / "ours-1" / str(number)
    directory.mkdir(parents=True)
    said = Announcement(cluster_id, job_id, ["n"], 1, "00", PROTOCOL_VERSION, closing, "n")
    (directory / "session.json").write_text(json.dumps(dataclasses.asdict(said)))
    (directory / "offer.json").write_bytes(SessionManifest(number, Requirements(None, ()).capacity(True), ("ask",)).to_json())
    return directory


def queue_with(state: str) -> QueueSnapshot:
    """A queue in which the job 7 has this state."""
    return QueueSnapshot(0.0, (QueueRow(7, "7", state, "", None, None, 1, "n", "p", "x"),))


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({}, True),
        ({"own_launcher": RayLauncher(num_cpus_per_node=1)}, False),
        ({"own_queue": SlurmQueueConfig(partition="p", time_limit="00:05:00")}, False),
        ({"own_queue": SlurmQueueConfig(partition="p", num_nodes=1)}, False),
        ({"reuse": False}, False),
    ],
    ids=["the same", "launcher", "time limit", "nodes", "reuse"],
)
def test_a_retry_with_other_requirements_does_not_reattach(
    other: dict[str, Any], expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step(run_id="r", step_key="s", partition_key=None, log=Log())
    first, plan = asking(tmp_path)
    asked = first._packed(plan, step)[2]
    accepted = dataclasses.replace(plan.payload, run_id="r", step="s", ray=None, want_cpus=2, time_limit=60.0)
    run_dir = tmp_path / "runs" / "r-s-n"
    run_dir.mkdir(parents=True)
    (run_dir / PAYLOAD).write_text(to_json(dataclasses.replace(accepted, data_dir=str(tmp_path / "data"))))
    (run_dir / REQUEST_FILE).write_bytes(asked)
    (run_dir / JOURNAL).write_bytes(encode({"type": "start", "cluster_id": CLUSTER, "allocation": {"job_id": "7"}}))
    announce(tmp_path, 1, CLUSTER, "7")
    monkeypatch.setattr(session_backend, "fetch_queue", lambda _: queue_with("RUNNING"))

    now, plan = asking(tmp_path, **other)
    assert now.can_reattach(plan, str(run_dir), step) is expected


@pytest.mark.parametrize("state", ["RUNNING", "NODE_FAIL"])
def test_a_retry_continues_a_payload_in_a_session_that_accepts_no_more(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session lets its payloads end, while steps have begun its next generation. The retry needs no session of its own."""
    backend, plan = asking(tmp_path)
    step = Step(run_id="r", step_key="s", partition_key=None, log=Log())
    run_dir = tmp_path / "runs" / "r-s-n"
    run_dir.mkdir(parents=True)
    (run_dir / REQUEST_FILE).write_bytes(backend._packed(plan, step)[2])
    (run_dir / JOURNAL).write_bytes(encode({"type": "start", "cluster_id": CLUSTER, "allocation": {"job_id": "7"}}))
    directory = announce(tmp_path, 1, CLUSTER, "7", closing="its time limit is near")
    announce(tmp_path, 2, "slurm-ba9876543210", "8")
    monkeypatch.setattr(session_backend, "fetch_queue", lambda _: queue_with(state))
    assert backend.can_reattach(plan, str(run_dir), step) is (state == "RUNNING")

    monkeypatch.setattr(session_backend, "send_request", None)  # No session is asked.
    registered: list[Any] = []
    context: Any = {"extras": {}}
    backend.start(plan, str(run_dir), context, dataclasses.replace(step, reattached=True), registered.append)
    assert [(each.job_id, each.cluster_id, each.session.directory) for each in registered] == [("7", CLUSTER, str(directory))]


def test_a_payload_of_an_earlier_attempt_has_ended_before_the_next_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, _ = asking(tmp_path)
    run_dir = tmp_path / "runs" / "r-s-n"
    run_dir.mkdir(parents=True)
    start = encode({"type": "start", "cluster_id": CLUSTER, "allocation": {"job_id": "7"}})
    (run_dir / JOURNAL).write_bytes(start)
    queue = SimpleNamespace(job=lambda number: SimpleNamespace(state={7: "RUNNING"}[number]))
    monkeypatch.setattr(session_backend, "fetch_queue", lambda _: queue)
    pauses: list[float] = []
    read, asked = backend.connection.read, list[int]()

    def reads(path: str, offset: int, limit: int) -> bytes:
        asked.append(offset)
        return read(path, offset, limit)

    monkeypatch.setattr(backend.connection, "read", reads)

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:  # The session has read the request.
            assert b"cancel" in (run_dir / CANCEL).read_bytes()
            with (run_dir / JOURNAL).open("ab") as file:
                file.write(encode({"type": "end", "nonce": "n"}))

    monkeypatch.setattr(session_backend.time, "sleep", pause)
    backend.end_abandoned(str(run_dir), 600.0)
    assert len(pauses) == 2
    assert asked[0] == 0 and set(asked[1:-1]) == {len(start)}  # Each look reads only what is new.
    (run_dir / JOURNAL).write_bytes(start)
    monkeypatch.setattr(session_backend, "_CANCEL_MARGIN", 0.0)
    with pytest.raises(StartError, match=r"was told to end, and its record in .* shows no end") as caught:
        backend.end_abandoned(str(run_dir), 0.0)
    assert caught.value.retry
    queue.job = lambda _: None  # The session is lost, so no process writes an end.
    backend.end_abandoned(str(run_dir), 0.0)
