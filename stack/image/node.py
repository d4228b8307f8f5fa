#!/usr/bin/python3
"""Entrypoint of every container of the dev stack: puts a node's files in place and becomes the daemon of its role.

Run as `node.py ROLE`; standard library only, and safe to run again in a container that restarts.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

KEYS = Path("/run/rayslurm/keys")
ETC = Path("/etc/slurm")
USERS = ("dev", "other")
ACCOUNT = "study"
GPUS_PER_NODE = 2
PATIENCE = 90.0
"""Seconds that a daemon waits for what it depends on."""

SLURM_CONF = """\
ClusterName=rayslurm
SlurmctldHost=slurmctld
# Containers that restart come back with other addresses.
CommunicationParameters=NoAddrCache

SlurmUser=slurm
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmdTimeout=30
ReturnToService=2

# Nodes may claim more than this machine has, so that a laptop can hold four of them.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1024
# Heterogeneous jobs are started by the backfill scheduler.
SchedulerParameters=bf_interval=2
MpiDefault=none
GresTypes=gpu

# No cgroups in an ordinary container: processes are found by their parents, and memory limits are enforced by polling.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill,NoShared

{storage}

NodeName=c[1-2] CPUs=4 RealMemory=4096
NodeName=g[1-2] CPUs=4 RealMemory=4096 Gres=gpu:fake:{gpus}
PartitionName=compute Nodes=c[1-2] Default=YES DefaultTime=01:00:00 MaxTime=7-00:00:00
PartitionName=gpu Nodes=g[1-2] DefaultTime=01:00:00 MaxTime=7-00:00:00
PartitionName=all Nodes=c[1-2],g[1-2] DefaultTime=01:00:00 MaxTime=7-00:00:00
"""

GRES_CONF = """\
NodeName=g[1-2] Name=gpu Type=fake File=/dev/fakegpu[0-{last}]
"""

CGROUP_CONF = """\
# slurmd begins with a cgroup plugin even where nothing uses it, and this one touches no file, whatever the host has.
CgroupPlugin=cgroup/v1
"""

SLURMDBD_CONF = """\
DbdHost=slurmdbd
SlurmUser=slurm
PidFile=/run/slurm/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=database
StorageUser=slurm
StoragePass={password}
"""

DATABASE_SQL = """\
CREATE DATABASE IF NOT EXISTS slurm_acct_db;
CREATE USER IF NOT EXISTS slurm@'%' IDENTIFIED BY '{password}';
GRANT ALL ON slurm_acct_db.* TO slurm@'%';
"""


def slurm_conf(accounting: bool) -> str:
    """Render slurm.conf, the same on every node."""
    storage = ["AccountingStorageType=accounting_storage/none"]
    if accounting:
        storage = [
            "AccountingStorageType=accounting_storage/slurmdbd",
            "AccountingStorageHost=slurmdbd",
            "AccountingStorageTRES=gres/gpu",
            "AccountingStorageEnforce=associations,limits,qos",
            # As on sites where administrators can read what was submitted.
            "AccountingStoreFlags=job_script,job_env",
        ]
    return SLURM_CONF.format(storage="\n".join(storage), gpus=GPUS_PER_NODE)


def database_password() -> str:
    """Derive the password between slurmdbd and its database, so that none is written down."""
    return hashlib.sha256(b"database" + (KEYS / "munge.key").read_bytes()).hexdigest()


def write(path: Path, content: str | bytes, owner: str = "root", mode: int = 0o644) -> None:
    """Write a file that has its owner and mode from the start."""
    path.unlink(missing_ok=True)
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        give(path, owner)
        os.chmod(path, mode)
        file.write(content.encode() if isinstance(content, str) else content)


def directory(path: Path, owner: str, mode: int = 0o755) -> None:
    """Make a directory with its owner and mode, unless it is there."""
    path.mkdir(parents=True, exist_ok=True)
    give(path, owner)
    os.chmod(path, mode)


def give(path: Path, owner: str) -> None:
    """Hand a path to a user and the user's group."""
    user = pwd.getpwnam(owner)
    os.chown(path, user.pw_uid, user.pw_gid)


