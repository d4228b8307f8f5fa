"""Runs from the terminal, on a fake Slurm: `rayslurm submit`, `script`, `ps`, `show`, `logs`, `cancel` and `attach`."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dagster_rayslurm.backends.batch import BatchBackend
from dagster_rayslurm.backends.listing import list_all
from dagster_rayslurm.cli import logs, main, ray
from dagster_rayslurm.runtime.protocol.record import encode
from dagster_rayslurm.runtime.protocol.spec import Announcement, ClusterAccess
from dagster_rayslurm.ssh.local import LocalConnection

from ..conftest import wait_until
from ..fake_slurm import FakeSlurm

TOML = """
[clusters.here]
environment = {{ kind = "pre-deployed", path = {prefix!r} }}
slurm = {{ remote_base = {base!r}, queue = {{ partition = "compute" }} }}
keep_run_dirs = "all"
"""
Rayslurm = Callable[..., Result]
NO_RAY = ("--no-ray", "--no-working-dir")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_slurm: FakeSlurm) -> Path:
    """The base directory of a cluster that is this machine, named in a rayslurm.toml of the current directory."""
    for name in [name for name in os.environ if name.startswith(("SLURM_EDGE_NODE_", "RAYSLURM_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "study").mkdir()
    monkeypatch.chdir(tmp_path / "study")
    monkeypatch.setenv("RAYSLURM_BASE", str(tmp_path / "here"))
    Path("rayslurm.toml").write_text(TOML.format(prefix=sys.prefix, base=str(tmp_path / "base")))
    return tmp_path / "base"


@pytest.fixture
def rayslurm(cluster: Path) -> Rayslurm:
    return lambda *words: CliRunner().invoke(main, list(words))


def runs(rayslurm: Rayslurm, *options: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in rayslurm("ps", "--json", *options).stdout.splitlines()]


# ---- submit


def test_a_script_runs_with_its_files_and_brings_its_output_and_exit_code(rayslurm: Rayslurm, fake_slurm: FakeSlurm) -> None:
    Path("train.py").write_text("import os, sys, helper\nhelper.say(os.environ['A'], os.environ['LOADED'])\nsys.exit(7)\n")
    Path("helper.py").write_text("def say(*words):\n    print(*words)\n    open('out.txt', 'w').write('x')\n")
    options = ("--name", "exp", "--nodes", "1", "--time", "00:05:00", "--env", "A=1", "--output", "*.txt", "--no-ray")
    done = rayslurm("submit", *options, "--load-env", "export LOADED=yes", "--", "python", "train.py")
    assert done.exit_code == 7 and "1 yes" in done.stdout, done.output
    (output,) = [line for line in done.stderr.splitlines() if line.endswith("out.txt")]
    assert Path(output.removeprefix("[rayslurm] ")).read_text() == "x"
    (run,) = runs(rayslurm, "--all")
    assert run["kind"] == "run" and run["state"] == "ended" and "exp" in run["name"]
    assert not runs(rayslurm), "ps without --all lists what lives"
    script = (Path(run["directory"]) / "job.sh").read_text()
    assert "#SBATCH --time=00:05:00" in script and "rayslurm submit exp" in script


def test_a_command_that_fails_on_load_env_is_named(rayslurm: Rayslurm, fake_slurm: FakeSlurm) -> None:
    done = rayslurm("submit", *NO_RAY, "--load-env", "module-of-nobody load cuda", "--", "true")
    assert done.exit_code == 125 and "`module-of-nobody load cuda` of the environment failed" in done.stderr
    assert not fake_slurm.jobs(), "nothing is submitted"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ((), 2, "write the command behind `--`"),
        (("--command", "true", "--", "true"), 2, "one of the two"),
        (("--env", "NOBODY_HAS_THIS", "--", "true"), 125, "NOBODY_HAS_THIS: this shell has no such variable"),
        (("--mode", "local", "--detach", "--", "true"), 125, "--detach: in mode 'local'"),
        (("--mode", "local", "--load-env", "true", "--", "true"), 125, "--load-env: mode 'local'"),
        (("--working-dir", ".", "--no-working-dir", "--", "true"), 2, "exclude each other"),
        (("--sbatch", "--no-such-thing", "--", "true"), 125, "unrecognized option"),
        (("--nodes", "0", "--", "true"), 2, "0 is not in the range"),
    ],
)
def test_what_cannot_run_submits_nothing(
    rayslurm: Rayslurm, fake_slurm: FakeSlurm, words: tuple[str, ...], code: int, says: str
) -> None:
    fake_slurm.fault("sbatch", "sbatch: unrecognized option", times=-1)
    done = rayslurm("submit", "--no-ray", *words)
    assert done.exit_code == code and says in done.stderr and "Traceback" not in done.stderr, done.output
    assert not fake_slurm.jobs() and not runs(rayslurm)


def test_a_run_that_is_left_is_found_again(rayslurm: Rayslurm, cluster: Path, fake_slurm: FakeSlurm) -> None:
    wait = f"print('begun', flush=True); import os, time\nwhile not os.path.exists({str(cluster / 'go')!r}): time.sleep(0.05)"
    left = rayslurm(
        "submit", "--detach", *NO_RAY, "--name", "long", "--", "python", "-c", f"{wait}\nprint('done')\nraise SystemExit(3)"
    )
    assert left.exit_code == 0, left.output
    name = left.stdout.strip()
    assert f"rayslurm logs -f {name}" in left.stderr and f"rayslurm cancel {name}" in left.stderr
    assert wait_until(lambda: [run["state"] for run in runs(rayslurm)] == ["running"], 60)
    assert wait_until(lambda: rayslurm("logs", name).stdout == "begun\n", 60)
    shown = rayslurm("show", "long")
    assert shown.exit_code == 0 and name in shown.stdout and "running" in shown.stdout
    (cluster / "go").write_text("")
    followed = rayslurm("logs", "-f", name[:8])
    assert followed.exit_code == 3 and followed.stdout == "begun\ndone\n", followed.output
    (row,) = runs(rayslurm, "--all")
    assert row["state"] == "ended"
    again = rayslurm("cancel", name)
    assert again.exit_code == 1 and "has ended already" in again.stderr


def test_an_interrupt_right_after_the_submission_names_the_run(
    rayslurm: Rayslurm, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = BatchBackend.start

    def start_and_interrupt(*arguments: Any) -> None:
        start(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(BatchBackend, "start", start_and_interrupt)
    fake_slurm.set(starts=False)
    left = rayslurm("submit", "--detach", "--quiet", *NO_RAY, "--", "true")
    (name,) = [run["name"] for run in runs(rayslurm)]
    assert left.exit_code == 130 and f"end it by `rayslurm cancel {name}`" in left.stderr, left.output
    assert fake_slurm.state(1) == "PENDING" and rayslurm("cancel", name).exit_code == 0


def test_json_stands_alone_on_standard_output(rayslurm: Rayslurm, fake_slurm: FakeSlurm) -> None:
    done = rayslurm("submit", "--json", *NO_RAY, "--", "sh", "-c", "echo said; exit 4")
    shown = json.loads(done.stdout)
    assert done.exit_code == shown["exit_code"] == 4 and shown["failure"] == "payload" and shown["job_id"] == "1"
    assert "said\n" in done.stderr and shown["message"] in done.stderr


def test_the_output_of_a_requeued_run_is_followed(rayslurm: Rayslurm, cluster: Path, fake_slurm: FakeSlurm) -> None:
    toml = Path("rayslurm.toml").read_text().replace("queue = {", "queue = { requeue = true,")
    Path("rayslurm.toml").write_text(toml)
    code = f"""echo "$SLURM_RESTART_COUNT begins"; until [ -e {cluster}/go ]; do sleep 0.05; done; exit 3"""
    name = rayslurm("submit", "--detach", *NO_RAY, "--", "sh", "-c", code).stdout.strip()
    command = [sys.executable, "-m", "dagster_rayslurm.cli", "logs", "-f", name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline().endswith("begins\n")
    fake_slurm.end(1, "REQUEUED")
    assert process.stdout.readline() == "1 begins\n", process.communicate(timeout=30)
    (cluster / "go").write_text("")
    _, said = process.communicate(timeout=30)
    assert process.returncode == 3 and "Slurm has requeued the job: attempt 2 begins" in said, said


def test_following_a_run_ends_when_slurm_ends_its_job(rayslurm: Rayslurm, fake_slurm: FakeSlurm) -> None:
    name = rayslurm("submit", "--detach", *NO_RAY, "--", "sh", "-c", "echo begun; exec sleep 100").stdout.strip()
    command = [sys.executable, "-m", "dagster_rayslurm.cli", "logs", "-f", name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    fake_slurm.end(1, "CANCELLED")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 125 and said.count("Error: ") == 1, said


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_cancels_the_run(cluster: Path, fake_slurm: FakeSlurm, signum: int, code: int) -> None:
    command = [sys.executable, "-m", "dagster_rayslurm.cli", "submit", *NO_RAY, "--", "sh", "-c", "echo begun; exec sleep 100"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    process.send_signal(signum)
    _, said = process.communicate(timeout=30)
    assert process.returncode == code and "Traceback" not in said, said
    assert wait_until(lambda: not fake_slurm.processes())


# ---- script


def test_the_script_is_printed_and_nothing_is_submitted(rayslurm: Rayslurm, fake_slurm: FakeSlurm, cluster: Path) -> None:
    printed = rayslurm("script", "--nodes", "3", "--gpus", "2", "--", "python", "-V")
    assert printed.exit_code == 0 and "#SBATCH --nodes=3" in printed.stdout and "#SBATCH --partition=compute" in printed.stdout
    assert not fake_slurm.calls("sbatch") and not cluster.exists()


def test_a_standalone_script_runs_without_the_package(rayslurm: Rayslurm, fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    words = ("script", "--standalone", "--no-ray", "--load-env", "export LOADED=yes", "--env", "A=it's", "--time", "5")
    printed = rayslurm(*words, "--", "sh", "-c", f'echo "$LOADED $A $(command -v python)" >{tmp_path}/said; exit 4')
    assert printed.exit_code == 0, printed.output
    path = tmp_path / "job.sh"
    path.write_text(printed.stdout)
    assert "dagster" not in printed.stdout
    done = subprocess.run(["bash", str(path)], env={**os.environ, "SLURM_JOB_ID": "1"}, check=False)
    assert done.returncode == 4 and (tmp_path / "said").read_text() == f"yes it's {sys.prefix}/bin/python\n"


def test_a_standalone_script_with_ray_is_valid_and_has_no_token_in_it(rayslurm: Rayslurm, tmp_path: Path) -> None:
    printed = rayslurm("script", "--standalone", "--nodes", "2", "--gpus", "1", "--", "python", "train.py")
    path = tmp_path / "job.sh"
    path.write_text(printed.stdout)
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    assert "ray start --head" in printed.stdout and "--num-gpus=1" in printed.stdout and "RAY_AUTH_TOKEN_PATH" in printed.stdout


# ---- ps, cancel


@pytest.mark.parametrize("parts", [(".",), ("components/cpu", "components/gpu")], ids=["whole", "components"])
def test_two_hundred_runs_are_listed_by_one_squeue(
    rayslurm: Rayslurm, fake_slurm: FakeSlurm, cluster: Path, parts: tuple[str, ...]
) -> None:
    for number in range(200):
        directory = cluster / "runs" / f"{number:08x}-train-{number:012x}"
        for part in parts:
            (directory / part).mkdir(parents=True)
            (directory / part / "status.json").write_text(json.dumps({"state": "running", "message": "on c1"}))
        (directory / "job_id").write_text(f"{number + 1}\n")
        if number % 2:
            fake_slurm.job(number + 1)
    fake_slurm.job(1000, "another")
    began = time.monotonic()
    rows = runs(rayslurm)
    assert time.monotonic() - began < 10
    assert len(fake_slurm.calls("squeue")) == 1
    assert [row["name"] for row in rows if row["kind"] == "job"] == ["another"]
    assert len(rows) == 101 and all(row["state"] == "running" for row in rows)
    assert len([row for row in runs(rayslurm, "--all") if row["state"] == "lost"]) == 100


def component_files(directory: Path, **states: str) -> None:
    """Writes the files of a run whose components have a payload each, in the given states; "" stands for a payload not begun."""
    for at, (name, state) in enumerate(states.items()):
        part = directory / "components" / name
        part.mkdir(parents=True, exist_ok=True)
        (part / "status.json").unlink(missing_ok=True)
        (part / "journal.jsonl").touch()
        if state:
            status = {"state": state, "message": f"{name} says", "at": 1000.0 + at, "runtime_pid": os.getpid()}
            (part / "status.json").write_text(json.dumps(status))


@pytest.mark.parametrize(
    ("cpu", "gpu", "state", "says"),
    [
        ("", "", "starting", ""),
        ("cluster-start", "", "cluster-start", "cpu: cpu says; gpu (starting): starting"),
        ("cluster-start", "ready", "ready", "cpu (cluster-start): cpu says; gpu: gpu says"),
        ("running", "running", "running", "cpu: cpu says; gpu: gpu says"),
        ("running", "ended", "running", "cpu: cpu says; gpu (ended): gpu says"),
        ("ended", "", "starting", "cpu (ended): cpu says; gpu: starting"),
        ("ended", "ended", "ended", "cpu: cpu says; gpu: gpu says"),
    ],
)
def test_a_run_with_a_payload_for_each_component_has_their_state(
    rayslurm: Rayslurm, fake_slurm: FakeSlurm, cluster: Path, cpu: str, gpu: str, state: str, says: str
) -> None:
    directory = cluster / "runs" / "0000aaaa-train-000000000001"
    for number in (17, 18):
        fake_slurm.job(number, label=f"17+{number - 17}", leader=17)
    component_files(directory, cpu=cpu, gpu=gpu)
    (directory / "job_id").write_text("17\n")
    (row,) = runs(rayslurm, "--all")
    assert (row["state"], row["says"], row["job_id"]) == (state, says, "17")
    assert len(runs(rayslurm)) == (state != "ended")
    assert len(fake_slurm.calls("squeue")) == 2, "one for each list"
    fake_slurm.end(17, "CANCELLED")
    (row,) = runs(rayslurm, "--all")
    assert row["state"] == ("ended" if state == "ended" else "lost")


def test_a_run_on_this_machine_has_the_state_of_its_components(rayslurm: Rayslurm, cluster: Path) -> None:
    directory = cluster.parent / "here" / "runs" / "0000aaaa-train-000000000001"
    component_files(directory, cpu="ended", gpu="running")
    assert [row["state"] for row in runs(rayslurm, "--here")] == ["running"]
    with subprocess.Popen(["true"]) as gone:
        pass
    path = directory / "components" / "gpu" / "status.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "runtime_pid": gone.pid}))
    (row,) = runs(rayslurm, "--here", "--all")
    assert (row["state"], row["says"]) == ("lost", "cpu (ended): cpu says; gpu: its runtime was killed")


def test_the_records_of_all_components_are_shown(rayslurm: Rayslurm, fake_slurm: FakeSlurm, cluster: Path) -> None:
    directory = cluster / "runs" / "0000aaaa-train-000000000001"
    component_files(directory, cpu="ended", gpu="ended")
    for code, name in enumerate(("cpu", "gpu")):
        end = {"type": "end", "reason": "exit", "exit_code": code, "usage": {"elapsed": 2.5}}
        (directory / "components" / name / "journal.jsonl").write_bytes(encode({"type": "start"}) + encode(end))
    shown = rayslurm("show", "0000aaaa")
    lines = {" ".join(line.split()) for line in shown.stdout.splitlines()}
    assert {"state ended", "exit code (cpu) 0", "exit code (gpu) 1", "elapsed (gpu) 2.5 s"} <= lines, shown.output
    records = [json.loads(line) for line in rayslurm("show", "0000aaaa", "--json").stdout.splitlines()]
    assert [(each["component"], each["type"]) for each in records] == [
        (name, kind) for name in ("cpu", "gpu") for kind in ("start", "end")
    ]


def test_a_listing_does_not_import_dagster(rayslurm: Rayslurm, fake_slurm: FakeSlurm, cluster: Path) -> None:
    """Importing Dagster takes longer than all the rest of `ps`."""
    for directory in ("runs/0000aaaa-train-1", "sessions/default-0123/1"):
        (cluster / directory).mkdir(parents=True)
    (cluster / "sessions/default-0123/1/manifest.json").write_text("{}")
    command = [sys.executable, "-X", "importtime", "-m", "dagster_rayslurm.cli", "ps", "--all", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == 2
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "dagster_rayslurm.backends.listing" in imported and not imported & {"dagster", "paramiko", "ray"}


@pytest.fixture
def running(fake_slurm: FakeSlurm, cluster: Path) -> Path:
    """The directory of a run that goes on in a session's job, and has written a line of output."""
    directory = cluster / "runs" / "0000aaaa-train-000000000001"
    directory.mkdir(parents=True)
    (directory / "status.json").write_text('{"state": "running"}')
    (directory / "stdio.jsonl").write_bytes(encode({"s": "stdout", "d": "begun\n"}))
    start = {"type": "start", "allocation": {"job_id": "17"}, "nonce": "000000000001", "attempt": 0, "at": 0.0}
    (directory / "journal.jsonl").write_bytes(encode(start))
    fake_slurm.job(17)
    return directory


