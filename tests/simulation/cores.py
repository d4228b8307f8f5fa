"""Scenarios of single cores of the runtime: the queue of payloads, the barrier of the separate topology, Ray's membership.

The cores are pure; these scenarios feed them with what processes, networks and users do, at virtual times.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from dagster_rayslurm.runtime.node.worker_nodes import Identity
from dagster_rayslurm.runtime.protocol.messages import ClusterError, End, EndReason, NodeEvent
from dagster_rayslurm.runtime.protocol.spec import PayloadSpec, RaySpec
from dagster_rayslurm.runtime.ray.membership import Member, Membership, Ready, Report
from dagster_rayslurm.runtime.separate.barrier import Barrier, ComponentAddress, ComponentState, Ended, RunState
from dagster_rayslurm.runtime.supervisor.queue import Claim, Next, Queue

from .history import Fault, History, Violation
from .world import Host

CAPACITY = {None: Claim(4, 2)}


def present(queue: Queue) -> list[Any]:
    """The waiting and the running entries of a queue."""
    return [*queue.arrived, *queue.running]


class QueueOfPayloads(History):
    """Runs send payloads to a session, which starts, refuses, loses and drains them."""

    name = "queue"

    def set_up(self) -> None:
        choice = self.choice
        self.limit, self.idle_timeout = choice.randint(1, 4), choice.choice([5.0, 60.0])
        self.queue = Queue(self.limit, 0.0, self.idle_timeout, True, idle_since=0.0)
        self.time_left = choice.choice([None, 100.0, 1000.0])
        self.came: list[Any] = []
        self.started: list[Any] = []
        self.gone: list[Any] = []
        self.overtaken: dict[str, list[str]] = {}
        """By run with a waiting payload: the runs of the payloads that have started since it came to the front."""
        self.stopped: str | None = None
        self.senders = choice.randint(1, 4)

    def draw(self) -> list[Fault]:
        kinds = {"cancel": 0.0, "drain": 0.0, "close": 0.0, "give_way": 0.0}
        count = self.choice.choice([0, 0, 1, 2, 5])
        return [Fault(round(self.choice.uniform(0.0, 80.0), 3), self.choice.choice(list(kinds))) for _ in range(count)]

    def begin(self) -> None:
        for number in range(self.senders):
            self.world.spawn(f"run {number}", Host("dagster"), lambda number=number: self._send(f"run-{number}"))
        self._settle()

    def _left(self) -> float | None:
        return None if self.time_left is None else self.time_left - self.world.now

    def _send(self, run: str) -> None:
        random = self.world.random
        for number in range(random.randint(1, 6)):
            self.world.sleep(random.choice([0.0, 1.0, random.uniform(0.0, 20.0)]))
            claim, limit = Claim(random.randint(0, 4), random.randint(0, 2)), random.choice([None, None, 30.0])
            fields: dict[str, Any] = {"want_cpus": claim.cpus, "want_gpus": claim.gpus, "time_limit": limit}
            spec = PayloadSpec(["x"], f"{run}/{number}", run_id=run, step=f"step{number % 2}", **fields)
            payload = SimpleNamespace(spec=spec, claim=claim, process=None)
            if self.queue.closing or self.stopped or self.queue.refusal(spec, self._left(), self.world.now):
                continue
            self.came.append(payload)
            self.queue = self.queue.added(payload, False, self.world.now)
            self.world.say(f"{spec.nonce} waits")
            self._schedule_payloads()

    def _schedule_payloads(self) -> None:
        for payload, _ in self.queue.late(self._left()):
            self._remove(payload, False)
        while True:
            fronts = {run: self._front(run) for run in self.queue.turns}
            self.queue, payload = self.queue.start_next(CAPACITY, lambda _: True, self.world.now)
            if payload is None:
                break
            self._check_start(payload, fronts)
            self.started.append(payload)
            self.world.say(f"{payload.spec.nonce} starts")
            payload.process = self.world.spawn(payload.spec.nonce, Host("c1"), lambda payload=payload: self._run_payload(payload))

    def _front(self, run: str) -> Any:
        return next(each.payload for each in self.queue.arrived if each.payload.spec.run_id == run)

    def _check_start(self, payload: Any, fronts: dict[str, Any]) -> None:
        run = payload.spec.run_id
        if payload in self.started:
            raise Violation(f"{payload.spec.nonce} starts twice")
        if fronts[run] is not payload:
            raise Violation(f"{payload.spec.nonce} starts before {fronts[run].spec.nonce}")
        self.overtaken = {each: self.overtaken.get(each, []) for each in fronts if each != run}
        for other, seen in self.overtaken.items():
            seen.append(run)
            if seen.count(run) > 1:
                raise Violation(f"{run} has had two turns while {other} waited")
        running = [each.payload.claim for each in self.queue.running]
        if len(running) > 1:
            used = Claim(sum(each.cpus for each in running), sum(each.gpus for each in running))
            if len(running) > self.limit or used.cpus > CAPACITY[None].cpus or used.gpus > CAPACITY[None].gpus:
                raise Violation(f"{len(running)} payloads run on {used}")

    def _run_payload(self, payload: Any) -> None:
        self.world.sleep(self.world.random.choice([0.1, 2.0, 15.0]))
        self._remove(payload, True)

    def _remove(self, payload: Any, to_exit: bool) -> None:
        if payload in self.gone:
            return
        self.gone.append(payload)
        self.world.say(f"{payload.spec.nonce} ends")
        if payload.process is not None and payload.process is not self.world.current:
            self.world.kill(payload.process)
        self.queue = self.queue.removed(payload, to_exit, self.world.now)
        self._schedule_payloads()
        self._settle()

    def _settle(self) -> None:
        self.queue, then = self.queue.settled(self.world.now)
        if then is not None:
            what, delay = then
            since, served = self.queue.idle_since, self.queue.served
            self.world.spawn("timer", Host("c1"), lambda: self._stop(what, since, served), delay)

    def _stop(self, what: Next, since: float, served: int) -> None:
        if present(self.queue) or (what is Next.IDLE and (self.queue.idle_since, self.queue.served) != (since, served)):
            return
        if what is Next.IDLE:
            self.close(0.0)
        else:
            self.stopped = what.value
            self.world.say(f"the session ends: {what.value}")

    def cancel(self, _: float) -> None:
        if present(self.queue):
            self._remove(self.world.random.choice(present(self.queue)).payload, False)

    def drain(self, _: float) -> None:
        self.queue = replace(self.queue, draining=self.queue.draining or "the end is near")
        self._settle()

    def close(self, _: float) -> None:
        self.queue = self.queue.ended_by(End(EndReason.CANCEL, "stopped"))
        for entry in present(self.queue):
            self._remove(entry.payload, False)
        self._settle()

    def give_way(self, _: float) -> None:
        if self.queue.may_give_way(self.world.now):
            if present(self.queue):
                raise Violation("a session with a payload gives way")
            self.close(0.0)

    def over(self) -> bool:
        return self.stopped is not None

    def check(self) -> None:
        self.ended = str(self.stopped)
        if present(self.queue):
            raise Violation(f"the session ends with {len(present(self.queue))} payloads")
        lost = [each.spec.nonce for each in self.came if each not in self.gone]
        if lost:
            raise Violation(f"payloads were lost: {lost}")


@dataclass
class _Component:
    """One component's runtime as its host sees it, and what it does."""

    name: str
    ready_after: float
    seconds: float
    failure: str | None
    told: RunState = field(default_factory=RunState)
    mine: ComponentState = field(default_factory=ComponentState)
    connected: bool = False
    starts: int = 0
    lost: bool = False
    stuck: bool = False  # Its cluster does not come up.
    left: bool = False


