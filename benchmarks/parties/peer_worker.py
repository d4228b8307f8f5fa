"""Runs payloads with dagster-slurm, in the environment that `peer` makes for it: orders come in, times go out.

The one argument is a JSON object that says how to reach the cluster; each line of the standard input orders a run, and
each line of the standard output tells of one.
"""

import json
import os
import sys
import time
from importlib.metadata import version
from typing import Any

import dagster as dg
from dagster_slurm import (  # type: ignore[import-not-found]
    BashLauncher,
    ComputeResource,
    RayLauncher,
    SlurmQueueConfig,
    SlurmResource,
    SlurmRunAllocationConfig,
    SSHConnectionResource,
)

_NO_CONSOLE = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}


def resource(site: dict[str, Any], **options: Any) -> Any:
    """What a user of the stack would configure."""
    ssh = SSHConnectionResource(
        host=site["host"],
        port=site["port"],
        user=site["user"],
        key_path=site["key_path"],
        known_hosts_file=site["known_hosts_file"],
        extra_opts=["-o", f"SetEnv={site['mark']}"],
    )
    queue = SlurmQueueConfig(partition=site["partition"], cpus=2, mem="2500M", time_limit="00:10:00")
    return ComputeResource(
        mode="slurm",
        slurm=SlurmResource(ssh=ssh, queue=queue, remote_base=site["remote_base"]),
        default_launcher=BashLauncher(),
        pre_deployed_env_path=site["env_path"],
        **options,
    )


def launcher(ray: bool) -> Any:
    """Ray as the others in the comparison start it, as far as there are options for it."""
    if not ray:
        return BashLauncher()
    # Its password would come from `uuidgen`, which nodes need not have.
    return RayLauncher(object_store_memory_gb=1, ray_start_args=["--include-dashboard=false"], redis_password="bench")


def run_several(site: dict[str, Any], instance: dg.DagsterInstance, order: dict[str, Any]) -> dict[str, Any]:
    """Payloads one after the other in one step, on the Ray cluster that their Dagster run has for its own."""
    allocation = SlurmRunAllocationConfig(num_nodes=order["nodes"], mem=order["mem"])
    shared = resource(site, allocation_scope="run", run_allocation=allocation)
    times: list[dict[str, float]] = []

    @dg.asset
    def measured(context: dg.AssetExecutionContext, compute: ComputeResource) -> dg.MaterializeResult:
        for env in order["several"]:
            start = time.time()
            compute.run(context=context, payload_path=order["payload"], launcher=launcher(True), extra_env=env)
            times.append({"start": start, "returned": time.time()})
        return dg.MaterializeResult()

    start = time.time()
    # As a resource of the run, so that Dagster has it release its allocation in the end.
    dg.materialize([measured], resources={"compute": shared}, instance=instance, run_config=_NO_CONSOLE)
    return {"start": start, "returned": time.time(), "times": times}


def run(compute: Any, instance: dg.DagsterInstance, order: dict[str, Any]) -> dict[str, Any]:
    """One payload inside the step of an asset."""
    times: dict[str, Any] = {}

    @dg.asset
    def measured(context: dg.AssetExecutionContext, compute: ComputeResource) -> dg.MaterializeResult:
        times["run_id"] = context.run.run_id
        times["start"] = time.time()
        compute.run(
            context=context,
            payload_path=order["payload"],
            launcher=launcher(order["ray"]),
            extra_slurm_opts={"nodes": order["nodes"], "mem": order["mem"]},
            extra_env=order["env"],
        )
        times["returned"] = time.time()
        return dg.MaterializeResult()

    dg.materialize([measured], resources={"compute": compute}, instance=instance, run_config=_NO_CONSOLE)
    entries = [entry for entry in instance.all_logs(times.pop("run_id")) if entry.user_message.startswith("paced ")]
    times["late"] = [entry.timestamp - float(entry.user_message.split()[1]) for entry in entries]
    return times


def main() -> None:
    site = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Payloads' output goes where the errors go.
    compute = resource(site)
    with dg.DagsterInstance.local_temp(site["scratch"], overrides={"telemetry": {"enabled": False}}) as instance:
        answers.write(json.dumps({"version": version("dagster-slurm")}) + "\n")
        for line in sys.stdin:
            try:
                order = json.loads(line)
                answer = run_several(site, instance, order) if "several" in order else run(compute, instance, order)
            except Exception as error:  # noqa: BLE001 - the other side is told.
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
