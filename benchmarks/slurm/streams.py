"""`slurm.stdout` and `slurm.messages`: what comes through from a compute node, how fast, and whether all of it."""

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import dagster as dg

from dagster_rayslurm import ComputeResource
from stack.link import Link
from stack.settings import ROOT

from ..figures import Figure, Options, Sample
from ..here import stdout_step
from ..here.messages import differences as message_differences
from ..here.stdout import LINES, run_here
from ..here.stdout import differences as line_differences
from ..parties.edge import ByHand, Edge
from ..parties.peer import peer
from ..parties.runs import Ours, Shape
from ..steps import PAYLOADS, alternate, base_dir, in_step, instance, timed

# No annotations from the future here: Dagster wants the type of `context` itself, not its name.

_SMALL = Shape(ray=False)
_LINES_BAR, _MESSAGES_BAR, _LATENCY_BAR = 20_000, 0.8, 0.5
_LINE_BYTES = 50
_CUTS = (0.25, 0.6)
"""Parts of the output after which the connection is cut."""
_CUT_SECONDS = 3.0
_MESSAGES, _PACED = PAYLOADS / "messages.py", PAYLOADS / "paced.py"
_PACED_LINES = PAYLOADS / "paced_lines.py"
_PACED_SECONDS, _PACED_RATE = 20, 40
_PEER_PART = 10
"""One of so many lines and messages must do for somebody who takes long."""


