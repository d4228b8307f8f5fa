"""`environment` and its parts: how long environments take that are sent, what is sent again, and what a copy on a node saves."""

import contextlib
import itertools
import json
import os
import pty
import re
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Optional

import dagster as dg

from dagster_rayslurm import ComputeResource, PackedEnvironment, PreDeployedEnvironment, UvEnvironment
from dagster_rayslurm.environments import SentEnvironment, send, wheels
from dagster_rayslurm.operations import environment_site
from stack.settings import ROOT

from ..figures import Figure, Options, Sample
from ..parties.edge import Edge
from ..parties.runs import Ours, Run, Shape, clocked, measured, quiet
from ..steps import PAYLOADS, base_dir, in_step, instance, timed
from .environment_step import Lines, ask, to_raw
from .throughput import at_once

# No annotations from the future here: Dagster wants the type of `context` itself, not its name.

_SECOND_BAR = 0.3
_WHEELS, _WHEEL_BYTES = 100, 200_000
_CALLERS, _MACHINES = 20, 4
_LARGE_BAR = 1.5
_GAP = 12.0
"""Most seconds of an upload without a new line or a change of the bar; lines come every five."""
_FILES_BAR = 0.25
_PYTHON = '#!/bin/sh\nexec /usr/bin/python3 "$@"\n'
_COUNT = "import os, sys; open(os.path.join(os.path.dirname(sys.argv[0]), '../../count'), 'a').write('x')\n"
"""`conda-unpack` of a packed environment: runs once for each time that it is unpacked."""
_DEFINITIONS = """\
import json
from benchmarks.parties.edge import Edge
from benchmarks.parties.runs import Ours, Shape
from benchmarks.slurm.environment_step import from_raw
site = json.loads({site!r})
compute = Ours(Edge(), site["directory"], site["partition"]).resource(Shape(ray=False), environment=from_raw(site["environment"]))
"""


@contextlib.contextmanager
def _site() -> Iterator[tuple[Edge, str, Path]]:
    """The stack, a directory on it and one here. This project's cache on this machine begins empty, that of uv does not."""
    asked = subprocess.run([wheels.find_uv()[0], "cache", "dir"], check=True, capture_output=True, text=True)
    edge = Edge()
    with edge.directory() as directory, base_dir() as scratch:
        before = {name: os.environ.get(name) for name in ("UV_CACHE_DIR", "XDG_CACHE_HOME")}
        os.environ.update(UV_CACHE_DIR=asked.stdout.strip(), XDG_CACHE_HOME=f"{scratch}/cache")
        try:
            yield edge, directory, Path(scratch)
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                os.environ.update({} if value is None else {name: value})


def _ours(edge: Edge, directory: str, name: str, options: Options) -> Ours:
    """This project with a base directory of its own, in which nothing is."""
    edge.shell(f"mkdir -p {directory}/{name}")
    return Ours(edge, f"{directory}/{name}", options.partition)


def _lock(project: Path, *dependencies: str, more: str = "") -> UvEnvironment:
    project.mkdir(exist_ok=True)
    (project / "pyproject.toml").write_text(
        f'[project]\nname = "study"\nversion = "1"\nrequires-python = ">=3.10"\ndependencies = {json.dumps(dependencies)}\n{more}'
    )
    subprocess.run([wheels.find_uv()[0], "lock", "--quiet"], cwd=project, check=True)
    return UvEnvironment(project=str(project))


def _fetch(compute: ComputeResource) -> int:
    """Fetch the files of an environment, and return their number. How long that takes says much of the network alone."""
    site = environment_site(compute)
    assert isinstance(site.environment, SentEnvironment)
    pieces = send.recipe_for(site.connection, site.environment, site.queues, Lines()).pieces
    send.fetch(pieces, Lines())
    return len(pieces)


def _new_process() -> None:
    """Forget the recipes that this process knows."""
    send._recipes.clear()


