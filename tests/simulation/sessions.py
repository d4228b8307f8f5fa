"""Sessions: several steps share a warm job, which is started once, takes payloads in turn, and ends when it is idle.

Real: acquisition and registry of sessions, the run request with its repetitions, the server's answers, the queue of payloads, and
all that follows a payload. Simulated: the carrier of requests, the supervisor's process, and what `slurm_mode` simulates.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from dagster_rayslurm import BashLauncher, SessionConfig, SlurmQueueConfig, SlurmResource
from dagster_rayslurm.backends.payload_files import PayloadFiles
from dagster_rayslurm.backends.sessions.backend import SessionBackend
from dagster_rayslurm.backends.sessions.request import AnswerLost, Unreachable
from dagster_rayslurm.edge import files, processes
from dagster_rayslurm.environments import Interpreter, PreDeployedEnvironment
from dagster_rayslurm.execution import reattach
from dagster_rayslurm.execution import run as execution
from dagster_rayslurm.failures import RunFailure
from dagster_rayslurm.plan import Plan, make_plan
from dagster_rayslurm.runtime.protocol.messages import End, EndReason
from dagster_rayslurm.runtime.protocol.record import EXIT, PAYLOAD, RUNTIME, RunRecord
from dagster_rayslurm.runtime.protocol.spec import PayloadSpec, RuntimeSpec, from_json, read_text
from dagster_rayslurm.runtime.supervisor import request_server
from dagster_rayslurm.runtime.supervisor.queue import Claim, Closing, Next, Queue

from ..fake_slurm import model
from .cluster import Cluster, Terminated
from .cores import present
from .history import Fault, Violation
from .slurm_mode import FAULTS, Attempt, AttemptHistory, Payload, SlurmMode, _build_runtime, end_record, execute, work
from .world import Host, Process, World

KINDS = [each for each in FAULTS if each not in ("retry_beside", "preempt", "requeue_jobs", "fill_local_disk")]
"""Faults of Slurm mode that these histories have, too."""
ANSWER_TIMEOUT = 60.0


class Loop:
    """Stands for the event loop of a runtime."""

    def __init__(self, world: World) -> None:
        self._world, self._due = world, list[tuple[float, int, Callable[[], Any]]]()
        self._numbers = itertools.count()
        self._waiters: list[Process] = []
        self.stopped = False

    def now(self) -> float:
        return self._world.now

    def call_later(self, delay: float, function: Callable[[], Any]) -> None:
        heapq.heappush(self._due, (self._world.now + delay, next(self._numbers), function))
        self._world.notify(self._waiters)

    def stop(self) -> None:
        self.stopped = True
        self._world.notify(self._waiters)

    def run(self) -> None:
        while not self.stopped:
            if self._due and self._due[0][0] <= self._world.now:
                heapq.heappop(self._due)[2]()
                continue
            timeout = self._due[0][0] - self._world.now if self._due else None
            number = len(self._due)
            self._world.wait(lambda number=number: self.stopped or len(self._due) > number, timeout, self._waiters)


@dataclass(eq=False)
class Running:
    """Stands for `Payload` of the runtime: a waiting or running payload."""

    spec: PayloadSpec
    run_dir: str
    record: RunRecord
    finish: Callable[[Running, dict[str, Any]], None]
    process: Process | None = None
    ended: bool = False
    on_ended: list[Callable[[], None]] = field(default_factory=list)

    def end_early(self, end: End, grace: float | None = None) -> None:
        said = {"reason": str(end.reason), "message": end.message, "exit_code": None, "signal": None}
        self.finish(self, said)


class Supervisor:
    """Stands for the supervisor of a session: its queue and its server's answers are real."""

    unhealthy = ()  # Nodes here pass their health checks.
    cluster = None  # Payloads here have no Ray cluster that somebody could reach.

    def __init__(self, history: Sessions, job_id: int, directory: str) -> None:
        self.history, self.world, self.job_id = history, history.world, job_id
        self.spec = from_json(RuntimeSpec, read_text(os.path.join(directory, RUNTIME)))
        self.machine = SimpleNamespace(hostname="c1")
        self.loop = Loop(self.world)
        self.queue = Queue(self.spec.max_concurrent_payloads, 0.0, self.spec.idle_timeout, True, idle_since=self.world.now)
        self._timer = 0
        self.process = self.world.current
        allocation: Any = SimpleNamespace(job_id=str(job_id), nodes=["c1"], head_addresses=["10.0.0.1"], components=[])
        self.server: Any = request_server.RequestServer(self, directory, "00", [], allocation)  # type: ignore[arg-type]
        self.settle()

    @property
    def closing(self) -> str | None:
        return self.queue.closing

    @property
    def open(self) -> bool:
        """Whether the session takes payloads."""
        return self.process is not None and self.process.alive and self.closing is None

    @property
    def payloads(self) -> list[Any]:
        return [each.payload for each in present(self.queue)]

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The server's answer to a request."""
        said: dict[str, Any] = {}
        channel: Any = SimpleNamespace(send=lambda **members: said.update(members))
        self.server.received(channel, dict(request))
        return said

    def submit(self, run_dir: str, environ: object = None) -> Running:
        spec = from_json(PayloadSpec, read_text(os.path.join(run_dir, PAYLOAD)))
        if self.closing is not None:
            raise Closing(self.closing)
        refusal = self.queue.refusal(spec, None, self.world.now)
        if refusal is not None:
            raise Closing(refusal)
        record = RunRecord(run_dir, 10**6, 0)
        payload = Running(spec, run_dir, record, self._finish)
        self.queue = self.queue.added(payload, False, self.world.now)  # type: ignore[arg-type]
        self._timer += 1
        start = {"type": "start", "at": time.time(), "attempt": 0, "nonce": spec.nonce, "cluster_id": self.spec.cluster_id}
        record.write({**start, "host": "c1", "allocation": {"job_id": str(self.job_id)}})
        record.sync()
        self.history.accepted(spec.nonce, self.job_id)
        self.schedule()
        return payload

    def schedule(self) -> None:
        while True:
            self.queue, payload = self.queue.start_next({None: Claim(4, 0)}, lambda _: True, self.world.now)
            if payload is None:
                return
            self._start(payload)

    def _start(self, payload: Any) -> None:
        assert self.process is not None
        name = f"payload {payload.spec.nonce}"
        payload.process = self.world.spawn(name, self.history.cluster.node, lambda: self._run(payload))
        self.process.threads.append(payload.process)

    def _run(self, payload: Running) -> None:
        done = self.history.payload_of(payload.spec.nonce)
        done.runs += 1
        payload.record.write({"type": "phase", "phase": "running", "message": "payload started", "at": time.time()})
        self._finish(payload, work(self.world, payload.record, done, lambda: False))

    def _finish(self, payload: Running, ended: dict[str, Any]) -> None:
        if payload.ended:
            return
        payload.ended = True
        if payload.process is not None and payload.process is not self.world.current:
            self.world.kill(payload.process)
        end_record(self.world, payload.record, payload.spec.nonce, ended)
        self.queue = self.queue.removed(payload, ended["reason"] == "exit", self.world.now)  # type: ignore[arg-type]
        for function in payload.on_ended:
            function()
        self.schedule()
        self.settle()

    def drain(self, why: str) -> None:
        if self.closing is None:
            self.queue = replace(self.queue, draining=why)
            self.world.say(f"the session drains: {why}")
            self.settle()

    def close(self, end: End) -> None:
        self.queue = self.queue.ended_by(end)
        self.world.say(f"the session ends: {end.message}")
        for payload in self.payloads:
            payload.end_early(end)
        self.settle()

    def give_way(self) -> bool:
        return False

    def describe(self) -> dict[str, Any]:
        return {"payloads": [{"run_dir": each.run_dir} for each in self.payloads]}

    def settle(self) -> None:
        self.queue, then = self.queue.settled(self.world.now)
        if then is None:
            return
        what, delay = then
        self._timer += 1
        number = self._timer
        if what is Next.IDLE:
            self.loop.call_later(delay, lambda: self._idle(number))
        else:
            self.loop.call_later(delay, self.loop.stop)

    def _idle(self, number: int) -> None:
        if number == self._timer and not present(self.queue):
            self.close(End(EndReason.CANCEL, "it was idle"))


