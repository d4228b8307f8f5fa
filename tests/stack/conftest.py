"""The Slurm stack, as tests see it."""

import os
from collections.abc import Sequence

import pytest

from stack.access import read_environment
from stack.cluster import Cluster
from stack.errors import StackError
from stack.settings import Settings


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

    def container(self, service: str) -> str:
        """The id of a service's container."""
        return self._cluster.container(service).id

    def ip(self, service: str) -> str:
        """The address of a service on the stack's network."""
        return self._cluster.container(service).address


@pytest.fixture(scope="session")
def stack() -> Stack:
    settings = Settings.from_environment()
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
    return Stack(cluster, env)
