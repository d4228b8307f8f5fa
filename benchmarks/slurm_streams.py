"""`slurm.stdout` and `slurm.messages`: what comes through from a compute node, how fast, and whether all of it."""

import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import dagster as dg

from dagster_rayslurm import ComputeResource
from stack.link import Link

from .edge import Edge
from .figures import Figure, Options, Sample
from .messages import differences as message_differences
from .slurm_runs import Ours, Shape
from .stdout import LINES, run_here
from .stdout import differences as line_differences
from .steps import PAYLOADS, alternate, base_dir, in_step, instance, timed

# No annotations from the future here: Dagster wants the type of `context` itself, not its name.

_SMALL = Shape(ray=False)
_LINES_BAR, _MESSAGES_BAR, _LATENCY_BAR = 20_000, 0.8, 0.5
_LINE_BYTES = 50
_CUTS = (0.25, 0.6)
"""Parts of the output after which the connection is cut."""
_CUT_SECONDS = 3.0
_MESSAGES, _PACED = PAYLOADS / "messages.py", PAYLOADS / "paced.py"
_PACED_COUNT, _PACED_RATE = 800, 40


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
            run_here(["-m", f"{__package__}.stdout_step", str(lines), base, str(report), site], output)
            problems.extend(line_differences(output, lines))
            return lines / float(json.loads(report.read_text())["seconds"])

        alternate(options.repeat(3), run_by_hand, lambda: ours.append(run_ours()))
        problem = next(iter(problems), None)
        problems.clear()
        with edge.link() as link, _Cutting(link, output, lines):
            rate_cut = run_ours(link.port)
    theirs, mine = Sample.of("ssh … srun > file", by_hand, "lines/s"), Sample.of("run()", ours, "lines/s")
    lost = Sample.of("problems", [float(len(problems))], "")
    rate = Sample.of("run()", [rate_cut], "lines/s")
    return [
        Figure("slurm.stdout", theirs, mine, mine, _LINES_BAR, at_least=True, problem=problem),
        Figure(f"slurm.stdout, {len(_CUTS)} lost connections", theirs, rate, lost, 0, problem=next(iter(problems), None)),
    ]


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

        alternate(options.repeat(2), many("client", by_hand), many("compute", ours))
        for run, lateness in (("client", late_by_hand), ("compute", late)):
            run_id, _ = step(_PACED, [str(_PACED_COUNT), str(_PACED_RATE)], run)
            lateness += _lateness(dagster, run_id)
    hand, our = Sample.of("PipesSubprocessClient here", by_hand, "/s"), Sample.of("run()", ours, "/s")
    ratio = Sample.of("ratio", [our.median / hand.median], "x")
    problem = next(iter(problems), None)
    if len(late) != _PACED_COUNT:
        problem = f"{len(late)} of {_PACED_COUNT} paced messages are in the event log"
    return [
        Figure("slurm.messages", hand, our, ratio, _MESSAGES_BAR, at_least=True, problem=problem),
        Figure(
            name=f"slurm.messages: to the event log, at {_PACED_RATE}/s",
            by_hand=Sample.of("PipesSubprocessClient here", late_by_hand),
            ours=Sample.of("run()", late),
            result=Sample.of("95th percentile", [statistics.quantiles(late, n=20)[-1]]),
            bar=_LATENCY_BAR,
            problem=problem,
        ),
    ]


def _lateness(dagster: dg.DagsterInstance, run_id: str) -> list[float]:
    """Seconds from the payload's call to the entry in the event log; all clocks are this machine's."""
    entries = [entry for entry in dagster.all_logs(run_id) if entry.user_message.startswith("paced ")]
    return [entry.timestamp - float(entry.user_message.split()[1]) for entry in entries]
