"""Defines the start records, the JSON files by which Dagster's side tells a runtime what to do, as frozen dataclasses.

A session is a Slurm job, or without Slurm a process, that keeps running between payloads. The head is the node on which payloads
start. The Ray cluster's head is on the same node. A heterogeneous job has components: groups of nodes that are alike. In the
separate topology, each component runs a payload and a runtime of its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass, field, replace
from typing import Any, Dict, List, Optional, Type, TypeVar, Union, get_args, get_origin, get_type_hints

from .record import RUNTIME, SECRETS

PROTOCOL_VERSION = 1  # Version of the start record, the journal and the control messages; both sides must agree on it.

JOB_MARK = "rayslurm"  # Key in the metadata of a Ray job; its value is the nonce of the payload that the job belongs to.

T = TypeVar("T")

# Environment variables that make Ray connect to a Ray cluster (Ray 2.60). The runtime sets them itself: inherited values would
# name another Ray cluster.
RAY_COORDINATES = (
    "RAY_ADDRESS",
    "RAY_API_SERVER_ADDRESS",
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
    "RAY_AUTH_TOKEN_PATH",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
)


@dataclass(frozen=True)
class NodeSpec:
    """Settings of Ray for the nodes of one component.

    Each field but `component_id` replaces the field of the same name in the Ray cluster's `RaySpec`, even if the value is None or
    empty. So None does not mean "as in that `RaySpec`"; it means the same as None in a `RaySpec`.
    """

    component_id: str
    num_cpus: Optional[int] = None
    num_gpus: Optional[int] = None
    object_store_memory: Optional[int] = None
    resources: Dict[str, float] = field(default_factory=dict)
    labels: Dict[str, str] = field(default_factory=dict)
    network_interface: Optional[str] = None
    health_check: Optional[str] = None


@dataclass(frozen=True)
class ComponentSpec:
    """One component of an allocation: its name, its number of nodes, and what was requested of Slurm for each node."""

    component_id: str
    num_nodes: int = 1
    # CPUs and GPUs that were requested for each node; None if no number was requested.
    asked_cpus: Optional[int] = None
    asked_gpus: Optional[int] = None


@dataclass(frozen=True)
class RaySpec:
    """How to start a Ray cluster; for CPUs and GPUs, None means the number that Slurm granted on the node.

    If `object_store_memory` is None, the object store gets a share of the node's memory.
    """

    num_cpus: Optional[int] = None
    num_gpus: Optional[int] = None
    object_store_memory: Optional[int] = None
    resources: Dict[str, float] = field(default_factory=dict)
    labels: Dict[str, str] = field(default_factory=dict)
    dashboard: bool = True
    auth: str = "token"  # "token", or "disabled" for no authentication.
    ray_version: Optional[str] = None  # The exact version of Ray that must be installed; None for any version.
    ray_args: List[str] = field(default_factory=list)  # Further arguments of `ray start`.
    node_ip_address: Optional[str] = None  # Address on which Ray listens on the head; None for no fixed address.
    network_interface: Optional[str] = None  # Interface whose address Ray uses; None to find an address without it.
    port_range: Optional[str] = None  # "LOW-HIGH" for all ports of Ray; None for any ports.
    startup_timeout: float = 300.0  # Seconds in which the Ray cluster must be up.
    # Built-in checks (see `node.health`) and shell commands, one in each line, which a node must pass before Ray starts there.
    health_check: Optional[str] = None
    max_workers: Optional[int] = None  # Number of worker nodes that join the head at most; None for all.
    min_nodes: Optional[int] = None  # Number of nodes that must have joined before the payload starts; None for all.
    launch_style: str = "builtin"  # "builtin" for `ray start` on each node, or "symmetric-run" for `ray symmetric-run`.
    metrics_dir: Optional[str] = None  # Directory that gets a file with the addresses of metrics; None for no such file.
    memory_guard: bool = True  # Whether the runtime kills the largest Ray worker of a node whose memory is nearly full.
    components: List[NodeSpec] = field(default_factory=list)  # The head's component first; empty if all nodes are alike.
    simulate: bool = False  # Whether Ray counts the requested CPUs and GPUs even if the machine has fewer (local mode).


@dataclass(frozen=True)
class PayloadSpec:
    """The start record of one payload: its command, environment, resources and limits."""

    argv: List[str]  # The command and its arguments.
    nonce: str  # Random name that identifies this payload to the runtime and on its nodes.
    env: Dict[str, str] = field(default_factory=dict)  # Without secret variables.
    # Variables for the network between the nodes (the setting `fabric`); they do not replace variables that the payload inherits.
    default_env: Dict[str, str] = field(default_factory=dict)
    # Directory with input files; the working directory of the payload gets a link to each entry. None for no such directory.
    working_dir: Optional[str] = None
    # Directory that outlives the run, created if missing; the payload and its Ray workers find it in RAYSLURM_DATA_DIR.
    data_dir: Optional[str] = None
    extra_files: List[str] = field(default_factory=list)  # Further input files, to which the working directory gets links.
    outputs: List[str] = field(default_factory=list)  # Shell patterns of files in the payload's directory to fetch at the end.
    max_output_bytes: int = 100 * 2**20  # Sum of the sizes of the fetched files at most.
    max_stdio_bytes: int = 2**30  # Bytes of output that the run record takes at most.
    grace_period: float = 10.0  # Seconds between SIGTERM and SIGKILL when the runtime ends the payload.
    uses_ray: bool = False
    ray: Optional[RaySpec] = None  # The Ray cluster to start for this payload alone; None for the runtime's Ray cluster.
    # The payload is forked from a process that has imported these modules; empty to start the payload in a fresh interpreter.
    preload: List[str] = field(default_factory=list)
    # CPUs and GPUs that the payload reserves on each node. If None, a payload with a Ray cluster of its own reserves all of them,
    # and any other payload reserves none.
    want_cpus: Optional[int] = None
    want_gpus: Optional[int] = None
    leaves_unhealthy: bool = False  # Whether to try the payload in another session after a failed health check.
    fails_infeasible: bool = False  # Whether the payload ends when tasks wait for what the Ray cluster can never grant.
    time_limit: Optional[float] = None  # Seconds that the payload may run; None for the time limit of the allocation.
    run_id: str = ""  # Id of the Dagster run; runs take turns in the queue of a session.
    step: str = ""  # Key of the Dagster step; a session expects a payload to take as long as the step's longest so far.


@dataclass(frozen=True)
class BarrierSpec:
    """How the runtime of one component reaches the barrier, at which the components of the separate topology wait for each other.

    The runtime of the first component is the host of the barrier: the others connect to it.
    """

    component_id: str  # This runtime's component.
    components: List[str]  # The names of all components, the host's first.
    key: str  # Secret that the runtimes of all components share, hex.
    ports: List[int]  # Ports to try; the host listens on the first free one.
    hosts: List[str] = field(default_factory=list)  # Addresses of the host, besides those that Slurm reports.
    patience: float = 300.0  # Seconds in which all components must be ready; otherwise the run fails.
    grace: float = 10.0  # Seconds after the loss of a connection in which a component may reconnect.


@dataclass(frozen=True)
class RuntimeSpec:
    """The start record of one runtime: its Ray cluster, its nodes and its lifetime."""

    cluster_id: str
    ray: Optional[RaySpec] = None  # The Ray cluster that all payloads of the runtime share.
    idle_timeout: Optional[float] = None  # Seconds without a payload after which a session ends; None: run one payload and end.
    yield_when_idle: bool = False  # Whether an idle session ends when another Slurm job waits for its nodes and asks for them.
    max_concurrent_payloads: int = 1
    control_key: Optional[str] = None  # Secret of the runtimes of an allocation, hex.
    # Secret from which Ray's token is derived, hex: set if several Ray clusters need the same token; None to use `control_key`.
    token_key: Optional[str] = None
    control_ports: List[int] = field(default_factory=list)  # Ports to try; the head's RPC server takes the first free one.
    # CPUs and GPUs per node that were requested of Slurm; None if no number was. If a node has fewer, the payload fails.
    asked_cpus: Optional[int] = None
    asked_gpus: Optional[int] = None
    requeue: bool = False  # Whether Slurm may run the job again; then the runtime keeps files that the next runtime needs.
    # Seconds before the time limit at which the payload gets `warn_signal`; None for no signal.
    warn_before_limit: Optional[float] = None
    warn_signal: str = "TERM"  # Without "SIG".
    # Variables for Ray's daemons, which all Ray workers inherit. If a Ray job set them, Ray would have to start new workers.
    worker_env: Dict[str, str] = field(default_factory=dict)
    # Modules that the preload server imports while the Ray cluster starts, for payloads with the same `preload`.
    preload: List[str] = field(default_factory=list)
    # Seconds before its time limit from which on a session accepts no more payloads; at most a tenth of the time limit counts.
    drain_margin: float = 60.0
    components: List[ComponentSpec] = field(default_factory=list)  # The head's first; empty if all nodes are alike.
    meeting: Optional[BarrierSpec] = None  # The barrier of the separate topology.
    protocol: int = PROTOCOL_VERSION


@dataclass(frozen=True)
class ClusterAccess:
    """How the user whose payload runs on a Ray cluster reaches the dashboard of this cluster.

    On the head node, the dashboard has a port; from other hosts, the user connects through a relay (`protocol.relay`). The record
    contains secrets, so its file must be readable only for the user.
    """

    cluster_id: str
    hostname: str  # Of the head node.
    dashboard_port: Optional[int]  # On the loopback address of the head node; None without dashboard.
    token: str  # Ray's token, for the header `Authorization` of requests to the dashboard; empty without authentication.
    pid: int  # Process id of the runtime on the head node.
    job_id: Optional[str] = None  # None without Slurm; then the loopback address is that of this machine.
    heterogeneous: bool = False  # Whether the job has several components, the one with the head node first.
    hosts: List[str] = field(default_factory=list)  # Names and addresses of the head node, the likeliest first.
    port: int = 0  # Port on which the head's runtime takes the request for a relay.
    key: str = ""  # Secret by which the client and the head's runtime authenticate each other for this request, hex.
    relay: List[str] = field(default_factory=list)  # The command of a relay, for srun.


@dataclass(frozen=True)
class Announcement:
    """How clients reach a session, and the session's state.

    The session's runtime keeps this record in the file `session.json`.
    """

    cluster_id: str
    job_id: str  # Slurm's id of the session's job, or the id of its process on this machine.
    hosts: List[str]  # Names and addresses of the head node, the likeliest first.
    port: int  # Port on which the session takes requests.
    key: str  # The secret of the session, hex.
    protocol: int  # `PROTOCOL_VERSION` of the session's runtime.
    closing: Optional[str]  # Why the session accepts no more payloads; None while it accepts them.
    hostname: str  # Of the head node.
    heterogeneous: bool = False  # Whether the job has several components, the one with the head node first.
    idle: bool = False  # Whether the session has served payloads and runs none now.
    served: int = 0  # Payloads that the session has accepted.
    pid: int = 0  # Process id of the session's runtime on the head node.
    # Nodes that failed a health check, each with `node`, `check` and `found`.
    unhealthy: List[Dict[str, str]] = field(default_factory=list)
    access: Optional[ClusterAccess] = None  # To the warm Ray cluster; None until the cluster is up, or without a cluster.


class SpecError(ValueError):
    """Raised when a start record or message has an invalid value, key or version; the text names the value, key or version."""


def to_json(spec: Any) -> str:
    """Returns the JSON text of `spec`, an instance of a dataclass of this module; the text is indented for human readers."""
    return json.dumps(dataclasses.asdict(spec), indent=1, sort_keys=True)


def from_json(cls: Type[T], text: str) -> T:
    """Returns the start record in the JSON text `text`, as an instance of the dataclass `cls`, such as `PayloadSpec`.

    Raises SpecError if the text is not JSON, if a key is unknown or missing, if a value has the wrong type, if the record has
    another protocol version, or if a payload has no command.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError("the start record is not JSON: %s" % error) from None
    protocol = data.get("protocol", PROTOCOL_VERSION) if isinstance(data, dict) else PROTOCOL_VERSION
    if protocol != PROTOCOL_VERSION:
        raise SpecError("the start record speaks protocol version %s and this runtime version %s" % (protocol, PROTOCOL_VERSION))
    spec = from_fields(cls, data)
    if isinstance(spec, PayloadSpec) and not (spec.argv and spec.argv[0]):
        raise SpecError("the start record's argv names no command")
    return spec


