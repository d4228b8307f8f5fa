"""Turns the evidence about a run into a verdict (success, or a kind of failure with a sentence) and into Dagster metadata."""

from .verdict import (
    SUCCESS,
    Judged,
    Verdict,
    exit_in_words,
    judge,
    judge_job,
    needs_job_facts,
    signal_name,
    unhealthy_nodes,
    with_hint,
)

__all__ = [
    "SUCCESS",
    "Judged",
    "Verdict",
    "exit_in_words",
    "judge",
    "judge_job",
    "needs_job_facts",
    "signal_name",
    "unhealthy_nodes",
    "with_hint",
]
