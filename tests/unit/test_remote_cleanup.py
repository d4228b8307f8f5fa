"""The sweep of a base directory, run on this machine: what is old and ours goes, nothing else."""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rayslurm.archive import runtime_name
from dagster_rayslurm.backends.base import sweep_remote
from dagster_rayslurm.plan import run_dir_name
from dagster_rayslurm.ssh.local import LocalConnection
from dagster_rayslurm.upload.bundle import bundle_files
from dagster_rayslurm.upload.deliver import install, place_of, runtime_place

from ..fake_slurm import FakeSlurm

DAY = 86400.0
RUN = "0123abcd-my_step-0123456789ab"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base dir"
    path.mkdir()
    return path


@pytest.fixture
def make(base: Path) -> Callable[..., Path]:
    """Makes a file, or a directory with the files that are given, of some age in days."""

    def make(name: str, age: float, *files: str, is_file: bool = False) -> Path:
        path = base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_file:
            path.write_text("x")
        else:
            path.mkdir()
            for file in files:
                (path / file).parent.mkdir(parents=True, exist_ok=True)
                (path / file).write_text(f"{file} of {name}")
                os.utime(path / file, (time.time() - age * DAY,) * 2)
        os.utime(path, (time.time() - age * DAY,) * 2)
        return path

    return make


@contextlib.contextmanager
def used_before_the_rename(use: Callable[[Path], object]) -> Iterator[None]:
    """Another process uses what the sweep is about to remove."""
    rename = os.rename

    def late(old: str, new: str) -> None:
        if new.endswith(".gone"):
            use(Path(old))
        rename(old, new)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", late)
        yield


def sweep(base: Path, retention_days: float = 14, every_minutes: int = 0) -> list[str]:
    return sorted(sweep_remote(LocalConnection(), str(base), retention_days, every_minutes=every_minutes))


def test_old_run_directories_are_removed(base: Path, make: Callable[..., Path]) -> None:
    old = make(f"runs/{RUN}", 15, "journal.jsonl", "work/deep/file")
    (old / "work/link").symlink_to(base)
    os.utime(old, (1, 1))
    make("runs/0123abcd-my_step-ffffffffffff", 13, "journal.jsonl")
    (make("runs/0123abcd-busy-0123456789ab", 20, "journal.jsonl") / "status.json").touch()
    os.utime(base / "runs/0123abcd-busy-0123456789ab", (1, 1))
    assert sweep(base) == [f"runs/{RUN}"]
    assert sorted(os.listdir(base / "runs")) == ["0123abcd-busy-0123456789ab", "0123abcd-my_step-ffffffffffff"]


@given(run_id=st.uuids().map(str), step=st.text(min_size=1, max_size=60))
def test_every_run_directory_name_matches_the_sweep(run_id: str, step: str) -> None:
    name = run_dir_name(run_id, step, "0123456789ab")
    assert subprocess.run(["grep", "-qxE", "--", "[A-Za-z0-9_.-]+-[0-9a-f]{12}"], input=name.encode()).returncode == 0


def test_foreign_files_stay(base: Path, make: Callable[..., Path], tmp_path: Path) -> None:
    for name in (
        "runs/thesis",
        "runs/a b-0123456789ab",
        f"runs/new\nline-{RUN}",
        f"runs/{RUN} ",
        "bundles/notes",
        f"bundles/{'0' * 31}",
        f"bundles/{'G' * 32}",
        "runtime/old.pyz",
        "queue/claim-x",
        "queue/.rs-0123.tmp",
        "data/0123abcd-my_step-0123456789ab",
        f"data/{'0' * 32}",
        f"{'0' * 32}",
        RUN,
    ):
        make(name, 99)
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "file").mkdir(parents=True)
    (base / "runs" / RUN).symlink_to(elsewhere)
    os.utime(base / "runs" / RUN, (1, 1), follow_symlinks=False)
    before = sorted(map(str, base.rglob("*")))
    assert sweep(base) == []
    assert sorted(map(str, base.rglob("*"))) == sorted([*before, str(base / ".swept")])
    assert (elsewhere / "file").exists()


