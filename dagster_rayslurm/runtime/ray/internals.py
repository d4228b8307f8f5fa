"""All calls of Ray's private or generated APIs by the runtime, in one place.

The calls are written for Ray 2.52 (the first with token authentication) and newer, and tried on 2.60. Older versions work with
`auth="disabled"` as far as they have the same names. `tests/runtime/test_ray_internals.py` calls each function with the installed
Ray. Each function imports what the function needs of Ray, because the runtime itself never imports Ray.

Other files that know Ray's internals: `payload/preload_child.py`, which cannot import the runtime, `node/usage.py` (names of
worker logs) and `payload/environment.py` (the raylet's command line).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import time
from types import SimpleNamespace
from typing import Any, Dict, Iterable, List, Mapping, Optional, Set

from ..node.network import join_host_port
from ..protocol.spec import COMPONENT_LABEL, JOB_MARK
from .feasibility import Bundle, Node, Rule, can_hold, fits
from .membership import Nodes

# Make the raylet look for its object store every 20 ms instead of every second, for 10 s at most as before (Ray 2.60).
RAYLET_ENVIRON = {
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
    "RAY_raylet_client_num_connect_attempts": "500",
}
# Variable of the raylet; "0" keeps it from starting one worker per CPU for each new driver, even if idle workers wait. Those
# workers take the CPU time that the driver needs for its first task.
PRESTART_AT_FIRST_DRIVER = "RAY_prestart_worker_first_driver"

_ALIVE = 0  # GcsNodeInfo.ALIVE in gcs.proto
_GROUP_REMOVED = 3  # PlacementGroupTableData.REMOVED in gcs.proto
_NODE_DEAD = 2  # NodeStatus.DEAD in autoscaler.proto
_NOT_IN = 2  # LABEL_OPERATOR_NOT_IN in common.proto
_LIVING_ACTORS = ("ALIVE", "RESTARTING", "PENDING_CREATION", "DEPENDENCIES_UNREADY")  # All states except dead.
_CLIENT_SERVER = "get_ray_client_dependency_error"  # Function that returns what the Ray Client server lacks to run.
_HEAD_INFO = "get_all_node_info_until_retrieved"  # Function of `ray start --address` that asks for the head's row of the table.
_TEMP_DIR_KEY = b"rayslurm_temp_dir"  # Key under which the head writes its temporary directory to the GCS, for the worker nodes.
# Prefix of the name of the actor that runs a job of `ray job submit`; the job's id follows.
_SUBMITTED = "_ray_internal_job_actor_"
# Libraries of Ray whose detached actors are no leaks: later payloads use them too, and would fail without them.
_SHARED_LIBRARIES = ("ray.data.", "ray.train.", "ray.tune.", "ray.llm.")
_TIMEOUT = 5.0  # Seconds that a request about idle workers may take.
_IDLE_WORKERS = 600  # Seconds after which Ray may end an idle worker, if there are more idle workers than CPUs.
_MOST_NAMES = 4  # Most nodes, or bundles of a placement group, that one message names.


def _module(name: str) -> Any:
    return importlib.import_module(name)


def installed_version() -> Optional[str]:
    """Returns the version of Ray in this Python environment without importing Ray; None if Ray is missing or unreadable."""
    importlib.invalidate_caches()
    with contextlib.suppress(ImportError, OSError, ValueError):  # Perhaps the file system is unavailable for a moment.
        spec = importlib.util.find_spec("ray")
        if spec is not None and spec.origin is not None:
            with open(os.path.join(os.path.dirname(spec.origin), "_version.py"), encoding="utf-8") as file:
                found = re.search(r"^version\s*=\s*[\"'](.+?)[\"']", file.read(), re.MULTILINE)
            return found.group(1) if found is not None else None
    return None


# ---- Before `ray start`


def dashboard_problem() -> Optional[str]:
    """Returns an error text if packages that Ray's dashboard needs are missing; None if all are installed.

    Ray 2.60 itself reports missing packages only in the dashboard's log.
    """
    problem = getattr(_module("ray._private.utils"), "get_dashboard_dependency_error", lambda: None)()
    return None if problem is None else str(problem)


def disable_client_server(command: List[str]) -> List[str]:
    """Keep `ray start` in this process from starting the Ray Client server; returns the command to use instead of `command`.

    The server costs a second of CPU time and a port. `command` has the words after `ray`. If the server will not start, the
    result lacks the option for the server's port, because Ray 2.60 then refuses this option. `ray symmetric-run` calls
    `ray start` in other processes, so there the server still starts.
    """
    scripts = _module("ray.scripts.scripts")
    if command[0] == "start" and hasattr(scripts, _CLIENT_SERVER):
        setattr(scripts, _CLIENT_SERVER, lambda: "disabled")
    if getattr(scripts, _CLIENT_SERVER, lambda: None)() is None:
        return command  # The server will be started, and must not take the default port, which other Ray clusters may use.
    return [word for word in command if not word.startswith("--ray-client-server-port=")]


def skip_dashboard() -> None:
    """Keep `ray start`, when it runs in this process later, from starting the dashboard's process.

    Ray 2.60 starts the process even if the dashboard is disabled. The process then only reports usage statistics, and costs a
    second of CPU time and 100 MB.
    """
    _module("ray._private.node").Node.start_api_server = lambda *_, **__: None


def move_dashboard_files(temp_dir: str) -> None:
    """Make the dashboard that `ray start` starts from this process keep its temporary files in `temp_dir`.

    `temp_dir` is removed with the Ray cluster. Otherwise a directory of Python's multiprocessing, which the dashboard of Ray 2.60
    uses, would stay in TMPDIR when the dashboard is killed. The TMPDIR of tasks and actors does not change.
    """
    constants, services = _module("ray._private.ray_constants"), _module("ray._private.services")
    start = services.start_ray_process  # Starts each of Ray's daemons.

    def start_inside(words: List[str], process_type: str, *args: Any, **options: Any) -> Any:
        if process_type == constants.PROCESS_TYPE_DASHBOARD:
            options["env_updates"] = {**(options.get("env_updates") or {}), "TMPDIR": temp_dir}
        return start(words, process_type, *args, **options)

    services.start_ray_process = start_inside


# ---- The GCS: Ray's control service on the head, which knows nodes, jobs, actors and placement groups


def connect_gcs(gcs: str) -> Any:
    """Returns Ray's client of the GCS at "HOST:PORT"; if nothing listens there, the client retries for tens of seconds."""
    return _module("ray._raylet").GcsClient(address=gcs)


