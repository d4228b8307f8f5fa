"""What became of a run: from evidence to a verdict, and to what users see of it in Dagster. Pure."""

from .verdict import SUCCESS, Judged, Verdict, exit_in_words, judge, judge_job, needs_job_facts, signal_name

__all__ = ["SUCCESS", "Judged", "Verdict", "exit_in_words", "judge", "judge_job", "needs_job_facts", "signal_name"]
