"""Tells how to reach the Ray cluster around it, so that a driver can be started on it by hand."""

import os

from dagster_pipes import open_dagster_pipes

with open_dagster_pipes() as pipes:
    pipes.report_custom_message({name: value for name, value in os.environ.items() if name.startswith("RAY_")})
