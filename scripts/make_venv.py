"""Make a virtual environment with pip in it, also where Debian's python3 comes without ensurepip.

Standard library only: this runs before anything is installed, and needs no root.
"""

import glob
import os
import subprocess
import sys
import tempfile
import venv


def debian_pip(directory: str) -> str:
    """Fetch the wheel of Debian's and Ubuntu's own pip with apt, into a directory, and return its path."""
    for name in ("lists/partial", "cache/archives/partial"):
        os.makedirs(os.path.join(directory, name))
    # Lists and cache of our own: the system's are root's, and may never have been updated.
    options = [f"-oDir::State::Lists={directory}/lists", f"-oDir::Cache={directory}/cache", "-oAPT::Sandbox::User="]
    subprocess.run(["apt-get", "-qq", *options, "update"], check=True)
    subprocess.run(["apt-get", "-qq", *options, "download", "python3-pip-whl"], check=True, cwd=directory)
    package = glob.glob(f"{directory}/python3-pip-whl*.deb")[0]
    subprocess.run(["dpkg-deb", "-x", package, f"{directory}/unpacked"], check=True)
    return glob.glob(f"{directory}/unpacked/usr/share/python-wheels/pip-*.whl")[0]


def main() -> None:
    """Make the environment named on the command line, unless it is there."""
    if sys.version_info < (3, 10):
        sys.exit(f"Python 3.10 or newer is needed, {sys.executable} is {sys.version.split()[0]}; set PYTHON=python3.x")
    target = sys.argv[1]
    python = os.path.join(target, "bin", "python")
    if os.path.exists(python) and subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode == 0:
        return
    # The pip that comes along may be years old and takes an hour over what a new one resolves in seconds.
    upgrade = ["install", "--quiet", "--upgrade", "pip"]
    try:
        import ensurepip  # noqa: F401

        venv.create(target, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", *upgrade], check=True)
    except ImportError:
        venv.create(target, with_pip=False, clear=True)
        with tempfile.TemporaryDirectory() as directory:
            try:
                wheel = debian_pip(directory)
            except (OSError, subprocess.CalledProcessError, IndexError) as error:
                sys.exit(f"{sys.executable} has no ensurepip, and pip cannot be fetched ({error}); install python3-venv")
            subprocess.run([python, f"{wheel}/pip", *upgrade], check=True)


if __name__ == "__main__":
    main()