def node_table(client: Any) -> Nodes:
    """Returns Ray's node table: for each node a dictionary, such as `{"alive": True, "head": False, "hostname": "c1", ...}`.

    The keys of the table are Ray's ids of the nodes. `client` is the result of `connect_gcs`. Raises one of Ray's RPC errors,
    which have no common public base class, if the GCS does not answer.
    """
    return {
        node_id.hex(): {
            "alive": info.state == _ALIVE,
            "head": bool(info.is_head_node),
            "hostname": info.node_manager_hostname,
            "address": info.node_manager_address,
            "resources": dict(info.resources_total),
            "component": dict(getattr(info, "labels", {})).get(COMPONENT_LABEL),
        }
        for node_id, info in client.get_all_node_info(timeout=2).items()
    }


def publish_head(client: Any, temp_dir: str, dashboard: bool) -> None:
    """Write facts about the head node to the GCS early, so that other processes need not wait seconds for Ray to do this.

    The function always writes `temp_dir`, the head's temporary directory, which worker nodes read by `published_head`. If
    `dashboard` is False, the function also writes an empty address of the dashboard, because Ray 2.60 would wait a second for
    this address. `client` is the result of `connect_gcs`. Errors are ignored.
    """
    with contextlib.suppress(Exception):
        constants = _module("ray._private.ray_constants")
        if not dashboard:
            client.internal_kv_put(constants.DASHBOARD_ADDRESS.encode(), b"", False, constants.KV_NAMESPACE_DASHBOARD)
        client.internal_kv_put(_TEMP_DIR_KEY, temp_dir.encode(), False, constants.KV_NAMESPACE_SESSION)


