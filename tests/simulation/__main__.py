"""Run histories: many in two processes, or one again by its seed. Run `python -m tests.simulation --help`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from .history import History, Outcome, shrink
from .kept import KEPT, SEEDS, run_kept
from .scenarios import SCENARIOS, scenario_of

MOST_SHOWN = 10
"""Most findings that a summary names."""


@dataclass
class Summary:
    """What some histories came to."""

    histories: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[int, str, str]] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count one history."""
        self.histories += 1
        self.faults.update(f"{outcome.scenario} {fault.kind}" for fault in outcome.faults)
        self.outcomes[f"{outcome.scenario} {outcome.ended}"] += 1
        if outcome.problem:
            self.findings.append((outcome.seed, outcome.scenario, outcome.problem))

    def merge(self, other: dict[str, Any]) -> None:
        """Add what a worker has counted."""
        self.histories += other["histories"]
        self.faults.update(other["faults"])
        self.outcomes.update(other["outcomes"])
        self.findings += [tuple(each) for each in other["findings"]]

    def __str__(self) -> str:
        hourly = self.histories / self.seconds * 3600 if self.seconds else 0.0
        lines = [f"{self.histories} histories in {self.seconds:.0f} s: {hourly:,.0f} an hour"]
        for title, counts in (("faults", self.faults), ("ends", self.outcomes)):
            lines.append(f"{title}: " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
        lines.append(f"findings: {len(self.findings)}")
        for seed, scenario, problem in sorted(self.findings)[:MOST_SHOWN]:
            lines.append(
                f"  {scenario}: {problem}\n    again: python -m tests.simulation --scenario {scenario} --seed {seed} --trace"
            )
        return "\n".join(lines)


def make(seed: int, scenario: str | None, without: Iterable[int] = ()) -> History:
    """The history of a seed."""
    return SCENARIOS[scenario or scenario_of(seed)](seed, without)


def run_seeds(seeds: Iterable[int], scenario: str | None, until: float, report: Callable[[Summary], None]) -> None:
    """Run the histories of some seeds until a time, and report now and then what they came to."""
    summary, reported = Summary(), time.monotonic()
    for seed in seeds:
        outcome = make(seed, scenario).run()
        summary.add(outcome)
        if time.monotonic() > min(until, reported + 1.0) or outcome.problem:
            report(summary)
            summary, reported = Summary(), time.monotonic()
        if time.monotonic() > until:
            return
    report(summary)


def run_workers(arguments: argparse.Namespace) -> Summary:
    """Run histories in several processes; each takes every n-th seed."""
    began, total, lock = time.monotonic(), Summary(), threading.Lock()
    command = [sys.executable, "-m", "tests.simulation", "--first", str(arguments.first), "--seconds", str(arguments.seconds)]
    command += ["--count", str(arguments.count), *(["--scenario", arguments.scenario] if arguments.scenario else [])]
    workers = [
        subprocess.Popen([*command, "--share", f"{number}/{arguments.workers}"], stdout=subprocess.PIPE, env=fixed_hashes())
        for number in range(arguments.workers)
    ]
    enough = threading.Event()

    def collect(worker: subprocess.Popen[bytes]) -> None:
        assert worker.stdout is not None
        for line in worker.stdout:
            with lock:
                total.merge(json.loads(line))
                if total.findings and arguments.stop:
                    enough.set()
        if worker.wait() and not enough.is_set():
            total.findings.append((arguments.first, arguments.scenario or "?", f"a worker ended with {worker.returncode}"))

    threads = [threading.Thread(target=collect, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads) and not enough.wait(0.2):
            pass
    finally:
        for worker in workers:
            worker.terminate()
        for thread in threads:
            thread.join()
    total.seconds = time.monotonic() - began
    return total


def fixed_hashes() -> dict[str, str]:
    """The environment of a process in which the order of sets does not vary."""
    return {**os.environ, "PYTHONHASHSEED": "0"}


def show(arguments: argparse.Namespace) -> int:
    """Run one history, perhaps shrink it, and print its end and its trace."""
    seed, scenario, without = arguments.seed, arguments.scenario, set(arguments.without)
    outcome = make(seed, scenario, without).run()
    if arguments.shrink and outcome.problem:
        count = len(make(seed, scenario).faults)
        without, outcome = shrink(lambda left_out: make(seed, scenario, left_out), count, without)
        left_out = ",".join(map(str, sorted(without)))
        print(f"shrunk: --seed {seed} --scenario {outcome.scenario}" + (f" --without {left_out}" if left_out else ""))
    if arguments.trace or outcome.problem:
        print("\n".join(outcome.trace))
    print(f"{outcome.scenario} {seed}, {'; '.join(map(str, outcome.faults)) or 'no faults'}")
    print(f"{outcome.ended}: {outcome.problem or 'all promises hold'}")
    return int(bool(outcome.problem))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser("python -m tests.simulation", description="Simulate histories, each made from its seed.")
    parser.add_argument("--hours", type=float, help="how long to run histories")
    parser.add_argument("--seconds", type=float, default=0.0, help="the same in seconds; with --count: at most so long")
    parser.add_argument("--count", type=int, default=0, help="how many histories to run")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--workers", type=int, default=2, help="how many processes run histories")
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), help="only this scenario; without it, the seed chooses one")
    parser.add_argument("--stop", action="store_true", help="stop at the first finding")
    parser.add_argument("--seed", type=int, help="run the history of this seed alone")
    parser.add_argument(
        "--without", type=lambda text: [int(each) for each in text.split(",")], default=[], help="faults to leave out"
    )
    parser.add_argument("--trace", action="store_true", help="print what happens in the history")
    parser.add_argument("--shrink", action="store_true", help="leave out faults of the history while it still breaks a promise")
    parser.add_argument("--kept", action="store_true", help="run the histories that once broke a promise")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    return parser


def main() -> int:
    """Returns 1 if a promise was broken."""
    arguments = parser().parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]], fixed_hashes())
    if arguments.kept:
        broken = 0
        for kept, outcome in run_kept():
            broken += 1
            print("\n".join([*outcome.trace, f"{kept.defect}: seed {outcome.seed}: {outcome.problem}"]))
        print(f"{len(KEPT) * len(SEEDS)} kept histories, {broken} findings")
        return int(broken > 0)
    if arguments.seed is not None:
        return show(arguments)
    arguments.seconds = 3600 * arguments.hours if arguments.hours else arguments.seconds
    if not arguments.seconds and not arguments.count:
        parser().error("say --hours, --count or --seed")
    if arguments.share is None:
        summary = run_workers(arguments)
        print(summary)
        return int(bool(summary.findings))
    number, of = map(int, arguments.share.split("/"))
    seeds = range(arguments.first + number, arguments.first + (arguments.count or 10**9), of)
    until = time.monotonic() + (arguments.seconds or float("inf"))
    run_seeds(seeds, arguments.scenario, until, lambda summary: print(json.dumps(vars(summary)), flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
