"""A program that installs conda packages into a prefix.

The program is sent to the cluster, together with a Python and py-rattler. The arguments of the program are the prefix, the
variables and scripts that the pixi project adds to the activation (JSON), and the paths of the packages' archives.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

# The directory below the prefix with the Python that runs this program, and its packages; removed at the end.
INSTALLER = ".installer"


async def _install(archives: list[str], prefix: str, cache: Path) -> None:
    from rattler import install
    from rattler.repo_data import RepoDataRecord

    records = []
    for archive in archives:
        try:
            records.append(await RepoDataRecord.from_package_archive(archive))
        except Exception as error:  # noqa: BLE001 py-rattler has many kinds, and no base class of them
            raise ValueError(f"{archive} cannot be read: {str(error).splitlines()[0]}") from None
    # As pixi does without `run-post-link-scripts = "insecure"`.
    await install(records, prefix, cache_dir=cache, execute_link_scripts=False, show_progress=False)


def _activation(prefix: str, variables: dict[str, str], scripts: list[str]) -> str:
    """Return the text of an `activate.sh` that activates the packages in the prefix, exports `variables` and sources `scripts`.

    `scripts` are texts, which are written into files in the prefix.
    """
    from rattler.shell import ActivationVariables, Shell, activate

    # Without a PATH, `activate` would take that of this process.
    now = ActivationVariables(None, [os.path.join(prefix, "bin")])
    lines = [activate(Path(prefix), now, Shell.bash).script]
    for name, value in variables.items():  # Written as py-rattler writes them: other variables in the value are expanded.
        escaped = value.replace('"', '\\"')
        lines.append(f'export {name}="{escaped}"')
    for number, text in enumerate(scripts):
        path = Path(prefix, "etc", "rayslurm", f"{number}.sh")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
        lines.append(f'. "{path}"')
    return "\n".join([*lines, ""])


def main(prefix: str, project: str, archives: list[str]) -> None:
    """Install the packages in `archives` into the prefix, write an `activate.sh`, and remove the installer.

    `archives` are the paths of the packages' archives. `project` is JSON: the variables and scripts that the pixi project adds to
    the activation. The installer is the directory `INSTALLER` in the prefix, with the Python that runs this program, and
    py-rattler.
    """
    installer = Path(prefix, INSTALLER)
    sys.path.insert(0, str(installer / "packages"))
    # An edge node is shared, and limits the number of threads of a user.
    os.environ.update(TOKIO_WORKER_THREADS="4", RAYON_NUM_THREADS="4")
    asyncio.run(_install(archives, prefix, installer / "cache"))
    text = _activation(prefix, **json.loads(project))
    Path(prefix, "activate.sh").write_text(text, encoding="utf-8", errors="surrogateescape")
    shutil.rmtree(installer)


if __name__ == "__main__":
    code = 1
    try:
        main(sys.argv[1], sys.argv[2], sys.argv[3:])
        code = 0
    except Exception as error:  # noqa: BLE001
        sys.stderr.write(f"{error}\n")
    finally:
        sys.stderr.flush()
        # Threads of py-rattler may still run, and crash while Python ends (PyO3/pyo3-async-runtimes issue 40).
        os._exit(code)
