"""Where and with what is measured: the machine, and the versions of everything that takes part."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dagster_rayslurm import __version__
from stack.settings import ROOT


def describe(on_stack: bool, peer: bool) -> dict[str, Any]:
    """What a reader of the figures must know; the stack is asked only if it is used."""
    facts: dict[str, Any] = {
        "cpus": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "processor": _processor(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "load": round(os.getloadavg()[0], 1),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
        "dagster-rayslurm": __version__,
        "revision": _revision(),
        "dagster": version("dagster"),
        "ray": version("ray"),
    }
    if on_stack:
        from .parties.edge import Edge

        facts["slurm"] = Edge().slurm_version()
    if on_stack and peer:
        from .parties.peer import installed_version

        facts["dagster-slurm"] = installed_version()
    return facts


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _revision() -> str | None:
    """The commit that is measured, with a plus sign if files differ from it."""
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None
