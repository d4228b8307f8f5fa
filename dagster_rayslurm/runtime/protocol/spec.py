"""The start record: what the orchestrator asks the runtime to do, as frozen dataclasses that travel as JSON.

The start record: what the orchestrator asks the runtime to do, as frozen dataclasses that travel as JSON.

Components of an allocation within one Ray cluster: what tells their nodes apart, for Ray and for the user. Pure.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass, field, replace
from typing import Any, Dict, List, Optional, Type, TypeVar, Union, get_args, get_origin, get_type_hints

PROTOCOL_VERSION = 1
"""Version of the start record, the journal and the control messages; both sides must agree on it."""

JOB_MARK = "rayslurm"
"""Key in a Ray job's metadata whose value is the nonce of the payload that the job belongs to."""

T = TypeVar("T")

RAY_COORDINATES = (
    "RAY_ADDRESS",
    "RAY_API_SERVER_ADDRESS",
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
    "RAY_AUTH_TOKEN_PATH",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
)
"""Variables that lead to a Ray cluster (Ray 2.60): the runtime sets them, and those it inherits lead elsewhere."""


@dataclass(frozen=True)
class NodeSpec:
    """What the nodes of one component of an allocation are to Ray. `None` means "as granted on the node"."""

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
    """One component of an allocation: its name, and what was asked for on each of its nodes."""

    component_id: str
    num_nodes: int = 1
    asked_cpus: Optional[int] = None
    asked_gpus: Optional[int] = None


@dataclass(frozen=True)
class RaySpec:
    """The Ray cluster that must be alive before a payload starts. `None` means "as granted on the node"."""

    num_cpus: Optional[int] = None
    num_gpus: Optional[int] = None
    object_store_memory: Optional[int] = None
    resources: Dict[str, float] = field(default_factory=dict)
    labels: Dict[str, str] = field(default_factory=dict)
    dashboard: bool = True
    auth: str = "token"
    ray_version: Optional[str] = None
    ray_args: List[str] = field(default_factory=list)
    node_ip_address: Optional[str] = None
    network_interface: Optional[str] = None
    port_range: Optional[str] = None
    startup_timeout: float = 300.0
    health_check: Optional[str] = None
    max_workers: Optional[int] = None
    """Most nodes that join the head; None for all."""
    min_nodes: Optional[int] = None
    """Nodes that must be alive before the payload starts; None for all."""
    launch_style: str = "builtin"
    memory_guard: bool = True
    """Whether the largest Ray worker of a node is killed before Slurm ends the job for its memory."""
    components: List[NodeSpec] = field(default_factory=list)
    """What nodes are where they differ by the component that they belong to, the head's first; none if they are all alike."""
    simulate: bool = False
    """Local mode: Ray counts the CPUs and GPUs that are asked for, even if the machine has fewer."""


@dataclass(frozen=True)
class PayloadSpec:
    """One payload: a command, its environment and what is expected of it."""

    argv: List[str]
    nonce: str
    env: Dict[str, str] = field(default_factory=dict)
    working_dir: Optional[str] = None
    """Directory whose entries appear in the payload's own working directory; None for an empty one."""
    data_dir: Optional[str] = None
    """Directory that outlives the run, made if it is not there; the payload and its workers find it in RAYSLURM_DATA_DIR."""
    extra_files: List[str] = field(default_factory=list)
    outputs: List[str] = field(default_factory=list)
    max_output_bytes: int = 100 * 2**20
    max_stdio_bytes: int = 2**30
    grace_period: float = 10.0
    uses_ray: bool = False
    ray: Optional[RaySpec] = None
    """The cluster that it needs, for a runtime that keeps none; None if it takes the runtime's."""
    preload: List[str] = field(default_factory=list)
    """Modules that a template process has imported from which the payload is forked; none for a fresh interpreter."""
    want_cpus: Optional[int] = None
    want_gpus: Optional[int] = None
    """What it claims of each node while others run beside it; None claims nothing."""
    time_limit: Optional[float] = None
    """Seconds that it may take; None for as long as its allocation lives."""
    run_id: str = ""
    step: str = ""
    """Dagster's run and step: runs take turns, and steps take about as long as they did before."""


@dataclass(frozen=True)
class BarrierSpec:
    """How the runtimes of components meet that run a payload each; the first component's is the host of the others."""

    component_id: str
    """The component of this runtime."""
    components: List[str]
    """All of them, the host's first."""
    key: str
    """Secret that they know each other by, hex."""
    ports: List[int]
    """Where the host listens: the first of them that is free."""
    hosts: List[str] = field(default_factory=list)
    """Where the host may be reached besides what Slurm says of its node."""
    patience: float = 300.0
    """Seconds in which all components must be ready."""


