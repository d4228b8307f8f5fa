"""Arguments and environment variables of `ray start` and `ray symmetric-run` on a node (Ray 2.60); without side effects."""

from __future__ import annotations

import json
from typing import Dict, List, Optional

from ..node import network
from ..node.resources import NodeResources, usable_memory
from ..protocol.spec import RaySpec

_STORE_SHARE = 0.3
"""Fraction of a node's memory that Ray's object store gets if the user sets no size; the same as Ray's own default."""

_SMALLEST_STORE = 75 * 2**20
"""Bytes; Ray 2.60 refuses to start with a smaller object store."""


def start_arguments(
    spec: RaySpec, machine: NodeResources, chosen: network.Ports, temp_dir: str, address: Optional[str], gcs: Optional[str] = None
) -> List[str]:
    """The arguments of `ray start` on this node.

    Args:
        spec: the part of the start record that describes the Ray cluster.
        machine: the resources that Slurm granted on this node.
        chosen: the node's ports.
        temp_dir: Ray's own directory.
        address: the address of this node; None for the one that Ray finds.
        gcs: "HOST:PORT" of the head to join; None for the head itself.
    """
    arguments = ["--block", "--head"] if gcs is None else ["--block", "--address=" + gcs]
    if gcs is None:
        arguments.append("--include-dashboard=%s" % ("true" if spec.dashboard else "false"))
    if address:
        arguments.append("--node-ip-address=" + address)
    return arguments + _node_arguments(spec, machine, chosen, temp_dir)


def symmetric_arguments(
    spec: RaySpec,
    machine: NodeResources,
    chosen: network.Ports,
    temp_dir: str,
    gcs: str,
    head: bool,
    nodes: int,
    entrypoint: List[str],
) -> List[str]:
    """The arguments of `ray symmetric-run` on this node.

    Args:
        gcs: "HOST:PORT" of the head.
        head: whether this node is the head.
        nodes: number of nodes for which `ray symmetric-run` waits.
        entrypoint: the command that it runs on the head once they have joined.
    """
    arguments = ["--address=" + gcs, "--min-nodes=%d" % nodes]
    if head:
        arguments.append("--include-dashboard=%s" % ("true" if spec.dashboard else "false"))
    own = [option for option in _node_arguments(spec, machine, chosen, temp_dir) if not option.startswith("--port=")]
    return [*arguments, *own, "--", *entrypoint]


def scheduled_cpus(spec: RaySpec, machine: NodeResources) -> int:
    """Number of CPUs that Ray schedules on a node: what the start record says, otherwise all CPUs of the node."""
    return machine.num_cpus if spec.num_cpus is None else spec.num_cpus


def _node_arguments(spec: RaySpec, machine: NodeResources, chosen: network.Ports, temp_dir: str) -> List[str]:
    """The arguments that `ray start` and `ray symmetric-run` share, on every node."""
    arguments = ["--disable-usage-stats", "--temp-dir=" + temp_dir, *chosen.options]
    arguments.append("--num-cpus=%d" % scheduled_cpus(spec, machine))
    arguments.append("--num-gpus=%d" % (machine.num_gpus if spec.num_gpus is None else spec.num_gpus))
    store = spec.object_store_memory
    if store is not None:
        arguments.append("--object-store-memory=%d" % store)
    if machine.memory_limit is not None:
        # Ray 2.60 reads the limits of the machine and the root cgroup, not those of the job.
        usable = usable_memory(machine)
        if store is None:
            store = int(usable * _STORE_SHARE)
            arguments.append("--object-store-memory=%d" % store)
        arguments.append("--memory=%d" % max(usable - store, 2**20))
    if spec.resources:
        arguments.append("--resources=" + json.dumps(spec.resources))
    if spec.labels:
        arguments.append("--labels=" + ",".join("%s=%s" % item for item in sorted(spec.labels.items())))
    return arguments + spec.ray_args


def granted_defaults(machine: NodeResources) -> Dict[str, str]:
    """Environment variables that limit a Ray which the payload itself starts to the CPUs and memory granted on this node.

    They set defaults only; a `ray.init` that connects to an existing cluster ignores them. Ray has no variable for the
    default number of CPUs (`RAY_OVERRIDE_RESOURCES` would also override an explicit `num_cpus`). But Ray counts CPUs as
    Python does, and Python 3.13 has a variable for that.
    """
    env = {"PYTHON_CPU_COUNT": str(machine.num_cpus)}
    if machine.memory_limit is not None:
        usable = usable_memory(machine)
        store = max(int(usable * _STORE_SHARE), _SMALLEST_STORE)
        env["RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES"] = str(store)
        env["RAY_OVERRIDE_RESOURCES"] = json.dumps({"memory": max(usable - store, 2**20)})
    return env


def ray_environment(spec: RaySpec, token_path: str) -> Dict[str, str]:
    """Environment variables for all processes of one Ray cluster, drivers included: how to authenticate, and no usage statistics.

    Args:
        token_path: the file that contains the cluster's token.
    """
    env = {"RAY_USAGE_STATS_ENABLED": "0"}
    if spec.auth == "token":
        env.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=token_path)
    else:
        env.update(RAY_AUTH_MODE="disabled")
    return env
