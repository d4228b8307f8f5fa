"""Judge a run, and show it in Dagster: evidence → verdict and metadata. Pure."""

from .verdict import SUCCESS, Judged, Verdict, exit_in_words, judge, judge_job, needs_job_facts, signal_name

__all__ = ["SUCCESS", "Judged", "Verdict", "exit_in_words", "judge", "judge_job", "needs_job_facts", "signal_name"]