@dataclass
class Step:
    """One step that wants its payload run in a session; stands in for a history of Slurm mode."""

    number: int
    payload: Payload
    attempts: list[Any] = field(default_factory=list)
    noted: list[str] = field(default_factory=list)
    over: bool = False


class StepAttempt(Attempt):
    """One Dagster process of one of several steps."""

    step: int

    @property
    def run_id(self) -> str:
        return f"run-{self.step}-{self.number}"


@functools.cache
def _backend(remote_base: str, idle_timeout: int, concurrent: int) -> SessionBackend:
    slurm = SlurmResource(remote_base=remote_base, queue=SlurmQueueConfig(partition="compute", time_limit="02:00:00"))
    session = SessionConfig(idle_timeout=idle_timeout, max_concurrent_payloads=concurrent, num_nodes=1)
    return SessionBackend(
        slurm=slurm,
        own_queue=None,
        environment=PreDeployedEnvironment(path="/env"),
        session=session,
        launcher=BashLauncher(),
        reuse=False,
        start_timeout=600.0,
        patience=300.0,
    )


class Sessions(SlurmMode):
    """Several steps, which share sessions."""

    name = "session"

    def set_up(self) -> None:
        super().set_up()
        choice = self.choice
        self.requeue = False
        self.idle_timeout, self.concurrent = choice.choice([20, 60]), choice.choice([1, 1, 2])
        self.steps = [
            Step(n, Payload(choice.choice([0.1, 3.0, 30.0]), choice.choice([0, 0, 0, 1]))) for n in range(choice.randint(1, 4))
        ]
        self.begin_at = [choice.choice([0.0, 0.0, 1.0, choice.uniform(0.0, 100.0)]) for _ in self.steps]
        self.sessions: dict[str, Supervisor] = {}
        self.by_nonce: dict[str, Step] = {}
        self.taken: dict[str, list[int]] = {}
        self.two_at_once = False

    def draw(self) -> list[Fault]:
        faults = [fault for fault in super().draw() if fault.kind in KINDS]
        return faults

    def patches(self) -> list[Any]:
        backend = "dagster_rayslurm.backends.sessions.backend"
        return [
            mock.patch.object(processes, "run", self.cluster.run),
            mock.patch.object(shutil, "which", lambda program, path=None: f"/usr/bin/{program}"),
            mock.patch.object(reattach, "AttemptHistory", AttemptHistory),
            mock.patch("dagster_rayslurm.backends.base._handled_by", self.world.handled_by),
            mock.patch.object(execution, "noticed_interrupts", lambda: contextlib.nullcontext(lambda: None)),
            mock.patch.object(execution, "has_terminal", lambda: False),
            mock.patch("dagster_rayslurm.upload.deliver.build_runtime", _build_runtime),
            mock.patch(f"{backend}.pack", lambda plan, *_: PayloadFiles(plan, {})),
            mock.patch("dagster_rayslurm.backends.batch.data_dir_of", lambda *_: "/data"),
            mock.patch(f"{backend}.check_environment_on", lambda *_: Interpreter("/env/bin/python")),
            mock.patch(f"{backend}.send_request", self.send),
            mock.patch("dagster_rayslurm.backends.sessions.listing.send_request", self.send),
            mock.patch.object(request_server, "RpcServer", lambda *_, **__: SimpleNamespace(port=1, close=lambda: None)),
            mock.patch.object(sys, "stdout", SimpleNamespace(write=self._write, flush=lambda: None)),
            mock.patch.object(sys, "stderr", SimpleNamespace(write=lambda text: None, flush=lambda: None)),
        ]

    def begin(self) -> None:
        os.makedirs(f"{self.directory}/cluster/base/runs")
        script = Path(self.directory, "payload.py")
        script.write_text("pass")
        limits = {"max_output_bytes": 10**6, "max_stdio_bytes": 10**6}
        self.plan = make_plan(payload_path=script, launcher=BashLauncher(), nonce="0" * 12, **limits)
        for step, at in zip(self.steps, self.begin_at, strict=True):
            self.attempt_at(step, at)
        self.world.spawn("scheduler", Host("slurmctld"), self._start_jobs)

    # -- Dagster

    def attempt_at(self, step: Step, delay: float = 0.0) -> None:
        """Start a Dagster process for a step."""
        attempt = StepAttempt(len(step.attempts) + 1, began=self.world.now + delay)
        attempt.step = step.number
        step.attempts.append(attempt)
        self.attempts.append(attempt)
        name = f"step {step.number}.{attempt.number}"
        attempt.process = self.world.spawn(name, self.dagster, lambda: self._run_one(step, attempt), delay)

    def attempt(self, before: Attempt | None = None) -> Attempt:
        """Start the step of an attempt again."""
        assert isinstance(before, StepAttempt)
        step = self.steps[before.step]
        self.attempt_at(step)
        return self.attempts[-1]

    def _pick(self) -> None:
        """Choose the attempt that the next fault hits: the last one in the list."""
        alive = [each for each in self.attempts if each.process is not None and each.process.alive]
        if alive:
            chosen = self.world.random.choice(alive)
            self.attempts.remove(chosen)
            self.attempts.append(chosen)

    def kill_dagster(self, pause: float) -> None:
        self._pick()
        super().kill_dagster(pause)

    def interrupt(self, again: float) -> None:
        self._pick()
        super().interrupt(again)

    def _run_one(self, step: Step, attempt: StepAttempt) -> None:
        backend = replace(_backend(f"{self.cluster.directory}/base", self.idle_timeout, self.concurrent))
        note = step.noted.append
        try:
            execute(
                _Noting(step, lambda name: (note(name), self.by_nonce.__setitem__(name.rpartition("-")[2], step))),
                attempt,
                backend,
                self.plan,
                self.cluster,
                f"{self.directory}/home",
            )
        except RunFailure as failure:
            attempt.failure = failure
        except KeyboardInterrupt:
            attempt.interrupted = True
        attempt.over_at = self.world.now
        sentence = attempt.failure or (attempt.verdict and attempt.verdict.sentence) or ""
        self.world.say(f"ends: {attempt.ended}: {sentence}")

    # -- sessions

    def send(self, connection: Any, to: Any, request: Mapping[str, Any], *_: Any) -> dict[str, Any]:
        """Carry a request to a session; stands for `send_request`."""
        connection.call(files.home, repeat=True)
        said = to.announcement
        if said is None:
            raise Unreachable(f"the session in {to.directory} does not say where it is")
        network, world = self.cluster.network, self.world
        world.sleep(network.latency)
        session = self.sessions.get(said.job_id)
        if session is None or session.process is None or not session.process.alive:
            raise Unreachable(f"the session in job {said.job_id} cannot be reached")
        answer: list[dict[str, Any]] = []
        waiters: list[Process] = []

        def ask() -> None:
            if session is not None:
                answer.append(session.answer(json.loads(json.dumps(request))))
                world.notify(waiters)

        session.loop.call_later(0.0, ask)
        world.wait(lambda: bool(answer), ANSWER_TIMEOUT, waiters)
        world.sleep(network.latency)
        lost = network.losses > 0
        network.losses -= lost
        if not answer or lost or not network.up:
            raise AnswerLost(f"the answer of the session in job {said.job_id} is lost")
        return answer[0]

    def payload_of(self, nonce: str) -> Payload:
        """The payload of a step by the nonce of its run directory."""
        return self.by_nonce[nonce].payload

    def accepted(self, nonce: str, job_id: int) -> None:
        """Note that a session has accepted a payload."""
        self.taken.setdefault(nonce, []).append(job_id)
        self.world.say(f"the session accepts {nonce}")
        if len(self.taken[nonce]) > 1:
            raise Violation(f"payload {nonce} was accepted by the sessions in jobs {self.taken[nonce]}")

    def job(self, cluster: Cluster, job_id: int) -> int:
        """The batch script of a session's job."""
        directory = model.first_of(cluster.state, job_id)["directory"]
        session, code = None, 0
        try:
            self.world.sleep(self.world.random.uniform(0.2, 5.0))
            session = Supervisor(self, job_id, directory)
            others = [each.job_id for each in self.sessions.values() if each.open]
            if others:
                self.world.say(f"sessions of jobs {others} are open as well")
                self.two_at_once = True
            self.sessions[str(job_id)] = session
            self.world.say("the session announces itself")
            session.loop.run()
        except Terminated:
            code = 143
            if session is not None:
                with contextlib.suppress(Terminated):
                    session.close(End(EndReason.TERMINATED, "the runtime received SIGTERM"))
        except OSError as error:
            self.world.say(f"the runtime fails: {error}")
            code = 1
        if session is not None:
            session.server.close()
        with contextlib.suppress(OSError), open(f"{directory}/{EXIT}", "a") as file:
            cluster.node.take(20)
            file.write(f"{job_id} 0 {code}\n")
        return code

    # -- the end

    def over(self) -> bool:
        if self.returning:
            return False
        for process in self.world.processes:
            if process.error is not None and not isinstance(process.error, (KeyboardInterrupt, OSError)):
                raise process.error
        if any(each.process is not None and each.process.alive for each in self.attempts):
            return False
        alive = self.cluster.alive()
        since = max([self.undisturbed_since, *(each.over_at or 0.0 for each in self.attempts)])
        if alive and self.world.now > since + self.idle_timeout + 150.0:
            raise Violation(f"jobs {alive} still run {self.world.now - since:.0f} s after the last step")
        return not alive

    def check(self) -> None:
        self.ended = " ".join(sorted({step.attempts[-1].ended for step in self.steps}))
        if self.two_at_once:
            raise Violation("two sessions were open at once")
        for step in self.steps:
            last = step.attempts[-1]
            succeeded = [each for each in step.attempts if each.ended == "success"]
            if len(succeeded) > 1:
                raise Violation(f"step {step.number} has succeeded twice")
            if succeeded and not step.payload.ended_well:
                raise Violation(f"step {step.number}: success, but the payload has not succeeded")
            if succeeded:
                told = [each for each in succeeded[0].messages if each.startswith("m")]
                if told != [f"m{number}" for number in range(len(told))] or len(told) != 4:
                    raise Violation(f"step {step.number}: results {told}")
            expected = "success" if step.payload.exit_code == 0 else "payload"
            if not self.faults and last.ended != expected:
                raise Violation(f"step {step.number}: {last.ended} without a fault: {last.failure or last.verdict}")
        if not self.faults and len(self.cluster.launches) > len(self.steps):
            raise Violation("more jobs than steps")


class _Noting:
    """The attempts at a step, and what notes the names of run directories."""

    def __init__(self, step: Step, note: Callable[[str], object]) -> None:
        self.attempts = step.attempts
        self.noted: Any = _Names(step.noted, note)


class _Names:
    """The names of run directories, by the order of their attempts."""

    def __init__(self, names: list[str], note: Callable[[str], object]) -> None:
        self._names, self.append = names, note

    def __bool__(self) -> bool:
        return bool(self._names)

    def __getitem__(self, index: int) -> str:
        return self._names[index]


__all__ = ["Plan", "Sessions"]
