"""Waiting until a stack can be used."""

from __future__ import annotations

import logging
import time

import paramiko

from .access import environment
from .cluster import Cluster
from .errors import StackError
from .settings import COMPUTE_NODES, Settings

GOOD_STATES = {"idle", "mixed", "allocated", "completing"}
STOPPED = "has stopped"

# It would print a traceback for each login that comes too early.
logging.getLogger("paramiko").setLevel(logging.CRITICAL)


def wait_until_ready(cluster: Cluster, timeout: float = 120) -> None:
    """Wait until all nodes take jobs and the edge node takes logins.

    Raises:
        StackError: A daemon has ended, or something is not ready in time; its last words follow.
    """
    deadline = time.monotonic() + timeout
    while True:
        missing = missing_parts(cluster)
        if not missing:
            return
        stopped = [service for service, why in missing.items() if why == STOPPED]
        if stopped or time.monotonic() > deadline:
            when = "" if stopped else f" within {timeout:.0f} s"
            said = [f"--- {service} {why}\n{cluster.log_tail(service)}" for service, why in missing.items()]
            raise StackError(
                f"The stack is not ready{when} because of {', '.join(missing)}: mend what its log says, "
                "or begin anew with `make stack-down` and `make stack-up`.\n" + "\n".join(said)
            )
        time.sleep(0.3)


def missing_parts(cluster: Cluster) -> dict[str, str]:
    """The services that are not ready, each with what is wrong."""
    containers = cluster.containers()
    for service in cluster.settings.services:
        if service not in containers or not containers[service].running:
            return {service: STOPPED}
    states = node_states(cluster)
    if not states:
        return {"slurmctld": "does not answer"}
    bad = {node: f"is {states.get(node, 'unknown')}" for node in COMPUTE_NODES if states.get(node) not in GOOD_STATES}
    return bad or login_trouble(cluster.settings)


def node_states(cluster: Cluster) -> dict[str, str]:
    """Slurm's word on each compute node; empty while the controller does not answer."""
    done = cluster.exec("edge", ["sinfo", "--noheader", "--Node", "--format=%N %T"], check=False)
    return dict(line.split() for line in done.stdout.splitlines()) if done.returncode == 0 else {}


def login_trouble(settings: Settings) -> dict[str, str]:
    """What keeps a client from logging in to the edge node."""
    variables = environment(settings)
    client = paramiko.SSHClient()
    client.load_host_keys(variables["SLURM_EDGE_NODE_KNOWN_HOSTS_FILE"])
    try:
        client.connect(
            variables["SLURM_EDGE_NODE_HOST"],
            int(variables["SLURM_EDGE_NODE_PORT"]),
            variables["SLURM_EDGE_NODE_USER"],
            key_filename=variables["SLURM_EDGE_NODE_KEY_PATH"],
            allow_agent=False,
            look_for_keys=False,
            timeout=5,
        )
    except (OSError, EOFError, paramiko.SSHException) as error:
        return {"edge": f"takes no login: {error}"}
    finally:
        client.close()
    return {}
