"""The simulated cluster: slurmctld, an edge node behind SSH, compute nodes, and their shared file system.

slurmctld is the model of the fake Slurm. Files are real files in a directory of this history, so that the package's own readers
and writers work on them; another host sees them late, as NFS clients do. Jobs are simulated processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dagster_rayslurm.edge import files, processes
from dagster_rayslurm.ssh import errors
from dagster_rayslurm.ssh.base import ConnectionFailed
from dagster_rayslurm.ssh.config import SSHConnectionResource
from dagster_rayslurm.ssh.connection import SSHConnection

from ..fake_slurm import model
from .world import EPOCH, Host, Process, World

NOTICED = 15.0
"""Seconds after which a client notices that its connection is dead, and after which the edge node does, at most."""
QUICK = ("files", "sessions", "base_directory")
"""Modules of `edge` whose functions take no time on the edge node."""
PROGRAMS = {"sbatch", *model.PROGRAMS}

_run = processes.run

SSH = SSHConnectionResource(host="edge", user="dev")

Job = Callable[["Cluster", int], int]
"""What the batch script of a job does on its first node; returns its exit code."""


@dataclass
class Network:
    """The path between Dagster's host and the edge node.

    Attributes:
        latency: seconds for one direction.
        up: whether anything gets through.
        losses: how many of the next answers are lost, each with its connection.
    """

    latency: float = 0.02
    up: bool = True
    losses: int = 0


@dataclass
class View:
    """What one host sees of the shared files: each perhaps as it was up to `lag` seconds ago.

    A new file may stay hidden, a file may lack its last lines, or show zeros where its new pages are to come.
    """

    world: World
    lag: float = 0.0
    _seen: dict[tuple[str, str], tuple[float, Any]] = field(default_factory=dict)
    _partial: set[str] = field(default_factory=set)  # Files whose last view was incomplete.

    def look(self, path: str, what: str, now: Callable[[str], Any]) -> Any:
        """What `now(path)` returns, or returned some seconds ago; `what` names the question."""
        if not self.lag:
            return now(path)
        until, found = self._seen.get((path, what), (0.0, None))
        if self.world.now >= until:
            found = now(path)
            self._seen[path, what] = self.world.now + self.world.random.uniform(0.0, self.lag), found
        return found

    def read(self, path: str, offset: int = 0, limit: int = 1 << 24) -> bytes:
        """Bytes of a file, b"" if it is not there."""
        if not self.lag:
            return files.read(path, offset, limit)
        data: bytes = self.look(path, "read", lambda _: self._half_new(path, files.read(path, 0, 1 << 24)))
        return data[offset : offset + limit]

    def _half_new(self, path: str, data: bytes) -> bytes:
        """Some content of a file that grows by appended lines: all of it, without its end, or with a hole at its end."""
        how = self.world.random.random()
        if how < 0.6 or not path.endswith(".jsonl") or not data or path in self._partial:
            self._partial.discard(path)  # All is in sight after twice the lag.
            return data
        self._partial.add(path)
        known = len(self._seen.get((path, "read"), (0.0, b""))[1])
        cut = self.world.random.randint(min(known, len(data)), len(data))
        return data[:cut] if how < 0.9 else data[:cut] + b"\0" * (len(data) - cut)

    def forget(self, *paths: object) -> None:
        """A client of NFS knows its own changes."""
        for path in paths:
            for name in (path, os.path.dirname(path)) if isinstance(path, str) else ():
                for what in ("read", "modified", "names"):
                    self._seen.pop((name, what), None)


@dataclass(eq=False)
class Call:
    """A call that the edge node works on: who waits for it, who works, and who is woken at its end."""

    client: Process
    worker: Process
    waiters: list[Process]


class Cluster:
    """One cluster of a history.

    Args:
        directory: for the files of the cluster; empty.
        job: what each job runs.
        settings: override entries of `model.FIRST_STATE`.

    Attributes:
        down_until: time until which slurmctld does not answer.
        launches: the ids of the jobs that have started, one for each start.
    """

    def __init__(self, world: World, directory: str, job: Job, **settings: Any) -> None:
        self.world, self.directory, self.network, self.down_until = world, directory, Network(), 0.0
        self.edge, self.node = Host("edge"), Host("c1")
        self.edge_view, self.node_view = View(world), View(world)
        self.state: model.State = {**model.FIRST_STATE, "jobs": {}, "min_job_age": 300.0, "kill_wait": 30.0, **settings}
        self.launches: list[int] = []
        self.calls: list[Call] = []
        """What the edge node works on."""
        self._job = job
        self._scripts: dict[int, Process] = {}

    def connection(self) -> SSHConnection:
        """A connection of a Dagster process, which has logged in before."""
        return _Connection(self)

    # -- Slurm

    def now(self) -> float:
        return EPOCH + self.world.now

    def change(self, function: Callable[..., Any], *args: Any) -> Any:
        """Change the state of slurmctld, and carry out what follows: scripts start, and get signals."""
        result = function(self.state, *args)
        for job_id in model.launches(self.state):
            name = f"job {job_id}"
            self.launches.append(job_id)
            self.world.say(f"Slurm starts {name} on {model.first_of(self.state, job_id)['nodes']}")
            self._scripts[job_id] = self.world.spawn(name, self.node, lambda job_id=job_id: self._run_script(job_id))
        for job_id, script in list(self._scripts.items()):
            kill_at = model.killed_at(self.state, model.first_of(self.state, job_id))
            if kill_at is not None and script.alive:
                del self._scripts[job_id]
                self.world.spawn(f"slurmd {job_id}", self.node, lambda s=script, j=job_id, k=kill_at: self._end_script(j, s, k))
        return result

    def alive(self) -> list[int]:
        """The ids of the jobs that are not over."""
        return [job["id"] for job in self.state["jobs"].values() if job["state"] not in model.TERMINAL]

    def end(self, job_id: int, final: str, reason: str = "None") -> None:
        """End a job, as Slurm or an administrator does."""
        self.world.say(f"job {job_id} becomes {final}")
        self.change(model.end, job_id, final, self.now(), reason)

    def lose_node(self) -> None:
        """The node of all jobs is reset: their processes are gone at once, and Slurm finds out after a while."""
        for job_id in self.kill_scripts():
            self.world.spawn(f"slurmctld {job_id}", self.edge, lambda j=job_id: self._find_node_lost(j))

    def kill_scripts(self) -> list[int]:
        """Kill the scripts of all jobs; returns the ids of the jobs."""
        killed = list(self._scripts)
        for script in self._scripts.values():
            self.world.kill(script)
        self._scripts.clear()
        return killed

    def _find_node_lost(self, job_id: int) -> None:
        self.world.sleep(self.world.random.uniform(1.0, 60.0))
        job = model.first_of(self.state, job_id)
        self.end(job_id, "REQUEUED" if job["requeue"] else "NODE_FAIL")
        self.change(model.script_ended, job_id, -9, self.now())

    def _run_script(self, job_id: int) -> int:
        code = self._job(self, job_id)
        self._scripts.pop(job_id, None)
        self.world.say(f"script of job {job_id} ends with {code}")
        self.change(model.script_ended, job_id, code, self.now())
        return code

    def _end_script(self, job_id: int, script: Process, kill_at: float) -> None:
        if kill_at > self.now():
            self.world.interrupt(script, Terminated())
        while script.alive and self.now() < kill_at:
            self.world.sleep(0.5)
        if script.alive:
            self.world.kill(script)
            self.change(model.script_ended, job_id, -9, self.now())

    # -- the edge node

    def run(
        self,
        command: Sequence[str],
        stdin: bytes = b"",
        timeout: float | None = None,
        environ: Mapping[str, str] | None = None,
        directory: str = "",
    ) -> tuple[int | None, bytes, bytes]:
        """Run a command on the edge node; stands for `edge.processes.run`."""
        words = list(command)
        while words[:1] == ["env"]:
            words = words[1:]
            while words and (words[0].startswith("-") or "=" in words[0]):
                words = words[2:] if words[0] == "-u" else words[1:]
        program = words[0]
        self.world.sleep(self.world.random.uniform(0.01, 0.3))
        if program == "tail":
            return 0, self.edge_view.read(words[-1])[-65536:], b""
        if program == "touch":
            return 0, b"", b""
        if program not in PROGRAMS:
            raise AssertionError(f"the simulated edge node has no {program}: {command}")
        if self.world.now < self.down_until:
            self.world.sleep(min(30.0, 30.0 if timeout is None else timeout))
            return 1, b"", b"%s: error: Unable to contact slurm controller (connect failure)\n" % program.encode()
        caller = model.Caller(environ or {}, directory or self.directory, os.getuid())
        if program == "sbatch":
            answer = self._sbatch(words[1:], caller)
        else:
            answer = self.change(lambda state: model.PROGRAMS[program](state, words[1:], caller, self.now()))
        self.world.sleep(self.world.random.uniform(0.0, 0.1))
        return answer.code, answer.out.encode(), answer.err.encode()

    def _sbatch(self, words: list[str], caller: model.Caller) -> model.Answer:
        _, paths = model.options_of(words)
        script = files.read(os.path.join(caller.directory, paths[0]), 0, 1 << 20)
        answer: model.Answer = self.change(model.sbatch, words, script.decode(), caller, self.now())
        self.world.say(f"sbatch: {answer.out.strip() or answer.err.strip()}")
        return answer

    def call(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Call a function of `edge` in the current process, which runs on the edge node."""
        if function is files.read:
            return self.edge_view.read(*arguments)
        if function is _run:
            return self.run(*arguments)
        if function in (files.modified, files.names):
            found = self.edge_view.look(arguments[0], function.__name__, lambda path: _outcome(function, path))
            if isinstance(found, OSError):
                raise found
            return found
        self.edge_view.forget(*arguments)
        return function(*arguments)

    def end_agents(self, client: Process) -> None:
        """A client is gone: the edge node notices that, at once or late, and kills the commands that it runs for the client."""
        left = [call for call in self.calls if call.client is client or call.client in client.threads]

        def work() -> None:
            self.world.sleep(self.world.random.choice([0.0, 0.2, NOTICED]))
            for call in left:
                self.world.kill(call.worker)
                self.world.notify(call.waiters)

        self.world.spawn("agent's end", self.edge, work)


