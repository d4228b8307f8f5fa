"""`ray start --block` on one node, in the environment's Python, reporting the cluster to the runtime.

`ray start` runs in this very process, on the head with a thread beside it that asks the GCS for its nodes. So the
import of Ray is paid once (on a worker while the head starts), and the cluster counts as alive as soon as the GCS says
so, seconds before `ray start` returns. Facts about Ray's private API were read in and tried on Ray 2.60.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import socket
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any, Dict, List, Mapping, Optional, Tuple

from ..protocol.spec import LABEL
from . import leak_check, prestart, unschedulable

TOKEN_SINCE = (2, 52)
"""First Ray version with token authentication."""

_FAST, _SLOW = 0.02, 1.0
_PENDING = 7.0
"""Seconds between two looks at what waits for resources; each takes a millisecond or two."""
_NOT_IN = 2  # LABEL_OPERATOR_NOT_IN in Ray's common.proto.
_MISSING = "get_ray_client_dependency_error"
"""Ray's function that tells what the server of Ray Client lacks, in its module of commands."""
_HEAD_INFO = "get_all_node_info_until_retrieved"
"""Ray's function that asks for the head, in its module of nodes."""
_START = "start_ray_process"
"""Ray's function that starts each of its processes, in its module of services."""
_TEMP_DIR = "--temp-dir="
_ALIVE = 0  # GcsNodeInfo.ALIVE in Ray's gcs.proto.


def main(argv: List[str]) -> int:
    """Run `ray start` as told; `argv` is one JSON object.

    Keys: `report_fd` (where JSON lines go), `audit_fd` (where questions for an audit come from, or null on a worker), `prestart`
    (arguments of `prestart.serve`, or null), `gcs`
    ("HOST:PORT" of the head), `head` (whether this is it), `expected`
    (number of nodes), `ray_version` (required one, or null), `token` (whether authentication is on), `command` (the words
    after `ray`), `entrypoint` (a file that `ray symmetric-run` makes when its cluster is up, or null).
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
        report(event="environment", message=message)
        return 1
    refusal = refuse_version(ray.__version__, order["ray_version"], order["token"]) or refuse_dashboard(ray, order["command"])
    if refusal:
        report(event="environment", message=refusal)
        return 1
    report(event="version", ray_version=ray.__version__)
    if order["audit_fd"] is not None:
        leak_check.serve(order["audit_fd"], order["gcs"], report)
    if order["prestart"] is not None:
        prestart.serve(gcs=order["gcs"], **order["prestart"])
    if order["head"]:
        threading.Thread(target=_watch, args=(order, report), daemon=True).start()
        keep_dashboard_inside(order["command"])
    else:
        _join_early(order["gcs"], order["command"])
    sys.argv = ["ray", *without_client_server(scripts, order["command"])]
    scripts.main()  # type: ignore[no-untyped-call]
    return 0


def keep_dashboard_inside(command: List[str]) -> None:
    """Have the dashboard's temporary files where all of Ray's files are, which go with the cluster.

    Ray 2.60's dashboard forks its modules from a server of Python's multiprocessing, whose directory in TMPDIR stays when it
    is killed. Tasks and actors keep the TMPDIR that they were given.
    """
    from ray._private import ray_constants, services

    start = getattr(services, _START, None)
    if command[0] != "start" or start is None:
        return

    def start_inside(words: List[str], process_type: str, *args: Any, **options: Any) -> Any:
        if process_type == ray_constants.PROCESS_TYPE_DASHBOARD:
            options["env_updates"] = {**(options.get("env_updates") or {}), "TMPDIR": _temp_dir(command)}
        return start(words, process_type, *args, **options)

    setattr(services, _START, start_inside)


def _temp_dir(command: List[str]) -> str:
    (word,) = [word for word in command if word.startswith(_TEMP_DIR)]
    return word[len(_TEMP_DIR) :]


def without_client_server(scripts: Any, command: List[str]) -> List[str]:
    """Have `ray start` do without the server of Ray Client: drivers run on the nodes, and it costs a CPU second and a port.

    Ray 2.60 starts it wherever `grpcio` is installed, with no option against it, and refuses an option for its port where
    `grpcio` is not. `ray symmetric-run` calls `ray start` in processes that nothing here reaches.

    Args:
        scripts: Ray's module of commands.
        command: the words after `ray`.

    Returns:
        The words that suit.
    """
    if command[0] == "start" and hasattr(scripts, _MISSING):
        setattr(scripts, _MISSING, lambda: "not wanted")
    if getattr(scripts, _MISSING, lambda: None)() is None:
        return command  # It is started, and must not take the port that all have in common.
    return [word for word in command if not word.startswith("--ray-client-server-port=")]


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


def refuse_dashboard(ray: Any, command: List[str]) -> Optional[str]:
    """Why the dashboard that a command asks for cannot be had, or None; Ray 2.60 says so where nobody looks."""
    lacks = getattr(ray._private.utils, "get_dashboard_dependency_error", lambda: None)()
    if "--include-dashboard=true" not in command or lacks is None:
        return None
    return "Ray has no dashboard for %s (%s): install ray[default] there, or set RayLauncher(dashboard=False)" % (
        sys.executable,
        lacks,
    )


def lacks_tokens(version: str) -> bool:
    """Whether a version of Ray, such as "2.60.0rc1", has no token authentication; one that cannot be read has it."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (int(found.group(1)), int(found.group(2))) < TOKEN_SINCE


