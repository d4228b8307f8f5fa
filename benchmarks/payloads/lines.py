"""Prints numbered lines of 50 bytes."""

import sys

for number in range(int(sys.argv[1])):
    print(f"{number:09d} {'x' * 39}")
