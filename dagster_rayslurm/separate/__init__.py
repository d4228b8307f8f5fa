"""Backends and merged results for `topology="separate"`: one payload for each component, all together in one Dagster run."""
