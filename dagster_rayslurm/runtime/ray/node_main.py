"""The process that runs `ray start --block` (or `ray symmetric-run`) on one node and reports to the runtime.

`ray start` runs in this very process; on the head a thread beside it polls the GCS for its nodes. So the import of Ray is
paid once (on a worker while the head starts), and the cluster counts as alive as soon as the GCS says so, seconds before
`ray start` returns.
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
"""First Ray version with token authentication."""

_FAST, _SLOW = 0.02, 1.0
"""Seconds between two polls of the node table: until the cluster is complete, and from then on."""
_DEMAND_INTERVAL = 7.0
"""Seconds between two polls of what waits for resources; each takes a millisecond or two."""
_TEMP_DIR = "--temp-dir="


def main(argv: List[str]) -> int:
    """Run Ray as one JSON object in `argv` says.

    Keys:
        report_fd: where events go as JSON lines.
        audit_fd: where queries of the leak check come from; null on a worker.
        prestart: arguments of `prestart.serve`, or null.
        gcs: "HOST:PORT" of the head.
        head: whether this node is the head.
        expected: number of nodes of the complete cluster.
        ray_version: the required version, or null.
        token: whether token authentication is on.
        command: the words after `ray`.
        entrypoint: file that `ray symmetric-run` makes when its cluster is up, or null.
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
    """The command that `ray symmetric-run` runs: make a file, which says that the cluster is up, and keep the cluster up.

    The payload is not this command, because `ray symmetric-run` exits with 0 as well when Ray did not start (Ray 2.60).
    """
    with open(path, "x"):
        pass
    while True:
        signal.pause()


def refuse_version(found: str, wanted: Optional[str], token: bool) -> Optional[str]:
    """Why this version of Ray cannot be used, or None."""
    if wanted and found != wanted:
        return "Ray %s is installed for %s, and ray_version asks for %s" % (found, sys.executable, wanted)
    if token and lacks_tokens(found):
        return (
            "Ray %s has no token authentication (Ray 2.52 has it), so anybody who reaches this node could run code as "
            'you: upgrade Ray, or accept that with RayLauncher(auth="disabled")' % found
        )
    return None


def refuse_dashboard(command: List[str]) -> Optional[str]:
    """Why the dashboard that a command asks for cannot run, or None."""
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
    """Whether a version of Ray, such as "2.60.0rc1", has no token authentication; one that cannot be parsed has it."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (int(found.group(1)), int(found.group(2))) < TOKEN_SINCE


class _Reporter:
    """Writes events to the runtime, from any thread."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)  # Ray's daemons must not hold it open.
        self._file = os.fdopen(fd, "w", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()

    def __call__(self, **event: Any) -> None:
        with self._lock:
            self._file.write(json.dumps(event) + "\n")


def _watch(order: Mapping[str, Any], report: _Reporter) -> None:
    """Report the node table when it changes, the start of the entrypoint, and demand that no node can grant."""
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
                # `ray start` watches its processes too, but only once it has returned, seconds later.
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
    """Reports demand that no node can ever grant, once for as long as it lasts."""

    def __init__(self, client: Any, report: _Reporter) -> None:
        self._client = client
        self._report = report
        self._next = 0.0
        self._before: List[str] = []
        self._reported: List[str] = []

    def poll(self, nodes: Nodes) -> None:
        """Ask the GCS if it is time. Demand is reported the second time it is found: a node that just joined may grant it."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _DEMAND_INTERVAL
        try:
            found = unschedulable.unschedulable(*internals.pending_demand(self._client, nodes))
        except Exception:  # Ray's errors have no common public base; the next poll may succeed.
            return
        lasting, self._before = [each for each in found if each in self._before], found
        for sentence in lasting:
            if sentence not in self._reported:
                self._report(event=Report.UNSCHEDULABLE, message=sentence)
        self._reported = lasting


def _wait_for_head(gcs: str, command: List[str]) -> None:
    """Wait until a worker may join: the head has published where its files are, or is alive."""
    _wait_for_port(gcs)
    client = internals.connect_gcs(gcs)
    while not any(node["head"] and node["alive"] for node in (_nodes(client) or {}).values()):
        time.sleep(_FAST)
        # `ray symmetric-run` calls `ray start` in another process, which has to ask Ray itself.
        head = internals.published_head(client) if command[0] == "start" else None
        if head is not None:
            return internals.assume_head(head)


def _temp_dir(command: List[str]) -> str:
    (word,) = [word for word in command if word.startswith(_TEMP_DIR)]
    return word[len(_TEMP_DIR) :]


def _wait_for_port(gcs: str) -> None:
    """Wait until somebody listens: the constructor of Ray's client retries for tens of seconds, slowly."""
    while True:
        try:
            return _connect(gcs, 1.0)
        except OSError:
            time.sleep(_FAST)


def _refuses(gcs: str) -> bool:
    """Whether nobody listens any more; a GCS that is only slow still does."""
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
    """The node table, or None while the GCS does not answer."""
    try:
        return internals.node_table(client)
    except Exception as error:  # Ray's RPC errors have no common public base.
        print("rayslurm: the GCS does not answer: %s" % error, file=sys.stderr)
        return None
