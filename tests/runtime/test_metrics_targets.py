"""The file with a Ray cluster's metrics addresses for Prometheus."""

import fnmatch
import json
import os
import re
import time
from pathlib import Path

import pytest

from dagster_rayslurm.runtime.process.loop import Loop
from dagster_rayslurm.runtime.ray.metrics_targets import MetricsTargets, targets

SOURCE = "prom_metrics_service_discovery.json"
OWN = [{"labels": {"job": "ray"}, "targets": ["10.0.0.1:8080"]}]


def run(loop: Loop, seconds: float = 1.2) -> None:
    loop.resume(seconds)


def test_the_file_follows_that_of_ray_until_the_cluster_ends(tmp_path: Path) -> None:
    ray, shared, loop = tmp_path / "ray", tmp_path / "a" / "b", Loop()
    ray.mkdir()
    of = MetricsTargets(loop, str(shared), "c1", {"slurm_job": "7"}, str(ray))
    assert list(shared.iterdir()) == []  # Ray has not listed its addresses yet.
    (ray / SOURCE).write_text("[{")  # Half a file is no reason to fail.
    run(loop)
    (ray / SOURCE).write_text(json.dumps(OWN))
    run(loop)
    [path] = shared.iterdir()
    assert path.name == "rayslurm-c1.json" and path.stat().st_mode & 0o777 == 0o644
    [group] = json.loads(path.read_text())
    assert group == {"targets": ["10.0.0.1:8080"], "labels": {"job": "ray", "ray_cluster": "c1", "slurm_job": "7"}}
    of.stop()
    assert not path.exists()
    run(loop, 0.1)
    of.stop()  # It may be stopped twice.


def test_files_of_killed_clusters_are_removed(tmp_path: Path) -> None:
    old, fresh, foreign = tmp_path / "rayslurm-old.json", tmp_path / "rayslurm-new.json", tmp_path / "other.json"
    for path in (old, fresh, foreign):
        path.write_text("[]")
    for path in (old, foreign):
        os.utime(path, (time.time() - 7200,) * 2)
    MetricsTargets(Loop(), str(tmp_path), "c1", {}, str(tmp_path)).stop()
    assert not old.exists() and fresh.exists() and foreign.exists()


def test_a_directory_that_cannot_be_made_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    of = MetricsTargets(Loop(), str(tmp_path / "file" / "x"), "c1", {}, str(tmp_path))
    assert (of.problem or "").startswith(f"metrics_dir='{tmp_path}/file/x' cannot be used: Not a directory;")
    of.stop()


@pytest.mark.parametrize("content", [[{}], [1], 3, [{"targets": 1, "labels": {}}], [{"targets": [], "labels": 1}]])
def test_another_format_is_an_error(content: object) -> None:
    with pytest.raises((TypeError, KeyError, ValueError)):
        targets(content, {})


def test_the_scrape_config_of_the_documentation_finds_the_file(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text()
    [files] = re.findall(r'- files: \["(.*)"\]', page)
    of = MetricsTargets(Loop(), str(tmp_path), "slurm-0123456789ab", {}, str(tmp_path))
    assert fnmatch.fnmatch(Path(of.path).name, Path(files).name) and f'metrics_dir="{Path(files).parent}"' in page
    of.stop()
