"""Prints numbered lines of 50 bytes: as many as its argument says, or BENCH_COUNT."""

import os
import sys

for number in range(int(sys.argv[1] if len(sys.argv) > 1 else os.environ["BENCH_COUNT"])):
    print(f"{number:09d} {'x' * 39}")
