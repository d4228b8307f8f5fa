"""The program that runs `ray start --block` (or `ray symmetric-run`) on one node and reports Ray's state to the runtime.

`ray start` runs in the process of this program. On the head, other threads of the process poll Ray's control service (GCS) and
serve the runtime's requests. So Ray is imported only once; on a worker node the import happens while the head starts. And the Ray
cluster counts as up as soon as the GCS reports the nodes, seconds before `ray start` itself has finished.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from typing import Any, Dict, List, Mapping, Optional, Set

from ..node.network import split_host_port
from ..node.usage import logs_of, started_ahead
from ..process.processes import become_subreaper
from ..protocol.messages import EndReason
from . import internals
from .membership import UNSCHEDULABLE, Nodes, Report

TOKEN_SINCE = (2, 52)  # First Ray version (major, minor) with token authentication.
MOST_IDLE_WORKERS = 4  # Most workers that are kept idle for the next payload; each takes some 60 MB of memory.

_FAST, _SLOW = 0.02, 1.0  # Seconds between two polls of the node table, until the Ray cluster is complete and from then on.
_DEMAND_INTERVAL = 3.0  # Seconds between two polls of what waits for resources; one poll takes a millisecond or two.
_START_TIMEOUT, _POLL = 60.0, 0.1  # Seconds in which a new idle worker must begin its log, and between two looks for that.


def main(argv: List[str]) -> int:
    """Run Ray on this node, and block until Ray ends; returns 1 without starting Ray if the installed Ray cannot be used.

    `argv` has one argument, the JSON text in which `RayNode` tells what to run. Its key `fd` is the descriptor of a socket, over
    which this program sends reports (`Report`) and receives requests (`serve`), as JSON lines. When Ray ends, the program usually
    exits with SystemExit, which Ray's command raises.
    """
    order = json.loads(argv[0])
    report = _Reporter(order["fd"])
    command = order["command"]
    try:
        import ray
        from ray.scripts import scripts

        refusal = refuse_version(ray.__version__, order["ray_version"], order["token"]) or refuse_dashboard(command)
    except ImportError as error:
        refusal = "Ray cannot be imported by %s: %s" % (sys.executable, error)
        if error.name == "ray":
            wanted = "==" + order["ray_version"] if order["ray_version"] else ">=2.52"
            refusal += "; install it there: %s -m pip install 'ray[default]%s'" % (sys.executable, wanted)
    if refusal:
        report(event=Report.FAILED, reason=EndReason.ENVIRONMENT, message=refusal)
        return 1
    if order["head"]:
        order["ray_version"] = ray.__version__
        serve(order["fd"], order["gcs"], logs_of(order["temp_dir"]), order["idle_workers"], report)
        threading.Thread(target=_watch, args=(order, report), daemon=True).start()
        if "--include-dashboard=false" in command:
            internals.skip_dashboard()
        elif command[0] == "start":
            internals.move_dashboard_files(order["temp_dir"])
    else:
        _wait_for_head(order["gcs"], command)
    if command[0] != "start":
        become_subreaper()  # `ray symmetric-run` leaves Ray's daemons without a parent; they are ended with this process.
    sys.argv = ["ray", *internals.disable_client_server(command)]
    scripts.main()  # type: ignore[no-untyped-call]
    return 0


# ---- Whether the installed Ray can be used


def refuse_version(found: str, wanted: Optional[str], token: bool) -> Optional[str]:
    """Returns why the installed version `found` of Ray must not be used, as a sentence; None if it may be used.

    `wanted` is the version that the user requires, None for any. `token` is True if Ray must have token authentication.
    """
    if wanted and found != wanted:
        return "Ray %s is installed for %s, and ray_version asks for %s" % (found, sys.executable, wanted)
    if token and lacks_tokens(found):
        return (
            "Ray %s has no token authentication (Ray 2.52 has it), so anybody who reaches this node could run code as "
            'you: upgrade Ray, or accept that with RayLauncher(auth="disabled")' % found
        )
    return None


def refuse_dashboard(command: List[str]) -> Optional[str]:
    """Returns why Ray's dashboard cannot run, as a sentence; None if it can, or if `command` does not start the dashboard.

    `command` has the words after `ray`.
    """
    problem = internals.dashboard_problem() if "--include-dashboard=true" in command else None
    advice = "Ray has no dashboard for %s (%s): install ray[default] there, or set RayLauncher(dashboard=False)"
    return None if problem is None else advice % (sys.executable, problem)


def lacks_tokens(version: str) -> bool:
    """Returns whether a version of Ray, such as "2.60.0rc1", lacks token authentication; False if the text is no version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (int(found.group(1)), int(found.group(2))) < TOKEN_SINCE


