"""`run(queue=…)` and `run(launcher=…)` change the fields that they set, and no others."""

from typing import Any

import dagster as dg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rayslurm import (
    BashLauncher,
    ComputeResource,
    Launcher,
    RayLauncher,
    RunFailure,
    SessionConfig,
    SlurmQueueConfig,
    SlurmResource,
)
from dagster_rayslurm.backends.sessions.backend import SessionBackend
from dagster_rayslurm.call import Call, log_origins
from dagster_rayslurm.environments import InheritedEnvironment
from dagster_rayslurm.plan import make_plan, merge

from .lines import Log

QUEUE = SlurmQueueConfig(partition="gpu", account="study", mem="2G", time_limit="05:00:00")

NAMES = st.sampled_from(["a", "b", "c"])
QUEUE_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "partition": st.none() | NAMES,
        "account": st.none() | NAMES,
        "constraint": st.none() | NAMES,
        "num_nodes": st.integers(1, 9),
        "cpus_per_node": st.none() | st.integers(1, 9),
        "gpus_per_node": st.none() | st.integers(0, 9),
        "gpu_type": st.none() | NAMES,
        "mem": st.none() | st.sampled_from(["1G", "2G"]),
        "mem_per_cpu": st.none() | st.sampled_from(["1G", "2G"]),
        "time_limit": st.sampled_from(["01:00:00", "10", "1-0"]),
        "exclusive": st.booleans(),
        "extra_sbatch": st.lists(st.sampled_from(["--licenses=a", "--gres=gpu:1", "--exclusive=user", "--nice=5"])),
    },
)
LAUNCHER_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "num_cpus_per_node": st.none() | st.integers(0, 9),
        "object_store_memory_gb": st.none() | st.sampled_from([0.5, 1.0]),
        "resources": st.dictionaries(NAMES, st.just(1.0)),
        "labels": st.dictionaries(NAMES, NAMES),
        "ray_args": st.lists(st.just("--verbose")),
        "dashboard": st.booleans(),
        "working_dir": st.none() | NAMES,
        "grace_period": st.integers(0, 99),
    },
)


def ruled_out(base: SlurmQueueConfig, own: dict[str, Any]) -> set[str]:
    """Fields of `base` that the fields of `own` contradict, written down once more."""
    out = set()
    if own.get("mem"):
        out.add("mem_per_cpu")
    if own.get("mem_per_cpu"):
        out.add("mem")
    options = own.get("extra_sbatch", [])
    if "--gres=gpu:1" in options:
        out |= {"gpus_per_node", "gpu_type"}
    elif "gpus_per_node" in own and not own["gpus_per_node"]:
        out.add("gpu_type")
    if "--exclusive=user" in options:
        out.add("exclusive")
    if own.get("gpus_per_node") is not None and "--gres=gpu:1" in base.extra_sbatch:
        out.add("extra_sbatch")
    if "exclusive" in own and "--exclusive=user" in base.extra_sbatch:
        out.add("extra_sbatch")
    return out - set(own)


@given(QUEUE_FIELDS, QUEUE_FIELDS)
def test_fields_of_a_queue_that_are_set_win_and_the_others_stay(base_fields: dict[str, Any], own_fields: dict[str, Any]) -> None:
    base, own = SlurmQueueConfig(**base_fields), SlurmQueueConfig(**own_fields)
    merged = merge(base, own)
    dropped = ruled_out(base, own_fields)
    for name in SlurmQueueConfig.model_fields:
        value = getattr(merged, name)
        if name in own_fields:
            assert value == getattr(own, name)
        elif name not in dropped:
            assert value == getattr(base, name)
        elif name == "extra_sbatch":
            assert [option for option in value if option in ("--licenses=a", "--nice=5")] == [
                option for option in base.extra_sbatch if option in ("--licenses=a", "--nice=5")
            ]
        else:
            assert value == SlurmQueueConfig.model_fields[name].default


@given(LAUNCHER_FIELDS, LAUNCHER_FIELDS)
def test_fields_of_a_launcher_that_are_set_win_and_the_others_stay(base: dict[str, Any], own: dict[str, Any]) -> None:
    assert merge(RayLauncher(**base), RayLauncher(**own)) == RayLauncher(**{**base, **own})


