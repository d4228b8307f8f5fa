"""Writes down the time at its first line, at the end of its work, at its last line and at the end of its process.

Who runs it says where, and whether there is Ray, by BENCH_MARKS and BENCH_RAY; or says nothing, as variables of a
payload's own make each of its Ray workers start anew.
"""

import time

marks: dict = {"first": time.time()}

import atexit  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402


def keep() -> None:
    marks["exit"] = time.time()
    with open(os.environ.get("BENCH_MARKS") or os.environ["RAYSLURM_DATA_DIR"] + "/marks.json", "w") as file:
        json.dump(marks, file)


atexit.register(keep)  # Before Ray is imported, so that it comes after Ray's own exit.

from dagster_pipes import open_dagster_pipes  # noqa: E402

marks["job"] = os.environ.get("SLURM_JOB_ID")

with open_dagster_pipes() as pipes:
    if os.environ.get("BENCH_RAY", "1" if "RAY_ADDRESS" in os.environ else "0") == "1":
        import ray

        @ray.remote
        def square(value: int) -> int:
            return value * value

        ray.init()
        marks["nodes"] = sum(node["Alive"] for node in ray.nodes())
        assert sum(ray.get([square.remote(value) for value in range(4)])) == 14
    pipes.log.info("hello")
    marks["work"] = time.time()
marks["last"] = time.time()
