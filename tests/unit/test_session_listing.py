"""List and end sessions, in a local directory."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import RayLauncher, SlurmQueueConfig
from dagster_rayslurm.backends.sessions import listing as session_listing
from dagster_rayslurm.backends.sessions.listing import end_generations
from dagster_rayslurm.backends.sessions.matching import Requirements
from dagster_rayslurm.backends.sessions.registry import Generation, SessionManifest, list_generations
from dagster_rayslurm.backends.sessions.request import Unreachable
from dagster_rayslurm.backends.sessions.state import job_of, state_of
from dagster_rayslurm.components import Component
from dagster_rayslurm.runtime.protocol.rpc import AnswerLost
from dagster_rayslurm.slurm.shared_queue import QueueRow, QueueSnapshot
from dagster_rayslurm.ssh.local import LocalConnection

ANNOUNCED = {
    "protocol": 1,
    "cluster_id": "slurm-abc",
    "job_id": "12",
    "hosts": ["c1"],
    "port": 1234,
    "key": "00ff",
    "pid": 1,
    "hostname": "c1",
    "closing": None,
}


def write(base: Path, number: int, key: str = "default-0123456789ab", **files: str) -> Path:
    directory = base / "sessions" / key / str(number)
    directory.mkdir(parents=True)
    for name, text in files.items():
        (directory / name.replace("_json", ".json")).write_text(text)
    os.utime(directory, (number, number))
    return directory


def queue(*rows: tuple[int, str, str]) -> QueueSnapshot:
    made = (QueueRow(job, str(job), state, "Resources", None, None, 1, "", "compute", name) for job, state, name in rows)
    return QueueSnapshot(0.0, tuple(made))


def test_generations_are_listed(base: Path) -> None:
    write(base, 1, job_id="11\n", exit="11 0 0\n", creator="rayslurm-session-1\n", session_json="damaged")
    directory = write(base, 2, job_id="12\n", exit="", session_json=json.dumps(ANNOUNCED))
    write(base, 10, creator="rayslurm-session-10\n")
    (directory / "waiting").mkdir()
    (base / "sessions" / "default-0123456789ab" / ".rs-1.probe").mkdir()
    write(base, 1, key="other-0123456789ab")
    found = list_generations(LocalConnection(), str(base), "default-0123456789ab")
    assert [(each.number, each.job_id, each.ended, each.job_name) for each in found] == [
        (1, 11, True, "rayslurm-session-1"),
        (2, 12, False, ""),
        (10, None, False, "rayslurm-session-10"),
    ]
    assert found[1].announcement is not None and found[1].announcement.key == "00ff" and found[0].announcement is None
    assert found[1].directory == str(directory)
    assert len(list_generations(LocalConnection(), str(base))) == 4
    assert list_generations(LocalConnection(), str(base / "nowhere")) == []


def test_states(base: Path) -> None:
    write(base, 1, job_id="11\n", exit="11 0 0\n")
    write(base, 2, job_id="12\n", exit="")
    write(base, 3, job_id="13\n", exit="", session_json=json.dumps({**ANNOUNCED, "job_id": "13"}))
    write(
        base, 4, job_id="14\n", exit="", session_json=json.dumps({**ANNOUNCED, "job_id": "14", "closing": "its time limit comes"})
    )
    write(base, 5, creator="rayslurm-five\n")
    found = list_generations(LocalConnection(), str(base))
    everything = queue(*((number, "RUNNING", "") for number in range(11, 15)), (15, "PENDING", "rayslurm-five"))
    assert [state_of(each, job_of(each, everything)) for each in found] == ["ended", "starting", "up", "draining", "pending"]
    over = queue((12, "FAILED", ""), (13, "COMPLETING", ""), (15, "CANCELLED", "rayslurm-five"))
    assert [state_of(each, job_of(each, over)) for each in found] == ["ended", "ended", "up", "ended", "ended"]
    assert [state_of(each, None) for each in found] == ["ended", "ended", "dead", "ended", "ended"]


def test_a_heterogeneous_job_is_found_by_its_first_component() -> None:
    """Slurm gives each component a number of its own and the same name, in any order."""
    rows = [
        (18, "17+1", "gpu"),
        (17, "17+0", "cpu"),
        (19, "17+2", "cpu"),
        (5, "5", "cpu"),
        (20, "20_[1-5]", "x"),
        (7, "7+0", "y"),
    ]
    found = QueueSnapshot(
        0.0,
        tuple(
            QueueRow(job, label, "PENDING", "None", None, None, 1, "", place, "rayslurm-a" if "17" in label else "")
            for job, label, place in rows
        ),
    )
    assert [row.job_id for row in found.rows if row.is_leader] == [17, 5, 20, 7]
    assert (
        [row.partition for row in found.components(17)]
        == ["cpu", "gpu", "cpu"]
        == [row.partition for row in found.components(18)]
    )
    assert [row.job_id for row in found.components(5)] == [5] and found.components(6) == ()
    generation = Generation("key", 1, "/base/sessions/key/1", job_name="rayslurm-a")
    assert (row := job_of(generation, found)) is not None and row.job_id == 17


def test_components_are_listed_from_the_manifest(base: Path) -> None:
    queue = SlurmQueueConfig(partition="gpu")
    parts = tuple(Component(name, queue, RayLauncher()) for name in ("gpu", "cpu"))
    capacity = Requirements(None, (), queue, parts).capacity(reuse=False)
    offer = SessionManifest(1, capacity, ("python", "ask")).to_json().decode()
    write(base, 1, job_id="12\n", offer_json=offer, session_json=json.dumps({**ANNOUNCED, "heterogeneous": True}))
    write(base, 2, job_id="13\n", session_json=json.dumps(ANNOUNCED))
    one, other = list_generations(LocalConnection(), str(base))
    assert one.manifest and one.manifest.capacity.components == ["gpu", "cpu"] and other.manifest is None
    assert one.announcement is not None and one.announcement.heterogeneous
    assert other.announcement is not None and not other.announcement.heterogeneous


class Slurm:
    """Jobs that end when they are cancelled or their session gets a stop request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *rows: tuple[int, str, str]) -> None:
        self.rows = list(rows)
        self.did: list[Any] = []
        self.patience: list[float] = []  # Seconds before each job is cancelled.
        monkeypatch.setattr(session_listing, "fetch_queue", lambda _: queue(*self.rows))
        monkeypatch.setattr(session_listing, "wait_until_gone", self._gone)
        monkeypatch.setattr(session_listing, "end_named", self._end_named)
        monkeypatch.setattr(session_listing, "send_request", self._ask)
        self.answer: Any = {"ok": True}

    def _gone(self, _: Any, job_id: int, patience: float) -> bool:
        self.did.append((job_id, patience > 0))
        self.patience.append(patience)
        return self.answer != "stuck"

    def _end_named(self, _: Any, name: str) -> str:
        self.did.append(name)
        return f"a Slurm job named {name} may have been submitted" if self.answer == "stuck" else ""

    def _ask(self, *arguments: Any) -> Any:
        self.did.append(arguments[2])
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def end_all(base: Path) -> bool:
    connection = LocalConnection()
    return end_generations(connection, list_generations(connection, str(base), "default-0123456789ab"))


