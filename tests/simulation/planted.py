"""How soon the simulator finds a defect: plants one after the other in a copy of the package, and runs histories until one fails.

Run `python -m tests.simulation.planted`; it prints a table. The defects resemble some that this package once had.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .__main__ import fixed_hashes

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Planted:
    """A defect: in `file` of the package, `old` becomes `new`."""

    defect: str
    file: str
    old: str
    new: str


PLANTED = [
    Planted(
        "after a lost answer the job is submitted again without a search",
        "slurm/submit.py",
        "found = find_job(connection, name, patience)",
        "found = None",
    ),
    Planted(
        "a run directory that names its job is submitted again",
        "edge/slurm.py",
        "        if not answer:\n",
        "        if True:\n",
    ),
    Planted(
        "an owner is confirmed without a look at who took the payload over",
        "backends/ownership.py",
        "self.new_owner = self._find_new_owner(judged)",
        "self.new_owner = None",
    ),
    Planted(
        "after a requeue, the end of the run before counts",
        "backends/ownership.py",
        'if end is not None and not (requeue and end["reason"] == EndReason.TERMINATED):',
        "if end is not None:",
    ),
    Planted(
        "results are not held back though Slurm may requeue the job",
        "follow/forward.py",
        'if self.hold_results and method.startswith("report_"):',
        'if False and method.startswith("report_"):',
    ),
    Planted(
        "the bookmark is ahead of the output that was shown",
        "follow/follower.py",
        "note(state.output.offset)",
        "note(state.output.offset + 60)",
    ),
    Planted(
        "the reader takes zeros of a network file system for data",
        "runtime/protocol/record.py",
        'hole = data.find(b"\\0")',
        "hole = -1",
    ),
    Planted(
        "a job is not cancelled if its submission is interrupted",
        "backends/batch.py",
        "cancel_named(self.connection, request.job_name, step.log)",
        "pass",
    ),
    Planted(
        "exit code 1 counts as success",
        "outcome/verdict.py",
        'if end["exit_code"] != 0:',
        'if end["exit_code"] not in (0, 1):',
    ),
    Planted(
        "two processes may both claim a session",
        "edge/slurm.py",
        "return creator == claim and not os.path.lexists(os.path.join(run_dir, ABANDONED))",
        "return True",
    ),
    Planted(
        "a run keeps its turn in a session after its payload has started",
        "runtime/supervisor/queue.py",
        "turns = (*(each for each in queue.turns if each != run), *(each for each in queue.turns if each == run))",
        "turns = queue.turns",
    ),
    Planted(
        "a Ray cluster is ready before enough nodes have joined",
        "runtime/ray/membership.py",
        "if self.ready or head is None or len(living) < self.needed or waits:",
        "if self.ready or head is None or waits:",
    ),
    Planted(
        "a later failure of a component replaces the first",
        "runtime/separate/barrier.py",
        "        if self.state.failed is None:\n            self.state, self.exit_code = replace",
        "        if True:\n            self.state, self.exit_code = replace",
    ),
]


def find(planted: Planted, seconds: float) -> tuple[str, str, str]:
    """Plant a defect in a copy, and simulate until it is found; returns histories, seconds and the broken promise, in words."""
    with tempfile.TemporaryDirectory(prefix="rs-planted-") as copy:
        for name in ("dagster_rayslurm", "tests"):
            shutil.copytree(ROOT / name, Path(copy, name), ignore=shutil.ignore_patterns("__pycache__"))
        path = Path(copy, "dagster_rayslurm", planted.file)
        text = path.read_text()
        if text.count(planted.old) != 1:
            return "-", "-", f"cannot be planted: {planted.file} has changed"
        path.write_text(text.replace(planted.old, planted.new))
        command = [sys.executable, "-m", "tests.simulation", "--stop", "--seconds", str(seconds)]
        done = subprocess.run(command, cwd=copy, env=fixed_hashes(), capture_output=True, text=True, check=False)
    count = re.search(r"(\d+) histories in (\d+) s", done.stdout)
    found = re.search(r"^  (\w+: (?:Violation|Stuck).*)$", done.stdout, re.MULTILINE)
    histories, took = count.groups() if count else ("?", "?")
    return histories, took, found[1] if found else f"not found {done.stdout[-300:]}"


def main() -> int:
    """Returns 1 unless all defects were found."""
    parser = argparse.ArgumentParser("python -m tests.simulation.planted", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="most seconds for one defect")
    seconds, missed = parser.parse_args().seconds, 0
    print("| Planted defect | Histories | Seconds | Found as |\n|---|---|---|---|")
    for planted in PLANTED:
        histories, took, found = find(planted, seconds)
        missed += found.startswith(("not found", "cannot"))
        print(f"| {planted.defect} | {histories} | {took} | {found[:110]} |", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
