"""The program that runs `ray start --block` (or `ray symmetric-run`) on one node and reports its state to the runtime.

`ray start` runs in this very process, and on the head a thread beside it polls Ray's control service (GCS) for nodes. So Ray
is imported only once, on a worker node while the head starts. And the Ray cluster counts as up as soon as the GCS reports its
nodes, seconds before `ray start` itself has finished.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from typing import Any, List, Mapping, Optional

from . import internals, leak_check, prestart, unschedulable
from .node_table import Nodes
from .reports import Report

TOKEN_SINCE = (2, 52)
"""First Ray version (major, minor) with token authentication."""

_FAST, _SLOW = 0.02, 1.0
"""Seconds between two polls of the node table: `_FAST` until the Ray cluster is complete, `_SLOW` from then on."""
_DEMAND_INTERVAL = 7.0
"""Seconds between two polls of what waits for resources; one poll takes a millisecond or two."""
_TEMP_DIR = "--temp-dir="


def main(argv: List[str]) -> int:
    """Run Ray on this node until it ends, and return the exit code. The only argument is a JSON object.

    Keys:
        report_fd: descriptor to which reports are written as JSON lines; see `reports`.
        audit_fd: descriptor from which queries of the leak check come; null on a worker node.
        prestart: arguments of `prestart.serve`; null if no idle workers are wanted.
        gcs: "HOST:PORT" of the head.
        head: whether this node is the head.
        expected: number of nodes of the complete Ray cluster.
        ray_version: the required version; null for any.
        token: whether token authentication is on.
        command: the words of the command line after `ray`.
        entrypoint: file that appears when `ray symmetric-run` has its cluster up (see `hold`); null for `ray start`.
    """
    order = json.loads(argv[0])
    report = _Reporter(order["report_fd"])
    try:
        import ray
        from ray.scripts import scripts
    except ImportError as error:
        message = "Ray cannot be imported by %s: %s" % (sys.executable, error)
        if error.name == "ray":
            wanted = "==" + order["ray_version"] if order["ray_version"] else ">=2.52"
            message += "; install it there: %s -m pip install 'ray[default]%s'" % (sys.executable, wanted)
        report(event=Report.ENVIRONMENT, message=message)
        return 1
    command = order["command"]
    refusal = refuse_version(ray.__version__, order["ray_version"], order["token"]) or refuse_dashboard(command)
    if refusal:
        report(event=Report.ENVIRONMENT, message=refusal)
        return 1
    report(event=Report.VERSION, ray_version=ray.__version__)
    if order["audit_fd"] is not None:
        leak_check.serve(order["audit_fd"], order["gcs"], report)
    if order["prestart"] is not None:
        prestart.serve(gcs=order["gcs"], **order["prestart"])
    if order["head"]:
        threading.Thread(target=_watch, args=(order, report), daemon=True).start()
        if command[0] == "start":
            internals.move_dashboard_files(_temp_dir(command))
    else:
        _wait_for_head(order["gcs"], command)
    sys.argv = ["ray", *internals.disable_client_server(command)]
    scripts.main()  # type: ignore[no-untyped-call]
    return 0


def hold(path: str) -> int:
    """Serve as the command of `ray symmetric-run`: make the file `path`, which says that the Ray cluster is up, and never end.

    `ray symmetric-run` keeps the cluster up as long as its command runs. It does not run the payload itself, because it also
    exits with 0 when Ray did not start (Ray 2.60).
    """
    with open(path, "x"):
        pass
    while True:
        signal.pause()


def refuse_version(found: str, wanted: Optional[str], token: bool) -> Optional[str]:
    """Why the version `found` of Ray cannot be used, as a sentence; None if it can.

    Args:
        found: the version in this Python environment.
        wanted: the required version; None for any.
        token: whether token authentication is on.
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
    """Why Ray's dashboard cannot run, as a sentence; None if it can, or if `command` does not ask for the dashboard."""
    if "--include-dashboard=true" not in command:
        return None
    problem = internals.dashboard_problem()
    if problem is None:
        return None
    return "Ray has no dashboard for %s (%s): install ray[default] there, or set RayLauncher(dashboard=False)" % (
        sys.executable,
        problem,
    )


