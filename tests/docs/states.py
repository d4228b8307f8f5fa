"""Draws the states of the pure cores into docs/architecture.md: `python -m tests.docs.states`.

Each diagram is explored from the code: from the first state, every event is tried, as often as the depth allows. A test compares
the section in the document with what the code says.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from dagster_rayslurm.backends.sessions.acquire import next_action
from dagster_rayslurm.follow import Cadence
from dagster_rayslurm.follow.follower import RecordState
from dagster_rayslurm.runtime.payload.life import Awaited, Life, Phase
from dagster_rayslurm.runtime.protocol.messages import End, EndReason
from dagster_rayslurm.runtime.protocol.spec import PayloadSpec, RaySpec
from dagster_rayslurm.runtime.ray.membership import Member, Membership, NodeEvent, Report
from dagster_rayslurm.runtime.separate.barrier import Barrier, ComponentAddress, ComponentState, Ended
from dagster_rayslurm.runtime.supervisor.queue import Queue
from dagster_rayslurm.slurm.states import JobWatch
from dagster_rayslurm.slurm.submit import next_step
from dagster_rayslurm.ssh.base import Completed, ConnectionLost

DOCUMENT = Path(__file__).parents[2] / "docs" / "architecture.md"
BEGIN, END = "<!-- states: begin, written by `python -m tests.docs.states` -->\n", "<!-- states: end -->\n"

Event = tuple[str, Callable[[Any], Any]]  # Its name, and the state after it; None where it cannot come.


class Core(NamedTuple):
    """One state machine: where its code is, its first state, its events, and the name of each state."""

    title: str
    code: str
    first: Any
    events: list[Event]
    name: Callable[[Any], str]
    depth: int


def edges(core: Core) -> dict[tuple[str, str], list[str]]:
    """The events that lead from one named state to another."""
    found: dict[tuple[str, str], list[str]] = {}
    level, known = [core.first], {repr(core.first)}
    for _ in range(core.depth):
        following = []
        for state in level:
            for label, event in core.events:
                after = event(state)
                if after is None:
                    continue
                before, then = core.name(state), core.name(after)
                if before != then and label not in found.setdefault((before, then), []):
                    found[before, then].append(label)
                if repr(after) not in known:
                    known.add(repr(after))
                    following.append(after)
        level = following
    return found


def diagram(core: Core) -> Iterator[str]:
    """The lines of a core's diagram, in Mermaid."""
    yield from (f"### {core.title}", "", f"`{core.code}`", "", "```mermaid", "stateDiagram-v2")
    yield f"    [*] --> {core.name(core.first)}"
    for (before, then), labels in sorted(edges(core).items()):
        yield f"    {before} --> {then}: {', '.join(labels)}"
    yield from ("```", "")


def job() -> Core:
    """A Slurm job, as its observations tell."""

    def seen(state: str | None) -> Callable[[JobWatch], JobWatch]:
        row: Any = None if state is None else SimpleNamespace(state=state, reason="None", start=None)
        return lambda watch: watch.seen(max(watch.newest, 0.0) + 100.0, row)

    events: list[Event] = [
        ("squeue shows it waiting", seen("PENDING")),
        ("squeue shows it running", seen("RUNNING")),
        ("squeue shows its end", seen("COMPLETED")),
        ("squeue does not show it", seen(None)),
        ("the run record begins", lambda watch: watch.started(max(watch.newest, 0.0) + 1.0)),
        ("srun exits", lambda watch: watch.exited(0)),
    ]
    return Core("A job", "slurm/states.py: JobWatch", JobWatch(0.0), events, lambda watch: str(watch.view.phase.value), 4)


def payload() -> Core:
    """A payload of the runtime: `Life` decides, `Payload` takes the steps that need no decision."""

    def step(before: Phase, after: Phase) -> Callable[[Life], Life | None]:
        return lambda life: replace(life, phase=after) if life.phase == before else None

    def exits(code: int) -> Callable[[Life], Life | None]:
        end = End(EndReason.EXIT, exit_code=code)
        return lambda life: life.exited(end, frozenset({Awaited.OUTPUT}))[0] if life.phase == Phase.RUNNING else None

    events: list[Event] = [
        ("its turn comes", step(Phase.QUEUED, Phase.STARTING)),
        ("its process runs", step(Phase.STARTING, Phase.RUNNING)),
        ("its process exits", exits(0)),
        ("its process fails", exits(1)),
        ("it is cancelled", lambda life: life.end_early(End(EndReason.CANCEL, "x"), 1.0, 0.0)[0]),
        ("the awaited comes", lambda life: life.received(Awaited.OUTPUT)[0] if life.exit else None),
        ("no signal comes", lambda life: life.received(Awaited.SIGNAL)[0] if life.exit else None),
        ("the last messages are copied", step(Phase.FINISHING, Phase.SEARCHING)),
        ("the outputs are found", step(Phase.SEARCHING, Phase.ENDED)),
    ]
    name = lambda life: life.phase.name.lower()  # noqa: E731
    return Core("A payload", "runtime/payload/life.py: Life", Life(), events, name, 7)


