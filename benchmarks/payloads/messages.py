"""Logs numbered messages through Pipes: as many as its argument says, or BENCH_COUNT."""

import os
import sys

from dagster_pipes import open_dagster_pipes

with open_dagster_pipes() as pipes:
    for number in range(int(sys.argv[1] if len(sys.argv) > 1 else os.environ["BENCH_COUNT"])):
        pipes.log.info(f"message {number}")
