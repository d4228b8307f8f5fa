"""`terminal.ps`, `terminal.dashboard` and `terminal.submit`: commands of `rayslurm`, each a process of its own with a login."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..figures import Figure, Options, Sample
from ..parties.edge import Edge, Key
from ..parties.runs import MEMORY, RAY_MEMORY
from ..steps import alternate, base_dir, timed

_RUNS = 200
_PS_BAR, _DASHBOARD_BAR, _SUBMIT_BAR = 1.0, 1.5, 0.3
_STEP = Path(__file__).with_name("terminal_step.py")
_PATIENCE = 60.0
# Run directories as runs leave them: half have ended, half have a job that Slurm does not know any more.
_MAKE_RUNS = """
for n in $(seq 1 {count}); do
    dir={base}/runs/$(printf 'submit-train-%012x' "$n"); mkdir -p "$dir"; cd "$dir"
    printf '{{"state": "%s", "message": "on c1", "at": 1}}' "$([ $((n % 2)) = 0 ] && echo ended || echo running)" > status.json
    echo $((900000 + n)) > job_id; : > journal.jsonl; : > stdio.jsonl; echo '{{}}' > payload.json
done
"""


class _Terminal:
    """Runs `rayslurm` on the stack, with a base directory of its own there."""

    def __init__(self, edge: Edge, directory: str, scratch: str) -> None:
        self.base = f"{directory}/terminal"
        own = {"RAYSLURM_REMOTE_BASE": self.base, "RAYSLURM_BASE": f"{scratch}/here"}
        self.environ = {**os.environ, **edge.env, **own}

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "dagster_rayslurm.cli", *words]

    def run(self, *words: str, **variables: str) -> str:
        """What a command prints; raises CalledProcessError if it fails."""
        environ = {**self.environ, **variables}
        return subprocess.run(self.command(*words), env=environ, check=True, stdout=subprocess.PIPE, text=True).stdout


def ps(options: Options) -> Figure:
    """`rayslurm ps --all` over many runs, and how often it asks Slurm; beside ssh with squeue and cat."""
    edge, ours, by_hand = Edge(), list[float](), list[float]()
    with base_dir() as scratch, edge.directory() as directory, edge.key(scratch, "ours", directory) as key:
        terminal = _Terminal(edge, directory, scratch)
        edge.shell(_MAKE_RUNS.format(count=_RUNS, base=terminal.base))
        listed = terminal.run("ps", "--all").count("submit-train-")  # Writes bytecode.

        def ask() -> None:
            ours.append(timed(lambda: terminal.run("ps", "--all"))[0])

        def look() -> None:
            by_hand.append(timed(lambda: _ssh(edge, f"squeue --me; cat {terminal.base}/runs/*/status.json"))[0])

        alternate(options.repeat(9), ask, look)
        calls = _calls_of_slurm(edge, key, terminal)
    problem = None if listed == _RUNS and calls == 1 else f"{listed} runs were listed, by {calls} calls of squeue"
    mine = Sample.of(f"rayslurm ps, {_RUNS} runs", ours)
    return Figure("terminal.ps", Sample.of("ssh: squeue and cat", by_hand), mine, mine, _PS_BAR, problem=problem)


def _calls_of_slurm(edge: Edge, key: Key, terminal: _Terminal) -> int:
    """Returns the number of squeue that one `ps` calls."""
    before = edge.calls(key)["squeue"]
    terminal.run("ps", "--all", SLURM_EDGE_NODE_KEY_PATH=key.path)
    return edge.calls(key)["squeue"] - before


def _ssh(edge: Edge, command: str) -> None:
    """Runs a command on the edge node by the `ssh` program, with a login of its own."""
    ssh = edge.resource()
    known = ["-o", f"UserKnownHostsFile={ssh.known_hosts_file}", "-o", "ControlPath=none", "-o", "LogLevel=ERROR"]
    words = ["ssh", *known, "-i", str(ssh.key_path), "-p", str(ssh.port), f"{ssh.user}@{ssh.host}", command]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def dashboard(options: Options) -> list[Figure]:
    """From `rayslurm dashboard` to its URL, and to the first answer of Ray."""
    edge, to_url, to_answer = Edge(), list[float](), list[float]()
    with base_dir() as scratch, edge.directory() as directory:
        terminal = _Terminal(edge, directory, scratch)
        size = ("--mem", RAY_MEMORY, "--cpus", "2", "--partition", options.partition, "--time", "20")
        terminal.run("session", "start", "--name", "bench", "--idle-timeout", "60", *size)
        try:
            for number in range(options.repeat(9) + 1):
                began = time.perf_counter()
                with _url(terminal) as url:
                    seconds = time.perf_counter() - began
                    with urllib.request.urlopen(f"{url}api/version", timeout=_PATIENCE) as answer:
                        json.load(answer)
                    if number:  # The first writes bytecode.
                        to_url.append(seconds)
                        to_answer.append(time.perf_counter() - began)
        finally:
            terminal.run("cancel", "bench")
    first, answered = Sample.of("to the URL", to_url), Sample.of("to Ray's first answer", to_answer)
    return [Figure("terminal.dashboard", None, first, first, _DASHBOARD_BAR, also=(answered,))]


@contextlib.contextmanager
def _url(terminal: _Terminal) -> Iterator[str]:
    """Yields the URL of `rayslurm dashboard bench`, which runs inside the block."""
    process = subprocess.Popen(
        terminal.command("dashboard", "bench"), env=terminal.environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.communicate()


def submit(options: Options) -> Figure:
    """`rayslurm submit` of a command without Ray, and an asset in mode "slurm" with the same, each a process by turns."""
    edge, ours, dagster, in_step = Edge(), list[float](), list[float](), list[float]()
    with base_dir() as scratch, edge.directory() as directory:
        terminal = _Terminal(edge, directory, scratch)
        size = ("--mem", MEMORY, "--cpus", "1", "--partition", options.partition, "--time", "10")
        words = ("submit", "--no-ray", "--no-working-dir", "--quiet", *size, "--", "hostname")
        step = [sys.executable, str(_STEP), options.partition, MEMORY, edge.env["RAYSLURM_ENV_PATH"], terminal.base]

        def by_submit() -> None:
            ours.append(timed(lambda: terminal.run(*words))[0])
            edge.wait_until_idle()

        def by_dagster() -> None:
            seconds, said = timed(lambda: _output(step, terminal))
            dagster.append(seconds)
            in_step.append(float(json.loads(said.rpartition("SECONDS ")[2])))
            edge.wait_until_idle()

        by_submit()  # Sends the runtime, and writes bytecode.
        by_dagster()
        del ours[:], dagster[:], in_step[:]
        alternate(options.repeat(9), by_submit, by_dagster)
    return Figure(
        "terminal.submit",
        Sample.of('process of an asset, mode="slurm"', dagster),
        Sample.of("rayslurm submit", ours),
        Sample.of("difference", [mine - theirs for mine, theirs in zip(ours, dagster, strict=True)]),
        _SUBMIT_BAR,
        also=(Sample.of("run() inside the asset", in_step),),
    )


def _output(command: Sequence[str], terminal: _Terminal) -> str:
    """Returns what a command prints on standard output; its other output goes nowhere."""
    done = subprocess.run(command, env=terminal.environ, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return done.stdout
