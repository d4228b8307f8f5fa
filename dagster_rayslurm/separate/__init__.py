"""Dagster's side of `topology="separate"`: one payload for each component, run and judged together."""