class BarrierOfComponents(History):
    """Components become ready, run, fail, lose their connections and come back."""

    name = "barrier"
    patience, grace = 300.0, 10.0

    def set_up(self) -> None:
        choice = self.choice
        self.components = []
        for number in range(choice.choice([1, 2, 2, 3, 5])):
            failure = choice.choice([None, None, None, None, "it raised"])
            self.components.append(
                _Component(f"part{number}", choice.choice([1.0, 20.0, 200.0]), choice.choice([1.0, 60.0]), failure)
            )
        self.host = self.components[0]
        self.host_left = False
        self.failures: list[str] = []

    def draw(self) -> list[Fault]:
        kinds, choice = ["lose_guest", "cut_guest", "cut_guest", "never_ready"], self.choice
        count = choice.choice([0, 0, 1, 1, 2, 3]) if len(self.components) > 1 else 0
        amounts = [0.1, 5.0, 9.0, 30.0]
        return [Fault(round(choice.uniform(0.0, 250.0), 3), choice.choice(kinds), choice.choice(amounts)) for _ in range(count)]

    def begin(self) -> None:
        self.barrier = Barrier([each.name for each in self.components], self.patience, self.grace, self.world.now)
        self.sent = self.barrier.state
        self.host.connected = True
        for component in self.components:
            self.world.spawn(component.name, Host("c1"), lambda component=component: self._live(component))
        self.world.spawn("ticks", Host("c1"), self._tick)

    def _tick(self) -> None:
        while not self.host_left:
            self.world.sleep(self.grace / 10)
            self.barrier.tick(self.world.now)
            self._act()

    def _live(self, component: _Component) -> None:
        self.world.sleep(self.world.random.uniform(0.0, 1.0))
        self._connect(component)
        self.world.sleep(component.ready_after)
        if not component.stuck:
            self._report(component, place=ComponentAddress(component.name, "10.0.0.1", None, []))
        while not component.told.places and component.told.failed is None:
            self.world.sleep(0.5)
            if component.lost:
                return
        if component.told.failed is None:
            component.starts += 1
            if not all(each.mine.place for each in self.components):
                raise Violation("a payload starts before all components are ready")
            until = self.world.now + component.seconds
            while self.world.now < until and component.told.failed is None:
                self.world.sleep(0.5)
                if component.lost:
                    return
        other = component.told.failed is not None
        failure = "another component has failed" if other else component.failure
        if failure is not None and not other:
            self.failures.append(component.name)
        self._report(component, ended=Ended(failure, 0 if failure is None else 3, False))

    def _report(self, component: _Component, **news: Any) -> None:
        component.mine = replace(component.mine, **news)
        if component.connected and not component.lost:
            self.world.sleep(self.world.random.uniform(0.0, 0.05))
            for _ in range(self.world.random.choice([1, 1, 2])):  # After a connection, a state comes again.
                self.barrier.update(component.name, component.mine, self.world.now)
            self._act()

    def _connect(self, component: _Component) -> None:
        if component.lost:
            return
        component.connected = True
        self.barrier.connected(component.name)
        self.barrier.update(component.name, component.mine, self.world.now)
        self._hear(component, self.sent)
        self._act()

    def _act(self) -> None:
        state = self.barrier.state
        before, self.sent = self.sent, state
        if before.failed is not None and (state.failed, state.why) != (before.failed, before.why):
            raise Violation("another component is named as the first to fail")
        if before.finished and not state.finished:
            raise Violation("a finished run goes on")
        for component in self.components:
            if component.connected and component is not self.host:
                self._hear(component, state)
        self._hear(self.host, replace(state, finished=state.finished and self.barrier.may_leave(self.world.now)))

    def _hear(self, component: _Component, state: RunState) -> None:
        component.told = state
        if state.finished and not component.left:
            component.left = True
            if component is self.host:
                self.host_left = True
                self.world.say(f"the run is over: {state.failed or 'success'}")
            else:
                component.mine = replace(component.mine, left=True)
                self.barrier.update(component.name, component.mine, self.world.now)

    def _guest(self) -> _Component:
        return self.world.random.choice(self.components[1:])

    def lose_guest(self, _: float) -> None:
        component = self._guest()
        component.lost, component.connected = True, False
        self.world.say(f"{component.name} is lost")
        self.barrier.disconnected(component.name, "its node is gone", self.world.now)

    def cut_guest(self, seconds: float) -> None:
        component = self._guest()
        component.connected = False
        self.world.say(f"{component.name} is cut off")
        self.barrier.disconnected(component.name, "the connection broke", self.world.now)
        self.world.sleep(seconds)
        self._connect(component)

    def never_ready(self, _: float) -> None:
        component = self._guest()
        if component.mine.place is None:
            component.stuck = True

    def over(self) -> bool:
        for process in self.world.processes:
            if process.error is not None:
                raise process.error
        return self.host_left

    def check(self) -> None:
        state, code = self.barrier.state, self.barrier.exit_code
        self.ended = "success" if state.failed is None else "failure"
        if (code == 0) != (state.failed is None):
            raise Violation(f"exit code {code}, but the first failure is of {state.failed}")
        if any(each.starts > 1 for each in self.components):
            raise Violation("a payload has started twice")
        ended = [each.mine.ended for each in self.components]
        if state.failed is None and any(each is None or each.failure for each in ended):
            raise Violation("success, but not all components have succeeded")
        if not self.faults and not self.failures and state.failed is not None:
            raise Violation(f"failure without a fault: {state.why}")
        if state.failed is None and not state.final:
            raise Violation("files for another attempt stay, though there will be none")
        if self.world.now > self.patience + 20 * self.grace + max(each.seconds for each in self.components) + 250.0:
            raise Violation("the runtimes stay for too long")


