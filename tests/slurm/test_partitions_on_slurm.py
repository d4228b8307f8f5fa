"""Partitions of one payload in a session on a real Slurm: a verdict for each, and a re-execution of those that failed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..conftest import pipes_script
from .fixtures import Site
from .test_partition_arrays_on_slurm import OnStack

pytestmark = pytest.mark.timeout(300)

KEYS = [f"p{number:02}" for number in range(20)]
SCORE = pipes_script("""
import pathlib
ran = pathlib.Path({shared!r}, "ran")
with open(ran, "a") as file:
    file.write(pipes.partition_key + "\\n")
if pipes.partition_key == "p07" and ran.read_text().split().count("p07") == 1:
    raise ValueError("bad data in p07")
pipes.report_asset_materialization(metadata={{"key": pipes.partition_key}})
""")


@pytest.fixture
def service(tmp_path: Path, site: Site) -> Iterator[OnStack]:
    made = OnStack(tmp_path, site, mode="slurm-session", count=len(KEYS))
    (tmp_path / "payload.py").write_text(SCORE.format(shared=made.shared))
    site.connection.make_dir(made.shared)
    yield made
    made.kill()
    made.dagster.dispose()


def test_a_partition_fails_and_only_this_one_runs_again(service: OnStack) -> None:
    assert service.start().wait(100) == 1, service.log
    said = "19 of 20 partitions are materialized, 1 failed: 'p07' (the payload raised ValueError: bad data in p07 (payload.py:"
    assert said in service.log and "[rayslurm] partition 'p07' failed: " in service.log, service.log
    assert service.materialized() == [key for key in KEYS if key != "p07"] and service.ran() == dict.fromkeys(KEYS, 1)
    assert service.start(service.failed()).wait(100) == 0, service.log
    assert service.materialized() == KEYS and service.ran() == {key: 1 + (key == "p07") for key in KEYS}
    for record in service.dagster.fetch_materializations(service.asset, limit=100).records:
        assert record.asset_materialization is not None
        assert record.asset_materialization.metadata["key"].value == record.partition_key
