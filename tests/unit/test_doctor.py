"""The lines of `rayslurm doctor`, from the facts of a real cluster (Slurm 22.05) that each test changes in one place.

tests/faults/test_doctor.py seeds defects on a real cluster.
"""

import contextlib
import copy
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dagster_rayslurm import BashLauncher, RayLauncher, SlurmQueueConfig, SlurmResource, SSHConnectionResource
from dagster_rayslurm.cli import main
from dagster_rayslurm.doctor import Line, Verdict, Wanted, probe
from dagster_rayslurm.doctor.account import forbids, parse_associations
from dagster_rayslurm.doctor.collect import examine
from dagster_rayslurm.doctor.machine_lines import edge_lines
from dagster_rayslurm.doctor.probe_lines import NO_PYTHON, ended_lines, probe_lines
from dagster_rayslurm.doctor.resource import resource_text
from dagster_rayslurm.doctor.slurm_lines import Slurm, chosen_partition, slurm_lines
from dagster_rayslurm.edge import machine, site
from dagster_rayslurm.edge.environment import PROBE
from dagster_rayslurm.environments import InheritedEnvironment
from dagster_rayslurm.errors import FailureKind, StartError
from dagster_rayslurm.slurm import submit
from dagster_rayslurm.slurm.partitions import parse_partitions
from dagster_rayslurm.slurm.request import JobRequest
from dagster_rayslurm.ssh import pool
from dagster_rayslurm.ssh.base import ConnectionLost
from dagster_rayslurm.ssh.local import LocalConnection

from ..conftest import wait_until
from ..fake_slurm import FakeSlurm

SURVEY = json.loads((Path(__file__).parent / "slurm_said" / "survey-22.05.json").read_text())


def wanted(**queue: Any) -> Wanted:
    return Wanted(SlurmResource(queue=SlurmQueueConfig(**queue)), "/opt/ray")


def complaints(lines: list[Line]) -> list[tuple[str, str]]:
    bad = [line for line in lines if line.verdict in (Verdict.WARNING, Verdict.FAILURE)]
    assert all(line.remedy for line in bad)
    return [(line.name, line.verdict.value) for line in bad]


def replaced(question: str, old: str, new: str) -> Callable[[dict[str, Any]], None]:
    """A change of the output of one of Slurm's programs."""

    def change(facts: dict[str, Any]) -> None:
        answer = facts["answers"][question]
        assert old in answer[1]
        answer[1] = answer[1].replace(old, new)

    return change


def answered(question: str, *answer: Any) -> Callable[[dict[str, Any]], None]:
    def change(facts: dict[str, Any]) -> None:
        facts["answers"][question] = [*answer, 0.1]

    return change


def test_a_healthy_cluster() -> None:
    lines = [*edge_lines(SURVEY, 0.01, 0.02), *slurm_lines(SURVEY, wanted())]
    assert complaints(lines) == []
    names = [line.name for line in lines]
    assert len(set(names)) == len(names)
    assert {"partition", "nodes", "accounting", "limits", "test submission", "base directory"} <= set(names)