def first_line(options: Options) -> list[Figure]:
    """From `uv.lock` to the first line, the first time and the second."""
    shape = Shape()
    found: dict[str, list[float]] = {"first": [], "second": [], "there": []}
    with _site() as (edge, directory, scratch):
        environment = _lock(scratch / "study", f"ray[default]=={version('ray')}", "dagster-pipes")
        _fetch(_ours(edge, directory, "fetch", options).resource(shape, environment=environment))

        def body(context: dg.AssetExecutionContext, compute: ComputeResource) -> None:  # noqa: ARG001
            for number in range(options.repeat(3)):
                ours = _ours(edge, directory, f"first-{number}", options)
                edge.wait_until_idle()
                sent = ours.resource(shape, environment=environment)
                found["first"].append(ours.run(context, sent, shape).to_first_line)
                there = ours.resource(shape, environment=PreDeployedEnvironment(path=ask(sent, Lines())[1]))
                again = (("second", sent), ("there", there))
                for name, resource in again if number % 2 == 0 else reversed(again):
                    edge.wait_until_idle()
                    edge.shell("sync")  # What the first time has written would be in the way of the next one.
                    _new_process()
                    found[name].append(ours.run(context, resource, shape).to_first_line)

        with instance() as dagster, quiet():
            in_step(ComputeResource(mode="local"), dagster, body)
    there, first, second = (
        Sample.of(label, found[name])
        for name, label in (("there", "an environment that is there"), ("first", "first time"), ("second", "second time"))
    )
    return [
        Figure("environment: uv.lock to the first line, first time", there, first, first, None, tolerance=1.0),
        Figure("environment: uv.lock to the first line, second time", there, second, second, None),
    ]


def second(options: Options) -> Figure:
    """What an unchanged environment adds to a run, in a new process and in one that has used it before."""
    with _site() as (edge, directory, scratch):
        environment = _lock(scratch / "study", f"ray[default]=={version('ray')}", "dagster-pipes")
        asked = [_ask(1, edge, directory, environment, options, scratch, machines=1)[0] for _ in range(options.repeat(9) + 1)]
    adds = Sample.of("in a new process", [each["seconds"] for each in asked[1:]])
    again = Sample.of("once more in that process", [each["again"] for each in asked[1:]])
    return Figure("environment.second: what it adds", None, adds, adds, _SECOND_BAR, also=(again,))


def _ask(
    callers: int, edge: Edge, directory: str, environment: SentEnvironment, options: Options, scratch: Path, machines: int
) -> Sequence[dict[str, Any]]:
    edge.shell(f"mkdir -p {directory}")
    site = {"directory": directory, "partition": options.partition, "scratch": str(scratch), "machines": machines}
    return at_once("environment_step", callers, {**site, "environment": to_raw(environment)})


def one_wheel(options: Options) -> list[Figure]:
    """How many files a changed wheel sends, and how long that takes."""
    sent: list[float] = []
    seconds: dict[str, list[float]] = {"all": [], "one": []}
    with _site() as (edge, directory, scratch):
        index, names = scratch / "index", [f"package{number}" for number in range(_WHEELS)]
        index.mkdir()
        for name in names:
            _wheel(index, name, "1.0")
        more = f'[tool.uv]\nno-index = true\nfind-links = ["{index}"]\n'
        for number in range(options.repeat(3)):
            ours = _ours(edge, directory, f"wheel-{number}", options)
            for name, changed in (("all", names), ("one", [*names[:-1], f"{names[-1]}=={number + 2}.0"])):
                if name == "one":
                    _wheel(index, names[-1], f"{number + 2}.0")
                else:
                    changed = [*names[:-1], f"{names[-1]}==1.0"]
                compute, log = ours.resource(Shape(ray=False), environment=_lock(scratch / "study", *changed, more=more)), Lines()
                _fetch(compute)
                _new_process()
                seconds[name].append(ask(compute, log)[0])
                if name == "one":
                    (line,) = (line for line in log.lines if "sending " in line)
                    sent.append(float(line.split("sending ")[1].split()[0]))
    files = Sample.of("for one changed wheel", sent, "files")
    everything, one = Sample.of("all wheels, and uv", seconds["all"]), Sample.of("one changed wheel", seconds["one"])
    least = Sample.of("the least", [1], "files")
    return [
        Figure("environment.wheel: files sent", least, files, files, 1),
        Figure("environment.wheel: until it is there", None, one, one, None, also=(everything,)),
    ]


def _wheel(index: Path, name: str, number: str) -> None:
    info = f"{name}-{number}.dist-info"
    with zipfile.ZipFile(index / f"{name}-{number}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/__init__.py", f"version = {number!r}\n")
        archive.writestr(f"{name}/data", os.urandom(_WHEEL_BYTES))
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        files = f"{name}/__init__.py", f"{name}/data", f"{info}/METADATA", f"{info}/WHEEL", f"{info}/RECORD"
        archive.writestr(f"{info}/RECORD", "".join(f"{each},,\n" for each in files))


