"""One of many callers: says "ready" inside the step of an asset, and runs its payload once it is told to."""

import json
import os
import sys
import time

import dagster as dg

from dagster_rayslurm import BashLauncher, ComputeResource, SessionConfig, SlurmQueueConfig, SlurmResource

from ..parties.edge import Edge
from ..parties.runs import MEMORY
from ..parties.sessions import HELLO
from ..steps import in_step, instance

# No annotations from the future here: Dagster wants the type of `context` itself, not its name.


def main() -> None:
    site, edge = json.loads(sys.argv[1]), Edge()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Payloads' output goes where the errors go.
    compute = ComputeResource(
        mode="slurm-session",
        slurm=SlurmResource(
            ssh=edge.resource(),
            queue=SlurmQueueConfig(partition=site["partition"], mem=MEMORY, time_limit="00:10:00"),
            remote_base=site["base"],
        ),
        pre_deployed_env_path=edge.env["RAYSLURM_ENV_PATH"],
        default_launcher=BashLauncher(),
        session=SessionConfig(name="race", idle_timeout=60),
    )

    def body(context: dg.AssetExecutionContext, compute: ComputeResource) -> None:
        answers.write("ready\n")
        sys.stdin.readline()
        start = time.time()
        run = compute.run(context=context, payload_path=HELLO)
        answers.write(json.dumps({"start": start, "returned": time.time(), "job": run.job_id}) + "\n")

    with instance() as dagster:
        in_step(compute, dagster, body)


if __name__ == "__main__":
    main()