def from_fields(cls: Type[T], data: Any, where: str = "the start record") -> T:
    """Returns an instance of the dataclass `cls` whose fields have the values of `data`, a JSON object as a dict.

    Nested objects become dataclasses too. Raises SpecError if `data` is no dict, if a key is unknown or missing, or if a value
    has the wrong type. `where` is the name of the JSON object in the error message, such as "the start record".
    """
    if not isinstance(data, dict):
        raise SpecError("%s is not a JSON object" % where)
    types = get_type_hints(cls)
    unknown = sorted(set(data) - set(types))
    if unknown:
        raise SpecError("%s has unknown keys: %s" % (where, ", ".join(unknown)))
    values = {name: _convert(types[name], value, "%s's %s" % (where, name)) for name, value in data.items()}
    try:
        return cls(**values)
    except TypeError as error:
        raise SpecError("%s is incomplete: %s" % (where, error)) from None


def _convert(kind: Any, value: Any, where: str) -> Any:
    """Returns `value`, part of a JSON document, converted to `kind`, the type annotation of a field such as `List[int]`.

    `kind` may be a scalar type, a dataclass, or an Optional, List or Dict of these. Raises SpecError if `value` has another type.
    `where` is the name of the value in the error message.
    """
    origin, args = get_origin(kind), get_args(kind)
    if origin is Union:  # The one union that is used is Optional.
        return None if value is None else _convert(args[0], value, where)
    if dataclasses.is_dataclass(kind):
        return from_fields(kind, value, where)  # type: ignore[arg-type]
    if origin is list and isinstance(value, list):
        return [_convert(args[0], each, where) for each in value]
    if origin is dict and isinstance(value, dict):
        return {_convert(args[0], name, where): _convert(args[1], each, where) for name, each in value.items()}
    if not _is_scalar(origin or kind, value):
        name = str(kind).replace("typing.", "") if origin else kind.__name__
        raise SpecError("%s must be %s, not %.80r" % (where, name, value))
    return value


