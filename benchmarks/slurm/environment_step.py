"""One of many processes that use an environment: logs in, says "ready", and asks for it once it is told to."""

import json
import os
import sys
import time
from typing import Any

import dagster_rayslurm
from dagster_rayslurm import ComputeResource
from dagster_rayslurm.environments import SentEnvironment
from dagster_rayslurm.environments.send import send_environment
from dagster_rayslurm.operations import environment_site
from dagster_rayslurm.upload.deliver import missing

from ..parties.edge import Edge
from ..parties.runs import Ours, Shape


def to_raw(environment: SentEnvironment) -> dict[str, Any]:
    """An environment for another process."""
    return {"class": type(environment).__name__, "fields": environment.model_dump(exclude={"kind"})}


def from_raw(raw: dict[str, Any]) -> SentEnvironment:
    """What `to_raw` was given."""
    environment: SentEnvironment = getattr(dagster_rayslurm, raw["class"])(**raw["fields"])
    return environment


class Lines:
    """A log that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, text: str) -> None:
        self.lines.append(text)

    debug = warning = info


def ask(compute: ComputeResource, log: Lines) -> tuple[float, str]:
    """Seconds that the environment of a resource takes, on a connection that is up, and its path on the cluster."""
    site = environment_site(compute)
    start = time.perf_counter()
    found = send_environment(site.connection, site.environment, site.base, log, site.queues)
    return time.perf_counter() - start, found.path  # type: ignore[union-attr]


def main() -> None:
    site = json.loads(sys.argv[1])
    if site["machines"] > 1:  # Processes share locks with those of their machine only.
        os.environ["XDG_RUNTIME_DIR"] = f"{site['scratch']}/{os.getpid() % site['machines']}"
        os.makedirs(os.environ["XDG_RUNTIME_DIR"], mode=0o700, exist_ok=True)
    edge, log = Edge(), Lines()
    shape = Shape(ray=False)
    ours = Ours(edge, site["directory"], site["partition"])
    compute = ours.resource(shape, environment=from_raw(site["environment"]))
    there = environment_site(compute)
    missing(there.connection, there.base, [])
    print("ready", flush=True)
    sys.stdin.readline()
    seconds, path = ask(compute, log)
    again, _ = ask(compute, log)
    print(json.dumps({"seconds": seconds, "again": again, "path": path, "lines": log.lines}), flush=True)


if __name__ == "__main__":
    main()
