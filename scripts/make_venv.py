"""Make a virtual environment with pip in it, also where Debian's python3 comes without ensurepip.

Standard library only: this runs before anything is installed.
"""

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
import venv

INDEX = os.environ.get("PIP_INDEX_URL", "").rstrip("/")


def pip_wheel(directory: str) -> str:
    """Download the newest pip wheel from the package index (PEP 691) and return its path."""
    request = urllib.request.Request(f"{INDEX}/pip/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        files = json.load(answer)["files"]
    wheels = [file for file in files if file["filename"].endswith(".whl") and not file.get("yanked")]
    newest = max(wheels, key=lambda file: file["upload-time"])
    path = os.path.join(directory, newest["filename"])
    urllib.request.urlretrieve(newest["url"], path)
    return path


def main() -> None:
    """Make the environment named on the command line, unless it is there."""
    if sys.version_info < (3, 10):
        sys.exit(f"Python 3.10 or newer is needed, {sys.executable} is {sys.version.split()[0]}; set PYTHON=python3.x")
    target = sys.argv[1]
    python = os.path.join(target, "bin", "python")
    if os.path.exists(python) and subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0:
        return
    try:
        import ensurepip  # noqa: F401

        venv.create(target, with_pip=True, clear=True)
    except (ImportError, subprocess.CalledProcessError):
        venv.create(target, with_pip=False, clear=True)
        with tempfile.TemporaryDirectory() as directory:
            wheel = pip_wheel(directory)
            subprocess.run([python, f"{wheel}/pip", "install", "--quiet", wheel], check=True)


if __name__ == "__main__":
    main()
