"""`load`: what one Dagster process costs whose steps wait for payloads, looked at from outside."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dagster_rayslurm.runtime.process import processes
from stack.settings import ROOT

from ..figures import Figure, Options, Sample
from ..parties.edge import Edge
from ..parties.peer import peer
from ..parties.runs import Shape
from ..steps import base_dir
from .load_step import WAIT

_STEPS, _QUICK_STEPS = (1, 10, 50), (1, 3)
_ROUNDS = 1
_SETTLE, _WINDOW, _QUICK_WINDOW = 3.0, 20.0, 3.0
_PATIENCE = 300.0
_MIB = 2**20


@dataclass(frozen=True)
class Cost:
    """What a process and all below it have had.

    Attributes:
        busy: percent of a core while all payloads sleep.
        memory: MiB meanwhile, beyond what it had before; what several share counts once.
        each: CPU seconds for each step in all, without those of the time in which nothing happened.
    """

    busy: float
    memory: float
    each: float


def load(options: Options) -> list[Figure]:
    """Percent of a core and MiB for so many steps at once, and CPU seconds for each step from its beginning to its end."""
    edge, window = Edge(), _QUICK_WINDOW if options.quick else _WINDOW
    counts = _QUICK_STEPS if options.quick else _STEPS
    ours: dict[int, list[Cost]] = {count: [] for count in counts}
    theirs: list[Cost] = []
    label = ""
    for _ in range(options.repeat(_ROUNDS)):
        for count in counts:
            with edge.directory() as directory:
                ours[count].append(_ours(edge, directory, options.partition, count, window))
        if options.peer:
            with base_dir() as scratch, edge.directory() as directory:
                cost, label = _theirs(edge, directory, options.partition, scratch, window)
                theirs.append(cost)
    return [figure for count in counts for figure in _figures(count, ours[count], theirs if count == 1 else [], label)]


def _figures(count: int, ours: list[Cost], theirs: list[Cost], label: str) -> list[Figure]:
    name = f"load, {count} step{'s' if count > 1 else ''}"

    def figure(what: str, unit: str, value: Callable[[Cost], float]) -> Figure:
        mine = Sample.of("slurm-session", [value(cost) for cost in ours], unit)
        others = (Sample.of(f"{label}, one step", [value(cost) for cost in theirs], unit),) if theirs else ()
        return Figure(f"{name}: {what}", None, mine, mine, None, others=others)

    return [
        figure("CPU", "% of a core", lambda cost: cost.busy),
        figure("memory", "MiB", lambda cost: cost.memory),
        figure("CPU time of each step, from beginning to end", "s", lambda cost: cost.each),
    ]


def _ours(edge: Edge, directory: str, partition: str, count: int, window: float) -> Cost:
    stop = f"{directory}/stop"
    site = {"directory": directory, "partition": partition, "steps": count, "stop": stop}
    with base_dir() as scratch, _process(site, Path(scratch) / "log") as process:

        def go_on() -> None:
            assert process.stdin is not None
            process.stdin.write("\n")

        try:
            cost = _watch(edge, process.pid, stop, count, window, begin=go_on, end=lambda: _read(process))
        except (TimeoutError, OSError) as error:
            raise RuntimeError(f"{error}; the process said:\n{(Path(scratch) / 'log').read_text()[-4000:]}") from error
        go_on()
        process.wait(_PATIENCE)
        return cost


def _read(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    if process.stdout.readline() != "over\n":
        raise RuntimeError("the payloads did not come to their end")


@contextlib.contextmanager
def _process(site: dict[str, object], log: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of its own, inside its step."""
    command = [sys.executable, "-m", f"{__package__}.load_step", json.dumps(site)]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True, bufsize=1
        )
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"the process ended early:\n{log.read_text()[-4000:]}")
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def _theirs(edge: Edge, directory: str, partition: str, scratch: str, window: float) -> tuple[Cost, str]:
    """One step of dagster-slurm: a second one would need a Dagster process of its own."""
    stop = f"{directory}/stop"
    with peer(edge, directory, partition, scratch) as other, ThreadPoolExecutor(1) as pool:
        runs = []

        def begin() -> None:
            runs.append(pool.submit(other.run_unmarked, Shape(ray=False), WAIT, BENCH_STOP=stop))

        return _watch(edge, other.pid, stop, 1, window, begin, lambda: runs[0].result()), other.label


def _watch(
    edge: Edge, pid: int, stop: str, count: int, window: float, begin: Callable[[], object], end: Callable[[], object]
) -> Cost:
    """Look at a process while payloads begin, sleep and end."""
    memory, cpu = _memory(pid), _cpu(pid)
    begin()
    try:
        _until_up(edge, stop, count)
        time.sleep(_SETTLE)
        slept, since = _cpu(pid), time.monotonic()
        time.sleep(window)
        slept, seconds = _cpu(pid) - slept, time.monotonic() - since
        grown = _memory(pid) - memory
    finally:
        edge.shell(f"touch {stop}")
    end()
    return Cost(100 * slept / seconds, grown / _MIB, (_cpu(pid) - cpu - slept) / count)


def _until_up(edge: Edge, stop: str, count: int) -> None:
    deadline = time.monotonic() + _PATIENCE
    while int(edge.shell(f"ls {stop}.* 2> /dev/null | wc -l")) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{count} payloads were not up within {_PATIENCE:.0f} s")
        time.sleep(0.5)


def _tree(pid: int) -> list[int]:
    return [pid, *(child.pid for child in processes.descendants(pid))]


def _cpu(pid: int) -> float:
    """CPU seconds of a process, of what lives below it and of what it has waited for."""
    ticks = 0
    for each in _tree(pid):
        with contextlib.suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _memory(pid: int) -> int:
    """Bytes that they have; what they share with each other counts once (proc_pid_smaps_rollup, "Pss")."""
    total = 0
    for each in _tree(pid):
        with contextlib.suppress(OSError):
            rollup = Path(f"/proc/{each}/smaps_rollup").read_text()
            total += int(rollup.partition("\nPss:")[2].split()[0]) * 1024
    return total