class _Reporter:
    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)  # Ray's daemons must not hold it open.
        self._file = os.fdopen(fd, "w", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()

    def __call__(self, **event: Any) -> None:
        with self._lock:
            self._file.write(json.dumps(event) + "\n")


def _watch(order: Mapping[str, Any], report: _Reporter) -> None:
    """Report the table of nodes whenever it changes, and that the entrypoint has started."""
    gcs, expected, entrypoint = order["gcs"], order["expected"], order["entrypoint"]
    try:
        # Its constructor retries for tens of seconds when nobody listens yet, so the port is tried first.
        _wait_for_port(gcs)
        client = _gcs_client(gcs)
        _tell_early(client, order["command"])
        known: Optional[Dict[str, Any]] = None
        pending = _Pending(client, report)
        while True:
            nodes = _nodes(client)
            if nodes is not None and nodes != known:
                report(event="nodes", nodes=nodes)
                known = nodes
            elif nodes is None and known is not None and _refuses(gcs):
                # `ray start` looks after its processes too, but not before it has come to its end, seconds later.
                return report(event="gcs-lost")
            if entrypoint and os.path.exists(entrypoint):
                report(event="entrypoint")
                entrypoint = None
            pending.look(known or {})
            complete = known is not None and sum(node["alive"] for node in known.values()) >= expected
            time.sleep(_SLOW if complete and not entrypoint else _FAST)
    except BaseException as error:
        report(event="watch-failed", message="%s: %s" % (type(error).__name__, error))


class _Pending:
    """Reports what is asked of the cluster and no node can ever grant, once for as long as it is asked.

    Args:
        client: asks the GCS.
        report: tells the runtime.
    """

    def __init__(self, client: Any, report: _Reporter) -> None:
        self._client = client
        self._report = report
        self._next = 0.0
        self._before: List[str] = []
        self._told: List[str] = []

    def look(self, nodes: Mapping[str, Any]) -> None:
        """Ask if it is time; what was there twice is told, since a node that has just joined may yet grant it."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _PENDING
        try:
            found = unschedulable.unschedulable(*_asked(self._client, nodes))
        except Exception:  # A Ray that cannot be asked this has no common error; it is asked the next time.
            return
        lasting, self._before = [each for each in found if each in self._before], found
        for sentence in lasting:
            if sentence not in self._told:
                self._report(event="unschedulable", message=sentence)
        self._told = lasting


def _asked(
    client: Any, nodes: Mapping[str, Any]
) -> Tuple[List[unschedulable.Request], List[unschedulable.Group], List[unschedulable.Node]]:
    """What is asked for and not granted yet, and what the nodes have: what Ray tells its autoscaler (Ray 2.60)."""
    messages: Any = importlib.import_module("ray.core.generated.autoscaler_pb2")
    reply = messages.GetClusterResourceStateReply.FromString(client.get_cluster_resource_state(timeout_s=2))
    state = reply.cluster_resource_state

    def request(asked: Any) -> unschedulable.Request:
        labels = tuple(
            tuple((rule.label_key, rule.operator != _NOT_IN, tuple(rule.label_values)) for rule in selector.label_constraints)
            for selector in asked.label_selectors
        )
        return unschedulable.Request(dict(asked.resources_bundle), labels)

    requests = [request(each.request) for each in state.pending_resource_requests]
    # `details` is "ID:STRATEGY|STATE".
    groups = [
        unschedulable.Group(each.details.rpartition(":")[2].partition("|")[0], [request(bundle) for bundle in each.requests])
        for each in state.pending_gang_resource_requests
    ]
    alive = [(each.node_id.hex(), each) for each in state.node_states if each.status != messages.DEAD]
    there = [
        unschedulable.Node(nodes.get(name, {}).get("hostname", name), dict(each.total_resources), dict(each.labels))
        for name, each in alive
    ]
    return requests, groups, there


def _tell_early(client: Any, command: List[str]) -> None:
    """Write what others would wait for, though it is known already; without it, some seconds are all that is lost.

    Where there is no dashboard, Ray 2.60 waits a second for a process that writes just that. Workers would wait for the
    head's raylet, which tells them where the head's files are.
    """
    with contextlib.suppress(Exception):
        from ray._private import ray_constants

        if "--include-dashboard=false" in command:
            client.internal_kv_put(ray_constants.DASHBOARD_ADDRESS.encode(), b"", False, ray_constants.KV_NAMESPACE_DASHBOARD)
        client.internal_kv_put(_TEMP_DIR.encode(), _temp_dir(command).encode(), False, ray_constants.KV_NAMESPACE_SESSION)


def _join_early(gcs: str, command: List[str]) -> None:
    """Wait until a worker may join: when the head has said where its files are, or else is alive.

    `ray start --address` wants to know no more of the head than that, and asks for it in steps of two seconds (Ray 2.60).
    What `ray symmetric-run` calls has nobody to tell it sooner.
    """
    from ray._private import node

    _wait_for_port(gcs)
    client = _gcs_client(gcs)
    head = None
    while head is None and not any(each["head"] and each["alive"] for each in (_nodes(client) or {}).values()):
        time.sleep(_FAST)
        head = _told_early(client) if command[0] == "start" else None
    if head is not None:
        setattr(node, _HEAD_INFO, lambda *_, **__: [head])


def _told_early(client: Any) -> Optional[SimpleNamespace]:
    """What `_tell_early` has written of the head, in the words of Ray's own table; None if it has not yet."""
    from ray._private import node, ray_constants

    told: List[Optional[bytes]] = []
    with contextlib.suppress(Exception):  # The GCS does not answer yet.
        told = [client.internal_kv_get(key, ray_constants.KV_NAMESPACE_SESSION) for key in (_TEMP_DIR.encode(), b"session_name")]
    if not told or not all(told) or not hasattr(node, _HEAD_INFO):
        return None
    temp_dir, session = (each.decode() for each in told if each)
    return SimpleNamespace(state=_ALIVE, temp_dir=temp_dir, session_dir=os.path.join(temp_dir, session))


def _wait_for_port(gcs: str) -> None:
    host, _, port = gcs.rpartition(":")
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
            return
        except OSError:
            time.sleep(_FAST)


def _refuses(gcs: str) -> bool:
    """Whether nobody listens any more; a GCS that is only slow still does."""
    host, _, port = gcs.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2.0).close()
        return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


def _gcs_client(gcs: str) -> Any:
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    return GcsClient(address=gcs)


def _nodes(client: Any) -> Optional[Dict[str, Any]]:
    """Nodes by id, or None while the GCS does not answer."""
    try:
        infos = client.get_all_node_info(timeout=2)
    except Exception as error:  # Ray's RPC errors have no common public base.
        print("rayslurm: the GCS does not answer: %s" % error, file=sys.stderr)
        return None
    return {
        node_id.hex(): {
            "alive": info.state == _ALIVE,
            "head": bool(info.is_head_node),
            "hostname": info.node_manager_hostname,
            "address": info.node_manager_address,
            "resources": dict(info.resources_total),
            "component": dict(getattr(info, "labels", {})).get(LABEL),
        }
        for node_id, info in infos.items()
    }
