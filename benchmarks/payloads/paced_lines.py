"""Prints lines with the time in them, 40 per second: `paced_lines.py COUNT`."""

import sys
import time

started = time.monotonic()
for number in range(int(sys.argv[1])):
    time.sleep(max(0.0, started + number / 40 - time.monotonic()))
    print(f"paced {time.time()}", flush=True)
