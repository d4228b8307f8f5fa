"""Count the modules whose functions run for one payload in local mode, in Dagster's process and in those of the runtime."""

import inspect
import os
import re
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType

import dagster as dg

from dagster_rayslurm import BashLauncher, ComputeResource, Launcher, RayLauncher
from dagster_rayslurm.backends import local

PACKAGE = Path(local.__file__).parents[1]
TRACER = """
import os, runpy, sys
found = set()
def trace(frame, event, argument):
    name = frame.f_code.co_filename
    if event == "call" and name not in found and "rayslurm_runtime/" in name and frame.f_code.co_flags & 2:
        found.add(name)
        with open({path!r}, "a") as file:
            file.write(name.partition("rayslurm_runtime/")[2] + "\\n")
sys.setprofile(trace)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs the runtime with a profiler that writes each module down when its first function (not a class body) is called."""


def modules_of(launcher: Launcher, payload: list[str]) -> tuple[set[str], set[str]]:
    """Modules of the package whose functions run for a payload: in Dagster's process, and in the runtime."""
    here: set[str] = set()
    start_command = local.runtime_command

    def trace(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_flags & inspect.CO_NEWLOCALS and code.co_filename.startswith(f"{PACKAGE}/"):
            here.add(os.path.relpath(code.co_filename, PACKAGE))

    with tempfile.TemporaryDirectory() as base:
        list_of_modules = Path(base, "modules")
        list_of_modules.touch()

        def traced_command(*arguments: object) -> list[str]:
            command = start_command(*arguments)  # type: ignore[arg-type]
            at = command.index("-I") + 1
            return [*command[:at], "-c", TRACER.format(path=str(list_of_modules)), *command[at:]]

        @dg.asset
        def traced(context: dg.AssetExecutionContext, compute: ComputeResource) -> dg.MaterializeResult:
            sys.setprofile(trace)
            threading.setprofile(trace)
            try:
                return compute.run(context=context, payload_path=payload, uses_pipes=False).get_materialize_result()
            finally:
                sys.setprofile(None)
                threading.setprofile(None)  # type: ignore[arg-type]

        local.runtime_command = traced_command
        dg.materialize([traced], resources={"compute": ComputeResource(default_launcher=launcher, local_base=base)})
        local.runtime_command = start_command
        there = {f"runtime/{line}" for line in list_of_modules.read_text().splitlines()}
    return here, {re.sub(r"\.pyc$", ".py", name) for name in there}


def main() -> None:
    """Print the counts."""
    launchers = {"without Ray": BashLauncher(), "with Ray": RayLauncher(object_store_memory_gb=0.1, dashboard=False)}
    for title, launcher in launchers.items():
        here, there = modules_of(launcher, ["true"])
        print(f"{title}: {len(here | there)} modules, {len(here)} in Dagster's process, {len(there)} in the runtime")
        if "--list" in sys.argv:
            print("  " + "\n  ".join(sorted(here | there)))


if __name__ == "__main__":
    main()
