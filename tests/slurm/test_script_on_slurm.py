"""The job script on a real Slurm: what is asked for arrives, whatever is in it, and a cancelled job leaves its exit code."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from dagster_rayslurm import SlurmQueueConfig
from dagster_rayslurm.runtime.protocol.record import EXIT
from dagster_rayslurm.slurm.pending import impossible
from dagster_rayslurm.slurm.refusals import explain
from dagster_rayslurm.slurm.request import FIELD_OF_OPTION, LOG, JobRequest, make_request, render_script

from ..fake_slurm import job_request
from ..stack.access import Stack

USER = "other"
"""Not the one of the other tests, whose clean-up cancels all jobs of theirs."""

EDGE = r'''
import json, os, shutil, subprocess, sys, tempfile, time

def run(*argv, cwd=None):
    return subprocess.run(argv, cwd=cwd, capture_output=True, encoding="utf-8")

def submit(script, *options, directory):
    path = os.path.join(directory, "job.sh")
    with open(path, "w", encoding="utf-8") as file:
        file.write(script)
    done = run("sbatch", "--parsable", *options, path, cwd="/")
    return done.stdout.strip(), done.stderr

def show(*jobs):
    """What Slurm knows of jobs: state, reason, name, comment, by id."""
    listed = run("squeue", "--noheader", "--states=all", "--jobs=" + ",".join(jobs), "--format=%A\x1f%T\x1f%r\x1f%j\x1f%k").stdout
    return {row[0]: row[1:] for row in (line.split("\x1f") for line in listed.split("\n")) if row[0]}

def until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)

def read(*path):
    with open(os.path.join(*path), encoding="utf-8") as file:
        return file.read()

arguments = json.loads(sys.argv[1])
base = tempfile.mkdtemp(prefix="t-", dir=os.path.expanduser("~"))
jobs = []
try:
    answer = main(arguments)
finally:
    if jobs:
        run("scancel", *jobs)
    until(lambda: not jobs or all(row[0] not in ("PENDING", "RUNNING", "COMPLETING") for row in show(*jobs).values()), 40)
    shutil.rmtree(base)
print(json.dumps(answer))
'''


def on_edge(stack: Stack, main: str, arguments: Any) -> Any:
    """What a function `main` returns on the edge node."""
    head, tail = EDGE.split("arguments = ", 1)
    program = f"{head}\n{main}\narguments = {tail}"
    return json.loads(stack.exec("edge", ["python3", "-X", "utf8", "-c", program, json.dumps(arguments)], user=USER))


HELD = """
def main(scripts):
    answer = []
    for script in scripts:
        job, said = submit(script, "--hold", directory=base)
        assert job.isdigit(), said
        jobs.append(job)
    shown = show(*jobs)
    return [shown[job][2:] + [run("scontrol", "show", "job", job).stdout] for job in jobs]
