"""Turns the evidence about a run into a verdict (success, or a kind of failure with a sentence) and into Dagster metadata."""
