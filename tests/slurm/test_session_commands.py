"""What a warm step costs the edge node, which many users share: hardly a process."""

from collections.abc import Callable
from typing import Any

import pytest

from dagster_rayslurm import ComputeResource
from dagster_rayslurm.execution import files
from dagster_rayslurm.ssh.connection import SSHConnection
from dagster_rayslurm.ssh.pool import close_connections

from ..conftest import pipes_script, run_asset
from .fixtures import Site

SECRET = pipes_script("""
import os
pipes.report_asset_materialization(metadata={"value": os.environ["VALUE"]})
""")


def test_a_warm_step_runs_no_command(
    session_compute: Callable[..., ComputeResource], script: Any, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With secrets as well, and in a process that has just begun."""
    ran: list[Any] = []
    run = SSHConnection.run

    def counted(self: SSHConnection, command: Any, *words: Any, **named: Any) -> Any:
        ran.append(command)
        return run(self, command, *words, **named)

    monkeypatch.setattr(SSHConnection, "run", counted)
    compute = session_compute()
    payload = script(SECRET)

    def step(value: str) -> None:
        done = run_asset(compute, payload, secret_env={"VALUE": value})
        (seen,) = done.result.asset_materializations_for_node("asset_under_test")
        assert seen.metadata["value"].value == value

    step("first")
    ran.clear()
    step("second")
    assert ran == []
    site.connection.write(f"{site.base}/.swept", b"")  # When it was swept first, there was nothing yet.
    close_connections()
    files._last_sweep.clear()
    step("third")
    assert ran == []
    assert site.sh('ls -A "$1/runs"', site.base) == ""
