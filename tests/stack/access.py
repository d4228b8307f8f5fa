"""The Slurm stack, as tests see it."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cached_property
from subprocess import DEVNULL, PIPE

import pytest

from stack.access import read_environment
from stack.cluster import Cluster
from stack.errors import StackError
from stack.settings import ROOT, Settings

_FIRST = "gw0"
"""What pytest-xdist calls the first process that runs tests."""

_END = "---- that is all"
"""What ends what a shell says."""


class Stack:
    """A running stack, whatever settings it was started with."""

    def __init__(self, cluster: Cluster, env: dict[str, str]) -> None:
        containers = cluster.containers()
        self._cluster = cluster
        self.env = env
        self.debian = containers["edge"].image.rpartition(":")[2].partition("-")[0]
        self.accounting = "slurmdbd" in containers
        self._shells: dict[str, subprocess.Popen[str]] = {}

    def exec(self, service: str, argv: Sequence[str], user: str | None = None, check: bool = True) -> str:
        """What a command in a service's container says, its errors after its output if it may fail."""
        done = self._cluster.exec(service, argv, user, check)
        return done.stdout if check else done.stdout + done.stderr

    def look(self, service: str, script: str) -> str:
        """What a shell of root's prints in a container; one stays there, as each `docker exec` costs a fifth of a second."""
        said = self._look(service, script)
        if said is None:  # Its container was ended meanwhile.
            said = self._look(service, script)
        assert said is not None, f"no shell stays in {service}"
        return said

    def _look(self, service: str, script: str) -> str | None:
        if service not in self._shells:
            command = ["docker", "exec", "--interactive", self.container(service), "sh"]
            # No test's own, however it is marked.
            env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
            self._shells[service] = subprocess.Popen(command, env=env, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True)
        shell = self._shells[service]
        assert shell.stdin is not None and shell.stdout is not None
        lines = []
        with suppress(BrokenPipeError):
            shell.stdin.write(f"{script}\necho {_END}\n")
            shell.stdin.flush()
            for line in shell.stdout:
                if line == f"{_END}\n":
                    return "".join(lines)
                lines.append(line)
        self._shells.pop(service).communicate()
        return None

    def close(self) -> None:
        """End what stays in the containers."""
        while self._shells:
            self._shells.popitem()[1].communicate()

    def processes(self, service: str) -> list[str]:
        """Command lines of the processes of `dev` in a container."""
        listed = [line.split(None, 1) for line in self.look(service, "ps -eo uid=,args=").splitlines()]
        return [words[1] for words in listed if len(words) == 2 and int(words[0]) == self._uid]

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
        with closing(Stack(cluster, env)) as stack:
            yield stack
