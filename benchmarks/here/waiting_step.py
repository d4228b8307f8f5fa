"""A process of its own for `waiting`: one step that awaits many payloads, on the Slurm programs that are on the PATH.

Arguments: the number of payloads, the base directory, and for a re-execution from failure the id of the run before.
"""

import asyncio
import json
import sys
import threading
import time

import dagster as dg

from benchmarks.steps import PAYLOADS
from dagster_rayslurm import BashLauncher, ComputeResource, SlurmResource
from dagster_rayslurm.follow.hub import hub_of
from dagster_rayslurm.ssh.pool import connection_to

# No annotations from the future here: Dagster wants the type of `context` itself, not its name.


def definitions() -> dg.Definitions:
    count, base = int(sys.argv[1]), sys.argv[2]

    @dg.asset
    async def waits(context: dg.AssetExecutionContext, compute: ComputeResource) -> None:
        tell({"began": time.time()})
        threading.Thread(target=tell_when_all_wait, args=(count,), daemon=True).start()
        payload = PAYLOADS / "hello.py"
        await asyncio.gather(*(compute.run_async(context=context, payload_path=payload) for _ in range(count)))

    slurm = SlurmResource(remote_base=f"{base}/there", poll_interval=30)
    compute = ComputeResource(mode="slurm", slurm=slurm, default_launcher=BashLauncher(), local_base=f"{base}/here")
    job = dg.define_asset_job("job", [waits], executor_def=dg.in_process_executor)
    return dg.Definitions([waits], jobs=[job], resources={"compute": compute})


def the_job() -> dg.JobDefinition:
    return definitions().resolve_job_def("job")


def tell(what: dict[str, float]) -> None:
    """Print an object for the process that measures."""
    print(json.dumps(what), file=sys.__stderr__, flush=True)


def tell_when_all_wait(count: int) -> None:
    hub = hub_of(connection_to(None))
    while len(hub._followed) < count:
        time.sleep(0.5)
    tell({"waiting": time.time(), "threads": threading.active_count()})


if __name__ == "__main__":
    import benchmarks.here.waiting_step as here

    before = sys.argv[3:]
    with dg.DagsterInstance.get() as instance:
        again = dg.ReexecutionOptions.from_failure(before[0], instance) if before else None
        console = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
        tags = {"dagster/is_resume_retry": "true"} if before else {}
        job = dg.reconstructable(here.the_job)
        dg.execute_job(job, instance=instance, run_config=console, tags=tags, reexecution_options=again)