def queue() -> Core:
    """Whether the runtime of a session takes payloads."""
    spec = PayloadSpec(argv=["x"], nonce="n", run_id="r")

    def added(queue: Queue) -> Queue | None:
        return None if queue.closing or queue.waiting or queue.running else queue.added(SimpleNamespace(spec=spec), False, 0.0)  # type: ignore[arg-type]

    def removed(queue: Queue) -> Queue | None:
        entry = next(iter((*queue.waiting, *queue.running)), None)
        return None if entry is None else queue.removed(entry.payload, True, 0.0)

    def name(queue: Queue) -> str:
        doing = "payloads" if queue.waiting or queue.running else "idle"
        return doing + ("_ending" if queue.ending else "_draining" if queue.draining else "")

    events: list[Event] = [
        ("a payload comes", added),
        ("the last payload ends", removed),
        ("a node is lost, or the time limit is near", lambda queue: None if queue.draining else replace(queue, draining="x")),
        ("a signal, or idle_timeout", lambda queue: queue.ended_by(End(EndReason.TERMINATED, "x"))),
    ]
    return Core("A session's queue", "runtime/supervisor/queue.py: Queue", Queue(idle_timeout=60.0), events, name, 4)


def membership() -> Core:
    """The nodes of a Ray cluster: a head and one worker, without `min_nodes`."""
    row = {"hostname": "n1", "component": None, "alive": True}
    head, worker = {**row, "hostname": "h", "head": True}, {**row, "head": False}

    def event(kind: str, **fields: Any) -> Callable[[Membership], Membership]:
        return lambda state: state.step({"event": kind, **fields})[0]

    def name(state: Membership) -> str:
        return "failed" if state.failed else "ready" if state.ready else "starting" if state.attempt else "checking"

    joined = {"node": 1, "identity": ("n1", None), "here": True, "problem": None}
    events: list[Event] = [
        ("Ray starts on the head", event(Report.STARTING)),
        ("the worker connects", event(NodeEvent.JOINED, **joined)),
        ("Ray fails on the worker", event(NodeEvent.RAY_FAILED, node=1, attempt=1, reason="cluster-start", message="x")),
        ("the worker stays away", event(NodeEvent.GONE, node=1)),
        ("the node table has all nodes", event(Report.NODES, nodes={"h": head, "n": worker})),
        ("the node table has the head as dead", event(Report.NODES, nodes={"h": {**head, "alive": False}, "n": worker})),
        ("Ray fails on the head", event(Report.FAILED, error=None)),
        ("startup_timeout is over", event(Report.DEADLINE)),
    ]
    first = Membership(RaySpec(), "h", {1: Member("n1")})
    return Core("A Ray cluster", "runtime/ray/membership.py: Membership", first, events, name, 4)


def barrier() -> Core:
    """Two components of the separate topology; a state is the list of what happened."""
    place = ComponentAddress("n", "1.2.3.4", None, ["n"])
    happens: dict[str, Callable[[Barrier], None]] = {
        "both are ready": lambda it: [it.update(name, ComponentState(place), 1.0) for name in "ab"] and None,
        "one fails": lambda it: it.update("b", ComponentState(place, Ended("x", 1, False)), 2.0),
        "both payloads end": lambda it: (
            [it.update(name, ComponentState(place, Ended(None, 0, False)), 3.0) for name in "ab"] and None
        ),
        "the time is over": lambda it: it.tick(1000.0),
    }

    def after(events: tuple[str, ...]) -> Barrier:
        made = Barrier(("a", "b"), 60.0, 10.0, 0.0)
        for each in "ab":
            made.connected(each)
        for event in events:
            happens[event](made)
        return made

    def name(events: tuple[str, ...]) -> str:
        state = after(events).state
        return "finished" if state.finished else "failed" if state.failed else "running" if state.places else "waiting"

    events: list[Event] = [(label, lambda state, label=label: (*state, label)) for label in happens]
    return Core("Components that start together", "runtime/separate/barrier.py: Barrier", (), events, name, 3)


