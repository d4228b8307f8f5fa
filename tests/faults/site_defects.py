"""Defects that sites, accounts and configurations have, and the line of `rayslurm doctor` that must name each.

Nearly all are seeded on the stack for real. Those in `SIMULATED` are seeded by a program of the user's that stands for what a
site would do, because the stack has no such site: an old or slow Slurm, a cluster without accounting, a rootless runtime, a
compute node whose clock is wrong.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from ..connections.sshd import Sshd
from .bench import BASE, NODES, Bench
from .breaking import paused, stopped, without_munge
from .lagging import Lag

Seed = Callable[[Bench, Path], AbstractContextManager[object]]


def nothing(bench: Bench, directory: Path) -> AbstractContextManager[object]:
    """The defect is in the arguments or variables."""
    return contextlib.nullcontext()


@dataclass(frozen=True)
class Defect:
    """A defect: how it is seeded, what doctor is called with, and the only line that it gives.

    Attributes:
        line: name of the line; a node's name in front of it may be any.
        variables: variables of the edge node that differ, without their prefix; `{dir}` is a directory of the test's.
        thorough: whether only the thorough tests seed it, because it takes long.
    """

    name: str
    line: str
    verdict: str = "failure"
    seed: Seed = nothing
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str | None] = field(default_factory=dict)
    thorough: bool = False


def start_up(text: str) -> Seed:
    return lambda bench, _: bench.start_up(text)


def sh(do: str, undo: str, service: str = "edge") -> Seed:
    return lambda bench, _: bench.undone(service, do, undo)


def key_file(mode: int) -> Seed:
    """A key of the test's own that the server does not know, at `{dir}/key`."""

    def seed(bench: Bench, directory: Path) -> AbstractContextManager[object]:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / "key")], check=True)
        os.chmod(directory / "key", mode)
        return contextlib.nullcontext()

    return seed


def known_hosts(changed: bool) -> Seed:
    """A file of known hosts at `{dir}/known`: without the server, or with another key."""

    def seed(bench: Bench, directory: Path) -> AbstractContextManager[object]:
        key_file(0o600)(bench, directory)
        key = (directory / "key.pub").read_text()
        line = f"[127.0.0.1]:{bench.stack.env['SLURM_EDGE_NODE_PORT']} {key}"
        (directory / "known").write_text(line if changed else "")
        return contextlib.nullcontext()

    return seed


def own_sshd(*options: str) -> Seed:
    """A further SSH server on the edge node; its port goes into the variables."""

    @contextlib.contextmanager
    def seed(bench: Bench, directory: Path):  # type: ignore[no-untyped-def]
        server = Sshd(bench.stack, "edge", *options)
        before = bench.stack.env
        changed = {"HOST": server.host, "PORT": str(server.port), "HOST_KEY_CHECKING": "accept-new"}
        changed["KNOWN_HOSTS_FILE"] = str(directory / "known")
        bench.stack.env = {**before, **{f"SLURM_EDGE_NODE_{name}": value for name, value in changed.items()}}
        try:
            yield
        finally:
            bench.stack.env = before
            server.close()

    return seed


def small_base(options: str) -> Seed:
    return lambda bench, _: bench.mounted(BASE, options, "edge")


def on_nodes(path: str, options: str, owner: str = "dev") -> Seed:
    return lambda bench, _: bench.mounted(path, options, *NODES, owner=owner)


def ephemeral(ports: str, *services: str) -> Seed:
    """The kernel takes the ports of outgoing connections from another range."""
    setting = "> /proc/sys/net/ipv4/ip_local_port_range"
    do, undo = (f"echo {each} {setting}" for each in (ports, "32768 60999"))
    return both(*(lambda b, _, service=service: b.inside(service, ["--net"], do, undo) for service in services))


def program(name: str, text: str) -> Seed:
    return lambda bench, _: bench.program(name, text)


def both(*seeds: Seed) -> Seed:
    @contextlib.contextmanager
    def seed(bench: Bench, directory: Path):  # type: ignore[no-untyped-def]
        with contextlib.ExitStack() as stack:
            for each in seeds:
                stack.enter_context(each(bench, directory))
            yield

    return seed