def test_following_ends_when_the_run_directory_is_removed(running: Path) -> None:
    """What started a run in a session removes its directory at the end; the session's job goes on."""
    command = [sys.executable, "-m", "dagster_rayslurm.cli", "logs", "-f", "0000aaaa"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        shutil.rmtree(running)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 125 and "has ended, and its directory is removed" in said, said


def test_following_ends_when_nobody_reads_the_output(running: Path) -> None:
    script = f"{sys.executable} -m dagster_rayslurm.cli logs -f 0000aaaa | head -n 1"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        with (running / "stdio.jsonl").open("ab") as file:
            file.write(encode({"s": "stdout", "d": "more\n"}))
        assert process.communicate(timeout=60) == ("", "")


def test_a_queue_that_does_not_answer_is_one_sentence(rayslurm: Rayslurm, fake_slurm: FakeSlurm) -> None:
    fake_slurm.fault("squeue", "slurm_load_jobs error: Unable to contact slurm controller", times=-1)
    done = rayslurm("ps")
    assert done.exit_code == 1 and "squeue did not answer" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("starts", [True, False])
def test_a_run_is_cancelled(rayslurm: Rayslurm, fake_slurm: FakeSlurm, starts: bool) -> None:
    fake_slurm.set(starts=starts)
    name = rayslurm("submit", "--detach", *NO_RAY, "--", "sleep", "100").stdout.strip()
    state = "running" if starts else "pending"
    assert wait_until(lambda: [run["state"] for run in runs(rayslurm)] == [state], 60)
    if not starts:
        assert "Resources" in runs(rayslurm)[0]["says"]
        refused = rayslurm("attach", name)
        assert refused.exit_code == 1 and "is pending, so there is nothing to enter" in refused.stderr
    done = rayslurm("cancel", name)
    assert done.exit_code == 0 and "ended the run" in done.stdout, done.output
    assert wait_until(lambda: not fake_slurm.processes()) and not runs(rayslurm)


def test_a_cancelled_run_has_its_own_grace_period(
    rayslurm: Rayslurm, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_END_MARGIN", 1.0)
    Path("rayslurm.toml").write_text(
        Path("rayslurm.toml").read_text() + 'default_launcher = { kind = "bash", grace_period = 60 }\n'
    )
    program = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(3), print('saved'), exit()));"
    program += "print('begun', flush=True); time.sleep(100)"
    name = rayslurm("submit", "--detach", *NO_RAY, "--", "python", "-c", program).stdout.strip()
    assert wait_until(lambda: rayslurm("logs", name).stdout == "begun\n", 60)
    by_slurm: list[Any] = []
    monkeypatch.setattr(logs, "wait_until_gone", lambda *job: not by_slurm.append(job))
    done = rayslurm("cancel", name)
    assert done.exit_code == 0 and rayslurm("logs", name).stdout == "begun\nsaved\n", done.output
    assert not by_slurm, "the command has not waited for the end of the payload"


