"""The Slurm stack, as tests see it."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import pytest

from stack.access import read_environment
from stack.cluster import Cluster
from stack.errors import StackError
from stack.settings import ROOT, Settings

_FIRST = "gw0"
"""What pytest-xdist calls the first process that runs tests."""


class Stack:
    """A running stack, whatever settings it was started with."""

    def __init__(self, cluster: Cluster, env: dict[str, str]) -> None:
        containers = cluster.containers()
        self._cluster = cluster
        self.env = env
        self.debian = containers["edge"].image.rpartition(":")[2]
        self.accounting = "slurmdbd" in containers

    def exec(self, service: str, argv: Sequence[str], user: str | None = None, check: bool = True) -> str:
        """What a command in a service's container says, its errors after its output if it may fail."""
        done = self._cluster.exec(service, argv, user, check)
        return done.stdout if check else done.stdout + done.stderr

    def processes(self, service: str) -> list[str]:
        """Command lines of the processes of `dev` in a container; asked from outside, which costs a fraction of a look inside."""
        command = ["docker", "top", self.container(service), "-eo", "pid,uid,args"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[1:]
        return [words[2] for line in listed if len(words := line.split(None, 2)) == 3 and int(words[1]) == self._uid]

    @cached_property
    def _uid(self) -> int:
        """The number of `dev`, which is the same in all containers."""
        return int(self.exec("edge", ["id", "-u", "dev"]))

    def container(self, service: str) -> str:
        """The id of a service's container."""
        return self._cluster.container_id(service)

    def ip(self, service: str) -> str:
        """The address of a service on the stack's network."""
        return self._cluster.container(service).address


@contextmanager
def stack_of_ones_own() -> Iterator[Stack]:
    """The stack, which no other process tests meanwhile: many tests break it, and all look at what is left on it.

    In CI its absence fails the test, elsewhere it skips it. Where several processes run the tests, the first has the stack
    that is up, and each of the others starts one beside it for the time of its tests.
    """
    first = Settings.from_environment()
    worker = os.environ.get("PYTEST_XDIST_WORKER", _FIRST)
    if worker == _FIRST or not read_environment(first):
        with _running(first) as stack:
            yield stack
        return
    os.environ["RAYSLURM_STACK_PROJECT"] = f"{first.project}-{worker}"
    os.environ["RAYSLURM_STACK_DIR"] = f"{first.directory}-{worker}"
    os.environ["RAYSLURM_STACK_SSH_PORT"] = str(first.ssh_port + 100 * int(worker.removeprefix("gw")))
    command = [sys.executable, "-m", "stack"]
    up = subprocess.run([*command, "up"], cwd=ROOT, capture_output=True, text=True)
    assert up.returncode == 0, up.stdout + up.stderr
    try:
        with _running(Settings.from_environment()) as stack:
            yield stack
    finally:
        subprocess.run([*command, "down"], cwd=ROOT, capture_output=True)


@contextmanager
def _running(settings: Settings) -> Iterator[Stack]:
    env = read_environment(settings)
    try:
        if not env:
            raise StackError("The Slurm stack is not up: start it with `make stack-up`.")
        cluster = Cluster(settings)
        cluster.container("edge")
    except StackError as error:
        if os.environ.get("CI"):
            pytest.fail(error.message)
        pytest.skip(error.message)
    with open(settings.directory / "tested", "w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pytest.fail("Another process runs tests on this stack.")
        yield Stack(cluster, env)
