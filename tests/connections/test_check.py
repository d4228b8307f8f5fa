"""`rayslurm check` with good and bad configurations."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def check(stack: Any, **changes: str | None) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **stack.env, **{f"SLURM_EDGE_NODE_{name}": value for name, value in changes.items()}}
    environ = {name: value for name, value in environ.items() if value is not None}
    rayslurm = Path(sys.executable).with_name("rayslurm")
    return subprocess.run([rayslurm, "check"], env=environ, capture_output=True, text=True, timeout=60)


def test_the_stack_is_found(stack: Any) -> None:
    done = check(stack)
    assert done.returncode == 0, done.stderr
    assert "logged in with paramiko" in done.stdout and "home directory: /home/dev" in done.stdout
    assert "Slurm: slurm" in done.stdout and "compute* (2 nodes)" in done.stdout and "gpu (2 nodes)" in done.stdout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"HOST": None}, "SSHConnectionResource.host: the environment variable SLURM_EDGE_NODE_HOST is not set"),
        ({"PORT": "abc"}, "SSHConnectionResource.port: the environment variable SLURM_EDGE_NODE_PORT is 'abc', not an integer"),
        ({"PORT": "1"}, "nothing listens there"),
        ({"HOST_KEY_CHECKING": "maybe"}, "host_key_checking: 'maybe' is not one of"),
        ({"HOST_KEY": "AAAA"}, 'host_key: this is not a public host key; write it as "ssh-ed25519 AAAA…"'),
        ({"KEY_PATH": "/no/such/key"}, "/no/such/key does not exist; check `key_path`"),
        ({"USER": "nobody-here"}, "refused the login with the key"),
    ],
)
def test_a_mistake_gets_one_sentence(stack: Any, changes: dict[str, str | None], message: str) -> None:
    done = check(stack, **changes)
    assert done.returncode == 1 and message in done.stderr and done.stdout == ""
    assert done.stderr.startswith("Error: ") and done.stderr.count("\n") == 1, done.stderr


def test_an_edge_node_without_slurm(stack: Any) -> None:
    stack.exec("edge", ["sh", "-c", "mkdir -p /opt/bare && mv /usr/bin/sinfo /opt/bare/"])
    try:
        done = check(stack)
    finally:
        stack.exec("edge", ["mv", "/opt/bare/sinfo", "/usr/bin/"])
    assert done.returncode == 1 and "sinfo is not on the PATH that a non-interactive login has on dev@" in done.stderr
