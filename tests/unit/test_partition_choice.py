"""Which partition a job with partition="auto" gets: the first that fits and is free, by one answer of Slurm."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import BashLauncher, ComputeResource, RayLauncher, SessionConfig, SlurmQueueConfig, SlurmResource
from dagster_rayslurm.backends.base import Step
from dagster_rayslurm.backends.batch import BatchBackend, example_script
from dagster_rayslurm.backends.sessions.matching import Requirements, misfit
from dagster_rayslurm.backends.sessions.registry import parse_manifest
from dagster_rayslurm.edge.sessions import MANIFEST
from dagster_rayslurm.environments import InheritedEnvironment
from dagster_rayslurm.errors import FailureKind, StartError
from dagster_rayslurm.slurm.partition_choice import choose
from dagster_rayslurm.slurm.partitions import Partition, parse_partitions
from dagster_rayslurm.slurm.request import JobRequest, srun_command
from dagster_rayslurm.slurm.standalone import standalone_script

from ..conftest import run_asset
from ..fake_slurm import FakeSlurm, job_request
from .lines import Log
from .test_excluded_nodes import het

PARTITIONS = """\
PartitionName=gpu AllowAccounts=ALL Default=NO MaxNodes=UNLIMITED MaxTime=1-00:00:00 State=UP
PartitionName=long AllowAccounts=study Default=NO MaxNodes=1 MaxTime=30-00:00:00 State=UP
PartitionName=work AllowQos=normal Default=YES MaxNodes=UNLIMITED MaxTime=12:00:00 State=UP
PartitionName=old Default=NO MaxTime=UNLIMITED State=DOWN
"""
NODES = """\
gpu|g1|idle|0/64/0/64|512000|gpu:a100:4(S:0-1)|a100,ib
gpu|g2|mix|32/32/0/64|512000|gpu:a100:4|a100,ib
long|l1|idle|0/32/0/32|64000|(null)|ib
work|w1|idle|0/16/0/16|64000|(null)|amd
work|w2|mix|12/4/0/16|64000|(null)|amd
work|w3|down*|0/0/16/16|64000|(null)|amd
old|o1|idle|0/16/0/16|64000|(null)|(null)
"""


def partitions(*changes: tuple[str, str]) -> list[Partition]:
    nodes = NODES
    for old, new in changes:
        assert old in nodes
        nodes = nodes.replace(old, new)
    return parse_partitions(PARTITIONS, nodes)


def auto(**queue: Any) -> JobRequest:
    return JobRequest("job", "", SlurmQueueConfig(partition="auto", **queue))


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:4", {"": 4}),
        ("gpu:3090:8(S:0-1)", {"3090": 8}),
        ("gpu:2080ti:8,gpu:4090:2", {"2080ti": 8, "4090": 2}),
        ("gpu:1g.5gb:7", {"1g.5gb": 7}),
        ("craynetwork:4,gpu:a100:4(S:0,1),nvme:1", {"a100": 4}),
    ],
)
def test_gpus_of_a_node(gres: str, gpus: dict[str, int]) -> None:
    (node,) = parse_partitions(PARTITIONS, f"gpu|g1|idle|0/64/0/64|512000|{gres}|(null)\n")[0].nodes
    assert dict(node.gpus) == gpus


BUSY = ("w1|idle|0/16/0/16", "w1|alloc|16/0/0/16"), ("w2|mix|12/4/0/16", "w2|alloc|16/0/0/16")


@pytest.mark.parametrize(
    ("queue", "changes", "name"),
    [
        ({}, (), "work"),  # The default one comes first.
        ({"num_nodes": 2, "cpus_per_node": 4}, (), "work"),  # A node that runs other jobs has four idle CPUs.
        ({"num_nodes": 2, "cpus_per_node": 4, "exclusive": True}, (BUSY[1],), "work,gpu"),
        ({"cpus_per_node": 8}, BUSY, "long"),  # GPUs that nobody asks for come last.
        ({"cpus_per_node": 64}, (), "gpu"),
        ({"mem": "100G"}, (), "gpu"),
        ({"mem_per_cpu": "50G", "cpus_per_node": 2}, (), "gpu"),
        ({"mem_per_cpu": "50G", "cpus_per_node": 2, "exclusive": True}, (), "gpu"),  # At least the memory of the two CPUs.
        ({"mem_per_cpu": "100G"}, (), "gpu"),
        ({"mem": "0"}, (), "work"),
        ({"time_limit": "2-00:00:00"}, (), "long"),
        ({"constraint": "ib"}, (), "long"),
        ({"constraint": "a100&ib"}, (), "gpu"),
        ({"constraint": "[rack1|rack2]"}, (), "work"),  # What is not understood is left to Slurm.
        ({"account": "thesis", "cpus_per_node": 8}, BUSY, "gpu"),
        ({"qos": "high"}, (), "long"),
        ({"gpus_per_node": 4, "gpu_type": "a100"}, (), "gpu"),
        ({"extra_sbatch": ["--gres=gpu:2"]}, (), "gpu"),
        ({"nodelist": "l1"}, (), "long"),
        ({"exclude": "w[1-2]"}, (), "long"),
        ({"cpus_per_node": 16}, BUSY, "long"),
        ({"cpus_per_node": 8, "num_nodes": 2}, BUSY, "gpu"),
        ({"gpus_per_node": 2, "num_nodes": 2}, (), "gpu"),  # It waits: sinfo does not show idle GPUs of a node that runs jobs.
    ],
)
def test_the_first_that_fits_and_is_free(queue: dict[str, Any], changes: Any, name: str) -> None:
    assert choose(auto(**queue), partitions(*changes)).request.queue.partition == name


@pytest.mark.parametrize(
    "state", ["idle@", "idle^", "idle$", "idle-", "idle%", "idle!", "resv", "plnd", "maint", "drain", "drng"]
)
def test_a_node_that_is_held_for_something_else_is_not_free(state: str) -> None:
    name = choose(auto(cpus_per_node=8), partitions(("w1|idle", f"w1|{state}"))).request.queue.partition
    assert name == "long"


@pytest.mark.parametrize("state", ["mix@", "mix^", "mix$", "mix-"])
def test_a_node_that_runs_jobs_and_soon_takes_none_is_not_free(state: str) -> None:
    change = ("w1|idle|0/16/0/16", f"w1|{state}|4/12/0/16")
    assert choose(auto(cpus_per_node=8), partitions(change)).request.queue.partition == "long"


@pytest.mark.parametrize("state", ["idle~", "idle#"])
def test_a_node_that_is_started_on_demand_is_free(state: str) -> None:
    assert choose(auto(cpus_per_node=8), partitions(("w1|idle", f"w1|{state}"))).request.queue.partition == "work"


@pytest.mark.parametrize(
    ("setting", "queue", "said"),
    [
        ("DenyQos=high", {"qos": "high"}, "it does not take the QOS high"),
        ("MinNodes=2", {}, "it gives a job 2 nodes at least, and num_nodes is 1"),
        ("MaxCPUsPerNode=8", {"cpus_per_node": 12}, "it gives a job 8 CPUs of a node at most, and cpus_per_node is 12"),
        ("MinNodes=0 MaxCPUsPerNode=UNLIMITED DenyQos=low", {"qos": "high"}, None),
    ],
)
def test_a_limit_of_the_partition(setting: str, queue: dict[str, Any], said: str | None) -> None:
    found = parse_partitions(f"PartitionName=work Default=YES {setting} State=UP", NODES)
    if said is None:
        assert choose(auto(**queue), found).request.queue.partition == "work"
        return
    with pytest.raises(ValueError, match=said):
        choose(auto(**queue), found)


def test_the_reason_is_told() -> None:
    (reason,) = choose(auto(cpus_per_node=8), partitions(*BUSY)).reasons
    assert reason == (
        'partition="auto" is long, the first that fits and is free: 1 node free; passed over work: 0 of 2 nodes free'
    )
    (reason,) = choose(auto(gpus_per_node=2, num_nodes=2), partitions()).reasons
    assert reason == 'partition="auto" is gpu, where the job waits (gpu: 1 of 2 nodes free)'


def test_where_nothing_is_free_the_job_waits_in_all_that_fit() -> None:
    full = (*BUSY, ("l1|idle|0/32", "l1|alloc|32/0"), ("g1|idle", "g1|alloc"), ("g2|mix|32/32/0", "g2|alloc|64/0/0"))
    assert choose(auto(), partitions(*full)).request.queue.partition == "work,long,gpu"
    assert [each.queue.partition for each in choose(het({"partition": "auto"}, {}), partitions(*full)).request.components] == [
        "work",
        None,
    ]


def test_components_get_nodes_of_their_own() -> None:
    job = het({"partition": "auto"}, {"partition": "auto"}, {"partition": "auto"}, {"partition": "gpu"})
    placement = choose(job, partitions())
    assert [each.queue.partition for each in placement.request.components] == ["work", "work", "long", "gpu"]
    assert [each.component_id for each in placement.request.components] == ["part0", "part1", "part2", "part3"]
    assert placement.reasons[2].startswith('component part2: partition="auto" is long')


def test_components_share_no_node_of_two_partitions() -> None:
    both = "".join(f"{name}|n{number}|idle|0/8/0/8|64000|(null)|(null)\n" for name in ("one", "two") for number in (1, 2))
    found = parse_partitions(
        "PartitionName=one Default=YES MaxNodes=1 State=UP\nPartitionName=two State=UP\n",
        both + "two|n3|mix|8/0/0/8|64000|(null)|(null)\n",
    )
    job = het({}, {"partition": "auto", "exclude": "n3"}, {"partition": "auto", "num_nodes": 1, "nodelist": "n2"})
    with pytest.raises(ValueError, match=r"component part2: .* no partition fits \(one: it lacks nodes of nodelist=n2"):
        choose(job, found)
    job = het({"partition": "one"}, {"partition": "two"}, {"partition": "auto"})
    placement = choose(job, found)
    assert placement.request.components[2].queue.partition == "two"
    assert placement.reasons == ('component part2: partition="auto" is two, where the job waits (two: 0 of 1 node free)',)


def test_none_fits() -> None:
    with pytest.raises(ValueError) as caught:
        choose(auto(cpus_per_node=60, time_limit="3-00:00:00"), partitions())
    assert str(caught.value) == (
        'partition="auto": no partition fits (work: its limit of 12:00:00 is less than time_limit=3-00:00:00; long: 0 of 1 node '
        "work and are large enough; old: its state is DOWN; gpu: its limit of 1-00:00:00 is less than time_limit=3-00:00:00)"
    )
    with pytest.raises(ValueError, match=r"component part1: .* no partition fits"):
        choose(het({}, {"partition": "auto", "gpus_per_node": 8}), partitions())
    with pytest.raises(ValueError, match=r"no partition fits \(sinfo shows none\)"):
        choose(auto(), [])


def backend(tmp_path: Path) -> BatchBackend:
    slurm = SlurmResource(remote_base=str(tmp_path / "base"))
    return BatchBackend(slurm=slurm, queue=slurm.queue, environment=InheritedEnvironment(), patience=5.0)


def test_slurm_is_asked_at_submission(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    log = Log()
    step = Step("run", "step", None, log)
    one = backend(tmp_path)
    assert one.placed(job_request("j", "", partition="compute"), step).queue.partition == "compute"
    assert fake_slurm.calls("sinfo") == []
    assert one.placed(auto(gpus_per_node=1), step).queue.partition == "gpu"
    assert len(fake_slurm.calls("sinfo")) == len(fake_slurm.calls("scontrol")) == 1
    assert any('partition="auto" is gpu' in line for line in log.lines)
    with pytest.raises(StartError, match=r'SlurmQueueConfig: partition="auto": no partition fits .* name a partition') as caught:
        one.placed(auto(gpus_per_node=100), step)
    assert caught.value.kind == FailureKind.CONFIGURATION


def test_a_session_keeps_the_partition_that_it_got(tmp_path: Path, fake_slurm: FakeSlurm, script: Callable[..., Path]) -> None:
    """A later payload takes the session where it is, whether it asks for "auto" or for that partition."""
    queue = SlurmQueueConfig(partition="auto")
    fake_slurm.set(node_states={"c1": "down", "c2": "drained"})
    compute = ComputeResource(
        mode="slurm-session",
        slurm=SlurmResource(remote_base=str(tmp_path / "base"), poll_interval=1, queue=queue),
        default_launcher=BashLauncher(),
        session=SessionConfig(name="one", idle_timeout=60),
    )
    payload = script("import os; print('ran in', os.environ['SLURM_JOB_PARTITION'])")
    jobs = {run_asset(compute, payload, uses_pipes=False, queue=own).completed[0].job_id for own in ({}, {"partition": "auto"})}
    assert len(jobs) == len(fake_slurm.jobs()) == 1
    (path,) = (tmp_path / "base" / "sessions").rglob(MANIFEST)
    manifest = parse_manifest(path.read_bytes())
    assert manifest is not None and manifest.capacity.queues[None]["partition"] == "gpu"
    for own, fits in (("auto", True), ("gpu", True), ("compute", False)):
        assert (misfit(Requirements(None, (), queue.having(partition=own)), manifest.capacity) is None) == fits


def test_a_script_for_a_person_names_no_partition(tmp_path: Path) -> None:
    assert "#SBATCH --partition=PARTITION\n" in example_script(auto(), SlurmResource())
    assert not any("--partition" in word for word in srun_command(auto().queue, 5)[3:])
    with pytest.raises(ValueError, match='partition="auto" is chosen where this package submits'):
        standalone_script(auto(), ["true"], RayLauncher().ray_spec())