def test_a_launcher_of_another_kind_replaces_the_default_one() -> None:
    class Own(Launcher):
        pass

    default: Launcher = RayLauncher(grace_period=5)
    for own in (BashLauncher(num_cpus=2), Own(grace_period=3)):
        assert merge(default, own) is own


@pytest.mark.parametrize("mode", ["slurm", "slurm-session"])
@pytest.mark.parametrize("own", [SlurmQueueConfig(num_nodes=2), {"num_nodes": 2}, SlurmQueueConfig(num_nodes=dg.EnvVar.int("N"))])
def test_the_script_has_what_the_resource_says(mode: str, own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("N", "2")
    monkeypatch.setenv("TEST_PARTITION", "gpu")
    queue = SlurmQueueConfig(partition=dg.EnvVar("TEST_PARTITION"), account="study", mem="2G", time_limit="05:00:00")
    compute = ComputeResource(mode=mode, slurm=SlurmResource(queue=queue), default_launcher=RayLauncher(num_cpus_per_node=3))
    text = compute.job_script(payload_path=["true"], queue=own, launcher=RayLauncher(num_gpus_per_node=1))
    for option in ("nodes=2", "partition=gpu", "account=study", "mem=2G", "time=05:00:00", "cpus-per-task=3", "gpus-per-node=1"):
        assert f"#SBATCH --{option}\n" in text


def test_a_queue_of_another_type_is_refused() -> None:
    compute = ComputeResource(mode="slurm", slurm=SlurmResource(queue=QUEUE))
    wrong: Any = "gpu"
    with pytest.raises(RunFailure, match="queue: 'gpu' is not a queue; pass a SlurmQueueConfig"):
        compute.job_script(payload_path=["true"], queue=wrong)
    with pytest.raises(RunFailure, match="num_node"):
        compute.job_script(payload_path=["true"], queue={"num_node": 2})


def session_setup(own: SlurmQueueConfig | None) -> SessionBackend:
    session = SessionConfig(num_nodes=2, time_limit="08:00:00")
    return SessionBackend(
        slurm=SlurmResource(queue=QUEUE),
        own_queue=own,
        environment=InheritedEnvironment(),
        session=session,
        launcher=BashLauncher(),
        reuse=False,
    )


def test_a_session_job_has_the_changes_of_the_call() -> None:
    plan = make_plan(payload_path=["true"], launcher=BashLauncher(), nonce="n", max_output_bytes=1, max_stdio_bytes=1)
    fits = session_setup(SlurmQueueConfig(num_nodes=1))
    assert fits.misfit(plan) is None
    # Only a time limit that the call sets is the payload's own.
    assert not fits.required(plan).time_limited
    assert session_setup(SlurmQueueConfig(time_limit="01:00:00")).required(plan).time_limited
    larger = session_setup(SlurmQueueConfig(num_nodes=3))
    assert "num_nodes=3" in (larger.misfit(plan) or "")
    queue = larger.own(plan).queue
    assert (queue.num_nodes, queue.partition, queue.mem, queue.time_limit) == (3, "gpu", "2G", "08:00:00")


def test_a_run_logs_where_values_come_from(tmp_path: Any) -> None:
    compute = ComputeResource(local_base=str(tmp_path), default_launcher=BashLauncher(grace_period=3))

    @dg.op(required_resource_keys={"compute"})
    def op(context: dg.OpExecutionContext) -> None:
        context.resources.compute.run(context=context, payload_path=["true"], launcher=BashLauncher(num_cpus=1), uses_pipes=False)

    @dg.job(resource_defs={"compute": compute})
    def job() -> None:
        op()

    with dg.DagsterInstance.ephemeral() as instance:
        result = job.execute_in_process(instance=instance)
        lines = [record.user_message for record in instance.all_logs(result.run_id)]
    assert "[rayslurm] launcher: num_cpus=1 from run(launcher=…); grace_period=3 from default_launcher" in lines


def test_values_that_the_call_rules_out_come_from_nowhere() -> None:
    compute = ComputeResource(mode="slurm", slurm=SlurmResource(queue=QUEUE), environment=InheritedEnvironment())
    log = Log()
    log_origins(Call(compute, payload_path=["true"], queue={"mem_per_cpu": "1G"}, launcher=RayLauncher()), log)
    kept = "partition='gpu', account='study', time_limit='05:00:00' from the resource"
    assert log.lines == [f"[rayslurm] queue: mem_per_cpu='1G' from run(queue=…); {kept}"]