def _is_scalar(kind: Any, value: Any) -> bool:
    """Returns whether a JSON value is a valid value of the type `kind`, which is str, bool, int or float.

    An int is also a valid float. A str is valid only if `is_passable` accepts it.
    """
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is float and isinstance(value, (int, float)):
        return abs(value) <= sys.float_info.max  # False for NaN too.
    return kind in (str, int) and isinstance(value, kind) and (kind is int or is_passable(value))


def is_passable(text: str) -> bool:
    """Returns whether the operating system accepts `text` as an argument, an environment variable or a path.

    The result is False for a text with a NUL character or a lone surrogate.
    """
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


# Key of the Ray label that holds the name of a node's component, as in `label_selector={"component": "gpu"}`.
COMPONENT_LABEL = "component"
# Prefix of the Ray resource by which tasks run on a component's nodes, as in `resources={"component:gpu": 1}`.
COMPONENT_RESOURCE = "component:"
# Amount of the resource `COMPONENT_RESOURCE` on each node, so large that it never limits how many tasks run.
COMPONENT_AMOUNT = 1000.0


def node_spec(ray: RaySpec, component_id: Optional[str]) -> RaySpec:
    """Returns the settings of Ray for the nodes of one component: the component's settings replace the common settings in `ray`.

    The result also has the Ray label and the Ray resource by which tasks select the component. If `component_id` is None, or
    names no component of `ray`, the result is `ray` itself.
    """
    for own in ray.components:
        if own.component_id == component_id:
            settings = {name: value for name, value in vars(own).items() if name != "component_id"}
            settings["resources"] = {**own.resources, COMPONENT_RESOURCE + own.component_id: COMPONENT_AMOUNT}
            settings["labels"] = {**own.labels, COMPONENT_LABEL: own.component_id}
            return replace(ray, **settings)
    return ray


def read_text(path: str) -> str:
    """Returns the content of the UTF-8 file `path`; raises OSError if it cannot be read, and ValueError if it is not UTF-8."""
    with open(path, encoding="utf-8") as file:
        return file.read()


def load_spec(directory: str) -> RuntimeSpec:
    """Returns the start record of the runtime, read from `directory`, the run directory or session directory.

    Exits the process with an error message if the start record is missing or invalid.
    """
    try:
        return from_json(RuntimeSpec, read_text(os.path.join(directory, RUNTIME)))
    except (OSError, SpecError) as error:
        sys.exit("rayslurm runtime: %s: %s" % (directory, error))


def take_secrets(run_dir: str, keep: bool) -> Dict[str, str]:
    """Read the payload's secret environment variables from the file `secrets.json` in `run_dir`, and return them by name.

    The file is deleted unless `keep` is True. Returns {} if there is no file. If the content is invalid, raises SpecError, and
    the file stays.
    """
    path = os.path.join(run_dir, SECRETS)
    try:
        data = json.loads(read_text(path))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError):
        raise SpecError("%s is not JSON" % path) from None
    secrets: Dict[str, str] = _convert(Dict[str, str], data, path)
    if not keep:
        os.unlink(path)
    return secrets