"""


def held(stack: Stack, *scripts: str) -> list[list[str]]:
    """Name, comment and all else that Slurm knows of jobs that wait for their release."""
    answer: list[list[str]] = on_edge(stack, HELD, scripts)
    return answer


@pytest.fixture
def reservation(stack: Stack) -> Iterator[str]:
    """A reservation of GPU nodes, a year ahead so that nobody waits for it, and features of these nodes."""
    name = "rayslurm_test"
    nodes = "nodename=g[1-2]"
    stack.exec("slurmctld", ["scontrol", "update", nodes, "availablefeatures=a100,nvlink", "activefeatures=a100,nvlink"])
    asked = [f"reservationname={name}", "starttime=now+365days", "duration=1", "nodes=g[1-2]", f"users={USER}"]
    stack.exec("slurmctld", ["scontrol", "create", "reservation", *asked])
    try:
        yield name
    finally:
        stack.exec("slurmctld", ["scontrol", "delete", f"reservationname={name}"])
        stack.exec("slurmctld", ["scontrol", "update", nodes, "activefeatures=", "availablefeatures="])


def ask(**fields: Any) -> JobRequest:
    return make_request(SlurmQueueConfig(**fields), (), job_name="rayslurm-test-0123456789ab", comment="a test's \\ #1")


def test_every_field_arrives(stack: Stack, reservation: str) -> None:
    everything = {
        "partition": "gpu",
        "account": "study",
        "qos": "normal",
        "reservation": reservation,
        "constraint": "a100&nvlink",
        "num_nodes": 2,
        "cpus_per_node": 3,
        "gpus_per_node": 2,
        "gpu_type": "fake",
        "mem": "2G",
        "time_limit": "1-02:03:00",
        "exclusive": True,
        "nodelist": "g[1-2]",
        "exclude": "c1",
        "switches": "1@00:04:00",
        "requeue": True,
        "extra_sbatch": ["--nice=100", "--contiguous", "--network=o'neil \\x"],
    }
    mem_per_cpu = ask(mem_per_cpu="512M", cpus_per_node=2)
    assert {*everything, "mem_per_cpu", "signal_before_timeout"} == set(SlurmQueueConfig.model_fields)
    scripts = [render_script(request, ["true"], "/tmp/a b/%j", {}) for request in (ask(**everything), mem_per_cpu)]
    (name, comment, shown), (_, _, other) = held(stack, *scripts)
    assert (name, comment) == ("rayslurm-test-0123456789ab", "a test's \\ #1")
    assert words(shown) >= {
        "Partition=gpu",
        "Account=study",
        "QOS=normal",
        f"Reservation={reservation}",
        "Features=a100&nvlink",
        "NumNodes=2-2",
        "NumTasks=2",
        "CPUs/Task=3",
        "NtasksPerN:B:S:C=1:0:*:*",
        "MinMemoryNode=2G",
        "TimeLimit=1-02:03:00",
        "OverSubscribe=NO",
        "ReqNodeList=g[1-2]",
        "ExcNodeList=c1",
        "Switches=1@00:04:00",
        "Requeue=1",
        "Nice=100",
        "Contiguous=1",
    }
    assert re.search(r"TresPerNode=gres[:/]gpu:fake:2\s", shown)
    assert "WorkDir=/tmp/a b/%j\n" in shown
    assert "Network=o'neil \\x\n" in shown
    assert words(other) >= {"MinMemoryCPU=512M", "CPUs/Task=2", "NumNodes=1-1", "Requeue=0", "TimeLimit=01:00:00", "Contiguous=0"}


def words(shown: str) -> set[str]:
    return set(shown.split())


harmless = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=[chr(c) for c in (*range(32), 127)]), max_size=100)
NASTY = [
    "\\",
    "\\\\'",
    "'",
    '"',
    "# no comment",
    "a'b\"c\\d#e;f$(g)`h`%i%%j",
    " packjob hetjob ",
    ": --nodes=3",
    "é\x85\u2028\U0001f600",
    "~*?[!",
]


@given(texts=st.lists(harmless.filter(bool), min_size=8, max_size=8))
@example(texts=[*NASTY, *(text * 2 for text in reversed(NASTY))])
@settings(max_examples=5, deadline=None, phases=(Phase.explicit, Phase.generate))
def test_any_text_arrives_as_it_is(stack: Stack, texts: list[str]) -> None:
    pairs = list(zip(texts[::2], texts[1::2], strict=True))
    scripts = [render_script(job_request(name, comment), ["true"], "/tmp", {}) for name, comment in pairs]
    assert [(name, comment) for name, comment, _ in held(stack, *scripts)] == pairs


IN_DIRECTORIES = r"""
def main(scripts):
    for name, script in scripts.items():
        directory = os.path.join(base, name)
        os.makedirs(directory)
        open(os.path.join(directory, "exit"), "w").close()
        job, said = submit(script.replace("/BASE", base), directory=base)
        assert job.isdigit(), said
        jobs.append(job)
    paths = [os.path.join(base, name) for name in scripts]
    until(lambda: all(read(path, "exit") for path in paths), 40)
    files = [{name: read(path, name).replace(base, "/BASE") for name in os.listdir(path)} for path in paths]
    return dict(zip(scripts, files)), sorted(os.listdir(base))
"""


def test_files_are_where_they_should_be_whatever_the_directory_is_called(stack: Stack) -> None:
    names = ["a b'\"c", "p%j%%t%5x", "b\\%j\\", "é $HOME`x`;#~*[1-2]"]
    request = job_request("files", "", num_nodes=2, time_limit="1", partition="compute")
    command = ["sh", "-c", 'pwd; echo "$WORD" >&2; [ "$SLURM_PROCID" = 1 ] || exit 0; sleep 1; exit 3']
    # In JSON and in the shell's quotes a base directory is the same text.
    scripts = {name: render_script(request, command, f"/BASE/{name}", {"WORD": "it's"}) for name in names}
    files, entries = on_edge(stack, IN_DIRECTORIES, scripts)
    assert entries == sorted([*names, "job.sh"])
    for name in names:
        assert set(files[name]) == {EXIT, LOG, "node-0.log", "node-1.log"}, name
        assert re.fullmatch(r"[0-9]+ 0 3\n", files[name][EXIT])
        for node in ("node-0.log", "node-1.log"):
            assert files[name][node].splitlines()[:2] == [f"/BASE/{name}", "it's"]
        assert "task 1: Exited with exit code 3" in files[name][LOG]


CANCELLED = r"""
def main(script):
    open(os.path.join(base, "exit"), "w").close()
    job, said = submit(script.replace("/BASE", base), directory=base)
    assert job.isdigit(), said
    jobs.append(job)
    logs = ["node-0.log", "node-1.log"]
    until(lambda: all(os.path.exists(os.path.join(base, log)) and "ready" in read(base, log) for log in logs), 40)
    run("scancel", job)
    until(lambda: show(job)[job][0] == "CANCELLED" and read(base, "exit"), 20)
    return show(job)[job][0], read(base, "exit"), read(base, "slurm.log"), [read(base, log) for log in logs]