def wait_for(host: str, port: int) -> None:
    """Wait until a port of another container answers."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            socket.create_connection((host, port), timeout=2).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                sys.exit(f"{host}:{port} did not answer within {PATIENCE:.0f} s ({error}); `make stack-logs` shows why")
            time.sleep(0.1)


def start_munged() -> None:
    """Start munged, which returns when it listens."""
    directory(Path("/run/munge"), "munge")
    directory(Path("/etc/munge"), "munge", 0o700)
    write(Path("/etc/munge/munge.key"), (KEYS / "munge.key").read_bytes(), "munge", 0o400)
    subprocess.run(["munged", "--force"], user="munge", group="munge", extra_groups=[], check=True)


def configure_slurm(accounting: bool) -> None:
    """Write the configuration that all nodes share."""
    directory(Path("/run/slurm"), "slurm")
    write(ETC / "slurm.conf", slurm_conf(accounting))
    write(ETC / "cgroup.conf", CGROUP_CONF)
    write(ETC / "gres.conf", GRES_CONF.format(last=GPUS_PER_NODE - 1))


def make_homes() -> None:
    """Make the users' homes on the shared volume, and let the client's key into them."""
    os.chmod("/scratch", 0o1777)
    for name in USERS:
        home = Path(pwd.getpwnam(name).pw_dir)
        if not home.exists():
            shutil.copytree("/etc/skel", home)
            for path in (home, *home.rglob("*")):
                give(path, name)
            os.chmod(home, 0o700)
        directory(home / ".ssh", name, 0o700)
        write(home / ".ssh" / "authorized_keys", (KEYS / "id_ed25519.pub").read_bytes(), name, 0o600)


def make_fake_gpus() -> None:
    """Make device nodes for Slurm to hand out; to whoever opens them they are /dev/null."""
    for number in range(GPUS_PER_NODE):
        path = Path(f"/dev/fakegpu{number}")
        if not path.exists():
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))


def add_to_accounting() -> None:
    """Make the cluster, the account and the users known to slurmdbd."""
    for what in (["cluster", "rayslurm"], ["account", ACCOUNT], ["user", ",".join(USERS), f"account={ACCOUNT}"]):
        # It fails for what is known already, so that what counts is looked at afterwards.
        added = sacctmgr("add", *what)
    known = sacctmgr("show", "associations", "format=account,user").stdout.split()
    if not set(known) >= {f"{ACCOUNT}|{user}" for user in USERS}:
        sys.exit(f"sacctmgr could not add the users: {added.stdout}{added.stderr}")


def sacctmgr(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run sacctmgr, asking nothing."""
    command = ["sacctmgr", "--immediate", "--noheader", "--parsable2", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def database() -> list[str]:
    """MariaDB, with a database and a user for slurmdbd."""
    directory(Path("/run/mysqld"), "mysql")
    setup = Path("/run/mysqld/setup.sql")
    write(setup, DATABASE_SQL.format(password=database_password()), "mysql", 0o600)
    return ["mariadbd", "--user=mysql", "--bind-address=0.0.0.0", "--skip-name-resolve", f"--init-file={setup}"]


def slurmdbd() -> list[str]:
    """The accounting daemon, once its database answers."""
    write(ETC / "slurmdbd.conf", SLURMDBD_CONF.format(password=database_password()), "slurm", 0o600)
    wait_for("database", 3306)
    return ["slurmdbd", "-D"]


def slurmctld() -> list[str]:
    """The controller, once accounting answers and knows the users."""
    if accounting_is_on():
        wait_for("slurmdbd", 6819)
        add_to_accounting()
    return ["slurmctld", "-D"]


def compute() -> list[str]:
    """A compute node.

    Reading /proc/PID/io of a user's process takes a capability that a container has not, and a process whose file opens
    but cannot be read goes unaccounted: without DAC_OVERRIDE the file does not open, and its memory is counted.
    """
    directory(Path("/var/lib/slurm/slurmd"), "root")
    return ["setpriv", "--bounding-set=-dac_override", "slurmd", "-D"]


def gpu() -> list[str]:
    """A compute node with fake GPUs."""
    make_fake_gpus()
    return compute()


def edge() -> list[str]:
    """The login node: sshd and Slurm's commands."""
    make_homes()
    Path("/run/sshd").mkdir(exist_ok=True)
    write(Path("/etc/ssh/ssh_host_ed25519_key"), (KEYS / "ssh_host_ed25519_key").read_bytes(), mode=0o600)
    return ["/usr/sbin/sshd", "-D", "-e"]


ROLES: dict[str, Callable[[], list[str]]] = {role.__name__: role for role in (database, slurmdbd, slurmctld, compute, gpu, edge)}


def accounting_is_on() -> bool:
    """Whether this stack has slurmdbd and its database."""
    return os.environ.get("RAYSLURM_STACK_ACCOUNTING", "on") == "on"


def main() -> None:
    """Become what the role on the command line says."""
    if len(sys.argv) != 2 or sys.argv[1] not in ROLES:
        sys.exit(f"a role is needed: {', '.join(ROLES)}")
    if not (KEYS / "munge.key").exists():
        sys.exit("the keys of the stack are not there: start it with `make stack-up`")
    start_munged()
    configure_slurm(accounting_is_on())
    command = ROLES[sys.argv[1]]()
    sys.stdout.flush()
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
