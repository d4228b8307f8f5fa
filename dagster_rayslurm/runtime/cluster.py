"""One Ray cluster: start its head, know when it is complete, notice when it is lost, end it."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from typing import Any, Callable, Dict, List, Optional

from . import ports, processes
from .footprint import footprint_error, ray_footprint
from .loop import Loop, Timer
from .machine import Machine
from .record import split_lines, tail_file
from .scratch import Scratch
from .spec import RAY_COORDINATES, RaySpec

_ATTEMPTS = 3
_CLASH = re.compile(r"address already in use|port \d+ is already|already occupied|Failed to bind", re.IGNORECASE)
_LOGS = ("gcs_server.out", "gcs_server.err", "raylet.out", "raylet.err", "dashboard.log", "ray_process_exit.log")
_SHARE_OF_LIMIT = 0.9
"""Part of a memory limit that Ray may schedule on; the runtime and Ray's daemons live on the rest."""

Nodes = Dict[str, Dict[str, Any]]


class ClusterError(Exception):
    """The cluster did not start or was lost.

    Attributes:
        reason: "environment", "cluster-start" or "cluster-lost", as in the `end` record.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def start_arguments(spec: RaySpec, machine: Machine, chosen: ports.Ports, temp_dir: str, address: Optional[str]) -> List[str]:
    """The arguments of `ray start --head` (Ray 2.60)."""
    arguments = ["--head", "--block", "--disable-usage-stats", "--temp-dir=" + temp_dir, *chosen.options]
    arguments.append("--num-cpus=%d" % (machine.num_cpus if spec.num_cpus is None else spec.num_cpus))
    arguments.append("--num-gpus=%d" % (machine.num_gpus if spec.num_gpus is None else spec.num_gpus))
    arguments.append("--include-dashboard=%s" % ("true" if spec.dashboard else "false"))
    if address:
        arguments.append("--node-ip-address=" + address)
    store = spec.object_store_memory
    if store is not None:
        arguments.append("--object-store-memory=%d" % store)
    if machine.memory_limit is not None:
        # Ray 2.60 looks at the machine and the root cgroup, not at what Slurm granted to the job.
        usable = int(machine.memory_limit * _SHARE_OF_LIMIT)
        if store is None:
            store = int(usable * 0.3)
            arguments.append("--object-store-memory=%d" % store)
        arguments.append("--memory=%d" % max(usable - store, 2**20))
    if spec.resources:
        arguments.append("--resources=" + json.dumps(spec.resources))
    if spec.labels:
        arguments.append("--labels=" + ",".join("%s=%s" % item for item in sorted(spec.labels.items())))
    return arguments + spec.ray_args


def interface_address(interface: str) -> str:
    """The IPv4 address of a network interface.

    Raises:
        ClusterError: if this node has no such interface, or it has no address.
    """
    request = struct.pack("256s", os.fsencode(interface)[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR of netdevice(7).
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise ClusterError(
                "cluster-start",
                "network_interface=%r has no IPv4 address on node %s (%s); it has: %s"
                % (interface, socket.gethostname(), error.strerror, known),
            ) from None
    return socket.inet_ntoa(answer[20:24])


class RayCluster:
    """A Ray head under this runtime.

    Args:
        loop: where everything happens.
        spec: what is asked for.
        machine: what this node grants.
        scratch: private directory for Ray's files and the token.
        on_ready: called once, when the cluster is complete.
        on_failed: called once, with why the cluster did not start or was lost.
        on_phase: called with a phase and a message for the user.
    """

    def __init__(
        self,
        loop: Loop,
        spec: RaySpec,
        machine: Machine,
        scratch: Scratch,
        on_ready: Callable[[], None],
        on_failed: Callable[[ClusterError], None],
        on_phase: Callable[[str, str], None],
    ) -> None:
        self.spec = spec
        self.ready = False
        self.nodes: Nodes = {}
        self.ray_version: Optional[str] = None
        self.bring_up: Optional[float] = None
        self.address: Optional[str] = None
        self.dashboard_url: Optional[str] = None
        self._loop = loop
        self._machine = machine
        self._scratch = scratch
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._on_phase = on_phase
        self._ports: Optional[ports.Ports] = None
        self._pid: Optional[int] = None
        self._report_fd: Optional[int] = None
        self._report = b""
        self._problem: Optional[ClusterError] = None
        self._deadline: Optional[Timer] = None
        self._attempt = 0
        self._started = time.monotonic()
        self._failed = False

    @property
    def environment(self) -> Dict[str, str]:
        """What a driver needs in its environment to reach this cluster and no other."""
        env = {"RAY_USAGE_STATS_ENABLED": "0"}
        if self.address:
            env["RAY_ADDRESS"] = self.address
        if self.dashboard_url:
            env["RAY_API_SERVER_ADDRESS"] = self.dashboard_url
        if self.spec.auth == "token":
            env.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=self._token_path)
        else:
            env.update(RAY_AUTH_MODE="disabled")
        return env

    def facts(self) -> Dict[str, Any]:
        """What metadata tells of the cluster."""
        return {
            "ray_version": self.ray_version,
            "ray_address": self.address,
            "dashboard_url": self.dashboard_url,
            "bring_up": self.bring_up,
            "nodes": sorted(self.nodes.values(), key=lambda node: (not node["head"], node["hostname"])),
        }

    def start(self) -> None:
        """Begin to start the cluster; `on_ready` or `on_failed` follows."""
        problem = footprint_error(ray_footprint(self.spec), self._machine)
        if problem:
            return self._fail(ClusterError("cluster-start", problem))
        self._deadline = self._loop.call_later(self.spec.startup_timeout, self._too_late)
        with open(self._token_path, "x", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(os.urandom(32).hex())
        if self.spec.health_check:
            return self._check_health(self.spec.health_check)
        self._start_head()

    def stop(self) -> None:
        """End every process of the cluster at once; the cluster's results are already elsewhere."""
        self._failed = True  # Nothing that ends from here on is news.
        if self._deadline is not None:
            self._deadline.cancel()
        self._end_head()

    def log_tails(self) -> Dict[str, str]:
        """The last lines of the logs that tell why a cluster failed."""
        logs = os.path.join(self._scratch.ray_temp_dir, "session_latest", "logs")
        paths = {"ray start": self._log_path, **{name: os.path.join(logs, name) for name in _LOGS}}
        tails = {name: tail_file(path, lines=15) for name, path in paths.items()}
        return {name: text for name, text in tails.items() if text.strip()}

    @property
    def _token_path(self) -> str:
        return self._scratch.join("ray.token")

    @property
    def _log_path(self) -> str:
        return self._scratch.join("ray-start.log")

    def _check_health(self, command: str) -> None:
        log = self._scratch.join("health-check.log")

        def done(code: int, _: Any) -> None:
            self._pid = None
            if code != 0:
                why = "the health check failed with exit code %d on node %s: %s" % (
                    code,
                    self._machine.hostname,
                    tail_file(log, lines=5).strip() or "it printed nothing",
                )
                return self._fail(ClusterError("cluster-start", why))
            if not self._failed:
                self._start_head()

        with open(log, "wb") as output:
            self._pid = self._loop.spawn(
                ["/bin/sh", "-c", command],
                done,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=processes.die_with_parent(),
            )

    def _start_head(self) -> None:
        self._attempt += 1
        if self._ports is not None and self._ports.lock is not None:
            os.close(self._ports.lock)
        try:
            self._ports = ports.choose(self.spec.port_range)
            address = self.spec.node_ip_address
            if self.spec.network_interface:
                address = interface_address(self.spec.network_interface)
        except (ports.PortError, ClusterError) as error:
            return self._fail(error if isinstance(error, ClusterError) else ClusterError("cluster-start", str(error)))
        shutil.rmtree(self._scratch.ray_temp_dir, ignore_errors=True)
        os.mkdir(self._scratch.ray_temp_dir, 0o700)
        if self.spec.dashboard:
            self.dashboard_url = "http://127.0.0.1:%d" % self._ports.dashboard
        self._report_fd, writer = os.pipe()
        os.set_blocking(self._report_fd, False)
        order = {
            "report_fd": writer,
            "gcs": "%s:%d" % (address or "127.0.0.1", self._ports.gcs),
            "ray_version": self.spec.ray_version,
            "token": self.spec.auth == "token",
            "start": start_arguments(self.spec, self._machine, self._ports, self._scratch.ray_temp_dir, address),
        }
        env = {name: value for name, value in os.environ.items() if name not in RAY_COORDINATES}
        env.update(self.environment)
        self._loop.on_readable(self._report_fd, self._read_report)
        try:
            with open(self._log_path, "ab") as log:
                self._pid = self._loop.spawn(
                    [sys.executable, sys.argv[0], "ray-node", json.dumps(order)],
                    self._head_exited,
                    cwd=self._scratch.path,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[writer],
                    preexec_fn=processes.die_with_parent(),
                )
        except OSError as error:
            self._fail(ClusterError("environment", "%s cannot be started: %s" % (sys.executable, error.strerror)))
        finally:
            os.close(writer)

    def _read_report(self) -> None:
        """Take what `ray_node` reported so far."""
        try:
            while self._report_fd is not None:
                data = os.read(self._report_fd, 65536)
                if not data:
                    self._loop.forget(self._report_fd)
                    os.close(self._report_fd)
                    self._report_fd = None
                lines, self._report = split_lines(self._report + data)
                for line in lines:
                    self._take(json.loads(line.decode("utf-8")))
        except BlockingIOError:
            return  # That was all for now.

    def _take(self, event: Dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "environment":
            self._problem = ClusterError("environment", event["message"])
        elif kind == "watch-failed":
            self._problem = ClusterError("cluster-start", "the GCS cannot be asked for its nodes: " + event["message"])
            self._end_head()
        elif kind == "version":
            self.ray_version = event["ray_version"]
        elif kind == "nodes":
            self._take_nodes(event["nodes"])

    def _take_nodes(self, nodes: Nodes) -> None:
        self.nodes = nodes
        alive = [node for node in nodes.values() if node["alive"]]
        head = next((node for node in alive if node["head"]), None)
        if head is None and self.ready:
            return self._fail(ClusterError("cluster-lost", "the GCS reports the head node as dead"))
        if head is not None and not self.ready and not self._failed:
            assert self._ports is not None
            host = head["address"]
            self.address = "%s:%d" % ("[%s]" % host if ":" in host else host, self._ports.gcs)
            self.ready = True
            self.bring_up = time.monotonic() - self._started
            if self._deadline is not None:
                self._deadline.cancel()
            resources = ", ".join("%s %g" % (n, v) for n, v in sorted(head["resources"].items()) if n in ("CPU", "GPU"))
            self._on_phase("cluster-ready", "Ray %s is up on %s (%s)" % (self.ray_version, head["hostname"], resources))
            self._on_ready()

    def _head_exited(self, code: int, _: Any) -> None:
        self._pid = None
        self._read_report()  # Its last words may say why, and may not have been read yet.
        if self._failed:
            return
        how = "signal %d" % -code if code < 0 else "exit code %d" % code
        node = self._machine.hostname
        if self.ready:
            return self._fail(ClusterError("cluster-lost", "the Ray head on node %s ended with %s" % (node, how)))
        if self._problem is not None:
            return self._fail(self._problem)
        if self._attempt < _ATTEMPTS and any(_CLASH.search(text) for text in self.log_tails().values()):
            self._on_phase("cluster-start", "a port was taken meanwhile; trying Ray again with others")
            return self._start_head()
        self._fail(ClusterError("cluster-start", "`ray start` on node %s ended with %s before Ray was up" % (node, how)))

    def _too_late(self) -> None:
        what = "Ray was not up" if self._attempt else "the health check did not end"
        limit = (what, self._machine.hostname, self.spec.startup_timeout)
        self._fail(ClusterError("cluster-start", "%s on node %s within startup_timeout=%g s" % limit))

    def _fail(self, error: ClusterError) -> None:
        if self._failed:
            return
        self._failed = True
        if self._deadline is not None:
            self._deadline.cancel()
        self._end_head()
        self._on_failed(error)

    def _end_head(self) -> None:
        if self._pid is not None:
            self._kill_group(self._pid)

    def _kill_group(self, pid: int) -> None:
        """SIGKILL `ray start` and all below it; Ray's daemons are in sessions of their own."""
        below = [process.pid for process in processes.descendants(pid)]
        processes.signal_group(pid, signal.SIGKILL)
        processes.kill_all(below)
