"""A small Ray driver: connects to its cluster and runs a few tasks."""

import ray
from dagster_pipes import open_dagster_pipes


@ray.remote
def square(value: int) -> int:
    return value * value


with open_dagster_pipes() as pipes:
    ray.init()
    total = sum(ray.get([square.remote(value) for value in range(4)]))
    pipes.log.info(f"total {total}")