def test_a_requeued_run_has_ended_only_at_its_last_end(rayslurm: Rayslurm, fake_slurm: FakeSlurm, cluster: Path) -> None:
    directory = cluster / "runs" / "0000aaaa-train-000000000001"
    directory.mkdir(parents=True)
    (directory / "status.json").write_text('{"state": "running"}')
    journal = [{"type": "start", "allocation": {"job_id": "17"}}, {"type": "end"}, {"type": "start"}]
    (directory / "journal.jsonl").write_bytes(b"".join(map(encode, journal)))
    fake_slurm.job(17)
    said: list[Result] = []
    cancelling = threading.Thread(target=lambda: said.append(rayslurm("cancel", "0000aaaa")))
    cancelling.start()
    assert wait_until((directory / "cancel.json").exists)
    cancelling.join(1)
    assert cancelling.is_alive(), said
    with (directory / "journal.jsonl").open("ab") as file:
        file.write(encode({"type": "end"}))
    cancelling.join(30)
    assert said[0].exit_code == 0, said[0].output


@pytest.fixture
def arrays(fake_slurm: FakeSlurm, cluster: Path) -> Path:
    """The directory of a run with two job arrays, of which the first has ended; no runtime has written a record yet."""
    directory = cluster / "runs" / "0000aaaa-train-000000000001"
    for number in (1, 2):
        (directory / f"array-{number}").mkdir(parents=True)
    (directory / "job_id").write_text("17\n")
    fake_slurm.job(17, "rayslurm-train-1-000000000001", "COMPLETED", label="17_0", leader=17)
    fake_slurm.job(19, "rayslurm-train-2-000000000001", label="18_1", leader=18)
    return directory


