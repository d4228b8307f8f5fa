"""Faults of the Slurm stack as context managers: stopped daemons, frozen containers, preemption. The end undoes the fault."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ..conftest import wait_until
from ..stack.access import Stack


def docker(*arguments: str) -> None:
    subprocess.run(["docker", *arguments], check=True, capture_output=True)


@contextmanager
def stopped(stack: Stack, *services: str) -> Iterator[Callable[[], None]]:
    """Stops the containers of some services in this order, and starts them in the opposite order at the end.

    Yields a function that starts them earlier.
    """
    containers = [stack.container(service) for service in services]
    back = False

    def start() -> None:
        nonlocal back
        if not back:
            back = True
            for container in reversed(containers):
                docker("start", container)
            assert wait_until(lambda: answers(stack), 90), f"{services} did not come back"

    try:
        for container in containers:
            docker("stop", "--time=5", container)
        yield start
    finally:
        start()


@contextmanager
def paused(stack: Stack, service: str) -> Iterator[None]:
    """Freezes all processes of a service's container."""
    container = stack.container(service)
    docker("pause", container)
    try:
        yield
    finally:
        docker("unpause", container)


@contextmanager
def without_munge(stack: Stack, service: str) -> Iterator[None]:
    """Ends munged, Slurm's authentication daemon, in a service's container, and starts it again at the end."""
    stack.exec(service, ["sh", "-c", "kill $(cat /run/munge/munged.pid)"])
    assert wait_until(lambda: not munge_works(stack, service))
    try:
        yield
    finally:
        stack.exec(service, ["runuser", "-u", "munge", "--", "munged", "--force"])
        assert wait_until(lambda: munge_works(stack, service))


@contextmanager
def preemption(stack: Stack) -> Iterator[str]:
    """Adds a partition whose jobs preempt all other jobs; yields its name."""
    conf = "/etc/slurm/slurm.conf"
    lines = "PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\nPartitionName=urgent Nodes=c[1-2] PriorityTier=10\n"
    stack.exec("slurmctld", ["sh", "-c", f'cp {conf} {conf}.before && printf %s "$1" >>{conf}', "sh", lines])
    try:
        stack.exec("slurmctld", ["scontrol", "reconfigure"])
        yield "urgent"
    finally:
        stack.exec("slurmctld", ["sh", "-c", f"mv {conf}.before {conf} && scontrol reconfigure"])
        assert wait_until(lambda: answers(stack), 60)


def munge_works(stack: Stack, service: str) -> bool:
    return stack.exec(service, ["sh", "-c", "munge --no-input >/dev/null 2>&1 && echo yes"], check=False).strip() == "yes"


def answers(stack: Stack) -> bool:
    """Whether slurmctld answers, and slurmdbd too if the stack has accounting."""
    asked = "scontrol ping | grep -q UP && squeue >/dev/null" + (
        " && sacctmgr -n show cluster >/dev/null" if stack.accounting else ""
    )
    return stack.exec("edge", ["sh", "-c", f"timeout 8 sh -c '{asked}' 2>/dev/null && echo yes"], check=False).strip() == "yes"


def nodes_are_idle(stack: Stack, nodes: Sequence[str]) -> bool:
    said = stack.exec("edge", ["sinfo", "--noheader", "--Node", f"--nodes={','.join(nodes)}", "--format=%t"], check=False)
    return set(said.split()) == {"idle"}
