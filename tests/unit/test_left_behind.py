"""Which request of an attempt before is the same as the one of now."""

import json

import pytest

from dagster_rayslurm.backends.left_behind import same_request
from dagster_rayslurm.runtime.record import PAYLOAD, RUNTIME
from dagster_rayslurm.slurm.submit import JOB_SCRIPT

SCRIPT = "#!/bin/sh\n# rayslurm: run {run}\n#SBATCH --comment='run {run}'\n#SBATCH --time={time}\nsrun x\n"


def files(run: str = "a", time: str = "5", key: str = "k", cpus: int = 1, argv: str = "python") -> dict[str, bytes]:
    return {
        PAYLOAD: json.dumps({"argv": [argv], "run_id": run, "want_cpus": cpus}).encode(),
        RUNTIME: json.dumps({"cluster_id": "c", "control_key": key, "control_ports": [len(key)]}).encode(),
        JOB_SCRIPT: SCRIPT.format(run=run, time=time).encode(),
    }


def test_who_asks_and_keys_make_no_difference() -> None:
    assert same_request(files(), files(run="b", key="other", cpus=2))


@pytest.mark.parametrize("other", [{"time": "6"}, {"argv": "sh"}])
def test_what_is_asked_for_does(other: dict[str, str]) -> None:
    assert not same_request(files(**other), files())


@pytest.mark.parametrize("damaged", [PAYLOAD, RUNTIME, JOB_SCRIPT])
@pytest.mark.parametrize("content", [b"", b"{"])
def test_a_damaged_file_is_not_the_same(damaged: str, content: bytes) -> None:
    assert not same_request({**files(), damaged: content}, files())
