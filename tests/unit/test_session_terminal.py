"""A session from the terminal, on a fake Slurm with real Ray: started, seen on two dashboards, entered by JupyterLab, stopped."""

import json
import os
import stat
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dagster_rayslurm.cli import main

from ..conftest import wait_until
from ..fake_slurm import FakeSlurm

TOML = """
[clusters.here]
default_launcher = {{ kind = "ray", object_store_memory_gb = 0.1, ray_args = ["--no-monitor"], grace_period = 2 }}
slurm = {{ remote_base = {base!r} }}
"""
# In place of JupyterLab, which the project does not install: what it needs of the configuration file, and of the way to it.
JUPYTER = """\
#!{python}
import http.server, json, os, sys
(config,) = [word.removeprefix("--config=") for word in sys.argv if word.startswith("--config=")]
read = json.load(open(config))
server, token = read["ServerApp"], read["IdentityProvider"]["token"]

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.path.startswith(server["base_url"]) and self.headers["Authorization"] == "Bearer " + token
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(json.dumps({{"address": os.environ["RAY_ADDRESS"], "words": sys.argv[1:2]}}).encode())
        if self.path.endswith("/stop"):
            os._exit(6)

http.server.HTTPServer((server["ip"], server["port"]), Handler).serve_forever()
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_slurm: FakeSlurm) -> Path:
    for name in [name for name in os.environ if name.startswith(("SLURM_EDGE_NODE_", "RAYSLURM_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "study").mkdir()
    monkeypatch.chdir(tmp_path / "study")
    monkeypatch.setenv("RAYSLURM_BASE", str(tmp_path / "here"))
    Path("rayslurm.toml").write_text(TOML.format(base=str(tmp_path / "base")))
    return tmp_path / "base"


@contextmanager
def serving(*words: str, errors: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """The URL that a command prints first, and its process."""
    with errors.open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "dagster_rayslurm.cli", *words], stdout=subprocess.PIPE, stderr=said, text=True
        )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), errors.read_text()
        yield url, process
    finally:
        process.terminate()
        process.communicate()


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


@pytest.mark.ray
@pytest.mark.timeout(120)
def test_a_session_is_seen_entered_and_stopped(cluster: Path, fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    started = CliRunner().invoke(main, ["session", "start", "--name", "work", "--json"])
    assert started.exit_code == 0, started.output
    row = json.loads(started.stdout)
    assert row["key"].startswith("work-") and row["job_id"] == "1"
    one, two = tmp_path / "one", tmp_path / "two"
    first_words, second_words = ("dashboard", "--wait", "work"), ("dashboard", "--wait", "1")
    with serving(*first_words, errors=one) as (url, first), serving(*second_words, errors=two) as (other, second):
        assert url != other and get(f"{url}api/version") == get(f"{other}api/version")
        with pytest.raises(urllib.error.HTTPError, match="403"):  # Each has a secret of its own.
            get(f"http://{other.split('/')[2]}/{url.split('/')[3]}/api/version")
        first.terminate()
        assert first.wait(30) and get(f"{other}api/version")["ray_version"], "the end of one does not end the other"
        _enter_jupyter(fake_slurm, tmp_path, row)
        stopped = CliRunner().invoke(main, ["session", "stop", "work"])
        assert stopped.exit_code == 0 and "Slurm job 1" in stopped.stdout, stopped.output
        assert wait_until(lambda: second.poll() is not None), two.read_text()
        assert second.returncode == 0 and two.read_text().count("has ended") == 1, two.read_text()
    assert not fake_slurm.jobs("PENDING", "RUNNING")
    assert wait_until(lambda: not fake_slurm.processes())


def _enter_jupyter(fake_slurm: FakeSlurm, tmp_path: Path, row: dict[str, Any]) -> None:
    """Enters the session by a stand-in for JupyterLab, sends requests to it, and ends it."""
    written = Path(row["directory"]).glob
    program = fake_slurm.base / "bin" / "jupyter"
    program.write_text(textwrap.dedent(JUPYTER).format(python=sys.executable))
    program.chmod(0o755)
    with serving("attach", "--jupyter", "work", errors=tmp_path / "jupyter") as (url, process):
        assert url.endswith("/lab") and wait_until(lambda: [*written("attach.*.sh")], 60)
        (config,) = written("attach.*.json")
        assert stat.S_IMODE(config.stat().st_mode) == 0o600
        assert wait_until(lambda: _answers(url), 60), (tmp_path / "jupyter").read_text()
        said = get(url)
        assert said["words"] == ["lab"] and ":" in said["address"]
        arguments = Path(f"/proc/{process.pid}/cmdline").read_text()
        assert json.loads(config.read_text())["IdentityProvider"]["token"] not in arguments
        _answers(url.removesuffix("/lab") + "/stop")  # The command may end before it has passed the answer on.
        assert process.wait(20) == 6 and not [*written("attach.*")]


def _answers(url: str) -> bool:
    try:
        return bool(get(url))
    except (OSError, urllib.error.HTTPError):
        return False