class Terminated(BaseException):
    """SIGTERM, in the script of a job."""


def _outcome(function: Callable[[str], Any], path: str) -> Any:
    try:
        return function(path)
    except OSError as error:
        return error


class _Connection(SSHConnection):
    """The package's own connection, with its retries, over a simulated login and agent."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(SSH, lambda _: _Login(cluster))
        self._cluster = cluster
        self._ever_connected = True

    def _start_agent(self, transport: Any) -> Any:
        self._cluster.world.sleep(3 * self._cluster.network.latency)
        if not self._cluster.network.up:
            raise errors.gone(self.ssh)
        return _Agent(self._cluster, self.ssh)

    def close(self) -> None: ...


class _Login:
    """Stands for one SSH login."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        cluster.world.sleep(4 * cluster.network.latency)
        if not cluster.network.up:
            cluster.world.sleep(cluster.world.random.uniform(0.1, 10.0))
            raise ConnectionFailed("dev@edge: no route to host", temporary=True)

    def alive(self) -> bool:
        return self._cluster.network.up

    def close(self) -> None: ...


class _Agent:
    """Stands for the client of the agent on the edge node."""

    def __init__(self, cluster: Cluster, ssh: SSHConnectionResource) -> None:
        self._cluster, self._world, self._ssh = cluster, cluster.world, ssh
        self.lost = False
        self.heard = 1000.0 + self._world.now

    def submit(self, deadline: float | None, function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
        if self.lost:
            raise errors.gone(self._ssh)

        def answer() -> Any:
            self._travel()
            quick = function.__module__.rpartition(".")[2] in QUICK
            result = (self._quick if quick else self._slow)(function, arguments, deadline)
            network = self._cluster.network
            if network.losses:
                network.losses, self.lost = network.losses - 1, True
                self._world.say(f"the answer of {function.__name__} is lost")
            self._travel()
            self.heard = 1000.0 + self._world.now
            return result

        return answer

    def _quick(self, function: Callable[..., Any], arguments: Sequence[Any], _: float | None) -> Any:
        process = self._world.current
        assert process is not None
        host, process.host = process.host, self._cluster.edge
        try:
            return self._cluster.call(function, arguments)
        finally:
            process.host = host

    def _slow(self, function: Callable[..., Any], arguments: Sequence[Any], deadline: float | None) -> Any:
        """Call a function in a process on the edge node, which goes on for a while after its client."""
        world, client = self._world, self._world.current
        assert client is not None
        waiters: list[Process] = []

        def work() -> Any:
            try:
                return self._cluster.call(function, arguments)
            finally:
                world.notify(waiters)

        worker = world.spawn(f"{client.name}@edge", self._cluster.edge, work)
        call = Call(client, worker, waiters)
        self._cluster.calls.append(call)
        left = None if deadline is None else max(0.0, deadline - 1000.0 - world.now) + 10.0
        ended = world.wait(lambda: not worker.alive, left, waiters)
        self._cluster.calls.remove(call)
        if not ended:
            world.kill(worker)
            raise TimeoutError
        if worker.error is not None:
            raise worker.error
        if not worker.finished:
            self.lost = True
            raise errors.lost(self._ssh)
        return worker.result

    def _travel(self) -> None:
        """Cross the network in one direction; a link that is down is noticed late."""
        self._world.sleep(self._world.random.uniform(0.5, 2.0) * self._cluster.network.latency)
        if self.lost or not self._cluster.network.up:
            self.lost = True
            self._world.sleep(self._world.random.uniform(0.0, NOTICED))
            raise errors.lost(self._ssh)

    def close(self) -> None:
        self.lost = True
