"""Seeds defects of a site on the Slurm stack, as context managers whose end mends them."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from dagster_rayslurm.cli import main
from dagster_rayslurm.ssh.pool import close_connections

from ..conftest import wait_until
from ..stack.access import Stack
from .breaking import answers, nodes_are_idle
from .lagging import Lag, lagging
from .mounts import shown

NODES = ("c1", "c2")
BASE = "/home/dev/doctor"
_FAKE = "/home/dev/fake-programs"
# umount(8) reads /proc/self/mountinfo, which is empty for a process of another pid namespace.
_MOUNTS = ("--mount", "--pid")


class Bench:
    """The stack, with what defects need."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack

    def doctor(self, *arguments: str, **variables: str | None) -> dict[str, Any]:
        """What `rayslurm doctor --json` prints; `variables` are those of the edge node without their prefix."""
        environ = {**self.stack.env, **{f"SLURM_EDGE_NODE_{name}": value for name, value in variables.items()}}
        close_connections()  # A login of an earlier test has earlier start-up files.
        done = CliRunner().invoke(main, ["doctor", "--json", f"--remote-base={BASE}", *arguments], env=environ)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.output
        assert done.exit_code in (0, 1) and done.stdout, done.output
        report: dict[str, Any] = json.loads(done.stdout)
        failed = any(line["verdict"] == "failure" for line in report["lines"])
        assert done.exit_code == int(failed)
        return report

    def sh(self, service: str, script: str) -> str:
        """Run a shell script as root in a container; returns its output."""
        return self.stack.exec(service, ["sh", "-c", script])

    @contextmanager
    def undone(self, service: str, do: str, undo: str) -> Iterator[None]:
        """A script of root's, and another one at the end."""
        self.sh(service, do)
        try:
            yield
        finally:
            self.sh(service, undo)

    def moved(self, path: str, *services: str) -> contextlib.AbstractContextManager[object]:
        """A file is not there."""
        stack = contextlib.ExitStack()
        for service in services:
            stack.enter_context(self.undone(service, f"mv {path} {path}.away", f"mv {path}.away {path}"))
        return stack

    @contextmanager
    def start_up(self, text: str) -> Iterator[None]:
        """Lines at the beginning of the user's ~/.bashrc."""
        file = "/home/dev/.bashrc"
        with self.undone("edge", f"cp -p {file} {file}.before", f"mv {file}.before {file}"):
            self.sh("edge", f"{{ echo {shlex.quote(text)}; cat {file}.before; }} > {file}")
            yield

    @contextmanager
    def program(self, name: str, text: str) -> Iterator[None]:
        """A program that comes first in the user's PATH, a shell script; `$real` in it is the real program's path."""
        script = f"#!/bin/sh\nreal=$(PATH=/usr/bin:/bin command -v {name})\n{text}\n"
        put = f"mkdir -p {_FAKE} && echo {shlex.quote(script)} > {_FAKE}/{name} && chmod 755 {_FAKE} {_FAKE}/{name}"
        with self.undone("edge", put, f"rm -rf {_FAKE}"), self.start_up(f"PATH={_FAKE}:$PATH"):
            yield

    @contextmanager
    def inside(self, service: str, spaces: Sequence[str], do: str, undo: str) -> Iterator[None]:
        """A command of this machine's root in namespaces of a container, such as "--net" (nsenter(1))."""
        asked = ["docker", "inspect", "--format={{.State.Pid}}", self.stack.container(service)]
        pid = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
        enter = ["nsenter", "--target", pid, *spaces, "sh", "-c"]
        subprocess.run([*enter, do], check=True, capture_output=True)
        try:
            yield
        finally:
            subprocess.run([*enter, undo], check=True, capture_output=True)

    @contextmanager
    def mounted(self, path: str, options: str, *services: str, owner: str = "dev") -> Iterator[None]:
        """A tmpfs over a directory, which is made if need be."""
        with contextlib.ExitStack() as stack:
            for service in services:
                self.sh(service, f"mkdir -p {path}")
                mount = f"mount -t tmpfs -o mode=755,{options} tmpfs {path}"
                stack.enter_context(self.inside(service, _MOUNTS, mount, f"umount -l {path}"))
                if owner and "ro" not in options.split(","):
                    self.sh(service, f"chown {owner} {path}")
            yield

    @contextmanager
    def seen_late(self, lag: Lag) -> Iterator[None]:
        """The base directory is on a file system where the compute nodes see changes late."""
        owner = int(self.sh("edge", "id -u dev"))
        self.sh("edge", f"install -d -o dev {BASE}")
        with tempfile.TemporaryDirectory(dir="/tmp") as name, contextlib.ExitStack() as stack:
            source = Path(name) / "source"
            source.mkdir(mode=0o700)
            os.chown(source, owner, owner)
            for service in ("edge", *NODES):
                each = Lag() if service == "edge" else lag
                view = stack.enter_context(lagging(source, Path(name) / service, each))
                stack.enter_context(shown(self.stack, service, view, BASE))
            yield

    @contextmanager
    def remounted(self, path: str, options: str, back: str, *services: str) -> Iterator[None]:
        """A mount of a container with other options."""
        with contextlib.ExitStack() as stack:
            for service in services:
                do, undo = (f"mount -o remount,{each} {path}" for each in (options, back))
                stack.enter_context(self.inside(service, _MOUNTS, do, undo))
            yield

    def blocked(self, service: str, other: str) -> contextlib.AbstractContextManager[None]:
        """A container cannot connect to the ports of another one that a runtime uses; Slurm's own are open."""
        rule = f"ipproto tcp dport 10000-32767 to {self.stack.ip(other)} prohibit"
        return self.inside(service, ["--net"], f"ip rule add {rule}", f"ip rule del {rule}")

    @contextmanager
    def slurm(self, do: str, undo: str) -> Iterator[None]:
        """A change by the administrator, on the controller's node."""
        with self.undone("slurmctld", do, undo):
            yield
        assert wait_until(lambda: answers(self.stack))

    def partition(self, setting: str, back: str) -> contextlib.AbstractContextManager[None]:
        """Another setting of the partition `compute`."""
        update = "scontrol update PartitionName=compute"
        return self.slurm(f"{update} {setting}", f"{update} {back}")

    def user(self, setting: str, back: str) -> contextlib.AbstractContextManager[None]:
        """Another limit of the user's association."""
        modify = "sacctmgr --immediate modify user dev set"
        return self.slurm(f"{modify} {setting}", f"{modify} {back}")

    @contextmanager
    def drained(self, nodes: str) -> Iterator[None]:
        """Nodes that take no jobs."""
        with self.slurm(
            f"scontrol update NodeName={nodes} State=DRAIN Reason=broken", f"scontrol update NodeName={nodes} State=RESUME"
        ):
            yield
        assert wait_until(lambda: nodes_are_idle(self.stack, NODES))

    @contextmanager
    def configured(self, *lines: str) -> Iterator[None]:
        """Further lines at the end of the controller's slurm.conf."""
        conf, text = "/etc/slurm/slurm.conf", shlex.quote("\n".join(lines))
        with self.slurm(
            f"cp {conf} {conf}.before && echo {text} >> {conf} && scontrol reconfigure",
            f"mv {conf}.before {conf} && scontrol reconfigure",
        ):
            yield


def environ_of(stack: Stack) -> dict[str, str]:
    """The environment of a process that reaches the stack."""
    return {**os.environ, **stack.env}
