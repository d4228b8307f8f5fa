"""Slurm mode: a Dagster process submits a job, follows its record and judges it, while faults happen.

Real: submission, the connection's retries, queue snapshots, the job's state, follower, verdict, ownership, reattach, cleanup and
the writer of the record. Simulated: network, slurmctld, NFS, the batch script with the runtime on the head node, Dagster's
instance, and time.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from dagster_rayslurm import BashLauncher, SlurmQueueConfig, SlurmResource, archive
from dagster_rayslurm.backends.base import Layout
from dagster_rayslurm.backends.batch import BatchBackend
from dagster_rayslurm.backends.payload_files import PayloadFiles
from dagster_rayslurm.compute_fields import ComputeFields
from dagster_rayslurm.edge import processes
from dagster_rayslurm.environments import Interpreter, PreDeployedEnvironment
from dagster_rayslurm.execution import reattach
from dagster_rayslurm.execution import run as execution
from dagster_rayslurm.execution.run import PayloadRun, drive, start_errors
from dagster_rayslurm.failures import RunFailure
from dagster_rayslurm.follow import Following, follow_all
from dagster_rayslurm.outcome.verdict import Verdict
from dagster_rayslurm.plan import Plan, make_plan
from dagster_rayslurm.runtime.protocol.record import CANCEL, EXIT, RunRecord

from ..fake_slurm import model
from .cluster import NOTICED, Cluster, Terminated
from .history import Fault, History, Violation
from .world import Host, Process, World

MOST_ATTEMPTS = 20
MESSAGES = 4
"""Results that a payload reports."""
PROMPT = 30.0
"""Seconds after the evidence in which there is a verdict."""
RECOVERY = 45.0
"""Seconds after the link is back in which the package has noticed: the pause between two tries, and the loss of the last one."""
GIVE_UP = 400.0
"""Seconds after the end of a job without an `end` in its record in which there is a verdict."""
FAULTS = {
    "cut": (0.5, 20.0, 90.0, 600.0),
    "slow": (0.3, 2.0),
    "lose_answers": (1.0, 1.0, 2.0, 3.0),
    "stop_slurmctld": (2.0, 60.0, 300.0),
    "fail_node": (0.0,),
    "preempt": (0.0,),
    "requeue_jobs": (0.0,),
    "cancel_job": (0.0,),
    "kill_runtime": (0.0,),
    "kill_dagster": (0.1, 5.0, 60.0),
    "kill_dagster_at_turn": (0.1, 5.0, 60.0),
    "retry_beside": (0.0,),
    "interrupt": (0.0, 0.0, 2.0, 20.0),
    "interrupt_at_turn": (0.0,),
    "fill_disk": (10.0, 200.0),
    "fill_local_disk": (10.0, 200.0),
    "set_edge_clock": (-300.0, -5.0, 5.0, 300.0),
    "set_node_clock": (-300.0, 300.0),
}
"""Kinds of faults, with the amounts to choose from."""
ENDS_JOB = ("fail_node", "preempt", "cancel_job", "kill_runtime", "interrupt", "interrupt_at_turn", "fill_disk")
"""Kinds that may end the job before the payload succeeds, or lose its end."""


@dataclass
class Payload:
    """What the simulated payload does: its length in seconds and its exit code; and what it has done."""

    seconds: float
    exit_code: int
    ended_well: bool = False
    runs: int = 0
    running: int = 0


@dataclass
class Attempt:
    """One Dagster process: what it was told, and how it ended."""

    number: int
    process: Process | None = None
    messages: list[str] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    lines: list[tuple[int, str]] = field(default_factory=list)
    verdict: Verdict | None = None
    failure: RunFailure | None = None
    interrupted: bool = False
    interrupt_sent: bool = False
    began: float = 0.0
    over_at: float | None = None

    @property
    def run_id(self) -> str:
        """The id of its Dagster run."""
        return f"run-{self.number}"

    @property
    def ended(self) -> str:
        """How the attempt ended, in a word."""
        if self.over_at is None:
            return "killed"
        if self.interrupted:
            return "interrupted"
        if self.failure is not None:
            return str(self.failure.kind)
        return str((self.verdict and self.verdict.kind) or "success")

    @property
    def not_started(self) -> bool:
        """Whether the attempt could not even look for the payload, so that a later one may take it over."""
        return self.failure is not None and self.failure.description.startswith("the run cannot be started")


class Log:
    """Stands for Dagster's log of a step."""

    def __init__(self, attempt: Attempt, world: World) -> None:
        self._attempt, self._world = attempt, world

    def isEnabledFor(self, level: int) -> bool:
        return level > logging.DEBUG

    def log(self, level: int, text: str) -> None:
        self._attempt.lines.append((level, text))
        self._world.say(text)

    def debug(self, text: str) -> None: ...

    def info(self, text: str) -> None:
        self.log(logging.INFO, text)

    def warning(self, text: str) -> None:
        self.log(logging.WARNING, text)

    def error(self, text: str) -> None:
        self.log(logging.ERROR, text)