@contextlib.contextmanager
def busy(bench: Bench, _: Path):  # type: ignore[no-untyped-def]
    """Another user's jobs on all nodes of the partition."""
    bench.stack.exec("edge", ["sbatch", "-N2", "--exclusive", "--output=/dev/null", "--wrap=srun sleep 300"], user="other")
    try:
        yield
    finally:
        bench.sh("slurmctld", "scancel --user=other; while squeue -h -u other | grep -q .; do sleep 0.2; done")


PROBE = ("--probe", "--env=/opt/ray")
# Python with a clock that is wrong. It stands for a wrong clock of a machine: libfaketime breaks `sleep`.
_AHEAD = """#!/usr/bin/python3.away
import os, runpy, sys, time
if os.path.exists(os.path.dirname(sys.argv[0]) + "/../pyvenv.cfg"):  # An environment's Python links to this one.
    os.execv("/usr/bin/python3.away", sys.argv)
time.time = lambda right=time.time: right() + %d
sys.argv = [arg for arg in sys.argv[1:] if arg not in ("-I", "-S", "-X", "utf8")]
if sys.argv[0] == "-c":
    exec(sys.argv[1])
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def ahead(seconds: int, *services: str) -> Seed:
    """The clock of some machines is ahead, as Python sees it there."""
    python, text = "/usr/bin/python3", shlex.quote(_AHEAD % seconds)
    do = f"mv {python} {python}.away && printf %s {text} > {python} && chmod 755 {python}"
    return both(*(sh(do, f"mv {python}.away {python}", service) for service in services))


LOGIN = (
    Defect("a wrong port", "network", variables={"PORT": "1"}),
    Defect("an unknown host", "network", variables={"HOST": "no-such-host.invalid"}),
    Defect("a changed host key", "host key", seed=known_hosts(True), variables={"KNOWN_HOSTS_FILE": "{dir}/known"}),
    Defect("an unknown host key", "host key", seed=known_hosts(False), variables={"KNOWN_HOSTS_FILE": "{dir}/known"}),
    Defect("host keys are not checked", "host key", "warning", variables={"HOST_KEY_CHECKING": "off"}),
    Defect("a key that is not authorized", "authentication", seed=key_file(0o600), variables={"KEY_PATH": "{dir}/key"}),
    Defect("a key that others can read", "authentication", seed=key_file(0o644), variables={"KEY_PATH": "{dir}/key"}),
    Defect("no key", "authentication", variables={"KEY_PATH": "{dir}/none"}),
    Defect("start-up files that exit", "login shell", seed=start_up("echo expired; exit 3")),
    Defect(
        "no login shell",
        "login shell",
        seed=sh("usermod --shell /usr/sbin/nologin dev", "usermod --shell /bin/bash dev"),
    ),
    Defect("no Python on the edge node", "login shell", seed=lambda b, _: b.moved("/usr/bin/python3", "edge")),
    Defect("start-up files that print", "login shell", "warning", start_up("echo 'Welcome! Quota: 3 GB'")),
    Defect("slow start-up files", "login shell", "warning", start_up("sleep 6"), thorough=True),
    Defect("no forwarding", "forwarding", "warning", own_sshd("AllowTcpForwarding no")),
)

EDGE = (
    Defect("a wrong clock on the edge node", "clock", seed=ahead(600, "edge")),
    Defect("a base directory that is a file", "base directory", seed=sh(f"touch {BASE}", f"rm {BASE}")),
    Defect(
        "a base directory of another user",
        "base directory",
        seed=sh(f"install -d -o other -m 777 {BASE}", f"rmdir {BASE}"),
    ),
    Defect("a base directory for everybody", "base directory", seed=sh(f"install -d -o dev -m 777 {BASE}", f"rmdir {BASE}")),
    Defect("a read-only base directory", "base directory", seed=small_base("ro")),
    Defect("a full disk", "disk space", seed=small_base("size=32k")),
    Defect("little space", "disk space", "warning", small_base("size=500m")),
    Defect("few free inodes", "disk space", "warning", small_base("nr_inodes=500")),
    Defect("a base directory with noexec", "noexec", "warning", small_base("noexec")),
    Defect("PYTHONPATH", "variables", "warning", start_up("export PYTHONPATH=/home/dev/old-ray")),
    Defect("a proxy for all addresses", "variables", "warning", start_up("export http_proxy=http://proxy:3128")),
    Defect("options of Slurm in variables", "variables", "warning", start_up("export SBATCH_EXPORT=NONE SQUEUE_USERS=root")),
    Defect("a TMPDIR that is not there", "variables", "warning", start_up("export TMPDIR=/local/scratch/dev")),
    Defect("few open files", "ulimits", seed=start_up("ulimit -n 256")),
    Defect("few processes", "ulimits", "warning", start_up("ulimit -u 2000")),
    Defect("little virtual memory", "ulimits", seed=start_up("ulimit -v 16000000")),
    Defect("no environment", "environment", arguments=("--env=/opt/none",)),
    Defect(
        "an environment without Ray",
        "environment",
        seed=sh("python3 -m venv --without-pip /scratch/empty", "rm -rf /scratch/empty"),
        arguments=("--env=/scratch/empty",),
    ),
    Defect(
        "an environment that cannot be activated",
        "environment",
        seed=sh("mkdir /scratch/act && echo 'module load cuda/99 || exit 4' > /scratch/act/activate.sh", "rm -rf /scratch/act"),
        arguments=("--env=/scratch/act",),
    ),
)

SLURM = (
    Defect("no squeue", "Slurm programs", seed=lambda b, _: b.moved("/usr/bin/squeue", "edge")),
    Defect("slurmctld is down", "slurmctld", seed=lambda b, _: stopped(b.stack, "slurmctld"), thorough=True),
    Defect("slurmctld hangs", "slurmctld", seed=lambda b, _: paused(b.stack, "slurmctld"), thorough=True),
    Defect("no munge on the edge node", "munge", seed=lambda b, _: without_munge(b.stack, "edge")),
    Defect("slurmdbd is down", "accounting", "warning", lambda b, _: stopped(b.stack, "slurmdbd"), thorough=True),
    Defect(
        "no account",
        "account",
        seed=lambda b, _: b.slurm(
            "sacctmgr --immediate delete user dev", "sacctmgr --immediate add user dev account=study defaultaccount=study"
        ),
    ),
    Defect("another account", "account", arguments=("--account=physics",)),
    Defect("another QOS", "QOS", arguments=("--qos=urgent",)),
    Defect("no jobs allowed", "limits", seed=lambda b, _: b.user("MaxSubmitJobs=0", "MaxSubmitJobs=-1")),
    Defect("short jobs only", "limits", seed=lambda b, _: b.user("MaxWall=00:10:00", "MaxWall=-1")),
    Defect(
        "no GPUs for this account",
        "limits",
        seed=lambda b, _: b.user("GrpTRES=gres/gpu=0", "GrpTRES=gres/gpu=-1"),
        arguments=("--partition=gpu", "--gpus-per-node=1"),
    ),
    Defect("jobs are forgotten at once", "job age", "warning", lambda b, _: b.configured("MinJobAge=5")),
    Defect("no such partition", "partition", arguments=("--partition=fast",)),
    Defect("a partition that is down", "partition", seed=lambda b, _: b.partition("State=DOWN", "State=UP")),
    Defect("a partition for others", "partition", seed=lambda b, _: b.partition("AllowGroups=root", "AllowGroups=ALL")),
    Defect(
        "a partition for another account",
        "partition",
        seed=lambda b, _: b.partition("DenyAccounts=study", "DenyAccounts="),
        arguments=("--account=study",),
    ),
    Defect("no default partition", "partition", seed=lambda b, _: b.partition("Default=NO", "Default=YES")),
    Defect(
        "a partition of small jobs",
        "partition",
        seed=lambda b, _: b.partition("MaxNodes=1", "MaxNodes=UNLIMITED"),
        arguments=("--num-nodes=2",),
    ),
    Defect("a short partition", "time limit", seed=lambda b, _: b.partition("MaxTime=30", "MaxTime=7-0")),
    Defect("all nodes are drained", "nodes", seed=lambda b, _: b.drained("c[1-2]")),
    Defect("half of the nodes are drained", "nodes", "warning", lambda b, _: b.drained("c2")),
    Defect("Slurm hides its nodes", "nodes", "warning", lambda b, _: b.configured("PrivateData=nodes")),
    Defect("more nodes than there are", "nodes", arguments=("--num-nodes=3",)),
    Defect("no GPUs in the partition", "GPUs", arguments=("--gpus-per-node=1",)),
    Defect("no GPUs of this type", "GPUs", arguments=("--partition=gpu", "--gpus-per-node=1", "--gpu-type=a100")),
    Defect("nodes with less memory", "node size", arguments=("--mem=64G",)),
    Defect("a feature that no node has", "test submission", arguments=("--constraint=infiniband",)),
)

SIMULATED = (
    Defect(
        "an old Slurm",
        "Slurm version",
        "warning",
        program("sbatch", 'case "$*" in --version) echo slurm 20.02.7;; *) exec $real "$@";; esac'),
    ),
    Defect("a slow slurmctld", "slurmctld", "warning", program("scontrol", 'sleep 6; exec $real "$@"'), thorough=True),
    Defect(
        "no accounting",
        "accounting",
        "warning",
        program("scontrol", '$real "$@" | sed s,accounting_storage/slurmdbd,accounting_storage/none,'),
    ),
    Defect("a runtime that needs user namespaces", "containers", "warning", program("unshare", "exit 1")),
    Defect(
        "a wrong clock on the nodes",
        "clock",
        "warning",
        ahead(120, *NODES),
        ("--probe",),
    ),
)

PROBED = (
    Defect(
        "a base directory that is not shared",
        "shared base directory",
        seed=on_nodes("/scratch", "size=1m"),
        arguments=("--remote-base=/scratch/base", *PROBE),
    ),
    Defect(
        "a file system that shows changes late",
        "visibility",
        "warning",
        lambda b, _: b.seen_late(Lag(size=10, least=8)),
        PROBE,
        thorough=True,
    ),
    Defect(
        "an environment on the edge node only",
        "environment",
        seed=sh("ln -s /opt/ray /opt/only-here", "rm /opt/only-here"),
        arguments=("--probe", "--env=/opt/only-here"),
    ),
    Defect("no Python on the nodes", "node Python", seed=lambda b, _: b.moved("/usr/bin/python3", *NODES), arguments=PROBE),
    Defect("no srun on the nodes", "srun", seed=lambda b, _: b.moved("/usr/bin/srun", *NODES), arguments=PROBE),
    Defect("/tmp with noexec", "/tmp", "warning", on_nodes("/tmp", "noexec,mode=1777", owner=""), PROBE),
    Defect("a full /tmp", "/tmp", seed=on_nodes("/tmp", "size=32k,mode=1777", owner=""), arguments=PROBE),
    Defect(
        "a small /dev/shm",
        "/dev/shm",
        "warning",
        lambda b, _: b.remounted("/dev/shm", "size=64m", "size=1g", *NODES),
        PROBE,
    ),
    Defect("a read-only /dev/shm", "/dev/shm", seed=lambda b, _: b.remounted("/dev/shm", "ro", "rw", *NODES), arguments=PROBE),
    Defect(
        "the edge node cannot reach the nodes",
        "from the edge node",
        "warning",
        both(*(lambda b, _, node=node: b.blocked("edge", node) for node in NODES)),
        PROBE,
    ),
    Defect(
        "the nodes cannot reach each other",
        "from node to node",
        seed=both(lambda b, _: b.blocked("c2", "c1"), lambda b, _: b.blocked("c1", "c2")),
        arguments=("--probe-nodes=2", "--env=/opt/ray"),
    ),
    Defect(
        "nodes that use all ports for outgoing connections",
        "ports",
        "warning",
        ephemeral("1024 65535", *NODES),
        PROBE,
    ),
    Defect(
        "nodes whose names lead to themselves",
        "host name",
        "warning",
        both(
            *(
                sh(
                    f"cd /etc; cp hosts hosts.before; sed 's/^[0-9.]*\\t{node}$/127.0.1.1 {node}/' hosts.before > hosts",
                    "cat /etc/hosts.before > /etc/hosts",
                    node,
                )
                for node in NODES
            )
        ),
        PROBE,
    ),
    Defect("a busy partition", "probe", "warning", busy, (*PROBE, "--wait=2")),
)

ALL = (*LOGIN, *EDGE, *SLURM, *SIMULATED, *PROBED)