def test_a_run_of_several_arrays_goes_on_after_the_first(rayslurm: Rayslurm, fake_slurm: FakeSlurm, arrays: Path) -> None:
    (run,) = runs(rayslurm)
    assert (run["name"], run["state"], run["says"]) == (arrays.name, "running", "1 elements run, 0 wait")
    assert json.loads(rayslurm("show", "--json", "0000aaaa").stdout)["state"] == "running"
    assert "running" in rayslurm("show", "0000aaaa").stdout
    fake_slurm.end(19, "COMPLETED")
    assert not runs(rayslurm)


def test_arrays_are_cancelled_by_slurm_at_once(rayslurm: Rayslurm, fake_slurm: FakeSlurm, arrays: Path) -> None:
    began = time.monotonic()
    done = rayslurm("cancel", "0000aaaa")
    assert done.exit_code == 0 and fake_slurm.state(19) == "CANCELLED", done.output
    assert time.monotonic() - began < 30, "no runtime reads the request of the whole run"


@pytest.mark.parametrize("words", [("logs", "0000aaaa"), ("logs", "-f", "0000aaaa"), ("attach", "0000aaaa", "--", "true")])
def test_arrays_have_no_single_payload(rayslurm: Rayslurm, arrays: Path, words: tuple[str, ...]) -> None:
    done = rayslurm(*words)
    assert done.exit_code and f"their files are in {arrays}/array-*/*" in done.stderr, done.output