# ---- Requests of the runtime


class _Reporter:
    """Sends reports to the runtime as JSON lines over the descriptor `fd`; any thread may call it, as in `report(event=…)`."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)  # Ray's daemons must not keep the pipe open after this process has ended.
        self._file = os.fdopen(fd, "w", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()

    def __call__(self, **event: Any) -> None:
        with self._lock:
            self._file.write(json.dumps(event) + "\n")


def serve(fd: int, gcs: str, logs: str, cpus: int, report: Any) -> None:
    """Start threads that serve requests of the runtime, and return; a request is a JSON line from the descriptor `fd`.

    The request `{"tables": ID}` is answered by a call of `report` with ID and the tables in which the runtime looks for leaks:
    things that payloads left in the Ray cluster. After an error, the call has None instead of the tables.

    The request `{"prestart": true}` has no answer. It makes Ray start worker processes in advance, until enough of them wait for
    the next payload. Enough is `cpus`, or `MOST_IDLE_WORKERS` if this is smaller. The request has no effect if `cpus` is 0, or if
    `internals.can_start_workers` returns False.

    `gcs` is "HOST:PORT" of the GCS, and `logs` is the path of Ray's log directory.
    """
    wanted = threading.Event()
    if cpus > 0 and internals.can_start_workers():
        if cpus <= MOST_IDLE_WORKERS:
            # An idle worker waits for each CPU already, so Ray need not start more for each driver. On a larger node it should.
            os.environ.setdefault(internals.PRESTART_AT_FIRST_DRIVER, "0")
        number = min(cpus, MOST_IDLE_WORKERS)
        threading.Thread(target=_keep_idle_workers, args=(wanted, gcs, logs, number), daemon=True).start()

    def answer() -> None:
        accessor: Any = None
        with os.fdopen(os.dup(fd), encoding="utf-8") as requests:
            for request in map(json.loads, requests):
                if "tables" not in request:
                    wanted.set()
                    continue
                tables: Optional[Dict[str, Any]] = None
                try:
                    accessor = internals.connect_state(gcs) if accessor is None else accessor
                    tables = internals.living_things(accessor)
                except Exception as error:  # Ray's errors have no common public base class, and their modules change.
                    print("rayslurm: no tables for the leak check: %r" % error, file=sys.stderr)
                    accessor = None
                report(event=Report.TABLES, id=request["tables"], tables=tables)

    threading.Thread(target=answer, daemon=True).start()


def _keep_idle_workers(wanted: threading.Event, gcs: str, logs: str, number: int) -> None:
    """Thread function: each time the event `wanted` is set, start Ray workers until `number` of them wait for work on this node.

    After an error, the thread ends with a message on stderr, and no more workers are started.
    """
    raylet: Any = None
    try:
        while wanted.wait():
            wanted.clear()
            ever, idle = started_ahead(logs)
            missing = number - len(idle)
            if missing > 0:
                raylet = internals.connect_raylet(gcs) if raylet is None else raylet
                internals.start_workers(raylet, missing)
                until = time.monotonic() + _START_TIMEOUT
                while started_ahead(logs)[0] < ever + missing:
                    if time.monotonic() > until:
                        return  # New workers have no logs to count them by, so each further request would start too many.
                    time.sleep(_POLL)
    except Exception as error:  # Ray's errors have no common public base class, and their modules change.
        print("rayslurm: no workers are kept ready: %s: %s" % (type(error).__name__, error), file=sys.stderr)


# ---- The GCS


def _watch(order: Mapping[str, Any], report: _Reporter) -> None:
    """Thread function on the head: report each change of Ray's node table, and the end of the GCS.

    If `ray symmetric-run` is used, the start of its command (entrypoint) is reported too. The thread ends with a report when the
    GCS has ended or an error has occurred. `order` is the JSON object that `RayNode` has sent.
    """
    gcs, entrypoint = order["gcs"], order["entrypoint"]
    try:
        _wait_for_port(gcs)
        client = internals.connect_gcs(gcs)
        internals.publish_head(client, order["temp_dir"], "--include-dashboard=false" not in order["command"])
        known: Optional[Nodes] = None
        threading.Thread(target=_report_demand, args=(gcs, report), daemon=True).start()
        while True:
            nodes = _nodes(client)
            if nodes is not None and nodes != known:
                report(event=Report.NODES, nodes=nodes, ray_version=order["ray_version"])
                known = nodes
            elif nodes is None and known is not None and isinstance(_connect_error(gcs, 2.0), ConnectionRefusedError):
                # A GCS that is only slow does not refuse. `ray start` begins to watch its processes seconds later.
                return report(event=Report.GCS_LOST)
            if entrypoint and os.path.exists(entrypoint):
                report(event=Report.ENTRYPOINT)
                entrypoint = None
            complete = known is not None and sum(node["alive"] for node in known.values()) >= order["expected"]
            time.sleep(_SLOW if complete and not entrypoint else _FAST)
    except BaseException as error:
        message = "the GCS cannot be asked for its nodes: %s: %s" % (type(error).__name__, error)
        report(event=Report.FAILED, reason=None, message=message)


def _wait_for_head(gcs: str, command: List[str]) -> None:
    """On a worker node, block without a time limit until this node can join the head at `gcs` ("HOST:PORT").

    This node can join once Ray's node table shows the head as alive. For `ray start`, it can join earlier: as soon as the head
    has written facts about itself to the GCS (`internals.publish_head`). `command` has the words after `ray`.
    """
    _wait_for_port(gcs)
    client = internals.connect_gcs(gcs)
    while not any(node["head"] and node["alive"] for node in (_nodes(client) or {}).values()):
        time.sleep(_FAST)
        # `ray symmetric-run` calls `ray start` in another process, where `assume_head` would have no effect.
        head = internals.published_head(client) if command[0] == "start" else None
        if head is not None:
            return internals.assume_head(head)


def _wait_for_port(gcs: str) -> None:
    """Block until something listens at `gcs` ("HOST:PORT"), without a time limit.

    Looks more often than Ray's own client would.
    """
    while _connect_error(gcs, 1.0):
        time.sleep(_FAST)


def _connect_error(gcs: str, timeout: float) -> Optional[OSError]:
    try:
        socket.create_connection(split_host_port(gcs), timeout=timeout).close()
    except OSError as error:
        return error
    return None


def _nodes(client: Any) -> Optional[Nodes]:
    """Returns Ray's node table (`internals.node_table`); None, with a message on stderr, if the GCS does not answer."""
    try:
        return internals.node_table(client)
    except Exception as error:  # Ray's RPC errors have no common public base class.
        print("rayslurm: the GCS does not answer: %s" % error, file=sys.stderr)
        return None


def _report_demand(gcs: str, report: _Reporter) -> None:
    """Thread function: every few seconds, report new requests for resources that no node can ever grant; never returns.

    A request is reported only if two polls in a row have found it: if a node has just joined, it may grant the request after the
    first poll. The request is reported again only if the number of living nodes changes.
    """
    client = internals.connect_gcs(gcs)
    before: Set[str] = set()
    reported: Set[str] = set()
    while True:
        with contextlib.suppress(Exception):  # Ray's errors have no common public base class. The next poll may succeed.
            sentences = internals.unschedulable(client)
            found = set(sentences)
            for key in sorted(found & before - reported):
                report(event=Report.PHASE, phase=UNSCHEDULABLE, message=sentences[key])
            before, reported = found, found & before
        time.sleep(_DEMAND_INTERVAL)