class MembershipOfNodes(History):
    """The worker nodes of a Ray cluster connect, start Ray, join, fail and get lost."""

    name = "membership"

    def set_up(self) -> None:
        choice = self.choice
        self.workers = choice.randint(0, 5)
        self.min_nodes = choice.choice([None, None, 1, self.workers])
        spec = RaySpec(min_nodes=self.min_nodes or None, startup_timeout=120.0)
        self.state = Membership(spec, "h0", {place: Member(f"n{place}") for place in range(1, self.workers + 1)})
        self.alive: dict[int, bool] = {}
        self.ready = self.errors = 0
        self.stop_at = 300.0

    def draw(self) -> list[Fault]:
        choice = self.choice
        kinds = ["lose_node", "fail_ray", "miss_node", "kill_head", "repeat_table", "disconnect"]
        count = choice.choice([0, 1, 1, 2, 3])
        faults = []
        for _ in range(count):
            faults.append(
                Fault(round(choice.uniform(0.0, 200.0), 3), choice.choice(kinds), choice.randint(1, max(1, self.workers)))
            )
        return faults

    def begin(self) -> None:
        self.missing: set[int] = {int(fault.amount) for fault in self.faults if fault.kind == "miss_node"}
        self.world.spawn("head", Host("h0"), self._head)
        for place in range(1, self.workers + 1):
            self.world.spawn(f"n{place}", Host(f"h{place}"), lambda place=place: self._worker(place))

    def _step(self, **event: Any) -> None:
        failed = self.state.failed
        self.state, actions = self.state.step(event)
        if failed and actions:
            raise Violation(f"a failed cluster still acts: {actions}")
        for action in actions:
            self.world.say(str(action))
            if isinstance(action, Ready):
                self.ready += 1
                living = sum(self.alive.values())
                if not self.alive.get(0) or living < self.state.needed:
                    raise Violation(f"ready with {living} of {self.state.needed} nodes")
            if isinstance(action, ClusterError):
                self.errors += 1

    def _head(self) -> None:
        self.world.sleep(self.world.random.uniform(0.5, 20.0))
        self._step(event=Report.STARTING, gcs="h0:1")
        self.world.sleep(self.world.random.uniform(0.5, 10.0))
        self.alive[0] = True
        self._show()
        self.world.sleep(max(0.0, 120.0 - self.world.now))
        self._step(event=Report.DEADLINE)

    def _worker(self, place: int) -> None:
        self.world.sleep(self.world.random.uniform(0.1, 15.0))
        identity = Identity(f"h{place}", None)
        self._step(event=NodeEvent.JOINED, node=place, identity=identity, here=True, problem=None)
        if place in self.missing:
            return
        while not self.alive.get(0):
            self.world.sleep(1.0)
        self.world.sleep(self.world.random.uniform(0.5, 30.0))
        if place not in self.alive:
            self.alive[place] = True
            self._show()

    def _show(self) -> None:
        row = {"address": "10.0.0.1", "resources": {"CPU": 1.0}, "component": None}
        nodes = {
            str(each): {**row, "hostname": f"h{each}", "head": each == 0, "alive": alive} for each, alive in self.alive.items()
        }
        self._step(event=Report.NODES, nodes=nodes)

    def repeat_table(self, _: float) -> None:
        self._show()

    def lose_node(self, place: float) -> None:
        self.alive[int(place)] = False
        self._step(event=NodeEvent.LOST, node=int(place), message="its connection ended")
        self.world.sleep(self.world.random.uniform(0.1, 10.0))
        self._show()
        self._step(event=NodeEvent.GONE, node=int(place))

    def fail_ray(self, place: float) -> None:
        self.alive[int(place)] = False
        failed = {"attempt": self.state.attempt, "reason": EndReason.CLUSTER_START, "message": "Ray fails"}
        self._step(event=NodeEvent.RAY_FAILED, node=int(place), **failed)

    def miss_node(self, _: float) -> None: ...

    def disconnect(self, place: float) -> None:
        self._step(event=NodeEvent.LOST, node=int(place), message="its connection ended")
        self.world.sleep(1.0)
        self._step(event=NodeEvent.JOINED, node=int(place), identity=Identity(f"h{int(place)}", None), here=True, problem=None)

    def kill_head(self, _: float) -> None:
        if self.alive.get(0):
            self.alive[0] = False
            self._step(event=Report.GCS_LOST)
            self._show()

    def over(self) -> bool:
        for process in self.world.processes:
            if process.error is not None:
                raise process.error
        return self.world.now > 250.0 or not self.world.pending

    def check(self) -> None:
        self.ended = "failed" if self.errors else "ready" if self.ready else "nothing"
        if self.ready > 1 or self.errors > 1:
            raise Violation(f"ready {self.ready} times, failed {self.errors} times")
        if not self.ready and not self.errors:
            raise Violation("neither ready nor failed after the deadline")
        if not self.faults and not self.ready:
            raise Violation("not ready without a fault")
        if not self._has("kill_head", "lose_node", "fail_ray") and self.errors and self.ready:
            raise Violation("a cluster that was ready has failed without a loss")

    def _has(self, *kinds: str) -> bool:
        return any(fault.kind in kinds for fault in self.faults)
