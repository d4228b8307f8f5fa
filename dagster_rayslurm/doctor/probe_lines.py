"""Report lines about compute nodes, from the facts that a probe (a job of `rayslurm doctor`) collected on the nodes. Pure.

In all functions, `node` has the facts that the probe collected on one node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..environments import Interpreter
from ..environments.check import Facts, refusal
from . import Line, Wanted, failed, failure, ok, warning
from .machine_lines import node_lines

NO_PYTHON = 63  # Exit code of the probe's shell command on a node without Python.
_SLOW_LAG = 5.0  # Seconds within which a node should see a change of a file and answer.
# Number that slurmstepd reports in place of a signal if it cannot open the output file of srun (seen on 22.05).
_NO_OUTPUT_FILE = 53
_REMOTE_BASE = "choose a SlurmResource.remote_base on a file system that the edge and all compute nodes share"


def ended_lines(end: Mapping[str, Any]) -> list[Line]:
    """Returns one failure that explains why a probe's job has not written facts for all nodes.

    `end` describes the job. For a running job, `end` has `state` ("RUNNING"), `facts` (the number of nodes that have written
    facts) and `nodes` (the number of all nodes). For an ended job, `end` has these keys:
        state: Slurm's name of the job's state, or "unknown".
        nodes: the names of the nodes, separated by commas; "" if unknown.
        signal: the number of the signal that ended the job; None if there was none, or if it is unknown.
        exit: the exit code of srun; None if it is unknown.
        log: the text of the job's logs.
    """
    where, log = end.get("nodes") or "a compute node", end.get("log", "")
    last = next((line for line in reversed(log.splitlines()) if "error" in line.lower()), "")[:300]
    if end["state"] == "RUNNING":
        what = f"the job runs, and {end['facts']} of {end['nodes']} nodes have written something that the edge node sees"
        return [failure("shared base directory", what, _REMOTE_BASE)]
    if end["exit"] == NO_PYTHON:
        what = f"{where} has no python3, and no environment that is there"
        return [failure("node Python", what, "name an environment on a shared file system with --env")]
    if end["exit"] is None and (end["signal"] == _NO_OUTPUT_FILE or not log):
        what = f"the job ran on {where} and left nothing in the base directory (state {end['state']}): it is not the same there"
        return [failure("shared base directory", what, _REMOTE_BASE)]
    if end["exit"] == 0:
        what = f"the job ended on {where}, and the edge node has not seen in time what the nodes wrote"
        return [failure("shared base directory", what, _REMOTE_BASE)]
    if end["exit"] is not None:
        what = f"srun failed on {where} with exit code {end['exit']}{': ' + last if last else ''}"
        return [failure("srun", what, "tell the site: `srun` inside of a batch job must start a program on its nodes")]
    return [failure("probe", f"the job ended as {end['state']} on {where} {last}".rstrip(), "try again, or tell the site")]


def probe_lines(nodes: Sequence[Mapping[str, Any]], measured: Mapping[str, Any], wanted: Wanted, seconds: float) -> list[Line]:
    """Returns the lines about the examined nodes.

    `nodes` has the facts of each node. `measured` is the result of `edge.site.reach_and_measure`. `wanted` is the examined
    configuration. `seconds` is the time from the submission of the job to the end of the job.
    """
    hosts = [node["host"] for node in nodes]
    lines = [ok("probe", f"a job on {', '.join(hosts)}, {seconds:.0f} s from submission to the end")]
    columns = (measured[name] for name in ("reached", "lags", "skews"))
    for node, reached, lag, skew in zip(nodes, *columns, strict=True):
        where = node["host"]
        lines += node_lines(node, skew, (lag or 0.0) / 2, where)
        lines += [*_environment(node, wanted), _lag(lag, where), *_interface(node), _ports(node, wanted.port_range)]
        if reached:  # Nothing connects to a node that listens on no port.
            lines.append(_reached(reached, node))
        lines += [_peer(peer, where, hosts[int(rank)]) for rank, peer in node["peers"].items() if peer]
    return lines


def _environment(node: Mapping[str, Any], wanted: Wanted) -> Iterator[Line]:
    """Yields a line that says whether the environment works on a node; yields nothing if the probe did not examine it."""
    found, name = node["environment"], f"{node['host']}: environment"
    if found is None:
        return
    path, remedy = (
        getattr(wanted.environment, "path", "the environment"),
        "put the environment on a file system that the compute nodes share",
    )
    if "error" in found:
        yield failure(name, f"its Python does not start on {node['host']}: {found['error']}", remedy)
        return
    versions = found["facts"]
    facts = Facts(Interpreter(f"{path}/bin/python"), tuple(versions["python"]), versions.get("ray"), versions.get("pipes"))
    problem = refusal(facts, path, wanted.launcher.ray_spec(), True)
    if problem is not None:
        yield failed(name, problem, "make the environment anew")
    else:
        ray = f", Ray {facts.ray}" if facts.ray else ""
        yield ok(name, f"Python {'.'.join(map(str, facts.python))}{ray}, Pipes {facts.pipes}")


def _lag(lag: float | None, where: str) -> Line:
    """Returns a line about how soon the node `where` saw a change that the edge node made to a file on the shared file system.

    `lag` is the time in seconds from the change until the edge node saw the node's answer; None if no answer came.
    """
    name = f"{where}: visibility"
    remedy = "choose a remote_base on a file system with less caching (NFS: actimeo), or expect output to come that late"
    if lag is None:
        return failure(name, "a change of a file was not seen there and answered within a minute", remedy)
    text = f"a change of a file is seen on {where} and answered after {lag:.2f} s"
    return warning(name, text, remedy) if lag > _SLOW_LAG else ok(name, text)


def _ports(node: Mapping[str, Any], port_range: str | None) -> Line:
    """Returns a line that says whether the runtime and Ray can listen on their ports on a node.

    `port_range` has the ports that Ray may use, as "LOW-HIGH"; None for any ports.
    """
    name, ports = f"{node['host']}: ports", node["ports"]
    low, high = ports["range"]
    first, last = ports["ephemeral"] or (65536, 65536)
    if not node["listens"]:
        what = f"all of the {ports['tried']} ports tried from {low} to {high} are in use, so that Ray cannot listen there"
        return failure(name, what, "set RayLauncher.port_range to ports that are free on the compute nodes, or ask the site")
    # Without `port_range`, Ray needs only a few ports outside of the ephemeral range.
    if first <= high and low <= last if port_range else first <= low and last >= 65535:
        what = f"the kernel takes the ports of outgoing connections from {first} to {last}, so that it may take one of Ray's"
        other = f"set RayLauncher.port_range to ports below {first}, or " if port_range else ""
        return warning(name, what, f'{other}ask the site for net.ipv4.ip_local_port_range="32768 60999"')
    others = "" if port_range or not ports["ephemeral"] else f"; Ray also takes ports from {first} to {last}"
    return ok(name, f"{ports['free']} of {ports['tried']} ports tried from {low} to {high} are free{others}")


def _interface(node: Mapping[str, Any]) -> Iterator[Line]:
    """Yields a line that says whether a node has the configured network interface; no line if no interface is configured."""
    name, interface = f"{node['host']}: network interface", node["interface"]
    if interface is None:
        return
    if "error" in interface:
        what, remedy = interface["error"], "set RayLauncher.network_interface to an interface that all compute nodes have"
        yield failure(name, what, f"{remedy}, or remove it")
    else:
        yield ok(name, f"{interface['name']} has the address {interface['address']}, which Ray uses")


def _reached(reached: Mapping[str, Any], node: Mapping[str, Any]) -> Line:
    """Returns a line that says whether the edge node can connect to a node.

    `reached` is the node's element of `reached` in the result of `edge.site.reach_and_measure`. `node` has the facts of the node.
    """
    name = f"{node['host']}: from the edge node"
    if "error" in reached:
        what = (
            f"no TCP connection to port {reached['port']} ({reached['error']}), so that sessions are asked by srun, more slowly"
        )
        low, high = node["ports"]["range"]
        return warning(name, what, f"nothing is needed; ask the site to let the edge node connect to the ports {low} to {high}")
    text = f"TCP connects to {reached['host']} in {1000 * reached['seconds']:.0f} ms"
    if by_interface := reached.get("by_interface"):
        address = f"{node['interface']['address']} of {node['interface']['name']}"
        problem = by_interface.get("error")
        # Requests to sessions go to the node's name, so the edge node need not be in Ray's network.
        text += f", but not to {address} ({problem}), which only Ray's nodes need" if problem else f", and to {address}"
    return ok(name, text)


def _peer(peer: Mapping[str, Any], where: str, other: str) -> Line:
    """Returns a line that says whether node `where` can connect to node `other`; `peer` is the result of `machine.reach`."""
    name = f"{where}: from node to node"
    if "error" in peer:
        what = f"{where} cannot connect to port {peer['port']} of {other} ({peer['error']}), so that no Ray cluster can span them"
        return failure(name, what, "set RayLauncher.network_interface or port_range to what the site lets through, or ask it")
    at = "" if peer["host"] == other else f" at {peer['host']}"
    return ok(name, f"{where} connects to {other}{at} in {1000 * peer['seconds']:.0f} ms")
