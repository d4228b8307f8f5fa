"""Start records: what Dagster's side tells a runtime to do, as frozen dataclasses that are sent as JSON. Pure.

`runtime.json` holds a `RuntimeSpec`, `payload.json` a `PayloadSpec`. Parsing refuses unknown keys and values of another type.
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
"""Variables that name a Ray cluster (Ray 2.60). The runtime sets them; inherited ones would name another cluster."""


@dataclass(frozen=True)
class NodeSpec:
    """Ray's resources and labels on the nodes of one component. `None` means "as granted on the node"."""

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
    """One component of an allocation: its name, and what was requested for each of its nodes."""

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
    """Largest number of nodes that join the head; None for all."""
    min_nodes: Optional[int] = None
    """Nodes that must be alive before the payload starts; None for all."""
    launch_style: str = "builtin"
    memory_guard: bool = True
    """Whether the largest Ray worker of a node is killed before Slurm ends the job for its memory."""
    components: List[NodeSpec] = field(default_factory=list)
    """Settings that differ by component, the head's first; empty if all nodes are alike."""
    simulate: bool = False
    """Local mode: Ray counts the requested CPUs and GPUs even if the machine has fewer."""


@dataclass(frozen=True)
class PayloadSpec:
    """One payload: its command, environment, resources and limits."""

    argv: List[str]
    nonce: str
    env: Dict[str, str] = field(default_factory=dict)
    working_dir: Optional[str] = None
    """Directory whose entries appear in the payload's own working directory; None for an empty one."""
    data_dir: Optional[str] = None
    """Directory that outlives the run, created if missing; RAYSLURM_DATA_DIR of the payload and its workers."""
    extra_files: List[str] = field(default_factory=list)
    outputs: List[str] = field(default_factory=list)
    max_output_bytes: int = 100 * 2**20
    max_stdio_bytes: int = 2**30
    grace_period: float = 10.0
    uses_ray: bool = False
    ray: Optional[RaySpec] = None
    """The payload's own cluster, for a runtime that keeps none; None to use the runtime's."""
    preload: List[str] = field(default_factory=list)
    """Modules of the preload server that the payload is forked from; empty for a fresh interpreter."""
    want_cpus: Optional[int] = None
    want_gpus: Optional[int] = None
    """CPUs and GPUs of each node that the payload occupies beside others; None for none."""
    time_limit: Optional[float] = None
    """Seconds; None for the time limit of the allocation."""
    run_id: str = ""
    step: str = ""
    """Dagster's run and step: runs take turns in the queue, and the last duration of a step is its estimate."""


@dataclass(frozen=True)
class BarrierSpec:
    """Start barrier of the separate topology; the first component's runtime is the host."""

    component_id: str
    """This runtime's component."""
    components: List[str]
    """All components, the host's first."""
    key: str
    """Shared secret of the runtimes, hex."""
    ports: List[int]
    """The host listens on the first free one."""
    hosts: List[str] = field(default_factory=list)
    """Where the host may be reached, besides the addresses that Slurm reports."""
    patience: float = 300.0
    """Timeout of the barrier in seconds."""


@dataclass(frozen=True)
class RuntimeSpec:
    """One runtime: its cluster, nodes and lifetime."""

    cluster_id: str
    ray: Optional[RaySpec] = None
    idle_timeout: Optional[float] = None
    """Seconds without a payload after which a session ends; None for a runtime that runs one payload and ends."""
    yield_when_idle: bool = False
    """Whether an idle session ends on request of a job that waits for its nodes."""
    max_concurrent_payloads: int = 1
    control_key: Optional[str] = None
    """Shared secret of the runtimes of an allocation, hex; the Ray token is derived from it."""
    token_key: Optional[str] = None
    """Secret for the Ray token instead of `control_key` if several runtimes share the token, hex."""
    control_ports: List[int] = field(default_factory=list)
    """The head's RPC server listens on the first free one."""
    asked_cpus: Optional[int] = None
    """CPUs per node that were requested of Slurm; a node that grants fewer is an error."""
    asked_gpus: Optional[int] = None
    requeue: bool = False
    """Whether Slurm may run the job again; then files that the next attempt needs are kept."""
    warn_before_limit: Optional[float] = None
    """Seconds before the time limit at which the payload gets `warn_signal`; None for no warning."""
    warn_signal: str = "TERM"
    worker_env: Dict[str, str] = field(default_factory=dict)
    """Variables of Ray's daemons, inherited by all workers; variables of a Ray job would make each worker restart."""
    preload: List[str] = field(default_factory=list)
    """Modules that the preload server imports while the cluster starts, for payloads with the same `preload`."""
    drain_margin: float = 60.0
    """Seconds before the time limit from which a session takes no payload of unknown duration."""
    components: List[ComponentSpec] = field(default_factory=list)
    """Components of the allocation, the head's first; empty if all nodes are alike."""
    meeting: Optional[BarrierSpec] = None
    """Start barrier of the separate topology; None otherwise."""
    protocol: int = PROTOCOL_VERSION


class SpecError(ValueError):
    """The start record cannot be used; the message says why."""


def to_json(spec: Any) -> str:
    """A spec as JSON, one key per line to be readable in the run directory."""
    return json.dumps(dataclasses.asdict(spec), indent=1, sort_keys=True)


def from_json(cls: Type[T], text: str) -> T:
    """Parse a spec, refusing unknown keys, values of other types and other protocol versions.

    Raises:
        SpecError: the text is no JSON object of this class, or has another protocol version.
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
    """A dataclass from a JSON object; each value must have the type of its field.

    Raises:
        SpecError: a key is unknown or missing, or a value has another type.
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
    """The value as this type; JSON objects become dataclasses."""
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
    """Whether a text can be an argument, a variable or a path of a process."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


COMPONENT_LABEL = "component"
"""Ray label with the name of a node's component: `label_selector={"component": "gpu"}`."""
COMPONENT_RESOURCE = "component:"
"""Prefix of the Ray resource that places tasks on a component's nodes: `resources={"component:gpu": 1}`."""
COMPONENT_AMOUNT = 1000.0
"""Amount of that resource on a node, so large that it never limits how many tasks run."""


def node_spec(ray: RaySpec, component_id: Optional[str]) -> RaySpec:
    """The cluster's spec with the values for one node, which may differ by component.

    Args:
        ray: the cluster.
        component_id: the node's component; None in an allocation without components.
    """
    own = next((each for each in ray.components if each.component_id == component_id), None)
    if own is None:
        return ray
    return replace(
        ray,
        num_cpus=own.num_cpus,
        num_gpus=own.num_gpus,
        object_store_memory=own.object_store_memory,
        resources={**own.resources, COMPONENT_RESOURCE + own.component_id: COMPONENT_AMOUNT},
        labels={**own.labels, COMPONENT_LABEL: own.component_id},
        network_interface=own.network_interface,
        health_check=own.health_check,
    )