def _packed(path: Path, mebibytes: int) -> PackedEnvironment:
    """An archive of random data and a Python, which counts how often it is unpacked."""
    parts = path.with_suffix(".d")
    (parts / "bin").mkdir(parents=True)
    for name, text in {"python": _PYTHON, "conda-unpack": _COUNT}.items():
        (parts / "bin" / name).write_text(text)
        (parts / "bin" / name).chmod(0o755)
    with (parts / "data").open("wb") as file:
        for _ in range(mebibytes):
            file.write(os.urandom(2**20))
    with tarfile.open(path, "w") as archive:
        for name in ("bin", "data"):
            archive.add(parts / name, name)
    (parts / "data").unlink()
    return PackedEnvironment(archive=str(path))


def race(options: Options) -> list[Figure]:
    """Processes that ask for an environment at the same moment: it is unpacked once."""
    unpacked: list[float] = []
    seconds: dict[int, list[float]] = {1: [], _CALLERS: []}
    problem: Optional[str] = None
    with _site() as (edge, directory, scratch):
        environment = _packed(scratch / "environment.tar", 20)
        for number in range(options.repeat(3)):
            for callers, found in seconds.items():
                base = f"{directory}/race-{number}-{callers}"
                answers = _ask(callers, edge, base, environment, options, scratch, _MACHINES)
                found.append(max(each["seconds"] for each in answers))
                unpacked.append(float(edge.shell(f"cat {base}/ours/prefixes/count | wc -c")))
                if len({each["path"] for each in answers}) != 1:
                    problem = f"they have {len({each['path'] for each in answers})} environments"
    one, everybody = (Sample.of(f"{callers} processes", found) for callers, found in seconds.items())
    times, least = Sample.of("by all of them", unpacked, "times"), Sample.of("the least", [1], "times")
    return [
        Figure("environment.race: how often it is unpacked", least, times, times, 1, problem=problem),
        Figure("environment.race: until all have it", one, everybody, everybody, None, tolerance=1.0, problem=problem),
    ]


def large(options: Options) -> list[Figure]:
    """An archive of 2 GB: how long it takes beside `sftp` and `tar`, and whether a terminal and the Dagster log show progress."""
    mebibytes = 200 if options.quick else 2000
    with _site() as (edge, directory, scratch), edge.by_hand(str(scratch)) as hand:
        environment = _packed(scratch / "environment.tar", mebibytes)
        by_hand, _ = timed(lambda: _put(hand, environment.archive, f"{directory}/by-hand"))
        edge.shell(f"rm -rf {directory}/by-hand")
        ours = _ours(edge, directory, "terminal", options)
        _fetch(ours.resource(Shape(ray=False), environment=environment))
        seconds, changes = _push(scratch, f"{directory}/terminal", environment, options)
        edge.shell(f"chmod -R u+w {directory}/terminal; rm -rf {directory}/terminal")
        logged = _lines_of_a_run(_ours(edge, directory, "run", options), environment)
    gaps = {"the terminal": _longest(changes), "the Dagster log": _longest(logged)}
    silent = [f"{where} showed nothing for {gap:.0f} s" for where, gap in gaps.items() if gap > _GAP]
    lines = (
        Sample.of("changes of the bar in a terminal", [float(len(changes))], ""),
        Sample.of("lines in the Dagster log", [float(len(logged) - 2)], ""),
    )
    mine, theirs = Sample.of("rayslurm env push", [seconds]), Sample.of("sftp and tar", [by_hand])
    ratio = Sample.of("ratio", [seconds / by_hand], "x")
    name = f"environment.large: {mebibytes * 2**20 / 1e9:.1f} GB until it is there"
    return [Figure(name, theirs, mine, ratio, _LARGE_BAR, also=lines, problem="; ".join(silent) or None)]


def _put(hand: Any, archive: str, target: str) -> None:
    hand.ssh(f"mkdir {target}")
    command = ["sftp", "-q", *hand.options, "-b", "-", hand.target]
    subprocess.run(command, input=f"put {archive} {target}/environment.tar\n".encode(), check=True, capture_output=True)
    hand.ssh(f"mkdir {target}/prefix && tar -x -f {target}/environment.tar -C {target}/prefix")


def _longest(times: Sequence[float]) -> float:
    """The longest time between two of the times."""
    return max((later - earlier for earlier, later in itertools.pairwise(times)), default=float("inf"))