class AttemptHistory:
    """Stands for `reattach.AttemptHistory`: what Dagster's event log says of earlier and later attempts."""

    output_is_local = True

    def __init__(self, context: Any, step_key: str, number: int | None) -> None:
        self._history: Any = context.history  # Has the attempts at the step, and the names that were noted.
        self._attempt: Attempt = context.attempt

    def earlier_run_dir(self) -> str | None:
        return self._history.noted[-1] if self._history.noted and self._attempt.number > 1 else None

    def note(self, name: str) -> None:
        self._history.noted.append(name)

    def successor(self) -> str | None:
        later = [each for each in self._history.attempts if each.number > self._attempt.number]
        return f"attempt {later[-1].number}" if later else None

    def logged_since(self, name: str) -> Iterator[tuple[int, str]]:
        earlier = [each for each in self._history.attempts if each.number < self._attempt.number]
        return iter([line for each in earlier for line in each.lines])


class Backend(BatchBackend):
    """The batch backend without bundles and environment check, which have nothing to decide in these histories."""

    def _prepare(self, plan: Plan, run_dir: str, step: Any, submits: bool = False) -> Any:
        with mock.patch.multiple(
            "dagster_rayslurm.backends.batch",
            pack=lambda plan, *_: PayloadFiles(plan, {}),
            deliver=lambda *_: f"{self.layout.base}/runtime.pyz",
            data_dir_of=lambda *_: "/data",
        ):
            return super()._prepare(plan, run_dir, step, submits)

    def interpreter_for(self, plan: Plan, step: Any) -> Interpreter:
        return Interpreter("/env/bin/python")


_build_runtime = functools.lru_cache(archive.build_runtime)


@functools.cache
def _settings(remote_base: str, requeue: bool) -> tuple[Any, ...]:
    """Configuration, which takes long to check."""
    queue = SlurmQueueConfig(partition="compute", num_nodes=1, time_limit="02:00:00", requeue=requeue)
    return SlurmResource(remote_base=remote_base), queue, PreDeployedEnvironment(path="/env")


class FollowedHere:
    """Payloads that are followed in the current thread, because the world's time passes only in threads of its own."""

    def __init__(self, following: Following) -> None:
        self.following = following

    def wait(self) -> None:
        follow_all(self.following.followed, self.following.deadline)

    def leave(self) -> None:
        pass