def published_head(client: Any) -> Optional[SimpleNamespace]:
    """Returns what `publish_head` wrote about the head node, as a row of Ray's node table; None if it is not there yet.

    `client` is the result of `connect_gcs`. Errors count as "not there yet".
    """
    with contextlib.suppress(Exception):  # The GCS does not answer yet.
        namespace = _module("ray._private.ray_constants").KV_NAMESPACE_SESSION
        temp_dir, session = (client.internal_kv_get(key, namespace) for key in (_TEMP_DIR_KEY, b"session_name"))
        if temp_dir and session and hasattr(_module("ray._private.node"), _HEAD_INFO):
            session_dir = os.path.join(temp_dir.decode(), session.decode())
            return SimpleNamespace(state=_ALIVE, temp_dir=temp_dir.decode(), session_dir=session_dir)
    return None


def assume_head(head: SimpleNamespace) -> None:
    """Patch Ray for the rest of this process: a later `ray start --address` takes `head` as the head's row of the node table.

    Ray 2.60 would otherwise wait until the GCS has the row. `head` is the result of `published_head`.
    """
    setattr(_module("ray._private.node"), _HEAD_INFO, lambda *_, **__: [head])


# ---- Tasks, actors and placement groups that no node can ever hold; Ray lets them wait without a message


def unschedulable(client: Any) -> Dict[str, str]:
    """Finds the tasks, actors and placement groups that wait for resources which the nodes can never grant.

    The result is that of `misfits`: sentences by key. `client` is the result of `connect_gcs`. Raises one of Ray's RPC errors,
    which have no common public base class, if the GCS does not answer.
    """
    hostnames = {node_id: str(node["hostname"]) for node_id, node in node_table(client).items()}
    reply = _module("ray.core.generated.autoscaler_pb2").GetClusterResourceStateReply
    answer = reply.FromString(client.get_cluster_resource_state(timeout_s=2))
    return misfits(answer.cluster_resource_state, hostnames)


def misfits(state: Any, hostnames: Mapping[str, str]) -> Dict[str, str]:
    """Returns sentences about what waits for resources that the nodes could not grant even if nothing else ran.

    All tasks and actors with the same request have one sentence, and so have all placement groups with the same request. The
    key of a sentence names the request and the number of living nodes; it does not change with the number of waiting tasks.

    `state` is a `ClusterResourceState`, a message of Ray's interface for autoscalers. `hostnames` has the host names of the
    nodes by Ray's id. The function has no side effects.
    """
    living = [node for node in state.node_states if node.status != _NODE_DEAD]
    nodes = [Node(dict(node.total_resources), dict(node.labels)) for node in living]
    # A task inside a placement group waits until the group is placed.
    alone = [each for each in state.pending_resource_requests if not any("_group_" in it for it in each.request.resources_bundle)]
    waiting: Dict[str, str] = {}  # What waits, by its key.
    counts: Dict[str, int] = {}
    asked: Set[str] = set()
    for each in alone:
        bundle, words = _bundle(each.request), _words(each.request)
        asked |= set(bundle.resources)
        if not any(fits(bundle, node) for node in nodes):
            counts[words] = counts.get(words, 0) + max(1, each.count)
            missing = [name for name in sorted(bundle.resources) if all(not node.resources.get(name) for node in nodes)]
            lack = "the cluster has no %s" % " and no ".join(missing) if missing else "no node has that"
            many = "%d tasks or actors wait for %s each" % (counts[words], words)
            waiting[words] = "%s, and %s" % (many if counts[words] > 1 else "a task or actor waits for " + words, lack)
    for group in state.pending_gang_resource_requests:
        strategy = group.details.rpartition(":")[2].partition("|")[0]  # "ID:STRATEGY|STATE"
        bundles = [_bundle(each) for each in group.requests]
        asked |= {name for bundle in bundles for name in bundle.resources}
        words = ", ".join("{%s}" % _words(each) for each in group.requests[:_MOST_NAMES]) + ", …" * (len(bundles) > _MOST_NAMES)
        what = "a placement group (%s) waits for %d bundles, %s" % (strategy, len(bundles), words)
        if what not in waiting and not can_hold(bundles, strategy, nodes):
            waiting[what] = "%s, and the nodes cannot hold them" % what
    names = ["CPU", "GPU", *sorted(asked - {"CPU", "GPU"})]
    has = [
        "%s has %s" % (hostnames.get(node.node_id.hex(), "?"), _amounts(node.total_resources, names))
        for node in living[:_MOST_NAMES]
    ]
    end = " (%s). That never starts unless the launcher and the queue ask for nodes that have it"
    there = "; ".join(has) + "; …" * (len(living) > _MOST_NAMES)
    return {"%s on %d nodes" % (key, len(living)): sentence + end % there for key, sentence in waiting.items()}