def _push(scratch: Path, directory: str, environment: PackedEnvironment, options: Options) -> tuple[float, list[float]]:
    """Seconds of `rayslurm env push` in a terminal, and when what it shows of the transfer has changed."""
    site = {"directory": directory, "partition": options.partition, "environment": to_raw(environment)}
    (scratch / "large_study.py").write_text(_DEFINITIONS.format(site=json.dumps(site)))
    program = "import sys; from dagster_rayslurm.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "env", "--from", "large_study:compute", "push"]
    ours, theirs = pty.openpty()
    began, shown, changes = time.monotonic(), "", []
    env = {**os.environ, "PYTHONPATH": f"{scratch}:{ROOT}", "TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=ROOT) as process:
        os.close(theirs)
        with contextlib.suppress(OSError):  # EIO: the other end is closed.
            while data := os.read(ours, 65536):
                amounts = re.findall(r"(\d+\.\d+)/(\d+\.\d+) GB|(\d+\.\d+)/(\d+\.\d+) MB", data.decode("utf-8", "replace"))
                if amounts and str(amounts[-1]) != shown:
                    shown = str(amounts[-1])
                    changes.append(time.monotonic())
        os.close(ours)
    if process.returncode:
        raise RuntimeError(f"rayslurm env push ended with exit code {process.returncode}")
    return time.monotonic() - began, changes


def _lines_of_a_run(ours: Ours, environment: PackedEnvironment) -> list[float]:
    """When lines about the transfer came into the event log of a run that sends an environment."""
    compute = ours.resource(Shape(ray=False), environment=environment)
    with instance() as dagster, quiet():
        in_step(compute, dagster, lambda context, compute: compute.run(context=context, payload_path=["true"], uses_pipes=False))
        (run,) = dagster.get_runs()
        entries = [(each.timestamp, each.user_message) for each in dagster.all_logs(run.run_id)]
    return [at for at, text in entries if re.search("environment: sending|uploading: |environment: made", text)]


def stage(options: Options) -> list[Figure]:
    """Ray from the shared environment, and from a copy on the node."""
    runs: dict[str, list[Run]] = {"shared": [], "node-local": []}
    with _site() as (edge, directory, scratch):
        environment = _lock(scratch / "study", f"ray[default]=={version('ray')}", "dagster-pipes")
        ours, shape = _ours(edge, directory, "stage", options), Shape(ray=False, mem="1G")

        def run(context: dg.AssetExecutionContext, name: str, marks: str) -> Run:
            compute = ours.resource(shape, environment=environment.model_copy(update={"stage": name}))
            arguments: dict[str, Any] = {"payload_path": PAYLOADS / "import_ray.py", "uses_pipes": False}
            edge.wait_until_idle()
            return measured(
                edge, marks, lambda: clocked(lambda: compute.run(context=context, extra_env={"BENCH_MARKS": marks}, **arguments))
            )

        def body(context: dg.AssetExecutionContext, compute: ComputeResource) -> None:  # noqa: ARG001
            for number in range(options.repeat(3) + 1):
                for name, found in runs.items():
                    found.append(run(context, name, f"{directory}/{name}-{number}.json"))

        with instance() as dagster, quiet():
            in_step(ComputeResource(mode="local"), dagster, body)
        files = _fetch(ours.resource(shape, environment=environment))
    shared, local = (found[1:] for found in runs.values())  # The first ones make the environments.
    wrong = [run.marks["prefix"] for run in local if run.marks["prefix"].startswith(directory)]
    problem = f"{wrong[0]} is no copy" if wrong else None

    def figure(what: str, value: Callable[[Run], float]) -> Figure:
        mine = Sample.of("node-local", [value(run) for run in local])
        theirs = Sample.of("shared", [value(run) for run in shared])
        return Figure(f"environment.stage: {what}", theirs, mine, mine, None, problem=problem, tolerance=1.0)

    opened = Sample.of("by one import of Ray", [float(run.marks["files"]) for run in shared], "files")
    copied = Sample.of("by a copy", [float(files)], "files")
    ratio = Sample.of("ratio", [copied.median / opened.median], "x")
    name = "environment.stage: files read on the shared file system"
    return [
        Figure(name, opened, copied, ratio, _FILES_BAR, problem=problem),
        figure("first import of Ray", lambda run: float(run.marks["imports"][0])),
        figure("later imports of Ray", lambda run: min(run.marks["imports"][1:])),
        figure("run() to the first line", lambda run: run.to_first_line),
    ]
