"""The environment of payloads in a container on the stack."""

import logging
import os
from typing import Any

import pytest

from dagster_rayslurm import ContainerEnvironment, PreDeployedEnvironment
from dagster_rayslurm.environments.send import send_environment
from dagster_rayslurm.ssh.base import Connection
from stack.container import IMAGE, MAKE_IMAGE

BASE = "/home/dev/inside"
"""Base directory of the environment; those of the tests are others."""
MOUNTS = ["/opt/ray", "/scratch"]
"""What containers see of the nodes beside the usual."""


def charliecloud(**fields: Any) -> ContainerEnvironment:
    """The environment in the stack's image; another program that the nodes have can be named for the tests of faults."""
    runtime = os.environ.get("RAYSLURM_STACK_RUNTIME") or "charliecloud"
    defaults = {"image": IMAGE, "runtime": runtime, "mounts": MOUNTS, "python": "/opt/ray/bin/python"}
    return ContainerEnvironment(**{**defaults, **fields})


def make_image(connection: Connection) -> None:
    """Make the image, once for each stack."""
    done = connection.run(["sh", "-c", MAKE_IMAGE, "sh", IMAGE])
    assert done.returncode == 0, done.stderr.decode()


def prefix_inside(connection: Connection, **fields: Any) -> str:
    """The prefix whose Python runs in a container."""
    make_image(connection)
    sent = send_environment(connection, charliecloud(**fields), BASE, logging.getLogger(__name__))
    assert isinstance(sent, PreDeployedEnvironment)
    return sent.path


def prefix_after(connection: Connection, base: str, script: str, python: str = "/opt/ray/bin/python") -> str:
    """The same with a Python that starts after a shell script inside, where variables such as LD_PRELOAD do not come in."""
    path = f"{base}/python-inside"
    connection.make_dir(base)
    connection.write(path, f'#!/bin/sh\n{script}\nexec {python} "$@"\n'.encode(), mode=0o700)
    return prefix_inside(connection, python=path)


def repeat_inside(metafunc: pytest.Metafunc) -> None:
    """Repeat a test on the stack with payloads in containers, in the thorough tests."""
    if "env_path" in metafunc.fixturenames:
        inside = pytest.param("container", marks=pytest.mark.thorough)
        metafunc.parametrize("env_path", [pytest.param("", id=pytest.HIDDEN_PARAM), inside], indirect=True)
