"""A small Ray driver that tells when its parts ended: its first line, its imports, `ray.init`, a few tasks."""

import sys
import time

ends: dict = {"first": time.time(), "preloaded": "ray" in sys.modules}

import ray  # noqa: E402
from dagster_pipes import open_dagster_pipes  # noqa: E402


@ray.remote
def square(value: int) -> int:
    return value * value


with open_dagster_pipes() as pipes:
    ends["imports"] = time.time()
    ray.init()
    ends["init"] = time.time()
    assert sum(ray.get([square.remote(value) for value in range(4)])) == 14
    ends["tasks"] = time.time()
    pipes.report_custom_message(ends)
