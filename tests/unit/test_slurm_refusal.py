"""Sentences for refusals and pending reasons, from recorded output of sbatch and squeue."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rayslurm import SlurmQueueConfig
from dagster_rayslurm.slurm.pending import impossible
from dagster_rayslurm.slurm.refusals import explain, is_temporary

FAILED = "sbatch: error: Batch job submission failed: "
POLICY = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"

# What was asked for, what sbatch wrote to stderr (22.05 and 24.11 the same unless noted), and what the user must read.
REFUSALS = [
    (
        "--partition=nope",
        f"sbatch: error: invalid partition specified: nope\n{FAILED}Invalid partition name specified",
        "partition",
    ),
    ("no default partition", f"{FAILED}No partition specified or system default partition", "partition"),
    ("a drained partition", f"{FAILED}Required partition not available (inactive or drain)", "partition"),
    ("AllowGroups", f"{FAILED}User's group not permitted to use this partition", "partition"),
    ("ReqResv", f"{FAILED}Access/permission denied", "partition"),
    ("--account=nope", f"{FAILED}Invalid account or account/partition combination specified", "account"),
    ("--qos=nope", f"{FAILED}Invalid qos specification", "qos"),
    ("--constraint=nope", f"{FAILED}Invalid feature specification", "constraint"),
    ("--reservation=nope", f"{FAILED}Requested reservation is invalid", "reservation"),
    ("another's reservation", f"{FAILED}Access denied to requested reservation", "reservation"),
    ("--nodelist=nope", f"{FAILED}Invalid node name specified", "nodelist"),
    ("--nodelist=a[ (24.11)", "sbatch: fatal: Invalid node list specified", "nodelist"),
    ("--nodelist=g1 (enforced)", f"{FAILED}Requested nodes not in this partition", "nodelist"),
    ("--nodelist=c1,c2 -N1 (22.05)", "sbatch: error: invalid number of nodes (-N 2-1)", "num_nodes"),
    ("-N3 (enforced)", f"{FAILED}Node count specification invalid", "num_nodes"),
    ("-N3 (24.11)", f"{FAILED}Requested node configuration is not available", "num_nodes"),
    (
        "-N1 -c5",
        f"sbatch: error: CPU count per node can not be satisfied\n{FAILED}Requested node configuration is not available",
        "cpus_per_node",
    ),
    ("-N2 -c5 (enforced)", f"{FAILED}More processors requested than permitted", "cpus_per_node"),
    ("--gpus-per-node=3", f"{FAILED}Requested node configuration is not available", "gpus_per_node"),
    ("--gpus-per-node=x:y (22.05)", "sbatch: error: Invalid generic resource (gres) specification", "gpu_type"),
    ("--gpus-per-node=x:y (24.11)", "sbatch: error: Invalid Trackable RESource (TRES) specification", "gpu_type"),
    (
        "--mem=100G",
        f"sbatch: error: Memory specification can not be satisfied\n{FAILED}Requested node configuration is not available",
        "mem",
    ),
    ("--mem=2000 (enforced)", f"{FAILED}Memory required by task is not available", "mem"),
    (
        "--mem with --mem-per-gpu",
        "sbatch: fatal: --mem, --mem-per-cpu, and --mem-per-gpu are mutually exclusive.",
        "extra_sbatch",
    ),
    ("--time=8-0 (enforced)", f"{FAILED}Requested time limit is invalid (missing or exceeds some limit)", "time_limit"),
    ("--time=abc", "sbatch: error: Invalid --time specification", "time_limit"),
    ("--switches=x", 'sbatch: error: Invalid numeric value "x" for --switches.', "switches"),
    ("--mem=abc", "sbatch: error: Invalid --mem specification", "mem"),
    ("--exclusive=nope", "sbatch: error: Invalid --exclusive specification", "exclusive"),
    (
        "DenyOnLimit",
        f"sbatch: error: QOSMaxCpuPerJobLimit\n{FAILED}{POLICY}",
        "cpus_per_node",
    ),
    (
        "a limit without a word",
        f"{FAILED}{POLICY}",
        "qos",
    ),
    ("--licenses=nope:1", f"{FAILED}Invalid license specification", "extra_sbatch"),
    ("--dependency=afterok:9 (24.11)", f"{FAILED}Job dependency problem", "extra_sbatch"),
    ("--nope", "sbatch: unrecognized option '--nope'\nTry \"sbatch --help\" for more information", "extra_sbatch"),
    ("--cpu-freq=x", "sbatch: error: Invalid --cpu-freq argument: x", "extra_sbatch"),
]

# Nothing in them is about the request.
TEMPORARY = [
    "sbatch: error: get_addr_info: getaddrinfo() failed: Name or service not known: No error, attempt number 1\n"
    'sbatch: error: slurm_set_addr: Unable to resolve "slurmctld"\n'
    f"sbatch: error: Unable to establish control machine address\n{FAILED}No error",
    f"{FAILED}Unable to contact slurm controller (connect failure)",
    f"{FAILED}Socket timed out on send/recv operation",
    f"{FAILED}Zero Bytes were transmitted or received",
    'sbatch: error: Munge encode failed: Failed to connect to "/run/munge/munge.socket.2": Connection refused\n'
    f"{FAILED}Protocol authentication error",
    f"sbatch: error: AssocMaxSubmitJobLimit\n{FAILED}{POLICY}",
    "sbatch: Slurm temporarily unable to accept job, sleeping and retrying\n"
    f"{FAILED}Rate limit exceeded, please retry momentarily",
]

# Reasons by their names in 22.05 and 24.11; sentences as `squeue -o %r` gave them, or `scontrol show job`.
NEVER = [
    ("PartitionTimeLimit", "time_limit"),
    ("PartitionConfig", "cpus_per_node"),
    ("MaxMemPerLimit", "mem"),
    ("BadConstraints", "constraint"),
    ("QOSMaxWallDurationPerJobLimit", "time_limit"),
    ("QOSMaxCpuPerJobLimit", "cpus_per_node"),
    ("QOSMaxGRESPerNode", "gpus_per_node"),
    ("QOSMaxMemoryPerJob", "mem"),
    ("QOSMaxCpuMinutesPerJobLimit", "time_limit"),
    ("AssocMaxNodePerJobLimit", "num_nodes"),
    ("AssocMaxMemPerNode", "mem"),
    ("AssocMaxBillingPerJob", "extra_sbatch"),
    ("QOSMinCpuNotSatisfied", "cpus_per_node"),
    ("QOSMinGRES", "gpus_per_node"),
    ("InvalidAccount", "account"),
    ("InvalidQOS", "qos"),
    ("AccountNotAllowed", "account"),
    ("Job's account not permitted to use this partition (acct allows other not study)", "account"),
    ("Job's_account_not_permitted_to_use_this_partition_(acct_allows_other_not_study)", "account"),
    ("Job's QOS not permitted to use this partition (qosonly allows special not normal)", "qos"),
    ("uid 1001 not in group permitted to use this partition (group). groups allowed: nobody", "partition"),
    ("ReservationDeleted", "reservation"),
    ("DependencyNeverSatisfied", "extra_sbatch"),
]

# Reasons that time, other jobs, nodes or administrators may take away, by their names in 22.05 and 24.11, and as they came.
PATIENCE = """
None Priority Dependency Resources PartitionNodeLimit PartitionDown PartitionInactive JobHeldAdmin JobHeldUser BeginTime
Licenses AssociationJobLimit AssociationResourceLimit AssociationTimeLimit Reservation ReqNodeNotAvail FrontEndDown SchedDefer
NodeDown SystemFailure JobLaunchFailure QOSUsageThreshold QOSJobLimit QOSResourceLimit QOSTimeLimit Cleaning Prolog
QOSGrpCpuLimit QOSGrpCPUMinutesLimit QOSGrpCPURunMinutesLimit QOSGrpJobsLimit QOSGrpMemLimit QOSGrpNodeLimit
QOSGrpSubmitJobsLimit QOSGrpWallLimit QOSMaxCpuPerUserLimit QOSMaxJobsPerUserLimit QOSMaxNodePerUserLimit
QOSMaxSubmitJobPerUserLimit AssocGrpCpuLimit AssocGrpCPUMinutesLimit AssocGrpJobsLimit AssocGrpMemLimit AssocGrpNodeLimit
AssocGrpWallLimit AssocMaxJobsLimit AssocMaxSubmitJobLimit JobHoldMaxRequeue JobArrayTaskLimit BurstBufferResources
BurstBufferStageIn PowerNotAvail PowerReserved AssocGrpGRES AssocGrpGRESMinutes QOSMaxGRESPerUser QOSMaxMemoryPerUser
QOSGrpGRES MaxCpuPerAccount MaxGRESPerAccount MaxJobsPerAccount MaxSubmitJobsPerAccount AccountingPolicy FedJobLock
AssocGrpBilling QOSGrpBilling
"""
PATIENCE_TEXTS = [
    "",
    "ReqNodeNotAvail, UnavailableNodes:d[1-2]",
    "ReqNodeNotAvail, May be reserved for other job",
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
    "job requeued in held state",
    "SomethingNew",
]


def fields_in(sentence: str) -> set[str]:
    return {word for word in re.findall(r"[a-z_]+", sentence) if word in SlurmQueueConfig.model_fields}


@pytest.mark.parametrize(("asked", "stderr", "field"), REFUSALS, ids=[row[0] for row in REFUSALS])
def test_a_refusal_says_which_field_and_what_slurm_said(asked: str, stderr: str, field: str) -> None:
    sentence = explain(stderr + "\n")
    assert sentence.startswith("Slurm refused the job (")
    assert field in fields_in(sentence)
    words = (
        stderr.splitlines()[0]
        .removeprefix(FAILED)
        .removeprefix("sbatch: error: ")
        .removeprefix("sbatch: ")
        .removeprefix("fatal: ")
    )
    assert words in sentence
    assert "\n" not in sentence
    assert not is_temporary(stderr)


def test_a_refusal_in_full() -> None:
    stderr = f"sbatch: error: invalid partition specified: nope\n{FAILED}Invalid partition name specified\n"
    words = "Slurm refused the job (invalid partition specified: nope; Invalid partition name specified): "
    assert explain(stderr) == words + "set SlurmQueueConfig.partition to one that `sinfo -s` lists"


@pytest.mark.parametrize("stderr", TEMPORARY)
def test_temporary_failures_may_be_retried(stderr: str) -> None:
    assert is_temporary(stderr)
    sentence = explain(stderr)
    assert sentence.startswith("Slurm takes no job now (")
    assert sentence.endswith("try again later")
    assert not fields_in(sentence)


def test_a_sites_own_words_are_passed_on_and_all_else_is_left_out() -> None:
    stderr = (
        "Welcome to edge!\n"
        "sbatch: warning: can't run 1 processes on 2 nodes, setting nnodes to 1\n"
        "sbatch: error: Please name a project with --account,\x1b[1m see https://site\n"
        f"{FAILED}Unspecified error\n"
    )
    assert explain(stderr) == (
        "Slurm refused the job (Please name a project with --account, [1m see https://site; Unspecified error): "
        "check SlurmQueueConfig against what your site demands of jobs"
    )
    assert "sbatch: not found" in explain("sh: 1: sbatch: not found\n")


@given(st.text())
def test_any_output_of_sbatch_makes_one_bounded_line(stderr: str) -> None:
    for text in (stderr, f"sbatch: error: {stderr}", stderr * 100):
        sentence = explain(text)
        assert not re.search(r"[\x00-\x08\n\r\x1b]", sentence)
        assert len(sentence) < 1500


@pytest.mark.parametrize(("reason", "field"), NEVER)
def test_a_reason_that_never_goes_away_names_the_field(reason: str, field: str) -> None:
    for partition in (None, "", "compute"):
        sentence = impossible(reason, partition)
        assert sentence is not None
        assert field in fields_in(sentence)
        assert sentence.endswith(f"({reason.replace('_', ' ')})")
        assert "\n" not in sentence


@pytest.mark.parametrize("reason", [*PATIENCE.split(), *PATIENCE_TEXTS])
def test_a_reason_that_may_go_away(reason: str) -> None:
    assert impossible(reason) is None


@pytest.mark.parametrize(
    "reason", ["PartitionTimeLimit", "MaxMemPerLimit", "Job's account not permitted to use this partition (x)"]
)
def test_a_job_for_several_partitions_may_always_start(reason: str) -> None:
    assert impossible(reason, "one,compute") is None