def _bundle(request: Any) -> Bundle:
    selectors = (
        tuple(Rule(each.label_key, each.operator != _NOT_IN, tuple(each.label_values)) for each in selector.label_constraints)
        for selector in request.label_selectors
    )
    return Bundle(dict(request.resources_bundle), tuple(selectors))


def _words(request: Any) -> str:
    words = [_amount(name, amount) for name, amount in sorted(request.resources_bundle.items())]
    for rule in request.label_selectors[0].label_constraints if request.label_selectors else ():
        relation = "!=" if rule.operator == _NOT_IN else "="
        words.append("label %s %s %s" % (rule.label_key, relation, " or ".join(rule.label_values)))
    return ", ".join(words)


def _amounts(resources: Mapping[str, float], names: Iterable[str]) -> str:
    return ", ".join(_amount(name, resources.get(name, 0.0)) for name in names)


def _amount(name: str, amount: float) -> str:
    memory = name in ("memory", "object_store_memory")
    return "%s: %.1f GiB" % (name, amount / 2**30) if memory else "%s: %g" % (name, amount)


def _sum(rows: Iterable[Mapping[str, float]]) -> Dict[str, float]:
    total: Dict[str, float] = {}
    for row in rows:
        for name, amount in row.items():
            total[name] = total.get(name, 0.0) + amount
    return total


# ---- What is alive in the cluster


def connect_state(gcs: str) -> Any:
    """Returns a new client for the tables of the GCS at `gcs` ("HOST:PORT"), for `living_things`.

    Ray's public alternatives have side effects: `ray.util.state` needs the dashboard, and `ray.init` makes a Ray job.
    """
    raylet = _module("ray._raylet")
    accessor = raylet.GlobalStateAccessor(raylet.GcsClientOptions.create(gcs, None, True, True))
    accessor.connect()
    return accessor


