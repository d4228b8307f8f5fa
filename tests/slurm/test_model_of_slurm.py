"""The model of slurmctld behaves as a real Slurm: the same commands lead to the same states, reasons and errors on both."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ..fake_slurm import model
from ..stack.access import Stack
from .test_script_on_slurm import on_edge

HISTORIES: dict[str, tuple[str, list[str], list[list[str]]]] = {
    "ends well": ("true", [], []),
    "fails": ("exit 3", [], []),
    "is cancelled while it runs": ("sleep 300", [], [["scancel", "JOB"]]),
    "is held, released and cancelled": ("sleep 300", ["--hold"], [["scontrol", "release", "JOB"], ["scancel", "JOB"]]),
    "is cancelled while it is held": ("true", ["--hold"], [["scancel", "JOB"], ["scancel", "JOB"]]),
    "is held twice": ("true", ["--hold"], [["scontrol", "hold", "JOB"], ["scontrol", "release", "JOB"]]),
    "is requeued and cancelled": ("sleep 300", ["--requeue"], [["scontrol", "requeue", "JOB"], ["scancel", "JOB"]]),
}
"""What the batch script does, options of sbatch, and commands, by what happens to the job."""
UNKNOWN = ("squeue --noheader --jobs=99999999 --format=%A", "scontrol show job 99999999")
"""Commands about a job that does not exist."""

ON_SLURM = r"""
def main(arguments):
    histories, unknown = arguments
    answer = []
    for work, options, commands, expected in histories:
        job, said = submit("#!/bin/sh\n#SBATCH --partition=compute --output=/dev/null\n" + work + "\n", *options, directory=base)
        assert job.isdigit(), said
        jobs.append(job)
        seen = []
        for command, wanted in zip([None, *commands], expected):
            code = run(*[word.replace("JOB", job) for word in command]).returncode if command else 0
            until(lambda: show(job)[job][:2] == wanted[1:], 60)
            seen.append([code, *show(job)[job][:2]])
        answer.append(seen)
    errors = [run(*command.split()) for command in unknown]
    return [answer, [[done.returncode, done.stdout, done.stderr] for done in errors]]
"""


class OnModel:
    """The model as a Slurm with room for every job."""

    def __init__(self) -> None:
        self.state: model.State = {**model.FIRST_STATE, "jobs": {}, "starts": False}
        self.caller, self.now = model.Caller({}, "/", 1000), 1_800_000_000.0

    def call(self, *words: str) -> model.Answer:
        self.now += 1.0
        return model.PROGRAMS[words[0]](self.state, list(words[1:]), self.caller, self.now)

    def submit(self, work: str, options: list[str]) -> str:
        lines = ["#!/bin/sh", "#SBATCH --partition=compute", *(f"#SBATCH {option}" for option in options), work]
        self.now += 1.0
        return model.sbatch(self.state, [], "\n".join(lines), self.caller, self.now).out.strip()

    def settle(self, job_id: str, work: str) -> list[str]:
        """Start the job if it can start, and let its script end; returns its state and reason."""
        job = model.first_of(self.state, int(job_id))
        if job["state"] == "PENDING" and job["reason"] == self.state["reason"]:
            model.start(self.state, int(job_id), self.now)
        sleeps = work.startswith("sleep")
        if job["state"] == "COMPLETING" or (job["state"] == "RUNNING" and not sleeps):
            code = re.search("exit ([0-9]+)", work)
            model.script_ended(self.state, int(job_id), -15 if sleeps else int(code[1]) if code else 0, self.now)
        shown = self.call("squeue", "--states=all", f"--jobs={job_id}", "--format=%T|%r")
        return shown.out.strip().split("|")


def on_model(work: str, options: list[str], commands: list[list[str]]) -> list[list[Any]]:
    """Exit code of each command, and state and reason of the job after it."""
    slurm = OnModel()
    job = slurm.submit(work, options)
    seen: list[list[Any]] = [[0, *slurm.settle(job, work)]]
    for command in commands:
        code = slurm.call(*(word.replace("JOB", job) for word in command)).code
        seen.append([code, *slurm.settle(job, work)])
    return seen


@pytest.mark.parametrize(
    ("history", "end"),
    [
        ("ends well", ["COMPLETED", "None"]),
        ("fails", ["FAILED", "NonZeroExitCode"]),
        ("is cancelled while it runs", ["CANCELLED", "None"]),
        ("is held twice", ["COMPLETED", "None"]),
    ],
)
def test_ends_of_jobs_in_the_model(history: str, end: list[str]) -> None:
    assert on_model(*HISTORIES[history])[-1][1:] == end


def test_the_model_is_as_slurm(stack: Stack) -> None:
    expected = [on_model(*history) for history in HISTORIES.values()]
    histories = [[*history, seen] for history, seen in zip(HISTORIES.values(), expected, strict=True)]
    seen, errors = on_edge(stack, ON_SLURM, [histories, list(UNKNOWN)])
    assert dict(zip(HISTORIES, seen, strict=True)) == dict(zip(HISTORIES, expected, strict=True))
    answers = [OnModel().call(*command.split()) for command in UNKNOWN]
    assert errors == [[each.code, each.out, each.err] for each in answers]
