"""The edge node of the Slurm stack: reached by this project and by hand, watched, counted and tidied."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from dagster_rayslurm import SSHConnectionResource
from stack.access import read_environment
from stack.cluster import Cluster
from stack.link import Link
from stack.settings import COMPUTE_NODES, Settings

_COUNTED = ("squeue", "scontrol", "sacct")
_IDLE_DEADLINE = 90.0
_BATCH = 4
"""Transfers of one `sftp` by hand."""

_WATCH = """\
echo ready; read job
while squeue --noheader --job="$job" 2> /dev/null | grep -q .; do sleep 0.05; done
date +%s.%N
"""
_MARKED = """\
for each in /proc/[0-9]*; do
    tr "\\0" "\\n" < "$each/environ" 2> /dev/null | grep -qx "{mark}" && echo "${{each#/proc/}}"
done 2> /dev/null; true
"""


def available() -> bool:
    """Whether the stack and the programs to compare with are there."""
    return bool(read_environment(Settings.from_environment())) and all(map(shutil.which, ("ssh", "sftp", "ssh-keygen", "docker")))


@dataclass(frozen=True)
class ByHand:
    """The clients of OpenSSH, on a master connection of their own."""

    options: list[str]
    target: str
    scratch: str

    def ssh(self, command: str = "true") -> str:
        """What a shell command on the edge prints."""
        return subprocess.run(["ssh", *self.options, self.target, command], check=True, capture_output=True, text=True).stdout

    def ssh_to(self, command: str, output: Path) -> None:
        """The same, into a file here."""
        with output.open("wb") as file:
            subprocess.run(["ssh", *self.options, self.target, command], check=True, stdin=subprocess.DEVNULL, stdout=file)

    def sftp(self, command: str) -> float:
        """Seconds per transfer, of several in one process, without those of an empty one."""
        full, empty = (self._batch(command, count) for count in (_BATCH, 0))
        return max(0.0, full - empty) / _BATCH

    def _batch(self, command: str, count: int) -> float:
        from ..steps import timed

        batch = f"{command}\n" * count
        argv = ["sftp", "-q", *self.options, "-b", "-", self.target]
        return timed(lambda: subprocess.run(argv, input=batch.encode(), check=True, capture_output=True))[0]


@dataclass(frozen=True)
class Key:
    """A key that one party alone logs in with, so that its logins and what it calls are told from those of others."""

    path: str
    fingerprint: str
    calls: str
    """File on the edge with a line for each call of a Slurm command; empty if they are not counted."""

    @property
    def commands(self) -> str:
        """File there with a line for each command that was started through sshd, but for SFTP servers."""
        return f"{self.calls}-commands"


class Edge:
    """The stack as the figures need it.

    Attributes:
        env: the variables that the stack sets for its clients, or what they are set to already, such as another user.
        user: who logs in.
        accounting: whether Slurm keeps account of jobs and steps.
    """

    def __init__(self) -> None:
        settings = Settings.from_environment()
        self.env = {name: os.environ.get(name, value) for name, value in read_environment(settings).items()}
        self.user = self.env["SLURM_EDGE_NODE_USER"]
        self._cluster = Cluster(settings)
        containers = self._cluster.containers()
        self._container = containers["edge"].id
        self.accounting = "slurmdbd" in containers

    def resource(self, port: int | None = None, client: str = "paramiko", key: str | None = None) -> SSHConnectionResource:
        """How this project gets there; the host key of another port is nowhere known."""
        return SSHConnectionResource(
            host=self.env["SLURM_EDGE_NODE_HOST"],
            port=port or int(self.env["SLURM_EDGE_NODE_PORT"]),
            user=self.user,
            key_path=key or self.env["SLURM_EDGE_NODE_KEY_PATH"],
            known_hosts_file=self.env["SLURM_EDGE_NODE_KNOWN_HOSTS_FILE"],
            host_key_checking="off" if port else "strict",
            client=client,
        )

    @contextlib.contextmanager
    def link(self, round_trip: float = 0.0) -> Iterator[Link]:
        """A link that leads there and can be cut."""
        with Link("127.0.0.1", int(self.env["SLURM_EDGE_NODE_PORT"]), round_trip / 2) as link:
            yield link

    @contextlib.contextmanager
    def by_hand(self, scratch: str, port: int | None = None) -> Iterator[ByHand]:
        """A master opened by hand."""
        ssh = self.resource(port)
        control = os.path.join(scratch, f"m{ssh.port}")
        known = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
        login = ["-i", str(ssh.key_path), "-o", f"Port={ssh.port}", "-o", f"User={ssh.user}"]
        subprocess.run(["ssh", "-M", "-S", control, "-fN", *known, *login, ssh.host], check=True, stderr=subprocess.DEVNULL)
        try:
            yield ByHand(["-o", f"ControlPath={control}", *known, *login], ssh.host, scratch)
        finally:
            subprocess.run(["ssh", "-S", control, "-O", "exit", ssh.host], capture_output=True)

    def shell(self, script: str) -> str:
        """What a shell script prints on the edge, run as the user but not through sshd."""
        return self._cluster.exec("edge", ["bash", "-c", script], self.user).stdout

    @contextlib.contextmanager
    def directory(self) -> Iterator[str]:
        """A directory on the file system that all nodes share."""
        path = f"/home/{self.user}/rayslurm-bench-{secrets.token_hex(4)}"
        self.shell(f"mkdir -m 700 {path}")
        try:
            yield path
        finally:
            self.shell(f"chmod -R u+w {path}; rm -rf {path}")  # Bundles are read-only.

    def upload(self, files: Sequence[Path], directory: str) -> None:
        """Put files into a directory on the edge."""
        self.shell(f"mkdir -p {directory}")
        for file in files:
            self._cluster.exec("edge", ["sh", "-c", f"cat > {directory}/{file.name}"], self.user, stdin=file.read_text())

    def read_json(self, path: str) -> Any:
        """What a JSON file there says."""
        return json.loads(self.shell(f"cat {path}"))

    @contextlib.contextmanager
    def key(self, scratch: str, name: str, count_in: str = "") -> Iterator[Key]:
        """A new key that the user may log in with for a while.

        Args:
            scratch: a directory here.
            name: a name for it.
            count_in: a directory on the edge, if the calls of Slurm's commands are to be counted.
        """
        path, comment = os.path.join(scratch, name), f"{name}-{secrets.token_hex(4)}"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", path], check=True)
        told = subprocess.run(["ssh-keygen", "-l", "-f", path], check=True, capture_output=True, text=True).stdout
        public, calls = Path(path + ".pub").read_text().strip(), ""
        if count_in:
            calls = f"{count_in}/{name}-calls"
            commands = f"{count_in}/{name}-bin"
            for command in _COUNTED:
                wrapper = f'#!/bin/sh\necho {command} >> {calls}\nexec /usr/bin/{command} "$@"\n'
                self.shell(f"mkdir -p {commands} && cd {commands} && printf %s {shlex.quote(wrapper)} > {command} && chmod +x *")
            count = f"case $SSH_ORIGINAL_COMMAND in *sftp-server) ;; *) echo x >> {calls}-commands;; esac"
            public = f'command="{count}; PATH={commands}:$PATH exec bash -c \\"$SSH_ORIGINAL_COMMAND\\"" {public}'
        self.shell(f"echo {shlex.quote(public)} >> ~/.ssh/authorized_keys")
        try:
            yield Key(path, told.split()[1], calls)
        finally:
            self.shell(f"sed -i '/ {comment}$/d' ~/.ssh/authorized_keys")

    def logins(self, fingerprint: str = "") -> int:
        """Logins that sshd has logged, of everybody or with one key."""
        done = subprocess.run(["docker", "logs", self._container], capture_output=True, text=True, check=True)
        lines = (done.stdout + done.stderr).splitlines()
        return sum("Accepted publickey for" in line and fingerprint in line for line in lines)

    def login_times(self, fingerprint: str) -> list[float]:
        """When sshd has let a key in, in seconds since the epoch, by Docker's clock, which is this machine's."""
        command = ["docker", "logs", "--timestamps", self._container]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        lines = (done.stdout + done.stderr).splitlines()
        accepted = [line.split()[0] for line in lines if "Accepted publickey for" in line and fingerprint in line]
        # Nine digits of a second are more than `fromisoformat` takes.
        return [datetime.fromisoformat(f"{stamp[:26]}+00:00").timestamp() for stamp in accepted]

    def cpu_seconds(self) -> float:
        """CPU time that the SSH and SFTP servers on the edge have had."""
        script = (
            "import os,glob\nt=0\nfor p in glob.glob('/proc/[0-9]*/stat'):\n  try: s=open(p).read()\n  except OSError: continue\n"
        )
        script += "  if '(sshd' in s or '(sftp-server' in s: f=s.rpartition(')')[2].split(); t+=int(f[11])+int(f[12])\n"
        script += "print(t/os.sysconf('SC_CLK_TCK'))"
        return float(self._cluster.exec("edge", ["python3", "-c", script]).stdout)

    def calls(self, key: Key) -> Counter[str]:
        """How often whoever has the key has called each of Slurm's commands."""
        return Counter(self.shell(f"cat {key.calls} 2> /dev/null; true").split())

    def commands(self, key: Key) -> int:
        """How many commands whoever has the key has started here."""
        return int(self.shell(f"cat {key.commands} 2> /dev/null | wc -l"))

    def controller_calls(self) -> int:
        """Calls of this user that slurmctld has answered, whichever program made them on whichever node."""
        told = self._cluster.exec("edge", ["sdiag"]).stdout
        counts = re.findall(rf"^\s+{re.escape(self.user)}\s+\(\s*\d+\)\s+count:(\d+)", told, re.MULTILINE)
        return int(counts[0]) if counts else 0

    def slurm_version(self) -> str:
        """The version of Slurm there."""
        return self.shell("sinfo --version").split()[-1]

    def wait_until_idle(self) -> None:
        """Wait until this user has no job left: one that still ends would disturb the next."""
        deadline = time.monotonic() + _IDLE_DEADLINE
        while left := self.shell("squeue --me --noheader --format='%A %T %j'").splitlines():
            if time.monotonic() > deadline:
                raise TimeoutError(f"jobs of {self.user} do not end: {'; '.join(left)}")
            time.sleep(0.1)

    def processes(self, node: str, program: Path) -> list[tuple[float, str]]:
        """What `payloads/processes.py` tells of a compute node."""
        told = self._cluster.exec(node, ["python3", "-"], self.user, stdin=program.read_text()).stdout
        return [(began, command) for began, command in json.loads(told)]

    def jobs_below(self, directory: str) -> list[str]:
        """Ids of the jobs, over or not, that work in a directory or below it."""
        listed = self.shell("squeue --me --states=all --noheader --format='%A %Z'").splitlines()
        return [line.split()[0] for line in listed if f"{line.split(maxsplit=1)[1]}/".startswith(f"{directory}/")]

    def end_jobs_below(self, directory: str) -> None:
        """Cancel those that are not over yet."""
        jobs = self.jobs_below(directory)
        if jobs:
            self.shell(f"scancel --quiet {' '.join(jobs)}; true")

    def steps(self, jobs: Sequence[str]) -> list[int]:
        """How often `srun` has made a step in each job, by accounting."""
        # "1234", "1234.batch" and one "1234.0" for each step; one over components is "1234+0.0", "1234+1.0" and so on.
        lines = self.shell(f"sacct --noheader --parsable2 --format=JobID --jobs={','.join(jobs)}")
        return [len(set(re.findall(rf"^{job}(?:\+\d+)?\.(\d+)$", lines, re.MULTILINE))) for job in jobs]

    @contextlib.contextmanager
    def queue_watch(self) -> Iterator[QueueWatch]:
        """Something that waits beside a measurement until a job is named, and costs nothing before."""
        command = ["docker", "exec", "--interactive", self._container, "sh", "-c", _WATCH]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                process.stdout.readline()  # What it costs to begin is over.
                yield QueueWatch(process)
            finally:
                if process.poll() is None:
                    process.kill()

    def end_marked(self, mark: str) -> None:
        """End the processes on the edge that have a variable in their environment."""
        pids = self.shell(_MARKED.format(mark=mark)).split()
        if pids:
            self.shell(f"kill {' '.join(pids)} 2> /dev/null; true")

    def remove_on_nodes(self, patterns: Sequence[str]) -> None:
        """Remove what jobs have left on the nodes' own disks."""
        for node in COMPUTE_NODES:
            self._cluster.exec(node, ["sh", "-c", f"rm -rf {' '.join(patterns)}"], self.user, check=False)


@dataclass(frozen=True)
class QueueWatch:
    """See `Edge.queue_watch`."""

    process: subprocess.Popen[str]

    def gone(self, job: str) -> float:
        """The time at which `squeue` does not show the job any more."""
        return float(self.process.communicate(f"{job}\n")[0])
