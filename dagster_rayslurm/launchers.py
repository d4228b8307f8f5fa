"""Launchers, which start a payload as a plain process or as the driver of a Ray cluster."""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import Annotated, Any, Literal, Optional

from pydantic import model_validator

from .config import StrictConfig, check_list, check_modules, identifier
from .fabric import FABRICS
from .fields import at_least, check_text, checked, choice, is_env_var, plain_text
from .runtime.node.health import CHECKS, value_error
from .runtime.node.network import parse_range
from .runtime.node.resources import Footprint, Requirement, node_footprint
from .runtime.protocol.spec import RaySpec

_DASHBOARD = {"--include-dashboard=true": True, "--include-dashboard=false": False}

# Options of `ray start` that users may not set, each with the reason or the field to use instead, for the error message.
_OWN_OPTIONS = {
    "--address": "the cluster is always a new one",
    "--block": "it is always on",
    "--dashboard-port": "use port_range",
    "--head": "the first node is the head",
    "--include-dashboard": 'write "--include-dashboard=true" or "=false", or use dashboard',
    "--node-ip-address": "use head_node_address or network_interface",
    "--num-cpus": "use num_cpus_per_node",
    "--num-gpus": "use num_gpus_per_node",
    "--object-store-memory": "use object_store_memory_gb",
    "--port": "use port_range",
    "--ray-client-server-port": "use port_range",
    "--resources": "use resources",
    "--temp-dir": "it must be short, private and on the node",
}