def execute(step: Any, attempt: Attempt, backend: Any, plan: Plan, cluster: Cluster, home: str) -> None:
    """Run a step in the current process, as `execution.run.execute` does without Dagster's Pipes session.

    `step` has the attempts at it and the names of run directories that were noted.
    """
    context: Any = SimpleNamespace(
        log=Log(attempt, cluster.world),
        run=SimpleNamespace(run_id=attempt.run_id),
        has_partition_key=False,
        history=step,
        attempt=attempt,
        get_step_execution_context=lambda: SimpleNamespace(step=SimpleNamespace(key="asset")),
    )
    backend.__dict__["connection"] = cluster.connection()
    backend.__dict__["layout"] = Layout(Path(f"{cluster.directory}/base"))
    resource = ComputeFields(mode="slurm", connection_loss_timeout=3600, local_base=home)
    handler = SimpleNamespace(handle_message=lambda message: attempt.messages.append(message["params"]["label"]))
    pipes: Any = {"partition_key_range": None}
    with start_errors():
        plan = replace(plan, payload=replace(plan.payload, nonce=cluster.world.random.randbytes(6).hex()))
        launch = reattach.reattach_or_new(context, plan, backend, Layout(Path(home)))
    run = PayloadRun(context.log, backend, resource, launch, {None: launch.plan})
    steps = run.following(
        lambda register: backend.start(launch.plan, run.run_dir, pipes, launch.step, register), lambda _: handler
    )
    drive(steps, lambda following, _: FollowedHere(following))
    judged = run.judge(run.first)
    attempt.verdict = judged.verdict
    run.clean_up(judged.verdict)


def work(world: World, record: RunRecord, payload: Payload, cancelled: Callable[[], bool]) -> dict[str, Any]:
    """Do what a payload does, and record it; returns how it ended, for the end of the record."""
    ended: dict[str, Any] = {"reason": "exit", "message": None, "exit_code": payload.exit_code, "signal": None}
    try:
        _say(record, "opened", None)
        for number in range(MESSAGES):
            for _ in range(4):
                world.sleep(payload.seconds / MESSAGES / 4)
                if cancelled():
                    return {**ended, "reason": "cancel", "exit_code": None, "signal": 15}
            record.output("stdout", f"line {number}\n", time.time())
            _say(record, "report_asset_materialization", f"m{number}")
        _say(record, "closed", None)
        payload.ended_well |= payload.exit_code == 0
    except Terminated:
        return {**ended, "reason": "terminated", "message": "the runtime received SIGTERM", "exit_code": None, "signal": 15}
    except OSError as error:
        return {**ended, "reason": "record", "message": str(error), "exit_code": None, "signal": 15}
    return ended


def _say(record: RunRecord, method: str, label: str | None) -> None:
    params = {"label": label or method, "asset_key": "asset"}
    message = {"__dagster_pipes_version": "0.1", "method": method, "params": params}
    record.write({"type": "pipes", "at": time.time(), "line": json.dumps(message)})
    record.sync()


def end_record(world: World, record: RunRecord, nonce: str, ended: dict[str, Any]) -> bool:
    """Write the end of a record; for some seconds again if that fails, as the runtime does. Returns whether it was written."""
    times = {"started_at": time.time(), "ended_at": time.time(), "pipes_messages": MESSAGES + 2}
    end = {"type": "end", "nonce": nonce, **ended, **times, "usage": {}, "outputs": [], "outputs_left_out": []}
    for _ in range(10):
        try:
            record.end({**end, "context": {"allocation": {}}})
        except OSError as error:
            world.say(f"the end of the record cannot be written: {error}")
            with contextlib.suppress(Terminated):
                world.sleep(0.5)
            continue
        world.say(f"end of the record: {ended['reason']} {ended['exit_code']}")
        return True
    return False


