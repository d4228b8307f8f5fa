"""Runs the probe, a small job that examines compute nodes from the inside; submits, follows and removes the job as a run does."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from ..backends.base import deferred_interrupts
from ..edge import machine, site
from ..edge.environment import PROBE
from ..errors import StartError
from ..launchers import RayLauncher
from ..runtime.node import interfaces
from ..runtime.node.network import parse_range
from ..runtime.protocol.record import EXIT
from ..slurm.accounting import fetch_job_facts
from ..slurm.config import SlurmQueueConfig
from ..slurm.pending import waiting_text
from ..slurm.refusals import never_starts
from ..slurm.request import LOG, SBATCH_FIELDS, JobRequest, job_name, make_request, render_script
from ..slurm.shared_queue import ClusterClock, QueueRow, SlurmUnanswered, fetch_queue
from ..slurm.states import TERMINAL, WAITING
from ..slurm.steps import parse_exit
from ..slurm.submit import JOB_SCRIPT, cancel_named, submit, wait_until_gone
from ..ssh.base import Connection
from . import Line, Wanted, failed, failure, warning
from .probe_lines import NO_PYTHON, ended_lines, probe_lines

_SECONDS = 120.0  # Seconds that the job waits for the edge node, at most.
_LAG_PATIENCE = 60.0  # Seconds until a change of a file must be seen by the other side.
_OWN_END = 3.0  # Seconds that the job has to end by itself when its work is done, before it is cancelled.
_SHOWN = 2000  # Most bytes of a log that explain a failure.
_PROGRAM, _OPTIONS = "machine.py", "options.json"
# Shell command that starts the program by the first Python that exists, even an old one. $1 is the run directory, and $2 is the
# environment's Python ("" if there is no environment).
_START = (
    'for python in python3 /usr/libexec/platform-python "$2"; do command -v "$python" >/dev/null 2>&1 && '
    f'exec "$python" "$1/{_PROGRAM}" "$1/{_OPTIONS}"; done; exit {NO_PYTHON}'
)


def run_probe(
    connection: Connection,
    base: str,
    wanted: Wanted,
    interpreter: list[str] | None,
    nodes: int,
    patience: float,
    say: Callable[[str], None],
) -> list[Line]:
    """Submits a job that examines `nodes` compute nodes, waits for the results, and returns the report lines.

    At the end, also after an error, the function cancels the job and removes the job's run directory. `base` is the path of the
    base directory. `interpreter` is the command that starts the environment's Python; None leaves the environment unexamined. The
    job may wait `patience` seconds to start. `say` is called with a sentence about why the job waits.
    """
    nonce = secrets.token_hex(6)
    run_dir = f"{base}/runs/doctor-{nonce}"
    request = _request(wanted, nodes, nonce, patience)
    files = _files(request, run_dir, base, wanted, interpreter, nodes)
    began = time.monotonic()
    try:
        try:
            job = submit(connection, run_dir, files, request, ClusterClock(connection), say)
        except StartError as error:
            return [failed("probe", error, "check the queue's fields")]
        except BaseException:
            log = SimpleNamespace(error=lambda text: say(text.removeprefix("[rayslurm] ")))
            with deferred_interrupts():
                cancel_named(connection, request.job_name, log)
            raise
        job_id = int(job.job_id)
        try:
            try:
                lines = _follow(connection, run_dir, request, job_id, wanted, began, patience, say)
            except OSError as error:
                lines = [failed("probe", error, "try again")]
            return [*lines, *_cancel(connection, job_id)]
        except BaseException:
            for line in _cancel(connection, job_id):
                say(f"{line.text}; {line.remedy}")
            raise
    finally:
        with contextlib.suppress(OSError):
            connection.remove(run_dir)


def _cancel(connection: Connection, job_id: int) -> list[Line]:
    """Cancels the probe's job if it has not ended; returns a warning if Slurm does not confirm the end, and [] otherwise."""
    with deferred_interrupts():
        if wait_until_gone(connection, job_id):
            return []
    what = f"Slurm does not confirm the end of job {job_id}"
    return [warning("probe", what, f"run `scancel {job_id}` on {connection.place}")]


def _request(wanted: Wanted, nodes: int, nonce: str, patience: float) -> JobRequest:
    """Returns the request for the probe's job on `nodes` nodes, with few resources, in the user's partition and account.

    The request has those fields of the user's queue that say where a job runs, the user's GPUs and the user's extra options of
    sbatch. It has the least CPUs, memory and time, so that the job starts soon. `nonce` is a random text, which becomes a part
    of the job's name. Slurm itself removes the job from the queue if the job cannot end within `patience` seconds plus ten
    minutes.
    """
    # `nodelist` may name more than `nodes` nodes.
    kept = {each.name for each in SBATCH_FIELDS if each.place} - {"nodelist"} | {"gpus_per_node", "gpu_type", "switches"}
    queue = SlurmQueueConfig(
        **wanted.queue.model_dump(include=kept),
        num_nodes=nodes,
        time_limit="5",
        # If this process is killed, Slurm removes the job that waits (sbatch(1), Slurm 22.05).
        extra_sbatch=[*wanted.queue.extra_sbatch, f"--deadline=now+{int(patience / 60) + 10}minutes"],
    )
    return make_request(queue, RayLauncher().footprint(), job_name=job_name("doctor", nonce), comment="rayslurm doctor")