def lacks_tokens(version: str) -> bool:
    """Whether a version of Ray, such as "2.60.0rc1", is too old for token authentication; False if it cannot be parsed."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (int(found.group(1)), int(found.group(2))) < TOKEN_SINCE


class _Reporter:
    """Sends reports to the runtime as JSON lines; any thread may call it."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)  # Ray's daemons must not keep the pipe open after this process has ended.
        self._file = os.fdopen(fd, "w", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()

    def __call__(self, **event: Any) -> None:
        with self._lock:
            self._file.write(json.dumps(event) + "\n")


def _watch(order: Mapping[str, Any], report: _Reporter) -> None:
    """On the head: report each change of the node table, the start of the entrypoint, and requests that no node can grant."""
    gcs, expected, entrypoint, command = order["gcs"], order["expected"], order["entrypoint"], order["command"]
    try:
        _wait_for_port(gcs)
        client = internals.connect_gcs(gcs)
        internals.publish_head(client, _temp_dir(command), "--include-dashboard=false" not in command)
        known: Optional[Nodes] = None
        demand = _DemandReporter(client, report)
        while True:
            nodes = _nodes(client)
            if nodes is not None and nodes != known:
                report(event=Report.NODES, nodes=nodes)
                known = nodes
            elif nodes is None and known is not None and _refuses(gcs):
                # `ray start` watches its processes as well, but begins with that only seconds later.
                return report(event=Report.GCS_LOST)
            if entrypoint and os.path.exists(entrypoint):
                report(event=Report.ENTRYPOINT)
                entrypoint = None
            demand.poll(known or {})
            complete = known is not None and sum(node["alive"] for node in known.values()) >= expected
            time.sleep(_SLOW if complete and not entrypoint else _FAST)
    except BaseException as error:
        report(event=Report.WATCH_FAILED, message="%s: %s" % (type(error).__name__, error))


class _DemandReporter:
    """Reports requests for resources that no node can ever grant; each request once, until it is gone."""

    def __init__(self, client: Any, report: _Reporter) -> None:
        self._client = client
        self._report = report
        self._next = 0.0
        self._before: List[str] = []
        self._reported: List[str] = []

    def poll(self, nodes: Nodes) -> None:
        """If some seconds have passed since the last poll, ask the GCS which requests wait, and report what can never be granted.

        A request is reported only when two polls in a row find it, because a node that has just joined may grant it.
        """
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _DEMAND_INTERVAL
        try:
            found = unschedulable.unschedulable(*internals.pending_demand(self._client, nodes))
        except Exception:  # Ray's errors have no common public base class. The next poll may succeed.
            return
        lasting, self._before = [each for each in found if each in self._before], found
        for sentence in lasting:
            if sentence not in self._reported:
                self._report(event=Report.UNSCHEDULABLE, message=sentence)
        self._reported = lasting


def _wait_for_head(gcs: str, command: List[str]) -> None:
    """On a worker node: wait until it may join, because the head has published where its files are, or is alive."""
    _wait_for_port(gcs)
    client = internals.connect_gcs(gcs)
    while not any(node["head"] and node["alive"] for node in (_nodes(client) or {}).values()):
        time.sleep(_FAST)
        # `ray symmetric-run` calls `ray start` in another process, where `assume_head` would have no effect.
        head = internals.published_head(client) if command[0] == "start" else None
        if head is not None:
            return internals.assume_head(head)


def _temp_dir(command: List[str]) -> str:
    (word,) = [word for word in command if word.startswith(_TEMP_DIR)]
    return word[len(_TEMP_DIR) :]


def _wait_for_port(gcs: str) -> None:
    """Wait until the GCS listens at "HOST:PORT". The constructor of Ray's own client would retry more slowly."""
    while True:
        try:
            return _connect(gcs, 1.0)
        except OSError:
            time.sleep(_FAST)


def _refuses(gcs: str) -> bool:
    """Whether the GCS at "HOST:PORT" refuses connections, so that it must have ended; False if it is only slow."""
    try:
        _connect(gcs, 2.0)
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def _connect(gcs: str, timeout: float) -> None:
    host, _, port = gcs.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=timeout).close()


def _nodes(client: Any) -> Optional[Nodes]:
    """Ray's node table; None while the GCS does not answer."""
    try:
        return internals.node_table(client)
    except Exception as error:  # Ray's RPC errors have no common public base class.
        print("rayslurm: the GCS does not answer: %s" % error, file=sys.stderr)
        return None
