"""The separate topology on the Dagster side: one payload per component, started and judged together."""
