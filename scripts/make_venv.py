"""Make a virtual environment with pip in it, also where Debian's python3 comes without ensurepip.

Standard library only: this runs before anything is installed.
"""

import html.parser
import os
import re
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
import venv

INDEX = os.environ.get("PIP_INDEX_URL", "").rstrip("/")


class Wheels(html.parser.HTMLParser):
    """The pip wheels of a package index's page (PEP 503)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[int, ...], str] = {}

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Keep the link of a release; pre-releases and yanked ones are passed over."""
        values = dict(attributes)
        link = values.get("href") or ""
        release = re.search(r"/pip-(\d+(?:\.\d+)*)-py3-none-any\.whl", link)
        if tag == "a" and release and "data-yanked" not in values:
            self.found[tuple(map(int, release[1].split(".")))] = link


def pip_wheel(directory: str) -> str:
    """Download the newest pip wheel from the package index and return its path."""
    page = f"{INDEX}/pip/"
    with urllib.request.urlopen(page, timeout=60) as answer:
        wheels = Wheels()
        wheels.feed(answer.read().decode())
    link = urllib.parse.urljoin(page, max(wheels.found.items())[1])
    path = os.path.join(directory, os.path.basename(urllib.parse.urlparse(link).path))
    urllib.request.urlretrieve(link, path)
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
        # The pip that comes with Python 3.10 takes an hour over what a new one resolves in seconds.
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--upgrade", "pip"], check=True)
    except (ImportError, subprocess.CalledProcessError):
        venv.create(target, with_pip=False, clear=True)
        with tempfile.TemporaryDirectory() as directory:
            wheel = pip_wheel(directory)
            subprocess.run([python, f"{wheel}/pip", "install", "--quiet", wheel], check=True)


if __name__ == "__main__":
    main()
