"""Dagster processes beside the test's own: `python -m tests.slurm.elsewhere JSON` says what became of their payloads.

The order names the fields of the resource (`slurm`, `ssh`, `queue`, `session` as dicts), the payload and its names: one
process each, all at once if there are several. Each prints a line of JSON at its end.
"""

import json
import os
import sys
from typing import Any

from dagster_rayslurm import BashLauncher, ComputeResource, SessionConfig, SlurmQueueConfig, SlurmResource, SSHConnectionResource

from ..conftest import run_asset


def resource(order: dict[str, Any]) -> ComputeResource:
    ssh, queue = SSHConnectionResource(**order["ssh"]), SlurmQueueConfig(**order["queue"])
    return ComputeResource(
        slurm=SlurmResource(ssh=ssh, queue=queue, **order["slurm"]),
        session=SessionConfig(**order["session"]),
        default_launcher=BashLauncher(grace_period=3),
        **order["fields"],
    )


def run(order: dict[str, Any], name: str, answers: int) -> None:
    told: dict[str, Any] = {"name": name}
    try:
        ran = run_asset(resource(order), order["payload"], extra_env={"NAME": name, **order["env"]})
        if ran.failures:
            told.update(kind=ran.failure.kind, sentence=ran.failure.description)
        else:
            told.update(job=ran.completed[0].job_id, cluster=ran.completed[0].cluster_id)
    except BaseException as error:  # noqa: BLE001 - an interrupt, too
        told.update(kind=type(error).__name__, sentence=str(error))
    os.write(answers, json.dumps(told).encode() + b"\n")


def main() -> None:
    order = json.loads(sys.argv[1])
    answers = os.dup(1)
    os.dup2(2, 1)  # Payloads' output goes where the log goes.
    if len(order["names"]) == 1:
        return run(order, order["names"][0], answers)
    children = []
    for name in order["names"]:
        child = os.fork()
        if child == 0:
            run(order, name, answers)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