"""

TASK = """
import os, signal, sys, time
head = os.environ["SLURM_PROCID"] == "0"
def end(*_):
    print("SIGTERM", flush=True)
    time.sleep(2 if head else 0)
    print("ended", flush=True)
    sys.exit(0 if head else 143)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(100)
"""


def test_a_cancelled_job_goes_on_until_its_tasks_have_ended_and_leaves_their_exit_code(stack: Stack) -> None:
    request = job_request("cancelled", "", num_nodes=2, time_limit="2", partition="compute")
    script = render_script(request, ["python3", "-c", "exec(__import__('os').environ['TASK'])"], "/BASE", {})
    script = script.replace("\ntrap ", f"\nexport TASK='{TASK}'\ntrap ")
    state, code, log, nodes = on_edge(stack, CANCELLED, script)
    assert state == "CANCELLED"
    assert re.fullmatch(r"[0-9]+ 0 143\n", code)
    assert "forcing job termination" in log
    # The other node's end does not cut the head's short, in spite of --kill-on-bad-exit.
    for node in nodes:
        assert [line for line in node.splitlines() if "slurmstepd" not in line] == ["ready", "SIGTERM", "ended"]


TOO_MUCH = r"""
UNSETTLED = ("None", "Priority", "Resources", "PartitionConfig")
def main(scripts):
    answers = [submit(script, directory=base) for script in scripts]
    jobs.extend(job for job, _ in answers if job)
    until(lambda: not jobs or not any(row[1] in UNSETTLED for row in show(*jobs).values()), 6)
    shown = show(*jobs) if jobs else {}
    return [[said, shown[job][1] if job else None] for job, said in answers]
"""

REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("num_nodes", {"num_nodes": 3}),
    ("cpus_per_node", {"cpus_per_node": 5}),
    ("cpus_per_node", {"cpus_per_node": 5, "num_nodes": 2}),
    ("gpus_per_node", {"gpus_per_node": 3, "partition": "gpu"}),
    ("gpus_per_node", {"gpus_per_node": 1}),
    ("gpu_type", {"gpus_per_node": 1, "gpu_type": "a100", "partition": "gpu"}),
    ("mem", {"mem": "100G"}),
    ("mem_per_cpu", {"mem_per_cpu": "100G"}),
    ("time_limit", {"time_limit": "8-00"}),
    ("time_limit", {"time_limit": "UNLIMITED"}),
    ("partition", {"partition": "nope"}),
    ("constraint", {"constraint": "nope"}),
    ("reservation", {"reservation": "nope"}),
    ("nodelist", {"nodelist": "nope"}),
    ("nodelist", {"nodelist": "g1", "partition": "compute"}),
    ("exclude", {"exclude": "c[1-2]", "partition": "compute"}),
    ("switches", {"switches": "x"}),
    ("extra_sbatch", {"extra_sbatch": ["--licenses=nope:1"]}),
    ("extra_sbatch", {"extra_sbatch": ["--nope"]}),
]


def test_what_cannot_be_granted_is_explained_with_the_fields_name(stack: Stack) -> None:
    scripts = [render_script(ask(**fields), ["true"], "/tmp", {}) for _, fields in REQUESTS]
    answers = on_edge(stack, TOO_MUCH, scripts)
    for (field, fields), (said, reason) in zip(REQUESTS, answers, strict=True):
        if reason == "PartitionNodeLimit":  # It may be that nodes are down, and come back.
            assert field == "num_nodes"
            assert impossible(reason) is None
            continue
        sentence = explain(said) if reason is None else impossible(reason, "compute")
        assert sentence, (fields, said, reason)
        assert field in re.findall(r"\w+", sentence), (fields, said, reason)
        assert "what your site demands" not in sentence, (fields, said, reason)


def test_every_option_of_this_sbatch_is_either_owned_or_passed_on(stack: Stack) -> None:
    """No option of its own is taken for the beginning of another one."""
    names = set(re.findall(r"--([a-z][a-z0-9-]+)", stack.exec("edge", ["sbatch", "--help"], user=USER)))
    assert len(names) > 80
    passed = set()
    for name in sorted(names):
        try:
            ask(extra_sbatch=[f"--{name}=x"])
            passed.add(name)
        except ValueError as error:
            assert "would take" not in str(error), name
    assert passed >= {"licenses", "begin", "dependency", "gres", "gpus", "mail-user", "time-min", "no-kill", "export"}
    assert not passed & (set(FIELD_OF_OPTION) - {"exclusive"})
