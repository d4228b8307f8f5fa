"""`rayslurm check` with good and bad configurations."""

import os
import re
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
    assert done.returncode == 0 and done.stderr == "", done
    assert done.stdout.count("\n") == 1 and done.stdout.endswith(" ok, 1 skipped\n"), done.stdout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"HOST": None}, "no cluster is configured; set SLURM_EDGE_NODE_HOST"),
        ({"PORT": "abc"}, "SSHConnectionResource.port: the environment variable SLURM_EDGE_NODE_PORT is 'abc', not an integer"),
        ({"HOST_KEY_CHECKING": "maybe"}, "host_key_checking: 'maybe' is not one of"),
        ({"HOST_KEY": "AAAA"}, 'host_key: this is not a public host key; write it as "ssh-ed25519 AAAA…"'),
    ],
)
def test_a_mistake_gets_one_sentence(stack: Any, changes: dict[str, str | None], message: str) -> None:
    done = check(stack, **changes)
    assert done.returncode == 1 and message in done.stderr and done.stdout == ""
    assert done.stderr.startswith("Error: ") and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"PORT": "1"}, r"network: .*nothing listens there"),
        ({"KEY_PATH": "/no/such/key"}, r"authentication: .*/no/such/key does not exist\n +→ check `key_path`"),
        ({"USER": "nobody-here"}, r"authentication: .*refused the login with the key"),
    ],
)
def test_a_login_that_fails_is_named_by_its_part(stack: Any, changes: dict[str, str | None], line: str) -> None:
    done = check(stack, **changes)
    assert done.returncode == 1 and done.stderr == ""
    assert re.search(f"^failure +{line}", done.stdout, re.MULTILINE), done.stdout


def test_an_edge_node_without_slurm(stack: Any) -> None:
    stack.exec("edge", ["sh", "-c", "mkdir -p /opt/bare && mv /usr/bin/squeue /opt/bare/"])
    try:
        done = check(stack)
    finally:
        stack.exec("edge", ["mv", "/opt/bare/squeue", "/usr/bin/"])
    assert done.returncode == 1 and "Slurm programs: squeue cannot be found on the edge node" in done.stdout