def test_a_name_of_several_runs_is_refused(rayslurm: Rayslurm, cluster: Path) -> None:
    for name in ("0000aaaa-train-1", "0000bbbb-train-2"):
        (cluster / "runs" / name).mkdir(parents=True)
        (cluster / "runs" / name / "status.json").write_text('{"state": "ended"}')
    refused = rayslurm("show", "0000")
    assert refused.exit_code == 1 and "2 runs, sessions or jobs" in refused.stderr and "0000aaaa-train-1" in refused.stderr
    assert "no run, session or job is called 'zzzz'" in rayslurm("cancel", "zzzz").stderr
    assert "no run, session or job is called '000'" in rayslurm("show", "000").stderr, "too short for the beginning of a name"


def test_a_session_is_listed_with_the_way_to_its_cluster(fake_slurm: FakeSlurm, cluster: Path) -> None:
    fake_slurm.job(17, "session")
    directory = cluster / "sessions" / "default-0123" / "2"
    directory.mkdir(parents=True)
    way = ClusterAccess("slurm-abcd", "c1", 8265, "t0ken", 1, "17")
    said = Announcement("slurm-abcd", "17", ["c1"], 1, "00", 1, None, "c1", access=way)
    (directory / "session.json").write_text(json.dumps(asdict(said)))
    (session,) = [each for each in list_all(LocalConnection(), str(cluster)) if each.kind == "session"]
    assert (session.name, session.job_id, session.state) == ("default-0123", "17", "up")
    assert list(session.clusters.values()) == [way]
    fake_slurm.end(17, "CANCELLED")
    (session,) = [each for each in list_all(LocalConnection(), str(cluster)) if each.kind == "session"]
    assert session.over and not session.clusters


