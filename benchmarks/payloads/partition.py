"""Materializes its partition."""

from dagster_pipes import open_dagster_pipes

with open_dagster_pipes() as pipes:
    pipes.report_asset_materialization(metadata={"key": pipes.partition_key})
