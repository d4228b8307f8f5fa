"""`phases`: where the time of a cold run on two nodes goes, by what the run leaves behind and by its nodes' processes."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dagster as dg

from dagster_rayslurm import ComputeResource
from dagster_rayslurm.runtime.protocol.record import JOURNAL, LineReader, node_log
from stack.settings import COMPUTE_NODES

from ..figures import Figure, Options, Sample
from ..parties.edge import Edge
from ..parties.runs import Ours, Shape, quiet
from ..steps import PAYLOADS, base_dir, in_step, instance

# No annotations from the future here: Dagster wants the type of `context` itself, not its name.

_ROUNDS = 7
_SHAPE = Shape(2)
_HELD, _PROCESSES = PAYLOADS / "held.py", PAYLOADS / "processes.py"
_PATIENCE = 180.0

Stamps = Mapping[str, float]
Processes = Sequence[tuple[float, str]]

PHASES = (
    ("logged in", "SSH login"),
    ("submitted", "deliver the files, sbatch"),
    ("job", "Slurm starts the job"),
    ("tasks", "srun starts a task on each node"),
    ("runtime", "the runtime is up on the head"),
    ("ray", "its checks, until it starts Ray"),
    ("gcs", "Ray is imported, the GCS begins"),
    ("raylet", "the head's raylet begins"),
    ("head", "the head is alive in the GCS"),
    ("joined", "the worker is alive in the GCS"),
    ("started", "the payload's process begins"),
    ("first", "its first line"),
)
"""Stamps in their order, each with what ends at it; every stamp is the beginning of the next phase."""

WORKER = (
    ("worker's task", "its task begins"),
    ("worker's ray", "it starts Ray"),
    ("worker's raylet", "its raylet begins"),
    ("joined", "it is alive in the GCS"),
)
"""Stamps of the second node, which are no phases: they overlap with the head's."""


def phases(options: Options) -> list[Figure]:
    """Seconds of each phase, in the order of the phases, and since `run()` what happens on the second node."""
    edge = Edge()
    found: list[Stamps] = []
    with base_dir() as scratch, edge.directory() as directory:
        batch = Ours(edge, directory, options.partition)
        for number in range(options.repeat(_ROUNDS) + (not options.quick)):
            edge.wait_until_idle()
            base = f"{directory}/{number}"
            with edge.key(scratch, f"phases-{number}") as key:
                # A key of its own makes a connection of its own.
                compute = batch.resource(_SHAPE, key=key.path, keep_run_dirs="all")
                found.append(_stamps(edge, compute, base, f"{directory}/ours/runs", key.fingerprint))
    # The first round fills caches.
    return figures(found if options.quick else found[1:])


def figures(found: Sequence[Stamps]) -> list[Figure]:
    """The figures of some runs' stamps, which are in seconds since `run()`."""
    total = Sample.of("run() to the payload's first line", [stamps["first"] for stamps in found])
    before = ["", *(name for name, _ in PHASES)]
    each = tuple(
        Sample.of(label, [max(0.0, stamps[name] - stamps.get(since, 0.0)) for stamps in found])
        for since, (name, label) in zip(before, PHASES, strict=False)
    )
    joined = Sample.of("run() to the worker being alive", [stamps["joined"] for stamps in found])
    since_run = tuple(Sample.of(f"{label}, since run()", [stamps[name] for stamps in found]) for name, label in WORKER)
    return [
        Figure("phases: run() to the first line", None, total, total, None, also=each),
        Figure("phases: the second node", None, joined, joined, None, also=since_run),
    ]


def _stamps(edge: Edge, compute: ComputeResource, base: str, runs: str, fingerprint: str) -> Stamps:
    """One run."""
    environment = {"BENCH_MARKS": f"{base}.json", "BENCH_STOP": f"{base}.stop"}

    def body(context: dg.AssetExecutionContext, compute: ComputeResource) -> tuple[str, float, dict[str, Processes]]:
        start = time.time()
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(lambda: compute.run(context=context, payload_path=_HELD, extra_env=environment, uses_pipes=False))
            try:
                _until_there(edge, f"{base}.json", call.done)
                processes: dict[str, Processes] = {node: edge.processes(node, _PROCESSES) for node in COMPUTE_NODES}
            finally:
                edge.shell(f"touch {base}.stop")
            call.result()
        return context.run.run_id, start, processes

    with instance() as dagster, quiet():
        run_id, start, processes = in_step(compute, dagster, body)
        log = [(entry.timestamp, entry.user_message) for entry in dagster.all_logs(run_id)]
    run_dir = edge.shell(f"ls -td {runs}/*").split()[0]
    (logged_in,) = edge.login_times(fingerprint)
    times = {
        "logged in": logged_in,
        "submitted": _first(log, "[rayslurm] submitted "),
        "first": edge.read_json(f"{base}.json")["first"],
        **_from_files(edge, run_dir),
    }
    journal = LineReader().feed(edge.shell(f"cat {run_dir}/{JOURNAL}").encode())
    times.update(from_journal(journal))
    times.update(
        from_processes(processes, next(record for record in journal if record["type"] == "start")["allocation"]["nodes"])
    )
    return {name: at - start for name, at in times.items()}


def _until_there(edge: Edge, path: str, over: Any) -> None:
    deadline = time.monotonic() + _PATIENCE
    while edge.shell(f"[ -e {path} ] && echo there; true").strip() != "there":
        if over():
            return  # What it raised is told.
        if time.monotonic() > deadline:
            raise TimeoutError(f"the payload did not begin within {_PATIENCE:.0f} s")
        time.sleep(0.2)


def _first(log: Sequence[tuple[float, str]], beginning: str) -> float:
    return next(at for at, message in log if message.startswith(beginning))


def _from_files(edge: Edge, run_dir: str) -> dict[str, float]:
    """When Slurm made the logs: of the job, and of the task of each node."""
    names = ["slurm.log", *(node_log(place) for place in range(_SHAPE.nodes))]
    job, head, worker = map(float, edge.shell(f"cd {run_dir} && stat --format=%.W {' '.join(names)}").split())
    return {"job": job, "tasks": max(head, worker), "worker's task": worker}


def from_journal(journal: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The stamps of the record."""

    def phase(name: str, message: str = "") -> float:
        return float(next(each["at"] for each in journal if each.get("phase") == name and each["message"].startswith(message)))

    return {
        "runtime": next(float(record["at"]) for record in journal if record["type"] == "start"),
        "head": phase("cluster-start", "1/"),
        "joined": phase("cluster-start", f"{_SHAPE.nodes}/"),
        "started": phase("running", "payload started"),
    }


def from_processes(processes: Mapping[str, Processes], nodes: Sequence[str]) -> dict[str, float]:
    """When Ray's processes began on the head, which is the first of the nodes, and on the other."""
    head, worker = (processes[node] for node in nodes)
    return {
        "ray": _began(head, " ray-node "),
        "gcs": _began(head, "/gcs_server "),
        "raylet": _began(head, "/raylet/raylet "),
        "worker's ray": _began(worker, " ray-node "),
        "worker's raylet": _began(worker, "/raylet/raylet "),
    }


def _began(processes: Processes, part: str) -> float:
    return min(at for at, command in processes if part in command)
