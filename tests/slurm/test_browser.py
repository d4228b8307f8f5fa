"""The Ray dashboard in a browser, through the proxy: Debian's chromium without a window shows the page of the nodes.

Set RAYSLURM_SCREENSHOTS to a directory to keep what the browser shows.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ..conftest import wait_until
from .fixtures import Site
from .test_dashboard import dashboard

SIZE = ("--nodes", "2", "--mem", "2500M", "--cpus", "2", "--time", "5")
_LOADED = 15000  # Milliseconds of the browser's own time, in which the page asks for the nodes several times.


@pytest.fixture
def chromium() -> str:
    """The browser; without it the test is skipped, and fails where CI is set, as in `make test-all`."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("there is no chromium; run: apt-get install chromium")
    return found


def _shown(chromium: str, url: str, profile: Path, picture: Path) -> str:
    """Returns the HTML of a page after its scripts have run, and keeps a picture of the page."""
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--window-size=1600,1000"]
    options += ["--disable-dev-shm-usage", "--no-first-run", f"--virtual-time-budget={_LOADED}"]
    subprocess.run([chromium, *options, f"--screenshot={picture}", url], check=True, capture_output=True, timeout=120)
    done = subprocess.run([chromium, *options, "--dump-dom", url], check=True, capture_output=True, text=True, timeout=120)
    return done.stdout


@pytest.mark.parametrize("way", ["tcp", "srun"])
def test_the_page_of_the_nodes(way: str, chromium: str, site: Site, tmp_path: Path) -> None:
    left = site.rayslurm("submit", "--detach", *SIZE, "--no-working-dir", "--", "sleep", "200")
    assert left.returncode == 0, left.stderr
    name = left.stdout.strip()
    path = f"{site.base}/runs/{name}/cluster.json"
    assert wait_until(lambda: site.connection.read(path, 0, 10000), 60), site.rayslurm("logs", name).stderr
    if way == "srun":  # As if the edge node reached no port of the nodes.
        access = json.loads(site.connection.read(path, 0, 10000))
        site.connection.write(path, json.dumps({**access, "port": 9}).encode())
    kept = Path(os.environ.get("RAYSLURM_SCREENSHOTS") or tmp_path)
    with dashboard(site, name, tmp_path) as (url, _, _):
        page = _shown(chromium, f"{url}#/cluster", tmp_path / "profile", kept / f"nodes-{way}.png")
        steps = site.sh("squeue --me --steps --noheader --format=%i").split()
        assert any(step.endswith(".1") for step in steps) == (way == "srun"), steps
    assert "c1" in page and "c2" in page and page.count("ALIVE") >= 2, page[:3000]
    assert site.rayslurm("cancel", name, "--now").returncode == 0