def test_unused_bundles_and_runtimes_are_removed(base: Path, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    made = bundle_files({"d/f": str(tmp_path / "f")})
    install(LocalConnection(), str(base), [made])
    assert sweep(base) == []
    for path in (place_of(str(base), made), runtime_place(str(base))):
        os.utime(path, (time.time() - 15 * DAY,) * 2)
    assert sweep(base) == sorted([f"bundles/{made.name}", f"runtime/{runtime_name()}"])
    assert os.listdir(base / "bundles") == os.listdir(base / "runtime") == []
    install(LocalConnection(), str(base), [made])
    assert Path(place_of(str(base), made), "d/f").read_text() == "x"


def test_bundles_named_by_a_run_directory_stay(base: Path, make: Callable[..., Path]) -> None:
    bundle, other, runtime = "a" * 32, "b" * 32, f"runtime-{'0' * 16}-cpython-311.pyz"
    for name in (bundle, other):
        make(f"bundles/{name}", 99, "f")
    make(f"runtime/{runtime}", 99, is_file=True)
    run = make(f"runs/{RUN}", 1, "journal.jsonl")
    (run / "payload.json").write_text(f'{{"working_dir": "{base}/bundles/{bundle}"}}')
    (run / "job.sh").write_text(f"srun python -I '{base}/runtime/{runtime}' node .")
    assert sweep(base) == [f"bundles/{other}"]
    subprocess.run(["rm", "-r", run], check=True)
    assert sweep(base) == [f"bundles/{bundle}", f"runtime/{runtime}"]


def test_separate_runs_that_still_run_stay(base: Path, make: Callable[..., Path]) -> None:
    """Only the files of their components change and name bundles."""
    bundle = "a" * 32
    make(f"bundles/{bundle}", 99, "f")
    component = make(f"runs/{RUN}", 99, "job.sh", "components/prep/payload.json") / "components/prep"
    (component / "payload.json").write_text(f'{{"working_dir": "{base}/bundles/{bundle}"}}')
    os.utime(component / "payload.json", (1, 1))
    (component / "journal.jsonl").touch()
    assert sweep(base) == []
    os.utime(component / "journal.jsonl", (1, 1))
    assert sweep(base) == [f"bundles/{bundle}", f"runs/{RUN}"]


KEY = "my.session-0123456789ab"


@pytest.fixture
def slurm(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """A fake Slurm with two jobs, and a variable of the login that would hide them."""
    fake_slurm.job(11)
    fake_slurm.job(13)
    monkeypatch.setenv("SQUEUE_STATES", "FAILED")
    return fake_slurm


def generation(make: Callable[..., Path], number: int, age: float, *, key: str = KEY, **content: str) -> Path:
    """A directory of a session: the files of a batch job, with some other content."""
    path = make(f"sessions/{key}/{number}", age, "job.sh", "exit", "waiting/0123")
    for name, text in content.items():
        (path / name).write_text(text)
    for each in (*path.rglob("*"), path, path.parent):
        os.utime(each, (time.time() - age * DAY,) * 2)
    return path


@pytest.mark.usefixtures("slurm")
def test_ended_sessions_are_removed(base: Path, make: Callable[..., Path]) -> None:
    """The number of the newest stays known as long as anybody looks for it."""
    for number in (1, 2, 3, 10):
        generation(make, number, 20, job_id=f"{number}\n", exit=f"{number} 0 0\n")
    (base / "sessions" / KEY).touch()
    assert sweep(base) == [f"sessions/{KEY}/{number}" for number in (1, 2, 3)]
    assert os.listdir(base / "sessions" / KEY) == ["10"]
    assert sweep(base) == []
    os.utime(base / "sessions" / KEY, (1, 1))
    assert sweep(base) == [f"sessions/{KEY}"] and os.listdir(base / "sessions") == []


@pytest.mark.usefixtures("slurm")
def test_live_sessions_stay(base: Path, make: Callable[..., Path]) -> None:
    generation(make, 1, 99, job_id="11\n", exit="")
    generation(make, 2, 99, exit="", **{"session.json": '{"closing": null, "job_id": "13", "key": "00"}'})
    generation(make, 3, 99, job_id="12\n", exit="")
    (generation(make, 4, 99, job_id="14\n", exit="") / "waiting" / "4567").touch()
    generation(make, 5, 99, job_id="1\n", exit="1 0 0\n")
    assert sweep(base) == [f"sessions/{KEY}/3"]
    assert sorted(os.listdir(base / "sessions" / KEY)) == ["1", "2", "4", "5"]


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize(("job_id", "lives"), [("11;north\n", True), ("12;north\n", False), ("x\n", False)])
def test_what_sbatch_prints_beside_the_id_of_a_job(job_id: str, lives: bool, base: Path, make: Callable[..., Path]) -> None:
    generation(make, 1, 99, job_id=job_id, exit="")
    assert sweep(base) == ([] if lives else [f"sessions/{KEY}"])


def test_a_session_stays_if_slurm_does_not_answer(base: Path, make: Any, slurm: FakeSlurm) -> None:
    for number in (1, 2):
        generation(make, number, 99, job_id=f"{number}\n", exit="")
    slurm.fault("squeue", "slurmctld is away")
    assert sweep(base) == []
    assert sweep(base) == [f"sessions/{KEY}"]


def test_a_session_without_a_job_is_removed(base: Path, make: Any) -> None:
    generation(make, 1, 99, exit="", creator="rayslurm-session-0123\n")
    generation(make, 1, 1, key="young-0123456789ab", exit="")
    assert sweep(base) == [f"sessions/{KEY}"]


def test_a_session_of_this_machine_stays(base: Path, make: Any) -> None:
    """Both are below the same base directory where Dagster runs on the edge node."""
    make("sessions/default-0123456789ab", 99, "session.json", "runtime.json")
    make("sessions/notes", 99, "1/exit")
    assert sweep(base) == []


def test_a_session_name_used_during_the_sweep_keeps_its_numbers(base: Path, make: Any) -> None:
    generation(make, 1, 99, exit="1 0 0\n")
    with used_before_the_rename(lambda path: (path / "2").mkdir()):
        assert sweep(base) == []
    assert sorted(os.listdir(base / "sessions" / KEY)) == ["1", "2"]


def test_bundles_named_by_a_session_stay(base: Path, make: Any, slurm: FakeSlurm) -> None:
    names = [f"runtime/runtime-{digit * 16}-0.pyz" for digit in "01"] + [f"bundles/{digit * 32}" for digit in "ab"]
    for name in names:
        make(name, 99, is_file=name.startswith("runtime"))
    script = {"job.sh": f"srun python -I '{base}/{names[0]}' session .", "runtime.json": f'{{"x": "{base}/{names[2]}"}}'}
    generation(make, 1, 99, job_id="11\n", exit="", **script)
    assert sweep(base) == sorted([names[1], names[3]])
    slurm.forget(11)
    assert sweep(base) == sorted([f"sessions/{KEY}", names[0], names[2]])


def test_leftovers_of_killed_processes_are_removed(
    base: Path, make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f".rs-{'0' * 16}.{end}" for end in ("tmp", "tgz", "unpack", "new", "gone")]
    made = [
        make(f"{place}/{name}", 99)
        for place in ("bundles", "runtime", "queue", "environments", "sessions", f"sessions/{KEY}")
        for name in names
    ]
    made[0].chmod(0o500)
    assert sweep(base) == [] and all(path.exists() for path in made)  # They came to be just now.
    monkeypatch.setattr("dagster_rayslurm.edge.base_directory._LEFTOVER", -1.0)
    assert sweep_remote(LocalConnection(), str(base), -14 * 1e4, every_minutes=0)
    assert not any(path.exists() for path in made) and os.listdir(base / "queue") == []


def test_old_environment_checks_are_removed(base: Path, make: Callable[..., Path]) -> None:
    make(f"environments/{'0' * 32}", 15, is_file=True)
    make(f"environments/{'1' * 32}", 13, is_file=True)
    sweep(base)
    assert os.listdir(base / "environments") == ["1" * 32]


def test_one_sweep_an_hour(base: Path, make: Callable[..., Path]) -> None:
    make("runs/0123abcd-a-0123456789ab", 99)
    assert sweep(base, every_minutes=60)
    make("runs/0123abcd-b-0123456789ab", 99)
    assert sweep(base, every_minutes=60) == []
    os.utime(base / ".swept", (time.time() - 3700,) * 2)
    assert sweep(base, every_minutes=60) == ["runs/0123abcd-b-0123456789ab"]


@pytest.mark.parametrize(("age", "commands"), [(0, 0), (3500, 0), (3700, 1), (-3500, 0), (-3700, 1)])
def test_a_sweep_that_is_not_due_starts_no_command(base: Path, age: float, commands: int) -> None:
    """A date in the future is that of a clock which was wrong once."""
    (base / ".swept").touch()
    os.utime(base / ".swept", (time.time() - age,) * 2)
    ran: list[Any] = []
    connection = LocalConnection()
    connection.call = lambda *_, **__: ran.append(1) or []  # type: ignore
    assert sweep_remote(connection, str(base), 14) == [] and len(ran) == commands


def test_nothing_to_sweep(tmp_path: Path) -> None:
    assert sweep(tmp_path / "not here") == [] and not (tmp_path / "not here").exists()


def test_directories_that_are_links(base: Path, make: Callable[..., Path], tmp_path: Path) -> None:
    make("real/0123abcd-a-0123456789ab", 99)
    (base / "runs").symlink_to("real")
    assert sweep(base) == ["runs/0123abcd-a-0123456789ab"]
    assert os.listdir(base / "real") == []


def test_a_bundle_used_during_the_sweep_stays(base: Path, make: Callable[..., Path]) -> None:
    path = make(f"bundles/{'a' * 32}", 99, "f")
    with used_before_the_rename(Path.touch):
        assert sweep(base) == []
    assert (path / "f").exists() and os.listdir(path.parent) == [path.name]