class SlurmMode(History):
    """One step in Slurm mode, with its retries."""

    name = "slurm"

    def set_up(self) -> None:
        choice = self.choice
        self.requeue = choice.random() < 0.3
        self.payload = Payload(choice.choice([0.1, 3.0, 30.0, 400.0]), choice.choice([0, 0, 0, 1]))
        self.cluster = Cluster(
            self.world,
            f"{self.directory}/cluster",
            self.job,
            starts=choice.random() < 0.7,
            **choice.choice([{"min_job_age": 5.0}, {}, {}, {"accounting": False}]),
        )
        self.attempts: list[Attempt] = []
        self.noted: list[str] = []
        self.undisturbed_since = 0.0
        """Until when a fault lasts that keeps the package from finding out."""
        self.ended_at: float | None = None
        """When the `end` of the record was written."""
        self.returning = 0
        """How many retries are to come."""
        self.dagster = Host("dagster")
        self.overlapped = False
        """Whether two jobs ran the payload at the same time."""

    def draw(self) -> list[Fault]:
        choice, cluster = self.choice, self.cluster
        cluster.edge_view.lag = choice.choice([0.0, 0.0, 0.0, 3.0, 25.0])
        cluster.node_view.lag = choice.choice([0.0, 0.0, 3.0])
        cluster.edge.skew, cluster.node.skew = choice.choice([0.0, 0.0, -20.0, 7.0]), choice.choice([0.0, 0.0, 90.0, -40.0])
        horizon = choice.choice([1.0, 5.0, 40.0, 2 * self.payload.seconds])
        faults = []
        for _ in range(choice.choice([0, 1, 1, 2, 2, 3, 4])):
            kind = choice.choice(list(FAULTS))
            at = round(choice.uniform(0.0, horizon), 3)
            faults.append(Fault(at, kind, choice.choice(FAULTS[kind])))
        return sorted(faults, key=lambda fault: fault.at)

    def fix(
        self, requeue: bool | None = None, seconds: float | None = None, lag: float | None = None, starts: bool | None = None
    ) -> None:
        self.requeue = self.requeue if requeue is None else requeue
        self.payload.seconds = self.payload.seconds if seconds is None else seconds
        self.cluster.edge_view.lag = self.cluster.edge_view.lag if lag is None else lag
        self.cluster.state["starts"] = self.cluster.state["starts"] if starts is None else starts

    def patches(self) -> list[Any]:
        out = SimpleNamespace(write=self._write, flush=lambda: None)
        return [
            mock.patch.object(processes, "run", self.cluster.run),
            mock.patch.object(shutil, "which", lambda program, path=None: f"/usr/bin/{program}"),
            mock.patch.object(reattach, "AttemptHistory", AttemptHistory),
            mock.patch("dagster_rayslurm.backends.base._handled_by", self.world.handled_by),
            mock.patch.object(execution, "noticed_interrupts", lambda: contextlib.nullcontext(lambda: None)),
            mock.patch.object(execution, "has_terminal", lambda: False),
            mock.patch("dagster_rayslurm.upload.deliver.build_runtime", _build_runtime),
            mock.patch.object(sys, "stdout", out),
        ]

    def begin(self) -> None:
        os.makedirs(f"{self.directory}/cluster/base/runs")
        script = Path(self.directory, "payload.py")
        script.write_text("pass")
        limits = {"max_output_bytes": 10**6, "max_stdio_bytes": 10**6}
        self.plan = make_plan(payload_path=script, launcher=BashLauncher(), nonce="0" * 12, **limits)
        self.attempt()
        self.world.spawn("scheduler", Host("slurmctld"), self._start_jobs)

    # -- Dagster

    def attempt(self, before: Attempt | None = None) -> Attempt:
        """Start a Dagster process that runs the step; with an attempt before, as a retry of it."""
        attempt = Attempt(len(self.attempts) + 1, began=self.world.now)
        self.attempts.append(attempt)
        attempt.process = self.world.spawn(f"dagster {attempt.number}", self.dagster, lambda: self._run_step(attempt))
        return attempt

    def _run_step(self, attempt: Attempt) -> None:
        try:
            self._execute(attempt)
        except RunFailure as failure:
            attempt.failure = failure
        except KeyboardInterrupt:
            attempt.interrupted = True
        attempt.over_at = self.world.now
        if attempt.not_started and self.cluster.alive() and attempt.number < MOST_ATTEMPTS:
            self.world.spawn("dagster", Host("fate"), lambda: self._retry(attempt))
        sentence = attempt.failure or (attempt.verdict and attempt.verdict.sentence) or ""
        self.world.say(f"ends: {attempt.ended}: {sentence}")

    def _retry(self, attempt: Attempt) -> None:
        self.returning += 1
        self.world.sleep(60.0)
        self.returning -= 1
        self.attempt(attempt)

    def _execute(self, attempt: Attempt) -> None:
        slurm, queue, environment = _settings(f"{self.cluster.directory}/base", self.requeue)
        backend = Backend(slurm=slurm, queue=queue, environment=environment, queue_timeout=None, patience=120.0)
        execute(self, attempt, backend, self.plan, self.cluster, f"{self.directory}/home")

    def _write(self, text: str) -> None:
        process = self.world.current
        attempt = next((each for each in self.attempts if each.process is process), None)
        if attempt is not None:
            attempt.output.append(text)

    # -- the job

    def job(self, cluster: Cluster, job_id: int) -> int:
        """The batch script: the runtime on the head node, and after it the file with the exit code."""
        job = model.first_of(cluster.state, job_id)
        run_dir = job["directory"] if job["directory"] != "/" else os.path.dirname(job["output"])
        try:
            code = self._runtime(job_id, run_dir, job["restarts"])
        except Terminated:
            code = 143
        except OSError as error:
            self.world.say(f"the runtime fails: {error}")
            code = 1
        with contextlib.suppress(OSError), open(f"{run_dir}/{EXIT}", "a") as file:
            cluster.node.take(20)
            file.write(f"{job_id} {job['restarts']} {code}\n")
        return code

    def _runtime(self, job_id: int, run_dir: str, attempt: int) -> int:
        world, payload = self.world, self.payload
        world.sleep(world.random.uniform(0.2, 2.0))
        nonce = json.loads(Path(run_dir, "payload.json").read_text())["nonce"]
        record = RunRecord(run_dir, 10**6, attempt)
        self.ended_at = None
        payload.runs += 1
        payload.running += 1
        if payload.running > 1:
            self.overlapped = True
            world.say("the payload runs twice at the same time")
        start = {"type": "start", "at": time.time(), "attempt": attempt, "nonce": nonce, "host": "c1"}
        try:
            record.write({**start, "allocation": {"job_id": job_id}})
            record.write({"type": "phase", "phase": "running", "message": "payload started", "at": time.time()})
            record.sync()
            cancel = f"{run_dir}/{CANCEL}"
            ended = work(world, record, payload, lambda: bool(self.cluster.node_view.read(cancel).strip()))
        except OSError as error:
            ended = {"reason": "record", "message": str(error), "exit_code": None, "signal": 15}
        payload.running -= 1
        with contextlib.suppress(Terminated):
            world.sleep(0.05)
        if end_record(world, record, nonce, ended):
            self.ended_at = world.now
        with contextlib.suppress(Terminated):
            world.sleep(world.random.uniform(0.05, 1.0))
        return 143 if ended["reason"] == "terminated" else 0  # srun's own code after SIGTERM.

    def _start_jobs(self) -> None:
        """Start what waits in the queue, after a while."""
        while True:
            self.world.sleep(self.world.random.uniform(1.0, 40.0))
            for job in list(self.cluster.state["jobs"].values()):
                if job["state"] == "PENDING":
                    self.cluster.change(model.start, job["id"], self.cluster.now())

    # -- faults

    def _disturb(self, seconds: float) -> None:
        self.undisturbed_since = max(self.undisturbed_since, self.world.now + seconds)

    def cut(self, seconds: float) -> None:
        network = self.cluster.network
        network.up = False
        self._disturb(seconds + RECOVERY)
        for call in list(self.cluster.calls):
            if self.world.random.random() < 0.3:
                self.world.kill(call.worker)
                self.world.notify(call.waiters)
        self.world.sleep(seconds)
        network.up = True
        self.world.say("the link is back")

    def slow(self, latency: float) -> None:
        self.cluster.network.latency = latency
        self._disturb(60.0 + 20 * latency)
        self.world.sleep(60.0)
        self.cluster.network.latency = 0.02

    def lose_answers(self, count: float) -> None:
        self._disturb(RECOVERY)
        self.cluster.network.losses += int(count)

    def stop_slurmctld(self, seconds: float) -> None:
        self._disturb(seconds + 30.0)
        self.cluster.down_until = max(self.cluster.down_until, self.world.now + seconds)

    def fail_node(self, _: float) -> None:
        self.payload.running = 0
        self.cluster.lose_node()

    def preempt(self, _: float) -> None:
        self._end_jobs("REQUEUED" if self.requeue else "PREEMPTED", "RUNNING")

    def requeue_jobs(self, _: float) -> None:
        if self.requeue:
            self._end_jobs("REQUEUED", "RUNNING")

    def cancel_job(self, _: float) -> None:
        self._end_jobs("CANCELLED", "RUNNING", "PENDING")

    def _end_jobs(self, final: str, *states: str) -> None:
        for job in list(self.cluster.state["jobs"].values()):
            if job["state"] in states:
                self.cluster.end(job["id"], final)

    def kill_runtime(self, _: float) -> None:
        """The kernel ends what runs on the node, and Slurm sees that the batch script was killed."""
        self.payload.running = 0
        for job_id in self.cluster.kill_scripts():
            self.cluster.change(model.script_ended, job_id, -9, self.cluster.now())

    def kill_dagster(self, pause: float) -> None:
        killed = self.attempts[-1]
        process = killed.process
        if process is not None and process.alive:
            self.returning += 1
            self.world.kill(process)
            self.cluster.end_agents(process)
            self.world.sleep(pause)
            self.returning -= 1
            self.attempt(killed)

    def _at_turn(self, action: Callable[[], None]) -> None:
        process = self.attempts[-1].process
        if process is not None and process.alive:
            turns = int(2 ** self.world.random.uniform(0.0, 9.0))
            process.trap = process.turns + turns, lambda: void(self.world.spawn("fate", Host("fate"), action))

    def kill_dagster_at_turn(self, pause: float) -> None:
        self._at_turn(lambda: self.kill_dagster(pause))

    def retry_beside(self, _: float) -> None:
        """Dagster takes the step for dead and starts it again while it lives."""
        process = self.attempts[-1].process
        # Before the payload has started, there is nothing that a retry could take over.
        if process is not None and process.alive and self.payload.runs and not self.cluster.edge_view.lag:
            self.attempt()

    def interrupt(self, again: float) -> None:
        """Somebody cancels the run; again after some seconds, unless that is 0."""
        process = self.attempts[-1].process
        if process is not None and process.alive:
            self.attempts[-1].interrupt_sent = True
            self.world.signal(process, 2)
            if again:
                self.world.sleep(again)
                self.world.signal(process, 2)

    def interrupt_at_turn(self, _: float) -> None:
        self._at_turn(lambda: self.interrupt(0.0))

    def fill_disk(self, seconds: float) -> None:
        self._disturb(seconds)
        self._fill(seconds, self.cluster.edge, self.cluster.node)

    def fill_local_disk(self, seconds: float) -> None:
        self._fill(seconds, self.dagster)

    def _fill(self, seconds: float, *hosts: Host) -> None:
        for host in hosts:
            host.full = True
        self.world.sleep(seconds)
        for host in hosts:
            host.full = False

    def set_edge_clock(self, seconds: float) -> None:
        self.cluster.edge.skew += seconds
        self._disturb(abs(seconds))

    def set_node_clock(self, seconds: float) -> None:
        self.cluster.node.skew += seconds

    # -- the end

    def over(self) -> bool:
        """Whether the last attempt is over, no retry is to come, and all jobs have ended."""
        if self.returning:
            return False
        for attempt in self.attempts:
            assert attempt.process is not None
            if attempt.process.alive:
                return False
            if attempt.process.error is not None:
                raise attempt.process.error
        alive = self.cluster.alive()
        last = self.attempts[-1]
        since = max(last.over_at or 0.0, self.undisturbed_since)
        if alive and self.world.now > since + 120.0:
            raise Violation(f"jobs {alive} still run 120 s after the step has ended")
        self.ended = last.ended
        return not alive

    def _has(self, *kinds: str) -> bool:
        return any(fault.kind in kinds for fault in self.faults)

    def check(self) -> None:
        last, payload = self.attempts[-1], self.payload
        succeeded = [each for each in self.attempts if each.ended == "success"]
        if self.overlapped:
            raise Violation("the payload ran twice at the same time")
        if len(succeeded) > max(1, payload.runs):
            raise Violation("two attempts say that one run of the payload has succeeded")
        if succeeded and not payload.ended_well:
            raise Violation("success, but the payload has not succeeded")
        if not succeeded and payload.ended_well and not self.faults:
            raise Violation(f"failure without a fault: {last.verdict or last.failure}")
        if last.ended == "record" and last.not_started and not self._has("fill_disk", "retry_beside"):
            raise Violation(f"a failure of the record without a full disk: {last.failure}")
        names = [job["name"] for job in self.cluster.state["jobs"].values()]
        if len(names) > len(set(names)):
            raise Violation("two jobs have the same name")
        for attempt in succeeded:
            self._check_results(attempt)
        self._check_lines()
        self._check_time(last)
        if succeeded and succeeded[-1] is last and not self._has("fill_local_disk"):
            self._check_nothing_left()

    def _check_nothing_left(self) -> None:
        """Check that nothing is left of the last payload, which has succeeded."""
        for place, path in (
            ("Dagster's host", f"{self.directory}/home/runs"),
            ("cluster", f"{self.directory}/cluster/base/runs"),
        ):
            left = [name for name in os.listdir(path) if name.startswith(self.noted[-1])] if os.path.isdir(path) else []
            if left and not self.undisturbed_since > self.world.now:
                raise Violation(f"left on the {place}: {left}")

    def _check_results(self, attempt: Attempt) -> None:
        expected = [f"m{number}" for number in range(MESSAGES)]
        told = [each for each in attempt.messages if each.startswith("m")]
        if told != expected:
            raise Violation(f"results {told}")
        if self.payload.runs > 1:
            return
        shown = "".join(text for each in self.attempts for text in each.output)
        for number in range(MESSAGES):
            if not 1 <= shown.count(f"line {number}\n") <= len(self.attempts):
                raise Violation(f"line {number} was shown {shown.count(f'line {number}')} times")

    def _check_lines(self) -> None:
        said = sum("running: payload started" in text for attempt in self.attempts for _, text in attempt.lines)
        if said > max(1, self.payload.runs) and not self._has("retry_beside"):
            raise Violation(f"a line about the payload was logged {said} times")

    def _check_time(self, last: Attempt) -> None:
        lost = sum(fault.amount for fault in self.faults if fault.kind == "lose_answers")
        lags = NOTICED * lost + 3 * (self.cluster.edge_view.lag + self.cluster.node_view.lag)
        if last.over_at is None or last.interrupted:
            return
        recorded = self.ended_at is not None and self.ended_at < last.over_at
        ended = self.ended_at if recorded else max((job["end"] or 0.0 for job in self._jobs()), default=0.0) - self.cluster.now()
        if not recorded:
            ended += self.world.now
        since = max(ended or 0.0, self.undisturbed_since, last.began)
        limit = (PROMPT if recorded and not self.requeue else GIVE_UP) + lags
        if self._jobs() and last.over_at > since + limit:
            raise Violation(f"the verdict came {last.over_at - since:.0f} s after the evidence")

    def _jobs(self) -> list[Any]:
        return list(self.cluster.state["jobs"].values())


def void(_: object) -> None:
    """Drop a value."""