class Launcher(StrictConfig):
    """Base class of launchers: a launcher defines a payload's command, and the Ray cluster and resources that the payload needs.

    To write a launcher of your own, derive from this class and pass an instance to `ComputeResource.run(launcher=…)`. The field
    `default_launcher` accepts only the launchers of this package, because Dagster would silently drop the fields of a subclass.
    """

    working_dir: Annotated[Optional[str], plain_text] = None
    """Directory of this machine whose entries the payload finds as links in its own working directory; None for no entries. New
    files beside the links stay apart. In local mode, writing to a linked file or directory changes the original; the links on a
    cluster lead to a read-only copy."""
    grace_period: Annotated[int, at_least(0, "seconds")] = 10
    """Seconds between SIGTERM and SIGKILL when the payload is cancelled."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__bases__:
            if base is not Launcher and base.__module__ == __name__:
                raise TypeError(
                    f"{cls.__name__} cannot derive from {base.__name__}: as `default_launcher` Dagster would silently turn it "
                    f"into a {base.__name__}; derive from Launcher and pass an instance to run(launcher=…)"
                )

    def command(self, argv: list[str]) -> list[str]:
        """Returns the command that starts the payload: by default `argv`, the payload's own command.

        `python` as the first word of `argv` and of the result means the environment's Python.
        """
        return argv

    def ray_spec(self) -> RaySpec | None:
        """Returns the settings of the Ray cluster that starts before the payload; None for a payload without Ray."""
        return None

    def footprint(self) -> Footprint:
        """Returns what the payload requires of each node: one `Requirement` for each launcher field about CPUs, GPUs or memory.

        The amount in a `Requirement` is None if the field is unset. A launcher without such fields returns ().
        """
        return ()


class BashLauncher(Launcher):
    """Runs the payload as a plain process."""

    kind: Literal["bash"] = "bash"
    """Tells the launchers apart in configuration."""
    num_cpus: Annotated[Optional[int], at_least(1)] = None
    """CPUs the payload needs; None for what is granted."""
    num_gpus: Annotated[Optional[int], at_least(0)] = None
    """GPUs the payload needs; None for what is granted."""

    def footprint(self) -> Footprint:
        return (
            Requirement("BashLauncher.num_cpus", self.num_cpus, "CPUs"),
            Requirement("BashLauncher.num_gpus", self.num_gpus, "GPUs"),
        )


def _check_port_range(value: object) -> str:
    parse_range(check_text(value))
    return str(value)


def _check_ray_args(value: object) -> list[str]:
    arguments = check_list(value, 'arguments of `ray start`, such as ["--system-config={…}"]')
    for argument in arguments:
        name = check_text(argument).partition("=")[0]
        if name in _OWN_OPTIONS:
            raise ValueError(f"{name} is set by the launcher itself; {_OWN_OPTIONS[name]}")
    return arguments


def _check_labels(value: object) -> object:
    for part in (part for item in value.items() for part in item) if isinstance(value, dict) else ():
        if not is_env_var(part) and set(check_text(part)) & set(",="):
            raise ValueError(f"{part!r} contains a comma or an equals sign, which a label of Ray cannot have")
    return value


def _check_health(value: object) -> str:
    """Returns health checks, given as text or list, as a text with one check per line; raises `ValueError` for a wrong check."""
    checks = value.splitlines() if isinstance(value, str) else check_list(value, 'checks, such as ["gpu-count", "clock"]')
    for check in checks:
        word = check_text(check).partition("=")[0]
        close = difflib.get_close_matches(word.lower().replace("_", "-"), CHECKS, n=1, cutoff=0.8)
        if word not in CHECKS and close:
            raise ValueError(f"{check!r} is no built-in check; did you mean {close[0]!r}?")
        if word in CHECKS and (problem := value_error(check)):
            raise ValueError(f"{check!r}: {problem}")
    return "\n".join(checks)


def _check_directory(value: object) -> str:
    if not check_text(value).startswith("/"):
        raise ValueError(f"{value!r} is no absolute path; write one that the nodes and Prometheus share")
    return str(value)


class RayLauncher(Launcher):
    """Runs the payload as the driver of a Ray cluster that spans the allocation.

    In the payload, `ray.init()` and `ray.init(address="auto")` connect to the payload's own Ray cluster and to no other cluster.
    """

    kind: Literal["ray"] = "ray"
    """Tells the launchers apart in configuration."""
    num_cpus_per_node: Annotated[Optional[int], at_least(0)] = None
    """CPUs that Ray schedules on each node; None for what is granted."""
    num_gpus_per_node: Annotated[Optional[int], at_least(0)] = None
    """GPUs that Ray schedules on each node; None for what is granted."""
    max_workers: Annotated[Optional[int], at_least(0)] = None
    """The largest number of worker nodes that join the head node; None for all. Local mode has one node. Not allowed for one Ray
    cluster across components, because each component sets `num_nodes`."""
    min_nodes: Annotated[Optional[int], at_least(1)] = None
    """Nodes that must be alive before the payload starts; None for all. Local mode has one node, or one for each component."""
    ray_version: Annotated[Optional[str], plain_text] = None
    """Exact Ray version that the environment must have."""
    ray_args: Annotated[list[str], checked(_check_ray_args)] = []
    """More arguments of `ray start`, on every node. `--include-dashboard` sets `dashboard`."""
    head_node_address: Annotated[Optional[str], plain_text] = None
    """Address on which Ray listens on the head node, and at which other nodes reach it; None for the address that Ray finds."""
    network_interface: Annotated[Optional[str], plain_text] = None
    """Network interface whose address each node uses, such as "ib0"."""
    component_id: Annotated[Optional[str], identifier] = None
    """Component of a heterogeneous job in which the payload runs."""
    object_store_memory_gb: Annotated[Optional[float], at_least(0.08, "GiB")] = None
    """Object store of each node in GiB. If None, 30 % of the machine's memory in local mode, and 27 % of the granted memory in a
    Slurm job."""
    resources: dict[str, float] = {}
    """Custom resources of each node."""
    labels: Annotated[dict[str, str], checked(_check_labels)] = {}
    """Labels of each node, for label selectors."""
    dashboard: bool = True
    """Start the dashboard, which needs `ray[default]`; without it the cluster is up a second or two sooner."""
    auth: Annotated[str, choice("token", "disabled")] = "token"
    """"token" for Ray's token authentication (Ray 2.52 or newer); "disabled" lets anyone who reaches the node run code as you."""
    launch_style: Annotated[str, choice("builtin", "symmetric-run")] = "builtin"
    """"builtin", or "symmetric-run" for `ray symmetric-run` on all nodes of a Slurm allocation."""
    memory_guard: bool = True
    """Warn when a node of a Slurm job uses 90 % of its memory, and kill the node's largest Ray worker at 95 %, so that Ray
    retries the task or raises, before Slurm ends the whole job. Without effect in local mode."""
    metrics_dir: Annotated[Optional[str], checked(_check_directory)] = None
    """Directory, the same for all nodes, in which each Ray cluster has a file with the addresses of its metrics, for Prometheus's
    `file_sd_configs`, as long as it runs. Needs the dashboard. None for no file."""
    startup_timeout: Annotated[int, at_least(1, "seconds")] = 300
    """Seconds within which the nodes (all, or `min_nodes`) must have joined the Ray cluster; otherwise the run fails."""
    port_range: Annotated[Optional[str], checked(_check_port_range)] = None
    """Range of the ports that Ray may use, as "LOW-HIGH", for sites with firewalls. Each Ray cluster takes 100 of these ports on
    each node, about 90 of them for worker processes."""
    health_check: Annotated[Optional[str], checked(_check_health)] = None
    """What each node must pass before Ray starts: built-in checks ("gpu-count", "gpu-ecc", "disk-space", "clock", "interface")
    and shell commands. Write one check, a list, or a text with a check on each line. A failure names the node; see
    ComputeResource.on_unhealthy."""
    fabric: Annotated[str, choice(*FABRICS)] = "none"
    """Network between the nodes: "infiniband", "efa" or "tcp" sets variables of NCCL, libfabric and gloo for it, unless they are
    set already, and the log shows them; "none" sets nothing."""
    preload: Annotated[list[str], checked(check_modules)] = []
    """Modules that a warm session imports once, such as ["ray", "torch"]; payloads that are Python scripts or modules begin
    with them imported. With "ray", up to four of Ray's workers are kept ready on the head node, too (needs `grpcio`, as
    `ray[default]` does). Without effect where nothing stays warm between payloads."""

    @model_validator(mode="before")
    @classmethod
    def _read_dashboard_from_ray_args(cls, values: Any) -> Any:
        """Returns the values of the launcher's fields, with `--include-dashboard` moved from `ray_args` to the field `dashboard`.

        Raises `ValueError` if `--include-dashboard` contradicts the field `dashboard`.
        """
        arguments: Any = values.get("ray_args") if isinstance(values, dict) else ()
        for argument in arguments if isinstance(arguments, (list, tuple)) else ():
            if isinstance(argument, str) and argument in _DASHBOARD:
                if values.get("dashboard", _DASHBOARD[argument]) != _DASHBOARD[argument]:
                    raise ValueError(f"ray_args: {argument} contradicts dashboard={values['dashboard']}; remove one of them")
                rest = [each for each in arguments if each != argument]
                return {**values, "ray_args": rest, "dashboard": _DASHBOARD[argument]}
        return values

    def ray_spec(self) -> RaySpec:
        store = self.object_store_memory_gb
        same = {each.name: getattr(self, each.name) for each in fields(RaySpec) if each.name in type(self).model_fields}
        return RaySpec(
            num_cpus=self.num_cpus_per_node,
            num_gpus=self.num_gpus_per_node,
            object_store_memory=None if store is None else int(store * 2**30),
            node_ip_address=self.head_node_address,
            **same,
        )

    def footprint(self) -> Footprint:
        return node_footprint(self.ray_spec())
