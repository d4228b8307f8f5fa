"""Renew the pictures of Dagster's UI and Ray's dashboard in docs/images: `make docs-screenshots`. Needs Chromium on the PATH.

The asset is that of the quickstart, materialized on this machine, and then as in the tutorial on the Slurm of `make stack-up`.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
PICTURES = ROOT / "docs" / "images"


def free_port() -> int:
    """A port of the loopback address that nothing listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def wait_for(url: str) -> None:
    """Wait until the web server answers."""
    for _ in range(120):
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    raise SystemExit(f"{url} does not answer")


def take(chromium: str, url: str, name: str, size: str, scratch: Path) -> None:
    """Save what the browser shows of a page; the page has some seconds of its own time to load."""
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={scratch / 'browser'}"]
    arguments += [f"--window-size={size}", "--virtual-time-budget=20000", f"--screenshot={PICTURES / name}", url]
    subprocess.run([chromium, *arguments], check=True, timeout=120, capture_output=True)
    print(PICTURES / name)


def blocks(page: str) -> dict[str, str]:
    """The Python files that a page of docs/start tells its reader to save, by name."""
    return dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", (ROOT / "docs" / "start" / page).read_text(), re.DOTALL))


def materialize(file: str, start: dict[str, Any]) -> str:
    """Materialize the asset `model` of a file; the id of the run."""
    command = [BIN / "dagster", "asset", "materialize", "-f", file, "--select", "model"]
    said = subprocess.run(command, check=True, capture_output=True, text=True, **start).stderr
    (run_id,) = set(re.findall(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", said.partition("RUN_START")[0])) or {""}
    return run_id


@contextlib.contextmanager
def running(command: list[Any], start: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """Run a program in the background, and end it as Ctrl-C does."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **start)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def main(scratch: Path) -> None:
    """Materialize the asset in both places, start the web servers, take the pictures."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("no chromium on the PATH; install it")
    for name, block in {**blocks("quickstart.md"), **blocks("tutorial.md")}.items():
        (scratch / name).write_text(block.replace('keep_run_dirs="all"', 'enable_cluster_reuse=True, keep_run_dirs="all"'))
    login = dict(line.split("=", 1) for line in (ROOT / ".stack" / "env").read_text().splitlines())
    environment = {**os.environ, **login, "DAGSTER_HOME": str(scratch), "HOME": str(scratch), "RAYSLURM_MODE": "slurm-session"}
    environment["PATH"] = f"{BIN}:{os.environ['PATH']}"
    (scratch / "dagster.yaml").write_text("telemetry:\n  enabled: false\nnux:\n  enabled: false\n")
    start: dict[str, Any] = {"cwd": scratch, "env": environment}
    url = f"http://127.0.0.1:{(port := free_port())}"
    with running([BIN / "dagster-webserver", "-f", "definitions.py", "-h", "127.0.0.1", "-p", str(port)], start):
        wait_for(f"{url}/server_info")
        run = f"{url}/runs/{materialize('definitions.py', start)}?logs=%5Brayslurm%5D"
        take(chromium, run, "run.png", "1500,620", scratch)
        take(chromium, f"{url}/assets/model", "asset.png", "1500,1400", scratch)
        run = f"{url}/runs/{materialize('cluster.py', start)}?logs=%5Brayslurm%5D"
        take(chromium, run, "slurm-run.png", "1500,620", scratch)
    rayslurm = [BIN / "rayslurm"]
    with running([*rayslurm, "dashboard", "--from", "cluster:compute", "default"], start) as dashboard:
        assert dashboard.stdout is not None
        take(chromium, f"{dashboard.stdout.readline().strip()}#/cluster", "dashboard.png", "1500,620", scratch)
    subprocess.run([*rayslurm, "session", "--from", "cluster:compute", "stop", "default"], check=True, **start)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(Path(directory))
