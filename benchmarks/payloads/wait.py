"""Waits for a file."""

import os
import time

while not os.path.exists(os.environ["BENCH_STOP"]):
    time.sleep(0.5)
