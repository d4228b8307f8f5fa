"""What Slurm's commands printed on real clusters of two versions.

Each section of a file is a command's output under `=== NAME JOB COMMAND`, and its exit code; `date` and hosts aside,
as it came: `scontrol show job JOB`, `sacct` with the fields of `accounting.SACCT_FIELDS`, `squeue` with `snapshot.COLUMNS`.
"""

import re
from pathlib import Path

VERSIONS = ("22.05", "24.11")


def said(version: str, name: str, command: str) -> tuple[int, str]:
    """The job and the output of one section."""
    text = Path(__file__).with_name(f"{version}.txt").read_bytes().decode("utf-8", "replace")
    match = re.search(rf"(?ms)^=== {name} (\d+) {command}\n(.*?)^rc \d+$", text)
    assert match, f"nothing is recorded of {name} {command} on Slurm {version}"
    return int(match[1]), match[2]
