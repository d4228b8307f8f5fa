"""The sweep of a base directory, run on this machine: what is old and ours goes, nothing else."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rayslurm.archive import runtime_name
from dagster_rayslurm.backends.run_dir import Layout, sweep_old, sweep_remote
from dagster_rayslurm.plan import run_dir_name
from dagster_rayslurm.ssh.base import Completed
from dagster_rayslurm.ssh.local import LocalConnection
from dagster_rayslurm.upload.bundle import bundle_files
from dagster_rayslurm.upload.deliver import install

from ..conftest import wait_until
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


class Changed(LocalConnection):
    """Sweeps with another text in the place of one."""

    def __init__(self, old: str, new: str) -> None:
        self._old = old
        self._new = new

    def run(self, command: Any, *arguments: Any, **named: Any) -> Any:
        return super().run(self._changed(command), *arguments, **named)

    def command(self, base: Path, every_minutes: int) -> list[str]:
        """The command of a sweep."""
        told: list[list[str]] = []
        connection = LocalConnection()
        connection.run = lambda command, *_: told.append(list(command)) or Completed(0, b"", b"")  # type: ignore
        sweep_remote(connection, str(base), 14, every_minutes=every_minutes)
        return self._changed(told[0])

    def _changed(self, command: list[str]) -> list[str]:
        assert any(self._old in word for word in command)
        return [word.replace(self._old, self._new) for word in command]


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
    done = install(LocalConnection(), str(base), [made])
    assert sweep(base) == []
    for path in (done.bundles[made], done.runtime):
        os.utime(path, (time.time() - 15 * DAY,) * 2)
    assert sweep(base) == sorted([f"bundles/{made.name}", f"runtime/{runtime_name()}"])
    assert os.listdir(base / "bundles") == os.listdir(base / "runtime") == []
    again = install(LocalConnection(), str(base), [made])
    assert Path(again.bundles[made], "d/f").read_text() == "x"


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
    late = Changed(
        'mv -T -- "$1/$2" "$1/$grave" ||', 'case $1 in sessions) mkdir "$1/$2/2" ;; esac; mv -T -- "$1/$2" "$1/$grave" ||'
    )
    assert sweep_remote(late, str(base), 14, every_minutes=0) == []
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
    make("queue/claim-1795282828000", 99)
    assert sweep(base) == [] and all(path.exists() for path in made)  # They came to be just now.
    monkeypatch.setattr("dagster_rayslurm.backends.run_dir._DAY", -1)
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
    connection.run = lambda command, *_: ran.append(command) or Completed(0, b"", b"")  # type: ignore
    assert sweep_remote(connection, str(base), 14) == [] and len(ran) == commands


def test_an_aborted_sweep_is_repeated(base: Path, make: Callable[..., Path]) -> None:
    make("runs/0123abcd-a-0123456789ab", 99)
    slow = Changed("for name in $(list runs", 'touch "began"; sleep 30; for name in $(list runs')
    process = subprocess.Popen(slow.command(base, 60), stderr=subprocess.PIPE, start_new_session=True)
    try:
        assert wait_until((base / "began").exists, 10) and (base / ".sweeping").is_dir()
        assert sweep(base, every_minutes=60) == [], "one at a time"
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(10) == 143
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert not (base / ".sweeping").exists() and not (base / ".swept").exists()
    assert sweep(base, every_minutes=60) == ["runs/0123abcd-a-0123456789ab"]
    assert not (base / ".sweeping").exists() and (base / ".swept").exists()


def test_the_claim_of_a_killed_sweep_expires(base: Path, make: Callable[..., Path]) -> None:
    make("runs/0123abcd-a-0123456789ab", 99)
    (base / ".sweeping").mkdir()
    assert sweep(base, every_minutes=60) == [] and not (base / ".swept").exists()
    os.utime(base / ".sweeping", (time.time() - 20 * 60,) * 2)
    assert sweep(base, every_minutes=60) == ["runs/0123abcd-a-0123456789ab"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("shell", [shell for shell in ("dash", "bash") if shutil.which(shell)])
def test_a_signal_loses_no_bundle_in_use(base: Path, make: Callable[..., Path], shell: str, signum: int) -> None:
    """It comes between the two renames, to the shell and all that it has started."""
    path = make(f"bundles/{'a' * 32}", 99, "f")
    between = Changed('mv -T -- "$1/$2" "$1/$grave" ||', 'touch -c "$1/$2"; mv -T -- "$1/$2" "$1/$grave" && : >up && sleep 1 ||')
    process = subprocess.Popen([shell if word == "sh" else word for word in between.command(base, 0)], start_new_session=True)
    try:
        assert wait_until((base / "up").exists, 10)
        os.killpg(process.pid, signum)
        assert process.wait(10) == 143
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert (path / "f").exists() and os.listdir(path.parent) == [path.name]
    assert not (base / ".swept").exists()


def test_nothing_to_sweep(tmp_path: Path) -> None:
    assert sweep(tmp_path / "not here") == [] and not (tmp_path / "not here").exists()


def test_directories_that_are_links(base: Path, make: Callable[..., Path], tmp_path: Path) -> None:
    make("real/0123abcd-a-0123456789ab", 99)
    (base / "runs").symlink_to("real")
    assert sweep(base) == ["runs/0123abcd-a-0123456789ab"]
    assert os.listdir(base / "real") == []


def test_a_bundle_used_during_the_sweep_stays(base: Path, make: Callable[..., Path]) -> None:
    path = make(f"bundles/{'a' * 32}", 99, "f")
    late = Changed('mv -T -- "$1/$2" "$1/$grave" ||', 'touch -c "$1/$2"; mv -T -- "$1/$2" "$1/$grave" ||')
    assert sweep_remote(late, str(base), 14, every_minutes=0) == []
    assert (path / "f").exists() and os.listdir(path.parent) == [path.name]


def test_old_local_sessions_are_removed(base: Path, make: Callable[..., Path]) -> None:
    """A complaint goes with them; what is announced stays, and what is a cluster's is not looked at here."""
    gone = [make("sessions/default-0123456789ab", 15, "runtime.json"), make("sessions/x-0.watch.log", 15, is_file=True)]
    make("sessions/warm-0123456789ab", 15, "session.json")
    make("sessions/young-0123456789ab", 13, "runtime.json")
    make("sessions/held-0.watch", 15, is_file=True)
    make("sessions/cluster-0123456789ab", 15, "1/exit")
    assert sorted(sweep_old(Layout(base), 14)) == sorted(gone)
    assert len(os.listdir(base / "sessions")) == 4
