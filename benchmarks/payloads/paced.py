"""Logs messages with the time in them: `paced.py COUNT PER_SECOND`, or BENCH_COUNT and BENCH_RATE."""

import os
import sys
import time

from dagster_pipes import open_dagster_pipes

count, per_second = map(float, sys.argv[1:] or (os.environ["BENCH_COUNT"], os.environ["BENCH_RATE"]))

with open_dagster_pipes() as pipes:
    started = time.monotonic()
    for number in range(int(count)):
        time.sleep(max(0.0, started + number / per_second - time.monotonic()))
        pipes.log.info(f"paced {time.time()}")