def stdout(options: Options) -> list[Figure]:
    """Lines per second from a compute node into the step's output, complete; the same with two lost connections."""
    edge = Edge()
    by_hand: list[float] = []
    ours: list[float] = []
    problems: list[str] = []
    lines = options.lines
    with base_dir() as base, edge.directory() as directory, edge.by_hand(base) as hand:
        output, report = Path(base) / "output", Path(base) / "report.json"
        edge.upload([LINES], directory)
        srun = f"srun --quiet --partition={options.partition} --mem={_SMALL.memory} python3 {directory}/{LINES.name} {lines}"

        def run_by_hand() -> None:
            by_hand.append(lines / timed(lambda: hand.ssh_to(srun, output))[0])

        def run_ours(port: int | None = None) -> float:
            site = json.dumps({"directory": directory, "partition": options.partition, "port": port})
            run_here(["-m", stdout_step.__name__, str(lines), base, str(report), site], output)
            problems.extend(line_differences(output, lines))
            return lines / float(json.loads(report.read_text())["seconds"])

        alternate(options.repeat(2), run_by_hand, lambda: ours.append(run_ours()))
        problem = next(iter(problems), None)
        problems.clear()
        with edge.link() as link, _Cutting(link, output, lines):
            rate_cut = run_ours(link.port)
        others: tuple[Sample, ...] = ()
        if options.peer:
            with peer(edge, directory, options.partition, base) as other:
                few = max(1, lines // _PEER_PART)
                seconds, _ = other.run_unmarked(_SMALL, LINES, BENCH_COUNT=str(few))
                others = (Sample.of(f"{other.label}, {few:,} lines", [few / seconds], "lines/s"),)
        late_by_hand, late = _late_lines(edge, directory, hand, options, base)
    theirs, mine = Sample.of("ssh … srun > file", by_hand, "lines/s"), Sample.of("run()", ours, "lines/s")
    lost = Sample.of("problems", [float(len(problems))], "")
    rate = Sample.of("run()", [rate_cut], "lines/s")
    return [
        Figure("slurm.stdout", theirs, mine, mine, _LINES_BAR, at_least=True, problem=problem, others=others),
        Figure(f"slurm.stdout, {len(_CUTS)} lost connections", theirs, rate, lost, 0, problem=next(iter(problems), None)),
        Figure(
            name=f"slurm.stdout: a line to the step's output, at {_PACED_RATE}/s",
            by_hand=late_by_hand,
            ours=late,
            result=Sample.of("95th percentile", [late.p95]),
            bar=None,
            also=(Sample.of("95th percentile by hand", [late_by_hand.p95]),),
        ),
    ]


def _late_lines(edge: Edge, directory: str, hand: ByHand, options: Options, base: str) -> tuple[Sample, Sample]:
    """How late lines with the time in them are, by hand and ours."""
    count = options.repeat(8) * _PACED_RATE
    edge.upload([_PACED_LINES], directory)
    srun = f"srun --quiet --unbuffered --partition={options.partition} --mem={_SMALL.memory}"
    by_hand = ["ssh", *hand.options, hand.target, f"{srun} python3 {directory}/{_PACED_LINES.name} {count}"]
    site = json.dumps({"directory": directory, "partition": options.partition, "port": None, "payload": str(_PACED_LINES)})
    report = str(Path(base) / "paced.json")
    ours = [sys.executable, "-m", stdout_step.__name__, str(count), base, report, site]
    found = Sample.of("ssh … srun", _late(by_hand)), Sample.of("run()", _late(ours))
    if any(len(sample.values) != count for sample in found):
        raise RuntimeError(f"{' and '.join(str(len(sample.values)) for sample in found)} of {count} paced lines came")
    return found


def _late(command: Sequence[str]) -> list[float]:
    """Seconds from the time in each line that a command prints to its coming here."""
    late = []
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            now = time.time()
            if line.startswith("paced "):
                late.append(now - float(line.split()[1]))
    return late


class _Cutting:
    """Cuts a link whenever a part of the output has come, for a few seconds."""

    def __init__(self, link: Link, output: Path, lines: int) -> None:
        self._link = link
        self._output = output
        self._sizes = [part * lines * _LINE_BYTES for part in _CUTS]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._output.unlink(missing_ok=True)
        self._thread.start()

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join()
        if self._sizes:
            raise RuntimeError(f"{len(self._sizes)} cuts did not happen before the end")

    def _run(self) -> None:
        while self._sizes and not self._over.wait(0.01):
            if self._output.exists() and self._output.stat().st_size >= self._sizes[0]:
                del self._sizes[0]
                self._link.cut()
                time.sleep(_CUT_SECONDS)
                self._link.mend()


def messages(options: Options) -> list[Figure]:
    """Pipes messages into the event log: how many per second, and how late a few of them are."""
    edge = Edge()
    client = dg.PipesSubprocessClient(message_reader=dg.PipesTempFileMessageReader())
    by_hand: list[float] = []
    ours: list[float] = []
    late_by_hand: list[float] = []
    late: list[float] = []
    problems: list[str] = []
    with edge.directory() as directory, instance() as dagster:
        compute = Ours(edge, directory, options.partition).resource(_SMALL)

        def step(payload: Path, arguments: list[str], run: str) -> tuple[str, float]:
            """The Dagster run, and seconds that the call took."""

            def body(context: dg.AssetExecutionContext, compute: ComputeResource) -> tuple[str, float]:
                def call() -> object:
                    if run == "client":
                        return client.run(context=context, command=[sys.executable, str(payload), *arguments])
                    command = ["python", payload.name, *arguments]
                    return compute.run(context=context, payload_path=command, extra_files=[payload])

                return context.run_id, timed(call)[0]

            return in_step(compute, dagster, body)

        def many(run: str, rates: list[float]) -> Callable[[], None]:
            def once() -> None:
                run_id, seconds = step(_MESSAGES, [str(options.messages)], run)
                rates.append(options.messages / seconds)
                problems.extend(message_differences(dagster, run_id, options.messages))

            return once

        alternate(options.repeat(1), many("client", by_hand), many("compute", ours))
        count = options.repeat(_PACED_SECONDS) * _PACED_RATE
        for run, lateness in (("client", late_by_hand), ("compute", late)):
            run_id, _ = step(_PACED, [str(count), str(_PACED_RATE)], run)
            lateness += _lateness(dagster, run_id)
    rates, latencies = _of_peer(edge, options, count) if options.peer else ((), ())
    hand, our = Sample.of("PipesSubprocessClient here", by_hand, "/s"), Sample.of("run()", ours, "/s")
    ratio = Sample.of("ratio", [our.median / hand.median], "x")
    problem = next(iter(problems), None)
    if len(late) != count:
        problem = f"{len(late)} of {count} paced messages are in the event log"
    return [
        Figure("slurm.messages", hand, our, ratio, _MESSAGES_BAR, at_least=True, problem=problem, others=rates),
        Figure(
            name=f"slurm.messages: to the event log, at {_PACED_RATE}/s",
            by_hand=Sample.of("PipesSubprocessClient here", late_by_hand),
            ours=Sample.of("run()", late),
            result=Sample.of("95th percentile", [statistics.quantiles(late, n=20)[-1]]),
            bar=_LATENCY_BAR,
            problem=problem,
            others=latencies,
            also=tuple(Sample.of(f"95th percentile, {sample.label}", [sample.p95]) for sample in latencies),
            tolerance=1.0,
        ),
    ]


def _of_peer(edge: Edge, options: Options, count: int) -> tuple[tuple[Sample, ...], tuple[Sample, ...]]:
    """The rate of dagster-slurm's messages, and how late they are."""
    few = max(1, options.messages // _PEER_PART)
    with base_dir() as scratch, edge.directory() as directory, peer(edge, directory, options.partition, scratch) as other:
        seconds, _ = other.run_unmarked(_SMALL, _MESSAGES, BENCH_COUNT=str(few))
        _, late = other.run_unmarked(_SMALL, _PACED, BENCH_COUNT=str(count), BENCH_RATE=str(_PACED_RATE))
        label = other.label
    return (Sample.of(f"{label}, {few:,} messages", [few / seconds], "/s"),), (Sample.of(label, late),)


def _lateness(dagster: dg.DagsterInstance, run_id: str) -> list[float]:
    """Seconds from the payload's call to the entry in the event log; all clocks are this machine's."""
    entries = [entry for entry in dagster.all_logs(run_id) if entry.user_message.startswith("paced ")]
    return [entry.timestamp - float(entry.user_message.split()[1]) for entry in entries]
