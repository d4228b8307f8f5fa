"""dagster-slurm, installed into an environment of its own, in a process of its own, on the same stack."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from stack.settings import ROOT

from .edge import Edge
from .runs import MARKS, Run, Shape, measured

_ENVIRONMENT = ROOT / ".bench" / "peer"
_PACKAGE = "dagster-slurm"
_REQUIREMENT = f"{_PACKAGE}>=1.22"
_WORKER = Path(__file__).with_name("peer_worker.py")


def installed_version() -> str:
    """The version of the package there."""
    program = f"from importlib.metadata import version; print(version({_PACKAGE!r}))"
    return subprocess.run([python(), "-c", program], check=True, capture_output=True, text=True).stdout.strip()


def python() -> str:
    """The Python of the peer's environment, which is made the first time.

    Raises:
        ClickException: the package cannot be installed.
    """
    interpreter, complete = _ENVIRONMENT / "bin" / "python", _ENVIRONMENT / "complete"
    if not complete.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(_ENVIRONMENT)], check=True)
        install = [str(interpreter), "-m", "pip", "install", "--quiet", _REQUIREMENT]
        done = subprocess.run(install, capture_output=True, text=True)
        if done.returncode != 0:
            raise click.ClickException(f"{_REQUIREMENT} cannot be installed; --no-peer measures without it:\n{done.stderr}")
        complete.touch()
    return str(interpreter)


class Peer:
    """A process that runs payloads with dagster-slurm, one after the other.

    Args:
        edge: the stack.
        directory: on the edge, for its files.
        partition: where its jobs run.
        scratch: a directory here, whose path must be short: sockets are made in it.
        key: the private key to log in with, if not the stack's.
    """

    def __init__(self, edge: Edge, directory: str, partition: str, scratch: str, key: str | None = None) -> None:
        self._edge = edge
        self._directory = directory
        self._scratch = scratch
        self._runs: list[Run] = []
        # A variable that sshd lets through, and all that it leaves behind on the edge has.
        self._mark = f"LC_RAYSLURM_BENCH={secrets.token_hex(8)}"
        ssh = edge.resource(key=key)
        self._target = ssh.host
        site = {
            "host": ssh.host,
            "port": ssh.port,
            "user": ssh.user,
            "key_path": ssh.key_path,
            "known_hosts_file": ssh.known_hosts_file,
            "mark": self._mark,
            "partition": partition,
            "remote_base": f"{directory}/peer",
            "env_path": f"{directory}/peer-env",
            "scratch": scratch,
        }
        self._log = open(os.path.join(scratch, "peer.log"), "w+")
        self._process = subprocess.Popen(
            [python(), str(_WORKER), json.dumps(site)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
            env={**os.environ, "DAGSTER_SLURM_SSH_CONTROL_DIR": scratch},
        )
        # What it expects of an environment that is already there.
        prefix = edge.env["RAYSLURM_ENV_PATH"]
        activate = f"echo 'export PATH={prefix}/bin:$PATH' > activate.sh"
        edge.shell(f"mkdir -p {directory}/peer-env && cd {directory}/peer-env && ln -s {prefix} env && {activate}")
        self.label = f"dagster-slurm {self._answer()['version']}"

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def run(self, shape: Shape) -> Run:
        """One payload with marks; what leaks is ended, so that the next run is as good as the first."""
        try:
            return self.run_only(shape)
        finally:
            self.end_leaked()

    def run_only(self, shape: Shape) -> Run:
        """One payload with marks, and nothing after it."""
        marks = f"{self._directory}/peer-{len(self._runs)}.json"
        self._runs.append(measured(self._edge, marks, lambda: self._order(shape, MARKS, shape.environment(marks))))
        return self._runs[-1]

    def run_shared(self, shape: Shape) -> Run:
        """One payload with marks, on a Ray cluster that its Dagster run has for its own."""
        before = self._edge.controller_calls()
        (run,) = self.run_several(shape, 1)
        return replace(run, calls=max(0, self._edge.controller_calls() - before))

    def run_several(self, shape: Shape, count: int) -> list[Run]:
        """Payloads with marks, one after the other on one Ray cluster; when its nodes are free again is not looked at."""
        paths = [f"{self._directory}/peer-shared-{number}.json" for number in range(count)]
        order = {
            "payload": str(MARKS),
            "several": [shape.environment(path) for path in paths],
            "nodes": shape.nodes,
            "mem": shape.memory,
        }
        try:
            times = self._ask(order)["times"]
            # A process that it has left on the edge cancels the job, and is not to be ended before that.
            self._edge.wait_until_idle()
        finally:
            self.end_leaked()
        runs = []
        for path, each in zip(paths, times, strict=True):
            runs.append(Run(each["start"], each["returned"], self._edge.read_json(path), each["returned"]))
        self._runs += runs
        return runs

    def run_unmarked(self, shape: Shape, payload: Path, **env: str) -> tuple[float, list[float]]:
        """Another payload: seconds that its `run()` took, and how late the messages were that have a time in them."""
        answer = self._ask({"payload": str(payload), "nodes": shape.nodes, "ray": shape.ray, "mem": shape.memory, "env": env})
        return answer["returned"] - answer["start"], answer["late"]

    def end_leaked(self) -> None:
        """End what has been left running on the edge."""
        self._edge.end_marked(self._mark)

    def close(self) -> None:
        """End the process and all that it started, and remove what its jobs left on the nodes."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        for control in Path(self._scratch).glob("cm-*"):
            subprocess.run(["ssh", "-S", str(control), "-O", "exit", self._target], capture_output=True)
        self.end_leaked()
        leavings = [f"/tmp/r{run.job}-*" for run in self._runs]
        self._edge.remove_on_nodes([*leavings, "/tmp/dagster-slurm-ray-ports"])

    def _order(self, shape: Shape, payload: Path, env: dict[str, str]) -> tuple[float, float]:
        """The times before and after its `run()`, by its own clock."""
        answer = self._ask({"payload": str(payload), "nodes": shape.nodes, "ray": shape.ray, "mem": shape.memory, "env": env})
        return answer["start"], answer["returned"]

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "it ended"}
        if "error" in answer:
            self._log.seek(0)
            raise RuntimeError(f"dagster-slurm: {answer['error']}; it said:\n{self._log.read()[-4000:]}")
        return answer


@contextlib.contextmanager
def peer(edge: Edge, directory: str, partition: str, scratch: str, key: str | None = None) -> Iterator[Peer]:
    """A peer for a while."""
    other = Peer(edge, directory, partition, scratch, key)
    try:
        yield other
    finally:
        other.close()