def test_the_log_of_a_session_is_printed(rayslurm: Rayslurm, fake_slurm: FakeSlurm, cluster: Path) -> None:
    fake_slurm.job(17, "session")
    directory = cluster / "sessions" / "default-0123" / "1"
    directory.mkdir(parents=True)
    (directory / "session.json").write_text(json.dumps(asdict(Announcement("slurm-abcd", "17", ["c1"], 1, "00", 1, None, "c1"))))
    (directory / "slurm.log").write_text("script\n")
    (directory / "node-0.log").write_text("runtime\n")
    assert rayslurm("logs", "default-0123").stdout == "script\nruntime\n"
    assert "only the output of a run" in rayslurm("logs", "-f", "default-0123").stderr


# ---- attach


def test_a_command_runs_in_the_environment_of_a_run(rayslurm: Rayslurm, fake_slurm: FakeSlurm, capfd: Any) -> None:
    name = rayslurm(
        "submit", "--detach", *NO_RAY, "--env", "A=it's\ttwo", "--secret-env", "HOME", "--", "sleep", "100"
    ).stdout.strip()
    assert wait_until(lambda: [run["state"] for run in runs(rayslurm)] == ["running"], 60)
    wait_until(lambda: "payload_pid" in (Path(runs(rayslurm)[0]["directory"]) / "status.json").read_text(), 60)
    capfd.readouterr()
    done = rayslurm("attach", name, "--", "sh", "-c", 'printf "%s|" "$A" "$PWD" "$DAGSTER_PIPES_CONTEXT"; exit 5')
    said = capfd.readouterr().out
    assert done.exit_code == 5, (done.output, said)
    a, directory, pipes, _ = said.split("|")
    assert a == "it's\ttwo" and directory.endswith(f"{name}/work") and pipes == ""
    assert rayslurm("attach", name, "--", "sh", "-c", "kill -TERM $$").exit_code == 128 + signal.SIGTERM
    written = Path(runs(rayslurm)[0]["directory"]).glob
    assert not [*written("attach.*")]
    for number in (signal.SIGTERM, signal.SIGHUP):
        command = [sys.executable, "-m", "dagster_rayslurm.cli", "attach", name, "--", "sh", "-c", "echo there; exec cat"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "there\n" and [*written("attach.*")]
            process.send_signal(number)
            assert process.wait(30) == 128 + number and not [*written("attach.*")]
    rayslurm("cancel", name, "--now")


def test_one_component_of_a_run_is_entered(rayslurm: Rayslurm, fake_slurm: FakeSlurm, cluster: Path, capfd: Any) -> None:
    directory = cluster / "runs" / "0000aaaa-train-000000000001"
    for number, name in enumerate(("cpu", "gpu")):
        fake_slurm.job(17 + number, label=f"17+{number}", leader=17)
        part = directory / "components" / name
        (part / "work").mkdir(parents=True)
        way = ClusterAccess(f"c-{name}", f"n{number}", 8265 + number, "", os.getpid(), str(17 + number), hosts=[f"n{number}"])
        (part / "cluster.json").write_text(json.dumps(asdict(way)))
        (part / "status.json").write_text(json.dumps({"state": "running", "payload_pid": os.getpid()}))
        start = {"type": "start", "allocation": {"job_id": str(17 + number), "nodes": [f"n{number}"]}}
        (part / "journal.jsonl").write_bytes(encode(start))
    (directory / "job_id").write_text("17\n")
    refused = rayslurm("attach", "0000aaaa", "--jupyter")
    assert refused.exit_code == 1 and "name one of them: 0000aaaa-train-000000000001/cpu, 0000" in refused.stderr, refused.output
    done = rayslurm("attach", "0000aaaa/gpu", "--", "pwd")
    assert done.exit_code == 0 and capfd.readouterr().out.endswith("components/gpu/work\n"), done.output
    (call,) = fake_slurm.calls("srun")
    assert {"--jobid=18", "--nodelist=n1"} <= {*call} and "--het-group=0" not in call


# ---- plain jobs of Slurm


def test_a_name_of_several_jobs_ends_none_of_them(rayslurm: Rayslurm, fake_slurm: FakeSlurm) -> None:
    fake_slurm.job(17, "train")
    fake_slurm.job(18, "train")
    refused = rayslurm("cancel", "train")
    assert refused.exit_code == 1 and "train (job 17), train (job 18); name one of them" in refused.stderr
    assert not fake_slurm.cancelled
    assert rayslurm("cancel", "18").exit_code == 0 and fake_slurm.jobs("RUNNING") == [17]


def test_a_task_of_an_array_is_cancelled_alone(rayslurm: Rayslurm, fake_slurm: FakeSlurm) -> None:
    for number, label in ((17, "17_3"), (18, "17_1"), (19, "17_2")):  # The last task has the number of the array.
        fake_slurm.job(number, "many", label=label)
    assert "Slurm job 17_1" in rayslurm("cancel", "17_1").stdout and fake_slurm.jobs("RUNNING") == [17, 19]
    assert rayslurm("cancel", "17_3").exit_code == 0 and fake_slurm.jobs("RUNNING") == [19]
    fake_slurm.job(17, "many", "PENDING", label="17_[3-5%1]")
    assert rayslurm("cancel", "17_[3-5%1]").exit_code == 0 and fake_slurm.jobs("RUNNING") == [19]
    assert fake_slurm.jobs("CANCELLED") == [17, 18]


def test_a_heterogeneous_job_is_entered_at_its_first_component(rayslurm: Rayslurm, fake_slurm: FakeSlurm) -> None:
    for number in (17, 18):
        fake_slurm.job(number, label=f"17+{number - 17}", leader=17)
    fake_slurm.job(20)
    assert rayslurm("attach", "17", "--", "true").exit_code == 0 and rayslurm("attach", "20", "--", "true").exit_code == 0
    assert ["--het-group=0" in call for call in fake_slurm.calls("srun")] == [True, False]


def test_waiting_for_a_dashboard_outlasts_a_queue_that_does_not_answer(
    rayslurm: Rayslurm, fake_slurm: FakeSlurm, cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_slurm.fault("squeue", "slurmctld is away")
    first = rayslurm("dashboard", "--wait", "0000aaaa")
    assert first.exit_code == 1 and "squeue did not answer" in first.stderr, "it waits for nothing"
    directory = cluster / "runs" / "0000aaaa-train-000000000001"
    directory.mkdir(parents=True)
    (directory / "job_id").write_text("17\n")
    fake_slurm.job(17, state="PENDING", reason="Resources")
    steps = iter([lambda: fake_slurm.fault("squeue", "slurmctld is away"), lambda: fake_slurm.end(17, "CANCELLED")])

    def step(_: float) -> None:
        next(steps)()  # type: ignore[no-untyped-call]

    monkeypatch.setattr(ray, "time", SimpleNamespace(sleep=step))
    done = rayslurm("dashboard", "--wait", "0000aaaa")
    lines = done.stderr.splitlines()
    assert len(lines) == 3 and "pending" in lines[0] and "slurmctld is away; waiting" in lines[1] and "lost" in lines[2], (
        lines,
        done.exception,
    )
