"""Tests: programs of Ray and programs with a screen work on a Ray cluster on Slurm, started from a terminal of this machine."""

import contextlib
import os
import pty
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..conftest import wait_until
from .fixtures import Site
from .test_dashboard import dashboard

SESSION = ("session", "start", "--partition", "all", "--nodes", "4", "--mem", "2500M", "--cpus", "1", "--time", "10", "--json")
# Python waits in the payload's place until it is stopped.
WAITS = "import time; print('begun', flush=True); time.sleep(600)"
COUNTS = "import ray; ray.init(logging_level='error'); print(len(ray.nodes()), 'nodes')"


@pytest.fixture
def session(site: Site) -> Iterator[str]:
    """The name of a session with a Ray cluster on four nodes."""
    started = site.rayslurm(*SESSION, "--name", "four")
    assert started.returncode == 0, started.stderr
    yield "four"
    assert site.rayslurm("cancel", "four").returncode == 0


@contextlib.contextmanager
def on_screen(site: Site, directory: Path, *words: str) -> Iterator["Screen"]:
    """A command of `rayslurm` in a terminal of tmux, whose screen can be read."""
    if shutil.which("tmux") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("there is no tmux; run: apt-get install tmux")
    screen = Screen(["tmux", "-S", str(directory / "tmux"), "-f", os.devnull])
    command = [sys.executable, "-m", "dagster_rayslurm.cli", *words]
    size = ["-x", "150", "-y", "40"]
    subprocess.run([*screen.tmux, "new-session", "-d", *size, *command], env={**site.environment, "TERM": "screen"}, check=True)
    try:
        yield screen
    finally:
        subprocess.run([*screen.tmux, "kill-server"], capture_output=True)


class Screen:
    """The screen of one program in tmux."""

    def __init__(self, tmux: list[str]) -> None:
        self.tmux = tmux

    def text(self) -> str:
        """What the screen shows; "" once the program has ended."""
        return subprocess.run([*self.tmux, "capture-pane", "-p"], capture_output=True, text=True).stdout

    def press(self, *keys: str) -> None:
        subprocess.run([*self.tmux, "send-keys", *keys], check=True)

    def shows(self, pattern: str, seconds: float = 60) -> bool:
        return bool(wait_until(lambda: re.search(pattern, self.text()), seconds))


def test_top_on_four_nodes(site: Site, session: str, tmp_path: Path) -> None:
    job = site.rayslurm("job", "submit", session, "--no-wait", "--submission-id", "sleeper", "--", "sleep", "600")
    assert job.returncode == 0, job.stderr
    with on_screen(site, tmp_path, "top", session) as screen:
        assert screen.shows("4 of 4 nodes alive"), screen.text()
        assert all(re.search(rf"{name} +.* (alive|head)", screen.text()) for name in ("c1", "c2", "g1", "g2")), screen.text()
        screen.press("j", "Enter")
        assert screen.shows(r"CPU 1, memory \d"), screen.text()
        screen.press("t")
        assert screen.shows(r"tasks \(\d+\)"), screen.text()
        screen.press("Tab", "Tab")
        assert screen.shows(r"jobs \(1\)[\s\S]*sleeper +.* RUNNING +.* sleep 600"), screen.text()
        screen.press("q")
        assert wait_until(lambda: not screen.text()), screen.text()
    assert site.rayslurm("job", "stop", session, "sleeper").returncode == 0


def test_jobs_of_ray(site: Site, session: str, tmp_path: Path) -> None:
    """By `rayslurm job`, and by Ray's own programs at the URL of `rayslurm dashboard`."""
    submitted = site.rayslurm("job", "submit", session, "--no-wait", "--submission-id", "one", "--", "python", "-uc", WAITS)
    assert submitted.returncode == 0, submitted
    assert wait_until(lambda: "begun" in site.rayslurm("job", "logs", session, "one").stdout, 60)
    assert "RUNNING" in site.rayslurm("job", "status", session, "one").stdout
    assert "submission_id='one'" in site.rayslurm("job", "list", session).stdout
    command = [sys.executable, "-m", "dagster_rayslurm.cli", "job", "logs", session, "-f", "one"]
    with subprocess.Popen(command, env=site.environment, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None and any("begun" in line for line in following.stdout)
        assert site.rayslurm("job", "stop", session, "one").returncode == 0
        assert following.wait(60) == 0
    assert "was stopped" in site.rayslurm("job", "status", session, "one").stdout
    with dashboard(site, session, tmp_path) as (url, _, _):
        environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}

        def ray(*words: str) -> str:
            program = [sys.executable, "-m", "ray.scripts.scripts", *words]
            done = subprocess.run(program, env=environ, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done
            return done.stdout

        assert "4 nodes" in ray("job", "submit", "--address", url.rstrip("/"), "--", "python", "-c", COUNTS)
        assert ray("list", "nodes", "--address", url.rstrip("/")).count("ALIVE") == 4


def test_an_interactive_shell(site: Site, session: str) -> None:
    """With a terminal, as a person types: the shell knows the Ray cluster, and its exit code is passed on."""
    terminal, ours = pty.openpty()
    command = [sys.executable, "-m", "dagster_rayslurm.cli", "attach", session]
    with subprocess.Popen(command, env=site.environment, stdin=ours, stdout=ours, stderr=ours, start_new_session=True) as shell:
        os.close(ours)
        said = b""

        def read_until(text: bytes, seconds: float = 60) -> None:
            nonlocal said
            deadline = time.monotonic() + seconds
            while text not in said:
                assert time.monotonic() < deadline, said
                with contextlib.suppress(OSError):
                    said += os.read(terminal, 65536)

        read_until(b"(four")
        os.write(terminal, f'python -c "{COUNTS}"\n'.encode())
        read_until(b"4 nodes")
        os.write(terminal, b"sleep 300\n")
        read_until(b"sleep 300\r\n")
        os.write(terminal, b"\x03exit 7\n")  # Ctrl-C ends the command, and not the shell.
        with contextlib.suppress(OSError):
            while os.read(terminal, 65536):
                pass
        assert shell.wait(30) == 7
    os.close(terminal)


def test_a_standalone_script_with_ray(site: Site) -> None:
    """The script runs on the cluster by `sbatch` alone."""
    words = ("--nodes", "2", "--mem", "2500M", "--cpus", "1", "--time", "5", "--no-working-dir")
    printed = site.rayslurm("script", "--standalone", *words, "--", "python", "-c", COUNTS)
    assert printed.returncode == 0, printed.stderr
    site.connection.make_dir(site.base)
    site.connection.write(f"{site.base}/job.sh", printed.stdout.encode())
    site.sh('cd "$1" && sbatch --wait --output=said job.sh', site.base)
    assert "2 nodes" in site.connection.read(f"{site.base}/said", 0, 65536).decode()