def test_end_sessions_stops_cancels_and_abandons(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Slurm(monkeypatch, (12, "RUNNING", ""), (13, "PENDING", ""), (99, "RUNNING", "another"))
    write(base, 1, job_id="11\n", exit="11 0 0\n")
    write(base, 2, job_id="12\n", exit="", session_json=json.dumps(ANNOUNCED))
    write(base, 3, job_id="13\n", exit="")
    directory = write(base, 4, creator="rayslurm-four\n")
    assert end_all(base)
    assert slurm.did == [{"op": "stop"}, (12, True), (13, False), "rayslurm-four"]
    assert (directory / "abandoned").is_dir(), "whoever submits it right now takes it back"


@pytest.mark.parametrize(("told", "patience"), [({"grace_period": 600.0}, 645.0), ({}, 55.0)], ids=["told", "not told"])
def test_a_stopped_session_has_the_grace_period_of_its_payloads(
    base: Path, told: dict[str, Any], patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = Slurm(monkeypatch, (12, "RUNNING", ""))
    slurm.answer = {"ok": True, **told}
    write(base, 2, job_id="12\n", exit="", session_json=json.dumps(ANNOUNCED))
    assert end_all(base) and slurm.patience == [patience]


@pytest.mark.parametrize("answer", [Unreachable("no way"), AnswerLost("who knows")])
def test_a_session_that_does_not_answer_is_cancelled(base: Path, answer: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Slurm(monkeypatch, (12, "RUNNING", ""))
    slurm.answer = answer
    write(base, 2, job_id="12\n", exit="", session_json=json.dumps(ANNOUNCED))
    assert end_all(base)
    assert slurm.did[1:] == [(12, False)]


def test_an_unconfirmed_end_fails(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Slurm(monkeypatch, (12, "RUNNING", "")).answer = "stuck"
    write(base, 2, job_id="12\n", exit="")
    with pytest.raises(session_listing.StartError, match="does not confirm the end of job 12; run `scancel 12`"):
        end_all(base)


def test_a_session_that_is_being_submitted_counts_as_ended(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Slurm(monkeypatch)
    write(base, 1, creator="rayslurm-one\n")
    assert end_all(base) and slurm.did == ["rayslurm-one"]
    assert not end_all(base), "it is abandoned now"
    slurm.answer = "stuck"
    with pytest.raises(session_listing.StartError, match="job named rayslurm-one may have been submitted"):
        end_all(base)


def test_end_sessions_without_a_living_session(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Slurm(monkeypatch)
    write(base, 1, job_id="11\n", exit="")
    assert not end_all(base) and slurm.did == []