def _files(
    request: JobRequest, run_dir: str, base: str, wanted: Wanted, interpreter: list[str] | None, nodes: int
) -> dict[str, bytes]:
    """Returns the contents of the files of the run directory `run_dir`, by name: the job script, a program and its options.

    The program is `edge.machine`, which each node runs. The program runs code from one more file, `machine.INTERFACES`. `base`
    is the path of the base directory, and `nodes` is the number of nodes. `interpreter` is the command that starts the
    environment's Python; None leaves the environment unexamined. Files that the nodes will write exist from the start and are
    empty, because NFS remembers for a while that a name is missing.
    """
    python = interpreter[0] if interpreter else ""
    command = ["sh", "-c", _START, "rayslurm", run_dir, python]
    options = {
        "run_dir": run_dir,
        "base": base,
        "nodes": nodes,
        "seconds": _SECONDS,
        "probe": PROBE,
        "environment": interpreter or [],
        "port_range": parse_range(wanted.port_range) if wanted.port_range else None,
        "network_interface": wanted.network_interface,
    }
    ranks = range(nodes)
    empty = [machine.GO, machine.STOP, *(machine.SEEN % rank for rank in ranks), *(machine.FACTS % rank for rank in ranks)]
    return {
        JOB_SCRIPT: render_script(request, command, run_dir, wanted.slurm.site).encode(),
        _PROGRAM: Path(machine.__file__).read_bytes(),
        machine.INTERFACES: Path(interfaces.__file__).read_bytes(),
        _OPTIONS: json.dumps(options).encode(),
        **dict.fromkeys(empty, b""),
    }


def _follow(
    connection: Connection,
    run_dir: str,
    request: JobRequest,
    job_id: int,
    wanted: Wanted,
    began: float,
    patience: float,
    say: Callable[[str], None],
) -> list[Line]:
    """Waits until the nodes have written facts, then examines the nodes from the edge node, and returns the report lines.

    Returns one warning or failure instead if the job cannot start, if the job waits longer than `patience` seconds, if the job
    ends early, or if squeue does not show the job. `began` is the time of the submission by `time.monotonic()`. `say` is called
    with a sentence about why the job waits.
    """
    nodes, pause, waiting, started, heard = request.queue.num_nodes, 0.2, "", None, time.monotonic()
    while True:
        facts = connection.call(site.probe_state, run_dir, nodes, repeat=True)
        complete = [each for each in facts if each is not None]
        if len(complete) == nodes and (nodes == 1 or all(each["peers"] for each in complete[1:])):
            break
        rows = _rows(connection, job_id)
        alive = [row for row in rows if row.state not in TERMINAL]
        now = time.monotonic()
        heard = now if rows else heard
        if alive and alive[0].state in WAITING:  # In CONFIGURING the nodes of the job are still being powered up.
            if never := never_starts(alive, request):
                return [failure("probe", f"the job can never start: {never}", "change SlurmQueueConfig as it says")]
            reason = alive[0].reason.replace("None", "")
            text = waiting_text(reason, alive[0].start, time.time())
            if text and text != waiting:
                waiting = text
                say(f"the probe, job {job_id}, is {text}")
            if now - began > patience:
                what = f"the job did not start within {patience:.0f} s ({text or 'it waits'}), and was cancelled"
                return [warning("probe", what, "try again with a longer --wait, or another partition")]
        elif rows and not alive:
            return _ended(connection, run_dir, job_id)
        elif alive:
            started = started or now
            if now - started > _SECONDS:
                return ended_lines({"state": "RUNNING", "facts": len(complete), "nodes": nodes})
        elif now - heard > _SECONDS:
            what = f"squeue has said nothing of the probe, job {job_id}, for {_SECONDS:.0f} s"
            return [failure("probe", what, "see whether squeue answers on the edge node, and try again")]
        time.sleep(pause)
        pause = min(1.5 * pause, 5.0)
    measured = connection.call(site.reach_and_measure, run_dir, complete, _LAG_PATIENCE, repeat=False, timeout=2 * _LAG_PATIENCE)
    connection.write(os.path.join(run_dir, machine.STOP), b"1")
    wait_until_gone(connection, job_id, patience=_OWN_END)
    return probe_lines(complete, measured, wanted, time.monotonic() - began)


def _rows(connection: Connection, job_id: int) -> list[QueueRow]:
    """Returns the rows of a job in the queue; [] if squeue does not show the job, or does not answer."""
    try:
        return list(fetch_queue(connection).components(job_id))
    except SlurmUnanswered:
        return []


def _ended(connection: Connection, run_dir: str, job_id: int) -> list[Line]:
    """Returns one failure that explains why a job ended before all nodes wrote facts."""
    facts = fetch_job_facts(connection, job_id)
    log = b"".join(connection.read(f"{run_dir}/{name}", 0, _SHOWN) for name in (LOG, "node-0.log"))
    return ended_lines(
        {
            "state": facts.state if facts else "unknown",
            "nodes": ", ".join(facts.nodes) if facts else "",
            "signal": facts.signal if facts else None,
            "exit": parse_exit(connection.read(f"{run_dir}/{EXIT}", 0, _SHOWN), job_id),
            "log": log.decode("utf-8", "replace").strip(),
        }
    )
