"""Writes down the time at its first line, and waits until a file is there: its nodes are looked at meanwhile."""

import time

first = time.time()

import json  # noqa: E402
import os  # noqa: E402

marks, release = os.environ["BENCH_MARKS"], os.environ["BENCH_STOP"]
with open(marks + ".part", "w") as file:
    json.dump({"first": first}, file)
os.rename(marks + ".part", marks)
while not os.path.exists(release):
    time.sleep(0.05)
