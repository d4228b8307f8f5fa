"""Runs a program again and again, several at once, and writes down how long each took: what a person's own loop does."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

program = os.path.join(os.environ["BENCH_SCRIPTS"], os.environ["BENCH_DRIVER"])
count, at_once = int(os.environ["BENCH_COUNT"]), int(os.environ["BENCH_AT_ONCE"])
first = time.time()


def run(_: int) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, program], check=True, stdin=subprocess.DEVNULL, capture_output=True)
    return time.perf_counter() - began


with ThreadPoolExecutor(at_once) as pool:
    list(pool.map(run, range(at_once)))  # The first ones find no worker processes yet.
    began = time.perf_counter()
    seconds = list(pool.map(run, range(count)))
    total = time.perf_counter() - began
marks = {"seconds": seconds, "total": total, "job": os.environ["SLURM_JOB_ID"]}
now = time.time()
marks.update(first=first, work=now, last=now, exit=now)
with open(os.environ["BENCH_MARKS"], "w") as file:
    json.dump(marks, file)
