"""Renew the pictures of Dagster's UI in docs/images: `make docs-screenshots`. Needs Chromium on the PATH.

The asset is that of the quickstart, materialized on this machine.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

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


def main(scratch: Path) -> None:
    """Materialize the asset, start the web server, take the pictures."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("no chromium on the PATH; install it")
    text = (ROOT / "docs" / "start" / "quickstart.md").read_text()
    for name, block in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.DOTALL):
        (scratch / name).write_text(block)
    environment = {**os.environ, "DAGSTER_HOME": str(scratch), "PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(scratch)}
    (scratch / "dagster.yaml").write_text("telemetry:\n  enabled: false\nnux:\n  enabled: false\n")
    start = {"cwd": scratch, "env": environment}
    materialize = [BIN / "dagster", "asset", "materialize", "-f", "definitions.py", "--select", "model"]
    said = subprocess.run(materialize, check=True, capture_output=True, text=True, **start)
    (run_id,) = set(re.findall(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", said.stderr.partition("RUN_START")[0])) or {""}
    url = f"http://127.0.0.1:{(port := free_port())}"
    server = subprocess.Popen([BIN / "dagster-webserver", "-f", "definitions.py", "-h", "127.0.0.1", "-p", str(port)], **start)
    try:
        wait_for(f"{url}/server_info")
        take(chromium, f"{url}/runs/{run_id}?logs=rayslurm", "run.png", "1500,620", scratch)
        take(chromium, f"{url}/assets/model", "asset.png", "1500,1400", scratch)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(Path(directory))