@dataclass(frozen=True)
class RuntimeSpec:
    """One runtime: the cluster it keeps, and how long it lives without a payload."""

    cluster_id: str
    ray: Optional[RaySpec] = None
    idle_timeout: Optional[float] = None
    yield_when_idle: bool = False
    """Seconds without a payload after which a session ends; None for a runtime that runs one payload and ends."""
    max_concurrent_payloads: int = 1
    control_key: Optional[str] = None
    """Secret that the runtimes of an allocation know each other by, hex; the cluster's token is made from it."""
    token_key: Optional[str] = None
    """What the cluster's token is made from instead, where several runtimes share it, hex."""
    control_ports: List[int] = field(default_factory=list)
    """Where the head's runtime listens for the others: the first of them that is free."""
    asked_cpus: Optional[int] = None
    """CPUs that Slurm was asked for on each node; fewer are an error of the site."""
    asked_gpus: Optional[int] = None
    requeue: bool = False
    """Whether Slurm may run the job again: what the next attempt needs is then left where it is."""
    warn_before_limit: Optional[float] = None
    """Seconds before the time limit at which the payload gets `warn_signal`; None for no warning."""
    warn_signal: str = "TERM"
    worker_env: Dict[str, str] = field(default_factory=dict)
    """Variables of Ray's daemons, which all workers inherit: those of a job's own make each worker start anew."""
    preload: List[str] = field(default_factory=list)
    """Modules that a template process imports while the cluster starts, for payloads that ask for the same ones."""
    drain_margin: float = 60.0
    """Seconds before the time limit from which a session takes no payload whose duration is not known."""
    components: List[ComponentSpec] = field(default_factory=list)
    """Components of the allocation, the head's first; none for an allocation of nodes that are all alike."""
    meeting: Optional[BarrierSpec] = None
    """What its payload waits for and ends with; None for a payload that is on its own."""
    protocol: int = PROTOCOL_VERSION


class SpecError(ValueError):
    """The start record cannot be used; the message says why."""


def to_json(spec: Any) -> str:
    """Render a spec as JSON, one key per line so that a person can read it in the run directory."""
    return json.dumps(dataclasses.asdict(spec), indent=1, sort_keys=True)


def from_json(cls: Type[T], text: str) -> T:
    """Parse a spec, refusing unknown keys, values of other types and other protocol versions.

    Raises:
        SpecError: if the text is no JSON object of this class, or speaks another protocol version.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError("the start record is not JSON: %s" % error) from None
    if not isinstance(data, dict):
        raise SpecError("the start record is not a JSON object")
    protocol = data.get("protocol", PROTOCOL_VERSION)
    if protocol != PROTOCOL_VERSION:
        raise SpecError("the start record speaks protocol version %s and this runtime version %s" % (protocol, PROTOCOL_VERSION))
    spec = from_fields(cls, data)
    if isinstance(spec, PayloadSpec) and not (spec.argv and spec.argv[0]):
        raise SpecError("the start record's argv names no command")
    return spec


def from_fields(cls: Type[T], data: Any, where: str = "the start record") -> T:
    """A dataclass from an object as JSON has it, each value of the type that its field is annotated with.

    Raises:
        SpecError: it is not.
    """
    if not isinstance(data, dict):
        raise SpecError("%s is not a JSON object" % where)
    kinds = get_type_hints(cls)
    unknown = sorted(set(data) - set(kinds))
    if unknown:
        raise SpecError("%s has unknown keys: %s" % (where, ", ".join(unknown)))
    values = {name: _of_kind(kinds[name], value, "%s's %s" % (where, name)) for name, value in data.items()}
    try:
        return cls(**values)
    except TypeError as error:
        raise SpecError("%s is incomplete: %s" % (where, error)) from None


def _of_kind(kind: Any, value: Any, where: str) -> Any:
    """The value, if it is of that type; a dataclass in it is made."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Union:  # The one union that is used is Optional.
        return None if value is None else _of_kind(args[0], value, where)
    if dataclasses.is_dataclass(kind):
        return from_fields(kind, value, where)  # type: ignore[arg-type]
    if origin is list and isinstance(value, list):
        return [_of_kind(args[0], each, where) for each in value]
    if origin is dict and isinstance(value, dict):
        return {_of_kind(args[0], name, where): _of_kind(args[1], each, where) for name, each in value.items()}
    if not _is_plain(origin or kind, value):
        name = str(kind).replace("typing.", "") if origin else kind.__name__
        raise SpecError("%s must be %s, not %.80r" % (where, name, value))
    return value


def _is_plain(kind: Any, value: Any) -> bool:
    if kind is str:
        return isinstance(value, str) and is_passable(value)
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is int:
        return isinstance(value, int)
    try:
        return kind is float and isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:  # An int that no float holds.
        return False


def is_passable(text: str) -> bool:
    """Whether the system takes a text as an argument, a variable or a path."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


LABEL = "component"
"""Label of each node that names its component: `label_selector={"component": "gpu"}`."""
RESOURCE = "component:"
"""What the name of a component's custom resource begins with: `resources={"component:gpu": 1}`."""
PLENTY = 1000.0
"""How much of that resource a node has: it says where something runs, and not how much of it."""


def node_spec(ray: RaySpec, component_id: Optional[str]) -> RaySpec:
    """What one node is told of its cluster.

    Args:
        ray: the cluster.
        component_id: the component that the node belongs to; None in an allocation that has none.
    """
    own = next((each for each in ray.components if each.component_id == component_id), None)
    if own is None:
        return ray
    return replace(
        ray,
        num_cpus=own.num_cpus,
        num_gpus=own.num_gpus,
        object_store_memory=own.object_store_memory,
        resources={**own.resources, **place(own)},
        labels={**own.labels, LABEL: own.component_id},
        network_interface=own.network_interface,
        health_check=own.health_check,
    )


def place(node: NodeSpec) -> Dict[str, float]:
    """The custom resource by which tasks and actors find the nodes of a component."""
    return {RESOURCE + node.component_id: PLENTY}
