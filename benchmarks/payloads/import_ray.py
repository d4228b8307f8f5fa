"""Writes down how long the import of Ray takes in fresh interpreters, where from, and how many files of it that reads."""

import time

marks: dict = {"first": time.time()}

import json  # noqa: E402
import os  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402

PROGRAM = """
import json, sys, time
began = time.perf_counter()
import ray
seconds = time.perf_counter() - began
files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
with open("/proc/self/maps") as maps:
    files |= {line.split()[-1] for line in maps}
print(json.dumps([seconds, len([file for file in files if file.startswith(sys.argv[1])])]))
"""

# The name of an environment is a link, and libraries are mapped by what it leads to.
found = [
    json.loads(
        subprocess.check_output([sys.executable, "-c", PROGRAM, os.path.realpath(sys.prefix).rpartition("-")[0] or sys.prefix])
    )
    for _ in range(5)
]
marks.update(job=os.environ.get("SLURM_JOB_ID"), prefix=sys.prefix, imports=[each[0] for each in found], files=found[0][1])
with open(os.environ["BENCH_MARKS"], "w") as file:
    json.dump(marks, file)
