"""One step whose payload prints, a process of its own: `python -m benchmarks.here.stdout_step LINES BASE_DIR REPORT [SITE]`.

SITE is a JSON object: the payload, which may be another one, then runs on the Slurm stack.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import dagster as dg

from dagster_rayslurm import BashLauncher, ComputeResource

from ..steps import in_step, timed
from .stdout import LINES


def reset_peak() -> None:
    """Have the kernel forget the peak of the imports, where it can (proc_pid_clear_refs(5))."""
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Bytes that this process had resident at most.

    Not ru_maxrss where there is something better: on Linux it starts at what the parent process had before exec.
    """
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Bytes on macOS.


def on_slurm(base: str, directory: str, partition: str, port: int | None) -> ComputeResource:
    """The stack, straight or over a link."""
    from ..parties.edge import Edge
    from ..parties.runs import Ours, Shape

    return Ours(Edge(), directory, partition).resource(Shape(ray=False), port, local_base=base)


def main() -> None:
    lines, base, report, *site = sys.argv[1:]
    where = json.loads(site[0]) if site else {}
    script = Path(where.pop("payload", LINES))
    compute = on_slurm(base, **where) if where else ComputeResource(local_base=base, default_launcher=BashLauncher())

    def body(context: dg.AssetExecutionContext, compute: ComputeResource) -> dict[str, float]:
        reset_peak()
        before = peak_memory()
        payload = ["python", script.name, lines]
        seconds, _ = timed(lambda: compute.run(context=context, payload_path=payload, extra_files=[script], uses_pipes=False))
        return {"seconds": seconds, "growth": peak_memory() - before}

    # An ephemeral instance keeps no compute logs, so what the step writes goes to this process's own output.
    with dg.DagsterInstance.ephemeral() as instance:
        measured = in_step(compute, instance, body)
    Path(report).write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