def record() -> Core:
    """What Dagster's side knows of a payload from its record; a state is the list of what happened."""

    def after(events: tuple[str, ...]) -> tuple[RecordState, bool]:
        state, over = RecordState("n", 60.0, True), False
        cadence = Cadence(busy=1.0, idle=1.0, waiting=1.0)
        for now, event in enumerate(events):
            if event == "Slurm requeues the job":
                state.add({"type": "start", "attempt": state.restarts + 1, "at": 1.0})
            elif event == "the record begins":
                state.add({"type": "start", "attempt": 0, "at": 1.0})
            elif event in ("its end comes", "an end by a signal comes"):
                reason = EndReason.TERMINATED if "signal" in event else EndReason.EXIT
                state.add({"type": "end", "nonce": "n", "reason": reason, "exit_code": 0})
            elif event == "the record is out of reach for too long":
                for later in (now, now + 100.0):
                    state.read_failed(OSError("x"), later)
            over = state.next_read(1, None, cadence, float(now), False) is None
        return state, over

    def name(events: tuple[str, ...]) -> str:
        state, over = after(events)
        if over:
            return "unreachable" if state.evidence.unreachable else "ended"
        return "ended_for_now" if state.evidence.end else "started" if state.evidence.started else "silent"

    labels = ["the record begins", "its end comes", "an end by a signal comes", "Slurm requeues the job"]
    events: list[Event] = [
        (label, lambda state, label=label: None if name(state) in ("ended", "unreachable") else (*state, label))
        for label in (*labels, "the record is out of reach for too long")
    ]
    return Core(
        "A record that is followed (of a job that Slurm may requeue)", "follow/follower.py: RecordState", (), events, name, 3
    )


def decisions() -> Iterator[str]:
    """Tables of the cores that are one decision: what follows from one look."""
    yield from (
        "### A submission",
        "",
        "`slurm/submit.py: next_step`",
        "",
        "| answer of the submission | what follows |",
        "|---|---|",
    )
    answers: dict[str, Any] = {
        "a job id": Completed(0, b"1.0\n7\n", b""),
        "sbatch refuses": Completed(1, b"", b"sbatch: error: Invalid partition name specified"),
        "slurmctld is busy or away": Completed(1, b"", b"sbatch: error: Socket timed out on send/recv operation"),
        "the connection is lost": ConnectionLost("x"),
        "no answer in time": TimeoutError("x"),
        "another process has claimed the session": Completed(78, b"", b""),
        "no sbatch": Completed(127, b"", b""),
    }
    for label, answer in answers.items():
        first, last = (next_step(answer, True, left).value for left in (1, 0))
        yield f"| {label} | {first}" + (f"; at the last try: {last}" if last != first else "") + " |"
    yield from ("", "### A session's newest generation", "", "`backends/sessions/acquire.py: next_action`", "")
    yield from ("| what its directory shows | what a step does |", "|---|---|")
    plain = {"number": 2, "ended": False, "announcement": None, "abandoned": False, "job_id": None, "age": 0.0}
    looks: dict[str, dict[str, Any]] = {
        "it is the one that did not serve this step": {"number": 1},
        "it was claimed a moment ago": {},
        "it was claimed long ago, and there is no job": {"age": 1e9},
        "its job is submitted": {"job_id": 7},
        "it announces itself": {"job_id": 7, "announcement": object()},
        "it was given up": {"abandoned": True},
        "its job has ended": {"job_id": 7, "ended": True},
    }
    for label, changes in looks.items():
        yield f"| {label} | {next_action(SimpleNamespace(**{**plain, **changes}), 1).value} |"  # type: ignore[arg-type]
    yield ""


def section() -> str:
    """The text between the marks in the document."""
    lines = [line for core in (job(), payload(), queue(), membership(), barrier(), record()) for line in diagram(core)]
    return BEGIN + "\n" + "\n".join([*lines, *decisions()]) + END


def written(text: str) -> str:
    """The document with the section as it is now."""
    before, _, rest = text.partition(BEGIN)
    return before + section() + rest.partition(END)[2]


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
    sys.exit(0)