def living_things(accessor: Any) -> Dict[str, Any]:
    """Returns the tables in which leaks of payloads are found, as a dictionary for JSON. `accessor` comes from `connect_state`.

    `jobs` has the nonce (random name) of the payload for each Ray job id. `living` has detached actors, placement groups that
    outlive their job, and running jobs of `ray job submit`. `available` and `total` have the free and the total amounts by name
    of resource.
    """
    messages = _module("ray.core.generated.gcs_pb2")
    # Without these options the GCS asks every driver, also stopped ones, whether it is busy.
    skip = {"skip_submission_job_info_field": True, "skip_is_running_tasks_field": True}
    jobs = map(messages.JobTableData.FromString, accessor.get_job_table(**skip))
    # The GCS remembers up to 100000 dead actors, which take seconds to read.
    rows = [row for state in _LIVING_ACTORS for row in accessor.get_actor_table(None, state)]
    actors = [actor for actor in map(messages.ActorTableData.FromString, rows) if actor.is_detached]
    owners = {actor.actor_id for actor in actors}
    living = [_living_actor(actor) for actor in actors if not _is_shared(actor)]
    for group in map(messages.PlacementGroupTableData.FromString, accessor.get_placement_group_table()):
        # Other placement groups end with the job or the actor that made them.
        if group.state != _GROUP_REMOVED and (group.is_detached or group.creator_actor_id in owners):
            group_id = group.placement_group_id.hex()
            title = "%r (namespace %r)" % (group.name, group.ray_namespace) if group.name else group_id
            living.append({"kind": "group", "id": group_id, "title": title, "job": group.creator_job_id.hex(), "since": 0.0})
    available = map(messages.AvailableResources.FromString, accessor.get_all_available_resources())
    total = map(messages.TotalResources.FromString, accessor.get_all_total_resources())
    return {
        "jobs": {job.job_id.hex(): job.config.metadata[JOB_MARK] for job in jobs if JOB_MARK in job.config.metadata},
        "living": living,
        "available": _sum(row.resources_available for row in available),
        "total": _sum(row.resources_total for row in total),
    }


def _living_actor(actor: Any) -> Dict[str, Any]:
    if actor.name.startswith(_SUBMITTED):  # An actor that is still being created has no start time.
        return {"kind": "job", "id": actor.name[len(_SUBMITTED) :], "job": "", "since": actor.start_time / 1000 or time.time()}
    names = {"name": actor.name, "namespace": actor.ray_namespace, "class": actor.class_name}
    return {"kind": "actor", "id": actor.actor_id.hex(), "job": actor.job_id.hex(), "since": 0.0, **names}


def _is_shared(actor: Any) -> bool:
    module = actor.function_descriptor.python_function_descriptor.module_name
    return module.startswith(_SHARED_LIBRARIES) and not actor.required_resources


# ---- The raylet: Ray's daemon on each node, which starts workers


def can_start_workers() -> bool:
    """Returns whether `start_workers` works with the installed packages.

    The function needs Ray's RPC `PrestartWorkers`, which older versions of Ray lack, and the package `grpcio`, a part of
    `ray[default]`.
    """
    try:
        _module("grpc")
        _module("ray._private.grpc_utils")
        return hasattr(_module("ray.core.generated.node_manager_pb2"), "PrestartWorkersRequest")
    except Exception:  # Another version of these modules may fail in any way.
        return False


def connect_raylet(gcs: str) -> Any:
    """Returns a client for the raylet on the head node of the Ray cluster whose GCS is at `gcs` ("HOST:PORT").

    The client authenticates itself with the Ray cluster's token.
    """
    nodes: List[Any] = list(connect_gcs(gcs).get_all_node_info(timeout=_TIMEOUT).values())
    head = next(node for node in nodes if node.is_head_node)
    address = join_host_port(head.node_manager_address, head.node_manager_port)
    channel = _module("ray._private.grpc_utils").init_grpc_channel(address)
    return _module("ray.core.generated.node_manager_pb2_grpc").NodeManagerServiceStub(channel)


def start_workers(raylet: Any, number: int) -> None:
    """Request that a raylet starts `number` worker processes that wait for any job.

    `raylet` is the result of `connect_raylet`.
    """
    messages = _module("ray.core.generated.node_manager_pb2")
    request = messages.PrestartWorkersRequest(num_workers=number, keep_alive_duration_secs=_IDLE_WORKERS)
    raylet.PrestartWorkers(request, timeout=_TIMEOUT)
