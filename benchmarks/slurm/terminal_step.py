"""One asset in mode "slurm", materialized by a process of its own: what `rayslurm submit` is compared with."""

import json
import sys
import time

import dagster as dg

from dagster_rayslurm import BashLauncher, ComputeResource, SlurmQueueConfig, SlurmResource, SSHConnectionResource

partition, mem, environment, remote_base = sys.argv[1:]
seconds: list[float] = []


@dg.asset
def asset(context: dg.AssetExecutionContext, compute: ComputeResource) -> dg.MaterializeResult:
    began = time.perf_counter()
    compute.run(context=context, payload_path=["hostname"], uses_pipes=False)
    seconds.append(time.perf_counter() - began)
    return dg.MaterializeResult()


queue = SlurmQueueConfig(partition=partition, mem=mem, cpus_per_node=1, time_limit="00:10:00")
compute = ComputeResource(
    mode="slurm",
    slurm=SlurmResource(ssh=SSHConnectionResource.from_env(), queue=queue, remote_base=remote_base),
    default_launcher=BashLauncher(),
    pre_deployed_env_path=environment,
)
dg.materialize([asset], resources={"compute": compute}, run_config={"loggers": {"console": {"config": {"log_level": "ERROR"}}}})
print("\nSECONDS", json.dumps(seconds[0]))
