"""Logs numbered messages through Pipes."""

import sys

from dagster_pipes import open_dagster_pipes

with open_dagster_pipes() as pipes:
    for number in range(int(sys.argv[1])):
        pipes.log.info(f"message {number}")