CHANGES = {
    "a partition for reservations": (replaced("partitions", "ReqResv=NO", "ReqResv=YES"), {}, ("partition", "failure")),
    "a partition of root's": (replaced("partitions", "RootOnly=NO", "RootOnly=YES"), {}, ("partition", "failure")),
    "jobs from other hosts": (replaced("partitions", "AllocNodes=ALL", "AllocNodes=login9"), {}, ("partition", "failure")),
    "another QOS": (replaced("partitions", "AllowQos=ALL", "AllowQos=long"), {"qos": "normal"}, ("partition", "failure")),
    "no time limit": (lambda facts: None, {"time_limit": "UNLIMITED"}, ("time limit", "failure")),
    "nodes that do not respond": (replaced("nodes", "|idle|", "|idle*|"), {}, ("nodes", "failure")),
    "a new state of nodes": (replaced("nodes", "|idle|", "|hatching|"), {}, ("nodes", "failure")),
    "no sacctmgr": (
        answered("associations", 127, "", "env: 'sacctmgr': No such file or directory"),
        {},
        ("accounting", "warning"),
    ),
    "an association elsewhere": (replaced("associations", "rayslurm|", "other|"), {}, ("account", "failure")),
    "too many CPUs for the QOS": (
        replaced("qos", "normal||||||", "normal|||cpu=8|||"),
        {"cpus_per_node": 4, "num_nodes": 3},
        ("limits", "failure"),
    ),
    "a refusal": (answered("test", 1, "", "sbatch: error: Job rejected: say --comment"), {}, ("test submission", "failure")),
    "a busy controller": (
        answered("test", 1, "", "sbatch: error: Socket timed out on send/recv"),
        {},
        ("test submission", "warning"),
    ),
    "a silent controller": (answered("config", None, "", ""), {}, ("slurmctld", "failure")),
    "another Slurm in PATH": (replaced("version", "22.05.8", "24.11.5"), {}, ("Slurm version", "warning")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named(name: str) -> None:
    change, queue, expected = CHANGES[name]
    facts = copy.deepcopy(SURVEY)
    change(facts)
    if name == "too many CPUs for the QOS":  # Then the partition has too few nodes as well.
        assert expected in complaints(slurm_lines(facts, wanted(**queue)))
    else:
        assert complaints(slurm_lines(facts, wanted(**queue))) == [expected]


def test_a_wrong_clock_is_not_the_file_servers() -> None:
    def said(late: float, skew: float) -> list[tuple[str, str]]:
        facts = copy.deepcopy(SURVEY)
        facts["machine"]["directories"]["base"]["clock"] = late
        return complaints(edge_lines(facts, skew, 0.0))

    assert said(-600.0, 600.0) == [("clock", "failure")]
    assert said(-60.0, 0.0) == [("file server clock", "warning")]
    assert said(0.0, 60.0) == [("clock", "warning")]  # The file server's is as wrong.
    assert said(1.0, 0.0) == []


def test_busy_and_cloud_nodes_are_no_alarm() -> None:
    for state in ("alloc", "mix", "comp", "plnd", "idle~", "alloc#", "resv", "mix-"):
        facts = copy.deepcopy(SURVEY)
        replaced("nodes", "|idle|", f"|{state}|")(facts)
        assert complaints(slurm_lines(facts, wanted())) == [], state


@pytest.mark.parametrize("queue", [{"mem": "64G"}, {"mem_per_cpu": "64G"}, {"mem_per_cpu": "16G", "cpus_per_node": 4}])
def test_no_node_has_the_memory(queue: dict[str, Any]) -> None:
    assert ("node size", "failure") in complaints(slurm_lines(SURVEY, wanted(**queue)))


def test_one_of_several_partitions_is_enough() -> None:
    facts = copy.deepcopy(SURVEY)
    replaced("partitions", "PartitionName=compute AllowGroups=ALL", "PartitionName=compute AllowGroups=root")(facts)
    assert complaints(slurm_lines(facts, wanted(partition="compute"))) == [("partition", "failure")]
    assert complaints(slurm_lines(facts, wanted(partition="compute,all"))) == []


def test_one_of_several_accounts_is_enough() -> None:
    facts = copy.deepcopy(SURVEY)
    rows = "rayslurm|study|dev||normal|normal|0|||||||\nrayslurm|thesis|dev||normal|normal||||||||\n"
    answered("associations", 0, rows, "")(facts)
    assert complaints(slurm_lines(facts, wanted())) == []
    assert complaints(slurm_lines(facts, wanted(account="study"))) == [("limits", "failure")]


def test_a_variable_of_the_login_names_the_partition() -> None:
    facts = copy.deepcopy(SURVEY)
    facts["machine"]["variables"] = {"SBATCH_PARTITION": "nowhere"}
    assert complaints(slurm_lines(facts, wanted())) == [("partition", "failure")]
    assert complaints(slurm_lines(facts, wanted(partition="gpu"))) == []
    assert complaints(edge_lines(facts, 0.0, 0.0)) == []


@pytest.mark.parametrize(
    ("queue", "partition"),
    [({}, "compute"), ({"gpus_per_node": 1}, "gpu"), ({"num_nodes": 3}, "all"), ({"exclude": "c1,c2"}, "gpu")],
)
def test_partition_auto_is_what_a_job_would_get_now(queue: dict[str, Any], partition: str) -> None:
    assert chosen_partition(Slurm(SURVEY, wanted(partition="auto", **queue))) == partition


def test_partition_auto_avoids_partitions_of_others() -> None:
    facts = copy.deepcopy(SURVEY)
    replaced("partitions", "PartitionName=compute AllowGroups=ALL", "PartitionName=compute AllowGroups=root")(facts)
    assert chosen_partition(Slurm(facts, wanted(partition="auto"))) == "gpu"
    with pytest.raises(ValueError, match="no partition fits"):
        chosen_partition(Slurm(facts, wanted(partition="auto", cpus_per_node=5)))


def test_partitions_of_large_clusters() -> None:
    partitions = "PartitionName=mixed Default=NO MaxTime=2-00:00:00 State=UP AllowGroups=a,b\nPartitionName=empty State=UP\n"
    nodes = (
        "mixed|n1|mix|32/32/0/64|512000|gpu:a100:4(S:0-1),nvme:1|ib,a100\n"
        "mixed|n2|down*|0/0/128/128|1024000+|gpu:h100:8|ib\nmixed|n3|idle|0/64/0/64|512000|gpu:2|(null)\n"
    )
    mixed, empty = parse_partitions(partitions, nodes)
    assert [node.usable for node in mixed.nodes] == [True, False, True] and [node.idle for node in mixed.nodes] == [
        False,
        False,
        True,
    ]
    assert (
        mixed.gpus == {"a100": 4, "h100": 8, "": 2}
        and mixed.limit("MaxTime") == 172800
        and mixed.names("AllowGroups") == ["a", "b"]
    )
    assert mixed.cells() == ["mixed", "UP", "2-00:00:00", "3", "2", "1", "64-128", "500-1000 GiB", "2 gpu, 4 a100, 8 h100"]
    assert empty.nodes == [] and empty.cells()[3:] == ["0", "0", "0", "", "", ""]


def test_limits_of_associations() -> None:
    (row,) = parse_associations("c|a|u||normal||||1-00:00:00|node=2,gres/gpu:a100=4||100|\n", "c")
    queue = SlurmQueueConfig(num_nodes=2, gpus_per_node=2, gpu_type="a100", time_limit="12:00:00")
    assert forbids(row, queue, 43200.0) == []
    assert len(forbids(row, queue.having(num_nodes=3, gpus_per_node=2), 90000.0)) == 3


def test_without_ssh_and_without_slurm(tmp_path: Path) -> None:
    here = SlurmResource(ssh=None, remote_base=str(tmp_path / "base"))
    report = examine(Wanted(here, InheritedEnvironment()), 0, 0.0, print)
    missing = [line for line in report.lines if line.name == "Slurm programs"]
    assert [line.verdict for line in missing] == [Verdict.FAILURE] and "sbatch" in missing[0].text
    names = {line.name for line in report.lines}
    assert {"login", "base directory", "disk space", "Python"} <= names and not {"slurmctld", "nodes", "accounting"} & names
    assert report.resource == "" and report.partitions == []


class Breaking(LocalConnection):
    """This machine, behind a connection that breaks whenever a certain function is called."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def call(self, function: Any, *args: Any, **options: Any) -> Any:
        if function is self.function:
            raise ConnectionLost("SSH to me@edge: the connection was lost")
        return super().call(function, *args, **options)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Calls `rayslurm` with a cluster whose edge node is this machine; with `breaking`, over a connection that breaks there."""
    for name in [name for name in os.environ if name.startswith(("SLURM_EDGE_NODE_", "RAYSLURM_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "rayslurm.toml").write_text(f'[clusters.here]\nslurm.remote_base = "{tmp_path}/base"\n')
    monkeypatch.chdir(tmp_path)

    def call(*words: str, breaking: Any = None) -> Any:
        monkeypatch.setattr(pool, "_local", Breaking(breaking))
        return CliRunner().invoke(main, list(words))

    return call


def test_a_connection_that_breaks_leaves_the_lines_so_far(command: Callable[..., Any]) -> None:
    done = command("doctor", "--json", breaking=site.survey)
    lines = json.loads(done.stdout)["lines"]
    assert [(line["name"], line["verdict"]) for line in lines] == [("login", "ok"), ("edge node", "failure")]
    assert lines[-1]["text"] == "SSH to me@edge: the connection was lost" and done.exit_code == 1
    done = command("check", breaking=site.survey)
    assert "failure edge node: SSH to me@edge" in done.stdout and "1 ok, 1 failure" in done.stdout and done.exit_code == 1


def test_an_option_replaces_the_field_that_it_contradicts(command: Callable[..., Any], tmp_path: Path) -> None:
    with (tmp_path / "rayslurm.toml").open("a") as file:
        file.write('slurm.queue = { mem_per_cpu = "4G" }\n')
    done = command("check", "--mem", "8G", breaking=site.survey)
    assert "exclude each other" not in done.output and "failure edge node: SSH to me@edge" in done.stdout


def test_check_prints_the_problems_of_doctor(command: Callable[..., Any]) -> None:
    """There is no Slurm here, which is a problem."""
    full, brief = (json.loads(command(name, "--json").stdout) for name in ("doctor", "check"))
    names = [[line["name"] for line in report["lines"] if line["verdict"] in ("warning", "failure")] for report in (full, brief)]
    assert names[0] == names[1] and "Slurm programs" in names[1]
    assert len(brief["lines"]) == len(names[1]) < len(full["lines"]) and brief.keys() == full.keys()


# ---- Compute nodes


ENDS = {
    "no Python": ({"state": "FAILED", "exit": NO_PYTHON, "signal": None}, "node Python"),
    "no srun": ({"state": "FAILED", "exit": 127, "signal": None, "log": "job.sh: 9: srun: not found"}, "srun"),
    "no output file": ({"state": "FAILED", "exit": None, "signal": 53}, "shared base directory"),
    "silence": ({"state": "COMPLETED", "exit": None, "signal": None}, "shared base directory"),
    "seen too late": ({"state": "COMPLETED", "exit": 0, "signal": None, "log": "x"}, "shared base directory"),
    "unseen": ({"state": "RUNNING", "facts": 0}, "shared base directory"),
    "lost": ({"state": "NODE_FAIL", "exit": None, "signal": None, "log": "slurmstepd: error: *** JOB 7 CANCELLED"}, "probe"),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_probe_that_ends_early(name: str) -> None:
    end, line = ENDS[name]
    assert complaints(ended_lines({"nodes": "c1", **end})) == [(line, "failure")]


@pytest.fixture
def probed(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """The facts of two "nodes", two processes of this machine that run the program of the probe, and what was measured.

    The parameter is a range of ports for Ray; None for any ports.
    """
    base = tmp_path / "base"
    for directory in (base, run_dir := tmp_path / "run"):
        directory.mkdir(mode=0o700)
    for name in (machine.GO, machine.STOP, *(each % rank for each in (machine.FACTS, machine.SEEN) for rank in (0, 1))):
        (run_dir / name).touch()
    options = {
        "run_dir": str(run_dir),
        "base": str(base),
        "nodes": 2,
        "seconds": 60,
        "probe": PROBE,
        "environment": [sys.executable],
        "port_range": getattr(request, "param", None),
        "network_interface": None,
    }
    (run_dir / "options.json").write_text(json.dumps(options))
    command = [sys.executable, machine.__file__, str(run_dir / "options.json")]
    started = [subprocess.Popen(command, env={**os.environ, "SLURM_PROCID": str(rank)}) for rank in (0, 1)]
    try:
        complete = lambda: all(facts := site.probe_state(str(run_dir), 2)) and facts[1]["peers"]  # noqa: E731
        assert wait_until(complete)
        facts = site.probe_state(str(run_dir), 2)
        yield facts, site.reach_and_measure(str(run_dir), facts, 20.0)
        (run_dir / machine.STOP).write_text("1")
        assert [process.wait(30) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()


def test_the_nodes_of_a_probe_are_reached_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall that drops packets costs the time of one node, and not of all."""
    together = threading.Barrier(16)
    monkeypatch.setattr(machine, "reach", lambda *_: {"order": together.wait(30)})
    (tmp_path / machine.GO).touch()
    found = site.reach_and_measure(str(tmp_path), [{"listens": [1]}] * 16, 0.0)
    assert sorted(each["order"] for each in found["reached"]) == list(range(16))


def test_the_program_of_the_probe(probed: Any) -> None:
    facts, measured = probed
    assert all(lag is not None and lag < 20 for lag in measured["lags"]) and all(abs(skew) < 10 for skew in measured["skews"])
    assert all("seconds" in each for each in measured["reached"]) and "seconds" in facts[1]["peers"]["0"]
    names = {line.name.rpartition(": ")[2] for line in probe_lines(facts, measured, wanted(), 2.0)}
    assert {
        "probe",
        "clock",
        "/tmp",
        "/dev/shm",
        "environment",
        "visibility",
        "from the edge node",
        "from node to node",
        "ports",
    } <= names
    for changes, expected in (
        ({"lags": [60.0, 0.1]}, "warning"),
        ({"lags": [None, 0.1]}, "failure"),
    ):
        lines = probe_lines(facts, {**measured, **changes}, wanted(), 2.0)
        assert next(line for line in lines if line.name.endswith("visibility")).verdict.value == expected
    low, high = facts[0]["ports"]["range"]
    assert low <= facts[0]["listens"][0] <= high and len(facts[0]["listens"]) == 2
    blocked = probe_lines(facts, {**measured, "reached": [{"error": "timed out", "port": low}] * 2}, wanted(), 2.0)
    assert any(line.name.endswith("from the edge node") and line.verdict is Verdict.WARNING for line in blocked)


@pytest.mark.parametrize(("launcher", "verdict"), [(RayLauncher(), "failure"), (BashLauncher(), "ok")])
def test_an_environment_without_ray_serves_a_payload_without_ray(launcher: Any, verdict: str, probed: Any) -> None:
    facts, measured = probed
    nodes = [{**each, "environment": {"facts": {"python": [3, 11, 0], "ray": None, "pipes": "1.9"}}} for each in facts]
    lines = probe_lines(nodes, measured, replace(wanted(), launcher=launcher), 2.0)
    assert {line.verdict.value for line in lines if line.name.endswith(": environment")} == {verdict}


@pytest.fixture
def occupied() -> Any:
    """Listens on all ports of a range; returns the range."""
    with contextlib.ExitStack() as held:
        for port in range(OCCUPIED[0], OCCUPIED[1] + 1):
            server = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):  # Another program may have it.
                server.bind(("", port))
        yield OCCUPIED


OCCUPIED = (23400, 23499)


@pytest.mark.parametrize("probed", [OCCUPIED], indirect=True)
def test_a_range_of_ports_that_is_in_use(occupied: Any, probed: Any) -> None:
    facts, measured = probed
    lines = probe_lines(facts, measured, replace(wanted(), launcher=RayLauncher(port_range="23400-23499")), 2.0)
    (port,) = {(line.verdict, line.text) for line in lines if line.name.endswith(": ports")}
    assert port[0] is Verdict.FAILURE and "from 23400 to 23499 are in use" in port[1]
    assert not [line for line in lines if line.name.endswith(("from the edge node", "from node to node"))]


def test_ports_of_outgoing_connections(probed: Any) -> None:
    facts, measured = probed
    for port_range, ephemeral, verdict in (
        (None, [32768, 60999], "ok"),
        (None, [1024, 65535], "warning"),
        (None, [15000, 65535], "ok"),
        (None, None, "ok"),
        ("20000-20999", [32768, 60999], "ok"),
        ("20000-20999", [20999, 65535], "warning"),
        ("40000-40999", [32768, 40000], "warning"),
        ("40000-40999", None, "ok"),
    ):
        low, high = map(int, (port_range or "10000-32767").split("-"))
        nodes = [{**each, "ports": {**each["ports"], "range": [low, high], "ephemeral": ephemeral}} for each in facts]
        lines = probe_lines(nodes, measured, replace(wanted(), launcher=RayLauncher(port_range=port_range)), 2.0)
        ports = [line for line in lines if line.name.endswith(": ports")]
        assert [line.verdict.value for line in ports] == [verdict] * 2, (port_range, ephemeral)
        assert all(bool(line.remedy) == (verdict == "warning") for line in ports)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    assert "error" not in machine.directory(str(tmp_path / "not" / "yet"))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert machine.directory(str(tmp_path / "file"))["error"] == "it is not a directory"
    assert machine.directory("/proc/none")["error"]


# ---- The resource to paste, and the command


def test_a_probe_listens_on_the_ports_of_the_launcher(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    asked = replace(wanted(), launcher=RayLauncher(port_range="24000-24199"))
    lines = probe.run_probe(LocalConnection(), str(tmp_path), asked, None, 2, 60.0, lambda _: None)
    ports = [line for line in lines if line.name.endswith(": ports")]
    assert [line.verdict for line in ports] == [Verdict.OK] * 2 and all(
        "tried from 24000 to 24199" in line.text for line in ports
    )
    assert {"from the edge node", "from node to node"} <= {line.name.rpartition(": ")[2] for line in lines}
    assert fake_slurm.jobs("COMPLETED") == [1] and not list((tmp_path / "runs").iterdir())


def test_a_probe_uses_the_network_interface_of_the_launcher(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    asked = replace(wanted(), launcher=RayLauncher(network_interface="lo"))
    lines = probe.run_probe(LocalConnection(), str(tmp_path), asked, None, 2, 60.0, lambda _: None)
    told: dict[str, list[Line]] = {}
    for line in lines:
        told.setdefault(line.name.rpartition(": ")[2], []).append(line)
    assert [line.text for line in told["network interface"]] == ["lo has the address 127.0.0.1, which Ray uses"] * 2
    (between,) = told["from node to node"]
    assert between.verdict is Verdict.OK and " at 127.0.0.1 in " in between.text
    assert all(line.verdict is Verdict.OK and ", and to 127.0.0.1 of lo" in line.text for line in told["from the edge node"])


def test_a_probe_asks_for_few_resources_where_the_users_jobs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[JobRequest] = []

    def refused(connection: Any, run_dir: str, files: Any, request: JobRequest, *_: Any) -> None:
        requests.append(request)
        raise StartError(FailureKind.SUBMISSION, "refused")

    kept: dict[str, Any] = {"partition": "p", "account": "a", "qos": "q", "reservation": "r", "constraint": "c"}
    kept |= {"exclude": "n9", "switches": "1", "gpus_per_node": 2, "gpu_type": "a100"}
    left_out = {"cpus_per_node": 4, "exclusive": True, "nodelist": "n[1-8]", "requeue": True, "signal_before_timeout": "USR1@60"}
    monkeypatch.setattr(probe, "submit", refused)
    for memory in ("mem", "mem_per_cpu"):
        queue = {**kept, **left_out, memory: "64G", "num_nodes": 8, "time_limit": "10:00:00", "extra_sbatch": ["--nice=5"]}
        assert {*queue, "mem", "mem_per_cpu"} == {*SlurmQueueConfig.model_fields}, "a new field belongs to one of the groups"
        (line,) = probe.run_probe(LocalConnection(), str(tmp_path), wanted(**queue), None, 2, 60.0, lambda _: None)
        assert line.verdict is Verdict.FAILURE
        options = ["--nice=5", "--deadline=now+11minutes"]
        assert requests.pop().queue == SlurmQueueConfig(**kept, num_nodes=2, time_limit="5", extra_sbatch=options)


def test_a_node_without_the_network_interface_is_named(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    asked = replace(wanted(), launcher=RayLauncher(network_interface="ib7"))
    lines = probe.run_probe(LocalConnection(), str(tmp_path), asked, None, 2, 60.0, lambda _: None)
    host = socket.gethostname()
    failures = [line for line in lines if line.name == f"{host}: network interface"]
    assert [line.verdict for line in failures] == [Verdict.FAILURE] * 2
    assert f"network_interface='ib7' has no address on node {host}" in failures[0].text and "it has: lo" in failures[0].text
    assert failures[0].remedy.startswith("set RayLauncher.network_interface to an interface")
    assert not [line for line in lines if line.name.endswith("from node to node")], "no address to connect to"


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
def test_a_node_is_reached_at_an_interface_that_has_ipv6_alone(probed: Any) -> None:
    facts, _ = probed
    node = {**facts[0], "interface": {"name": "lo", "address": "::1"}}
    assert machine.reach(node, facts[0]["listens"][0], True)["host"] == "::1"


def test_an_edge_node_outside_of_rays_network_is_no_problem(probed: Any) -> None:
    facts, measured = probed
    interface = {"name": "ib0", "address": "192.0.2.7"}
    nodes = [{**each, "interface": interface} for each in facts]
    blocked = {"error": "192.0.2.7: timed out", "port": 1}
    reached = [{**each, "by_interface": blocked} for each in measured["reached"]]
    nodes[1] = {**nodes[1], "peers": {"0": blocked}}
    lines = probe_lines(nodes, {**measured, "reached": reached}, wanted(), 2.0)
    edge = [line for line in lines if line.name.endswith("from the edge node")]
    assert all(line.verdict is Verdict.OK and "not to 192.0.2.7 of ib0 (192.0.2.7: timed out)" in line.text for line in edge)
    (between,) = [line for line in lines if line.name.endswith("from node to node")]
    assert between.verdict is Verdict.FAILURE and "network_interface" in between.remedy


def test_a_probe_of_which_slurm_says_nothing(tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_slurm.set(starts=False)
    fake_slurm.fault("squeue", "slurmctld is away", times=1000)
    monkeypatch.setattr(probe, "_SECONDS", 0.5)
    monkeypatch.setattr(submit, "_GONE_DEADLINE", 0.0)
    silent, left = probe.run_probe(LocalConnection(), str(tmp_path), wanted(), None, 1, 600.0, lambda _: None)
    assert silent.verdict is Verdict.FAILURE and "squeue has said nothing" in silent.text
    assert fake_slurm.jobs("CANCELLED") == [1]
    assert left.verdict is Verdict.WARNING and "does not confirm the end of job 1" in left.text and "scancel 1" in left.remedy


def test_an_interrupted_probe_of_which_slurm_says_nothing(
    tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def interrupted(text: str) -> None:
        said.append(text)
        if len(said) == 1:
            fake_slurm.fault("squeue", "slurmctld is away", times=1000)
            raise KeyboardInterrupt

    fake_slurm.set(starts=False)
    monkeypatch.setattr(submit, "_GONE_DEADLINE", 0.0)
    with pytest.raises(KeyboardInterrupt):
        probe.run_probe(LocalConnection(), str(tmp_path), wanted(), None, 1, 600.0, interrupted)
    assert fake_slurm.jobs("CANCELLED") == [1] and "scancel 1" in said[-1]


def test_a_probe_whose_connection_breaks(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    fake_slurm.set(starts=False)
    (line,) = probe.run_probe(Breaking(site.probe_state), str(tmp_path), wanted(), None, 1, 600.0, lambda _: None)
    assert line.verdict is Verdict.FAILURE and "the connection was lost" in line.text and fake_slurm.jobs("CANCELLED") == [1]


def test_a_probe_waits_for_nodes_that_are_powered_up(
    tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waits(_: str) -> None:
        (job_id,) = fake_slurm.jobs()
        fake_slurm.job(job_id, state="CONFIGURING")

    fake_slurm.set(starts=False)
    monkeypatch.setattr(probe, "_SECONDS", 0.0)  # For which a job that runs may be silent.
    (line,) = probe.run_probe(LocalConnection(), str(tmp_path), wanted(), None, 1, 2.0, waits)
    assert line.verdict is Verdict.WARNING and "did not start within 2 s" in line.text and fake_slurm.jobs("CANCELLED") == [1]


def test_an_interrupt_while_the_probe_is_submitted(
    tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    said: list[str] = []
    fake_slurm.fault("squeue", "slurmctld is away", times=1000)
    monkeypatch.setattr(probe, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        probe.run_probe(LocalConnection(), str(tmp_path), wanted(), None, 1, 600.0, said.append)
    assert len(said) == 1 and said[0].startswith("a Slurm job named ") and "run `scancel --name=" in said[0]


def test_the_resource_to_paste() -> None:
    gate = SSHConnectionResource(host="gate", user="me", password="secret")
    ssh = SSHConnectionResource(host="login", user="me", key_passphrase="hidden", jump_host=gate)
    queue = SlurmQueueConfig(partition="none", num_nodes=2)
    slurm = SlurmResource(ssh=ssh, queue=queue, remote_base="/work/me", site={"LANG": "C"}, poll_interval=60)
    chosen = Wanted(slurm, None)
    text = resource_text(chosen, Slurm(SURVEY, chosen))
    assert "secret" not in text and "hidden" not in text
    assert 'key_passphrase=dg.EnvVar("SLURM_EDGE_NODE_KEY_PASSPHRASE")' in text
    assert 'password=dg.EnvVar("SLURM_EDGE_NODE_JUMP_PASSWORD")' in text
    import dagster as dg

    names = {each.__name__: each for each in (SlurmQueueConfig, SlurmResource, SSHConnectionResource)}
    made = eval(text, {**names, "dg": dg})
    assert made.queue == SlurmQueueConfig(partition="compute", num_nodes=2) and made.remote_base == "/work/me"
    assert made.site == {"LANG": "C"} and made.poll_interval == 60
    assert made.ssh.host == "login" and made.ssh.jump_host.host == "gate"


def test_the_default_partition_stands_for_a_missing_one() -> None:
    facts, asked = json.loads(json.dumps(SURVEY)), wanted(partition="none")
    facts["answers"]["partitions"][1] = "\n".join(reversed(facts["answers"]["partitions"][1].strip().splitlines()))
    assert 'partition="compute"' in resource_text(asked, Slurm(facts, asked)).replace("'", '"')


def test_no_cluster_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    for command in ("doctor", "check"):
        done = CliRunner().invoke(main, [command])
        assert done.exit_code == 1 and done.stderr.startswith("Error: no cluster is configured; ") and done.stdout == ""


def test_a_wrong_field_is_refused_before_a_login(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_EDGE_NODE_HOST", "no-such-host.invalid")
    done = CliRunner().invoke(main, ["doctor", "--time-limit=tomorrow"])
    assert done.exit_code == 1 and "time_limit" in done.stderr and done.stderr.count("\n") == 1
