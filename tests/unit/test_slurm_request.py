"""The request for a job: the queue configuration, completed by the launcher, without contradictions."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rayslurm import BashLauncher, RayLauncher, SlurmQueueConfig
from dagster_rayslurm.launchers import Launcher
from dagster_rayslurm.slurm.request import FIELD_OF_OPTION, JobRequest, job_comment, job_name, make_request

from ..fake_slurm import job_request

OTHERS = """
acctg-freq bb bbf begin cluster-constraint contiguous core-spec cores-per-socket cpu-freq
cpus-per-gpu deadline delay-boot dependency distribution export export-file extra-node-info get-user-env gid gpu-bind
gpu-freq gpus gpus-per-socket gpus-per-task gres gres-flags hint hold ignore-pbs kill-on-invalid-dep licenses mail-type
mail-user mcs-label mem-bind mem-per-gpu mincpus network nice no-kill oom-kill-step overcommit oversubscribe power prefer
priority profile propagate quiet reboot resv-ports sockets-per-node spread-job stepmgr thread-spec threads-per-core time-min
tmp tres-bind tres-per-task uid use-min-nodes verbose wait-all-nodes wckey
"""
"""Options of sbatch (`--help` and man page of 22.05 and 24.11) that are neither a field nor used by the job script."""

RESERVED = """
job-name comment output error input open-mode chdir wrap array parsable wait ntasks ntasks-per-node ntasks-per-gpu tasks-per-node
clusters test-only help version batch container container-id het-group pack-group
"""

PLAIN = BashLauncher()

EVERYTHING = {
    "partition": "gpu",
    "account": "study",
    "qos": "normal",
    "reservation": "course",
    "constraint": "a100&nvlink",
    "num_nodes": 2,
    "cpus_per_node": 4,
    "gpus_per_node": 2,
    "gpu_type": "fake",
    "mem": "2G",
    "time_limit": "1-02:03:04",
    "exclusive": True,
    "nodelist": "g[1-2]",
    "exclude": "c1",
    "switches": "1@00:30:00",
    "requeue": True,
    "extra_sbatch": ["--nice=100", "--contiguous"],
}


def ask(queue: SlurmQueueConfig, launcher: Launcher = PLAIN) -> JobRequest:
    return make_request(queue, launcher.footprint(), job_name="job", comment="why")


def refusal(queue: SlurmQueueConfig, launcher: Launcher = PLAIN) -> str:
    with pytest.raises(ValueError) as caught:
        ask(queue, launcher)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_request_has_every_field_of_the_queue() -> None:
    queue = SlurmQueueConfig(**EVERYTHING)
    request = ask(queue)
    assert (request.queue, request.job_name, request.comment) == (queue, "job", "why")


def test_the_default_queue_is_one_node_for_an_hour() -> None:
    assert ask(SlurmQueueConfig()) == job_request("job", "why", num_nodes=1, time_limit="01:00:00")


@pytest.mark.parametrize(
    "launcher",
    [RayLauncher(num_cpus_per_node=3, num_gpus_per_node=2), BashLauncher(num_cpus=3, num_gpus=2)],
    ids=["ray", "bash"],
)
def test_the_launcher_fills_in_what_the_queue_leaves_open(launcher: Launcher) -> None:
    request = ask(SlurmQueueConfig(gpu_type="fake"), launcher)
    assert (request.queue.cpus_per_node, request.queue.gpus_per_node, request.queue.gpu_type) == (3, 2, "fake")
    roomy = ask(SlurmQueueConfig(cpus_per_node=8, gpus_per_node=4), launcher)
    assert (roomy.queue.cpus_per_node, roomy.queue.gpus_per_node) == (8, 4)


@pytest.mark.parametrize("queue", [SlurmQueueConfig(), SlurmQueueConfig(gpus_per_node=0)], ids=["open", "zero"])
def test_zero_requests_nothing(queue: SlurmQueueConfig) -> None:
    request = ask(queue, RayLauncher(num_cpus_per_node=0, num_gpus_per_node=0))
    assert (request.queue.cpus_per_node, request.queue.gpus_per_node) == (None, None)


@pytest.mark.parametrize(
    ("queue", "launcher", "wanted", "granted"),
    [
        ({"cpus_per_node": 2}, RayLauncher(num_cpus_per_node=3), "RayLauncher.num_cpus_per_node=3", "cpus_per_node=2"),
        ({"cpus_per_node": 2}, BashLauncher(num_cpus=3), "BashLauncher.num_cpus=3", "cpus_per_node=2"),
        ({"gpus_per_node": 1}, RayLauncher(num_gpus_per_node=2), "RayLauncher.num_gpus_per_node=2", "gpus_per_node=1"),
        ({"gpus_per_node": 0}, BashLauncher(num_gpus=1), "BashLauncher.num_gpus=1", "gpus_per_node=0"),
    ],
)
def test_a_launcher_that_wants_more_than_the_queue_grants(queue: dict, launcher: Launcher, wanted: str, granted: str) -> None:
    message = refusal(SlurmQueueConfig(**queue), launcher)
    assert message.startswith(f"{wanted} is more than SlurmQueueConfig.{granted} grants; ")
    assert "leave it out" in message


def test_memory_is_per_node_or_per_cpu() -> None:
    assert "mem='2G' and mem_per_cpu='1G' exclude each other" in refusal(SlurmQueueConfig(mem="2G", mem_per_cpu="1G"))
    assert ask(SlurmQueueConfig(mem_per_cpu="1G")).queue.mem_per_cpu == "1G"


@pytest.mark.parametrize(
    ("before", "limit", "seconds"), [("60", "1", 60), ("USR1@3601", "01:00:00", 3600), ("10@90000", "1-01", 90000)]
)
def test_a_warning_that_would_come_before_the_job(before: str, limit: str, seconds: int) -> None:
    message = refusal(SlurmQueueConfig(signal_before_timeout=before, time_limit=limit))
    assert all(word in message for word in (f"signal_before_timeout={before!r}", f"time_limit={limit!r}", f"{seconds} seconds"))


@pytest.mark.parametrize(("before", "limit"), [("59", "1"), ("USR1@999999999", "UNLIMITED"), ("3599", "60:00")])
def test_a_warning_within_the_time_limit(before: str, limit: str) -> None:
    ask(SlurmQueueConfig(signal_before_timeout=before, time_limit=limit))


@pytest.mark.parametrize("gpus", [None, 0])
def test_a_gpu_type_without_gpus(gpus: int | None) -> None:
    message = refusal(SlurmQueueConfig(gpu_type="a100", gpus_per_node=gpus))
    assert "gpu_type='a100'" in message
    assert "gpus_per_node" in message


@pytest.mark.parametrize("option", ["--gres=gpu:2", "--gres=license:1,gpu:a100:2", "--gpus=4", "--gpus-per-task=1"])
def test_gpus_may_be_asked_for_by_sbatchs_own_options(option: str) -> None:
    # The launcher's wish is not asked for a second time; whether it is met shows on the node.
    request = ask(SlurmQueueConfig(extra_sbatch=[option]), RayLauncher(num_gpus_per_node=2))
    assert (request.queue.gpus_per_node, request.queue.extra_sbatch) == (None, [option])
    message = refusal(SlurmQueueConfig(gpus_per_node=2, extra_sbatch=[option]))
    assert repr(option) in message
    assert "gpus_per_node=2" in message
    assert "gpu_type" in refusal(SlurmQueueConfig(gpu_type="a100", extra_sbatch=[option]))


@pytest.mark.parametrize("name", sorted(FIELD_OF_OPTION))
def test_an_option_that_has_a_field_is_refused_with_the_fields_name(name: str) -> None:
    for option in (f"--{name}", f"--{name}=1"):
        if option == "--exclusive=1":
            continue
        message = refusal(SlurmQueueConfig(extra_sbatch=["--nice=1", option]))
        assert f"--{name} has a field of its own; use {FIELD_OF_OPTION[name]}" in message
    assert FIELD_OF_OPTION[name] in SlurmQueueConfig.model_fields


@pytest.mark.parametrize("name", RESERVED.split())
def test_an_option_that_runs_depend_on_is_refused(name: str) -> None:
    assert f"--{name} cannot be chosen; " in refusal(SlurmQueueConfig(extra_sbatch=[f"--{name}=x"]))


@pytest.mark.parametrize("option", ["--licenses matlab:1", "--", "--=1", "---x", "--1x", "--a b=c"])
def test_other_words_than_long_options_are_refused(option: str) -> None:
    assert "--NAME=VALUE" in refusal(SlurmQueueConfig(extra_sbatch=[option]))


def test_all_other_options_of_sbatch_can_be_given() -> None:
    options = [f"--{name}=1" for name in OTHERS.split()]
    assert ask(SlurmQueueConfig(extra_sbatch=options)).queue.extra_sbatch == options


def test_exclusive_with_a_value_is_an_extra_option() -> None:
    assert ask(SlurmQueueConfig(extra_sbatch=["--exclusive=user"])).queue.extra_sbatch == ["--exclusive=user"]
    assert "use exclusive" in refusal(SlurmQueueConfig(exclusive=True, extra_sbatch=["--exclusive=user"]))


@pytest.mark.parametrize("field", ["job_name", "comment"])
def test_names_with_control_characters_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match="control character"):
        make_request(SlurmQueueConfig(), (), **{"job_name": "a", "comment": "b", field: "x\ny"})


@given(step=st.text(), nonce=st.text("0123456789abcdef", min_size=12, max_size=12))
def test_a_job_name_is_harmless_short_and_ends_in_the_nonce(step: str, nonce: str) -> None:
    name = job_name(step, nonce)
    assert re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name)
    assert name.startswith("rayslurm-")
    assert name.endswith(f"-{nonce}")


def test_a_job_name_says_which_step() -> None:
    assert job_name("group.train[eu/2026]", "0123456789ab") == "rayslurm-group.train_eu_2026_-0123456789ab"


@given(step=st.text(), partition=st.none() | st.text())
def test_a_comment_is_one_bounded_line(step: str, partition: str | None) -> None:
    comment = job_comment("0" * 36, step, partition)
    assert len(comment.encode()) <= 500
    assert len(comment.splitlines()) == 1
    assert not re.search(r"[\x00-\x1f\x7f]", comment)
    make_request(SlurmQueueConfig(), (), job_name="x", comment=comment)


def test_a_comment_names_run_step_and_partition() -> None:
    assert job_comment("r1", "train", "2026|é") == "dagster run r1 step train partition 2026|é"
    assert job_comment("r1", "train", None) == "dagster run r1 step train"
    assert (
        job_comment("r1", "a\nb", "\x1b[31m")
        == "dagster run r1 step a\N{REPLACEMENT CHARACTER}b partition \N{REPLACEMENT CHARACTER}[31m"
    )
    long = job_comment("r1", "train", "ä" * 1000)
    assert long.startswith("dagster run r1 step train partition ää")
    assert long.endswith("ä…")


@pytest.mark.parametrize(
    ("store", "queue", "says"),
    [
        (
            64,
            {"mem": "1G"},
            "RayLauncher.object_store_memory_gb=64 is more than SlurmQueueConfig.mem='1G' leaves for Ray: 0.9 GiB",
        ),
        (0.95, {"mem": "1G"}, "raise mem, or lower object_store_memory_gb"),
        (0.95, {"mem": "1024"}, "mem='1024'"),
        (2, {"mem_per_cpu": "1G", "cpus_per_node": 2}, "SlurmQueueConfig.mem_per_cpu='1G' for 2 CPUs leaves for Ray: 1.8 GiB"),
        (0.8, {"mem": "1G"}, None),
        (64, {"mem": "0"}, None),
        (64, {}, None),
        (64, {"mem_per_cpu": "1G"}, None),
        (64, {"mem_per_cpu": "1G", "cpus_per_node": 2, "exclusive": True}, None),
        (1.7, {"mem_per_cpu": "1G", "cpus_per_node": 2}, None),
    ],
)
def test_the_object_store_fits_into_the_memory(store: float, queue: dict[str, Any], says: str | None) -> None:
    def make() -> JobRequest:
        footprint = RayLauncher(object_store_memory_gb=store).footprint()
        return make_request(SlurmQueueConfig(**queue), footprint, job_name="n", comment="")

    if says is None:
        assert make()
    else:
        with pytest.raises(ValueError, match=r"object_store_memory_gb") as caught:
            make()
        assert says in str(caught.value)
