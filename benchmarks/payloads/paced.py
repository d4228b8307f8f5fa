"""Logs messages with the time in them: `paced.py COUNT PER_SECOND`."""

import sys
import time

from dagster_pipes import open_dagster_pipes

count, per_second = int(sys.argv[1]), float(sys.argv[2])

with open_dagster_pipes() as pipes:
    started = time.monotonic()
    for number in range(count):
        time.sleep(max(0.0, started + number / per_second - time.monotonic()))
        pipes.log.info(f"paced {time.time()}")
