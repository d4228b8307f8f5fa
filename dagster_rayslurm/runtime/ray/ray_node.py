"""Runs Ray on one node, as head or worker: makes Ray's directories, arguments and environment, and watches its process."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import string
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Mapping, Optional

from ..node import health
from ..node.interfaces import address_of
from ..node.network import Ports, choose_ports, join_host_port, route_address, split_host_port
from ..node.resources import NodeResources, granted_gpus, usable_memory
from ..node.usage import logs_of
from ..process import processes
from ..process.loop import Loop
from ..process.scratch import Scratch, is_full
from ..protocol.messages import ClusterError, EndReason, Unhealthy
from ..protocol.record import split_lines, tail_file
from ..protocol.rpc import derive_key
from ..protocol.spec import RAY_COORDINATES, RaySpec, RuntimeSpec, node_spec
from .internals import PRESTART_AT_FIRST_DRIVER, RAYLET_ENVIRON
from .membership import Event, Report

_ATTEMPTS = 3  # Most attempts to start Ray on this node.
_CLASH = r"address already in use|port \d+ is already|already occupied|Failed to bind"
# What Ray's logs contain when another attempt may succeed: a port was taken, or Ray's agents were not up in its own 15 s.
_TEMPORARY = re.compile(_CLASH + r"|Timed out waiting for file \S*_port_", re.IGNORECASE)
_UP = "Ray runtime started."  # What `ray start` prints when Ray is up on a node (Ray 2.60).
_KEEPS_WORKERS_READY = "ray"  # A module: a runtime that preloads it for payloads also keeps idle Ray workers ready.
# Ray's logs that may tell why Ray failed on a node.
_LOGS = ("gcs_server.out", "gcs_server.err", "raylet.out", "raylet.err", "dashboard.log", "ray_process_exit.log")
# The `ray` program that `ray symmetric-run` finds in its PATH; %s is the Python to use.
_SHIM = """#!/bin/sh
# `ray stop` would end every Ray of this user on this node, also other clusters; this one ends with its runtime.
[ "$1" = stop ] && exit 0
exec %s -m ray.scripts.scripts "$@"
"""
# The command of `ray symmetric-run`, as long as the cluster is up: it makes a file, which says that, and never ends. It is not
# the payload, because `ray symmetric-run` also exits with 0 when Ray did not start (Ray 2.60).
_HOLD = ["/bin/sh", "-c", ': >"$0"; exec sleep 2147483647']
_STORE_SHARE = 0.3  # Of a node's memory, for Ray's object store if the user sets no size; Ray's own default.
_SMALLEST_STORE = 75 * 2**20  # Bytes; Ray 2.60 refuses to start with a smaller object store.
# Names of clusters' directories: one character, because the path of a Unix socket must be short. "r" is Ray's of the warm one.
_DIR_NAMES = [name for name in string.digits + string.ascii_lowercase if name != "r"]
_DYING, _PAUSE = 0.5, 10.0  # Seconds until a cluster's directory is removed, and until another attempt.


# ---- Arguments and environment of `ray start` and `ray symmetric-run` (Ray 2.60), without side effects


def start_arguments(
    spec: RaySpec, machine: NodeResources, chosen: Ports, temp_dir: str, address: Optional[str], gcs: Optional[str] = None
) -> List[str]:
    """Returns the arguments of `ray start` on this node, without the word "start".

    `gcs` is "HOST:PORT" of the head that this node joins; None if this node is the head. `address` is this node's address for
    Ray; None if Ray is to find it. `machine` has the resources that are granted on this node, `chosen` has the ports for Ray,
    and `temp_dir` is Ray's temporary directory.
    """
    head = ["--head", "--include-dashboard=%s" % ("true" if spec.dashboard else "false")]
    arguments = ["--block", *(head if gcs is None else ["--address=" + gcs])]
    if address:
        arguments.append("--node-ip-address=" + address)
    arguments += ["--disable-usage-stats", "--temp-dir=" + temp_dir, *chosen.options]
    arguments.append("--num-cpus=%d" % _scheduled_cpus(spec, machine))
    arguments.append("--num-gpus=%d" % (machine.num_gpus if spec.num_gpus is None else spec.num_gpus))
    store = spec.object_store_memory
    if machine.memory_limit is not None:
        # Ray 2.60 reads the limits of the machine and the root cgroup, not those of the job.
        usable = usable_memory(machine)
        store = int(usable * _STORE_SHARE) if store is None else store
        arguments.append("--memory=%d" % max(usable - store, 2**20))
    if store is not None:
        arguments.append("--object-store-memory=%d" % store)
    if spec.resources:
        arguments.append("--resources=" + json.dumps(spec.resources))
    if spec.labels:
        arguments.append("--labels=" + ",".join("%s=%s" % item for item in sorted(spec.labels.items())))
    return arguments + spec.ray_args


def symmetric_arguments(start: List[str], gcs: str, nodes: int, entrypoint: List[str]) -> List[str]:
    """Returns the arguments of `ray symmetric-run` on a node, made from `start`, the arguments of `ray start` for this node.

    `gcs` is "HOST:PORT" of the head. `ray symmetric-run` runs the command `entrypoint` on the head once `nodes` nodes have
    joined.
    """
    unknown = ("--block", "--head", "--address=", "--node-ip-address=", "--port=")
    own = [option for option in start if not option.startswith(unknown)]
    return ["--address=" + gcs, "--min-nodes=%d" % nodes, *own, "--", *entrypoint]


def _scheduled_cpus(spec: RaySpec, machine: NodeResources) -> int:
    return machine.num_cpus if spec.num_cpus is None else spec.num_cpus


def granted_defaults(machine: NodeResources) -> Dict[str, str]:
    """Returns environment variables with which a Ray cluster that `ray.init` starts gets the resources granted on this node.

    The variables are for payloads. The arguments `num_cpus` and `object_store_memory` of `ray.init` override them; `_memory`
    does not (Ray 2.60). If `ray.init` connects to an existing Ray cluster, the variables have no effect. The number of CPUs is
    in `PYTHON_CPU_COUNT` (Python 3.13), because Ray counts CPUs as Python does. It is not in `RAY_OVERRIDE_RESOURCES`, which
    would override `num_cpus`.
    """
    env = {"PYTHON_CPU_COUNT": str(machine.num_cpus)}
    if machine.memory_limit is not None:
        usable = usable_memory(machine)
        store = max(int(usable * _STORE_SHARE), _SMALLEST_STORE)
        env["RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES"] = str(store)
        env["RAY_OVERRIDE_RESOURCES"] = json.dumps({"memory": max(usable - store, 2**20)})
    return env


def ray_environment(spec: RaySpec, token_path: str) -> Dict[str, str]:
    """Returns environment variables for all processes of a Ray cluster, drivers included.

    The variables set the authentication of `spec`, and disable Ray's usage statistics. `token_path` is the path of the file
    with the token; it is not used if `spec` disables authentication.
    """
    token = {"RAY_AUTH_TOKEN_PATH": token_path} if spec.auth == "token" else {}
    return {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token" if token else "disabled", **token}


def _token(runtime: RuntimeSpec, key: str) -> str:
    """Returns the token with which the processes of one Ray cluster authenticate each other.

    The token is derived from the secret that all nodes have and from `key`, so that each node has the same token. Without a
    secret, the token is random. `key` is "" for the warm cluster; for a payload's own cluster, it is the payload's nonce (its
    random name).
    """
    secret = runtime.token_key or runtime.control_key
    if secret is None:
        return os.urandom(32).hex()
    return derive_key(secret, "ray-token:" + key if key else "ray-token")


# ---- Directories


class ClusterDir(Scratch):
    """A new private directory for the files of one Ray cluster, inside the scratch directory `parent` of the runtime.

    Its name is one character, because paths of sockets must be short. The constructor raises OSError if all such names are in
    use, or if the directory cannot be made.
    """

    def __init__(self, parent: Scratch) -> None:
        for name in random.sample(_DIR_NAMES, len(_DIR_NAMES)):  # Names are seldom reused soon, because removal takes time.
            self.path = parent.join(name)
            if not os.path.lexists(self.path):
                return os.mkdir(self.path, 0o700)
        raise OSError("%d clusters are in %s already" % (len(_DIR_NAMES), parent.path))

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def remove_later(self, loop: Loop, delay: float = _DYING) -> None:
        """Have the event loop remove this directory of a Ray cluster after `delay` seconds, and try again later until it is gone.

        Processes of Ray that are dying may still write into it.
        """

        def clear() -> None:
            self.remove()
            if os.path.lexists(self.path):
                self.remove_later(loop, _PAUSE)

        loop.call_later(delay, clear)


# ---- The process


@dataclass(eq=False)
class RayNode:
    """Runs Ray on this node for one Ray cluster, as head or worker: starts, watches and ends it.

    If Ray does not start for a reason that may pass, such as a taken port, Ray is started again; `_ATTEMPTS` is the largest
    number of starts. After any other failure, or the failure of the last start, the object ends Ray on this node and calls the
    callback `on_event` with the failure.
    """

    loop: Loop
    runtime: RuntimeSpec
    cluster: RaySpec
    key: str  # "" for the warm cluster; for a payload's own cluster, the payload's nonce (its random name).
    machine: NodeResources
    scratch: Scratch
    nodes: int  # Number of nodes of the complete cluster.
    on_event: Callable[[Event], None]  # Gets the reports of Ray's process and of this object; see `Report`.
    environ: Mapping[str, Optional[str]] = field(default_factory=dict)  # For Ray's daemons; None removes a variable.
    shared: Optional[str] = None  # A directory on the file system that all nodes share; None in local mode.
    ready: bool = False  # Whether the cluster is complete; from then on, the end of Ray here is a loss, not a failed start.
    pid: Optional[int] = None  # Process id of the common ancestor of all Ray processes on this node.
    ports: Ports = field(default_factory=Ports)  # Of the latest attempt to start Ray.

    def __post_init__(self) -> None:
        self.spec = node_spec(self.cluster, self.machine.component)
        self._symmetric = self.spec.launch_style == "symmetric-run"
        self._log = self.scratch.join("ray-start.log")
        self._gcs: Optional[str] = None
        self._address: Optional[str] = None
        self._socket: Optional[socket.socket] = None  # Connection to Ray's process; None while there is none.
        self._partial = b""
        self._attempt = 0
        self._over = False
        self.token_path = self.scratch.join("ray.token")
        self.token = _token(self.runtime, self.key)

    def start(self, gcs: Optional[str] = None, address: Optional[str] = None) -> None:
        """Run the health checks, if there are any, and then start Ray on this node. Does not wait.

        `gcs` is "HOST:PORT" of the head to join; None on the head. `address` is the head's own address; None if it is not
        known, and on a worker node, where it is not used. A failure is passed to the callback `on_event`.
        """
        self._gcs, self._address = gcs, address
        checks = (self.spec.health_check or "").splitlines()
        built_in = [check for check in checks if health.name_of(check) in health.CHECKS]
        self._commands = [check for check in checks if check not in built_in]
        if built_in:
            self._run_checks(built_in)
        else:
            self._run_command()

    def request(self, **request: Any) -> bool:
        """Send a request, such as `request(prestart=True)`, to the program `node_main`, which runs Ray on this node.

        Does not wait. Returns False if the program does not run or cannot take the request now. An answer is passed later to
        the callback `on_event`.
        """
        try:
            return self._socket is not None and self._socket.send(json.dumps(request).encode("utf-8") + b"\n") > 0
        except OSError:
            return False  # The process has ended, or has not read for a while.

    def end(self) -> None:
        """Kill every process of Ray on this node, and release its ports. The callback `on_event` is not called again."""
        self._over = True
        self._kill()
        self.ports.release()

    def log_tails(self) -> Dict[str, str]:
        """Returns the last lines of the logs that may tell why Ray failed on this node, by name of log.

        Empty logs are left out.
        """
        tails = {name: tail_file(path, lines=15) for name, path in self._log_paths.items()}
        return {name: text for name, text in tails.items() if text.strip()}

    @property
    def _log_paths(self) -> Dict[str, str]:
        logs = logs_of(self.scratch.ray_temp_dir)
        return {"ray start": self._log, **{name: os.path.join(logs, name) for name in _LOGS}}

    def _run_checks(self, checks: List[str]) -> None:
        """Start the built-in health checks `checks`, without waiting; when all have passed, call `_run_command`.

        If a check fails, Ray is not started, and the failure is passed to the callback `on_event`.
        """
        # Local mode gives components GPUs that are simulated; nobody can check those.
        simulated = self.cluster.simulate or (self.shared is None and self.machine.component is not None)
        order = health.Order(
            checks=checks,
            gpus=None if simulated else self.machine.num_gpus,
            visible=granted_gpus(os.environ) or [],
            scratch=self.scratch.path,
            shared=self.shared,
            interface=self.spec.network_interface,
        )
        answer, write = os.pipe()

        def done(code: int, _: Any) -> None:
            self.pid = None
            with open(answer, "rb") as file:
                found = file.read()
            if self._over:
                return
            if code == 0:
                return self._run_command()
            died = "built-in", "the checks ended with exit code %d: %s" % (code, tail_file(log, lines=5).strip())
            check, problem = json.loads(found.decode("utf-8")) if found else died
            self._unhealthy(check, "node %s failed its health check %s: %s" % (self.machine.name, check, problem), problem)

        log = self.scratch.join("health-check.log")
        try:
            program = [sys.executable, sys.argv[0], "health", order.to_json(), str(write)]
            self._spawn(program, done, log, self._daemon_environ(os.environ), pass_fds=[write])
        finally:
            os.close(write)

    def _run_command(self) -> None:
        """Start the next shell command of the user's health check, without waiting; after the last one, start Ray.

        If a command fails, Ray is not started, and the failure is passed to the callback `on_event`.
        """
        if not self._commands:
            return self._choose_address()
        command, log = self._commands.pop(0), self.scratch.join("health-check-%d.log" % len(self._commands))

        def done(code: int, _: Any) -> None:
            self.pid = None
            if self._over:
                return
            if code == 0:
                return self._run_command()
            said = tail_file(log, lines=5).strip() or "it printed nothing"
            why = "the health check failed with exit code %d on node %s: %s" % (code, self.machine.name, said)
            self._unhealthy("command", why, "exit code %d: %s" % (code, said))

        self._spawn(["/bin/sh", "-c", command], done, log, self._daemon_environ(os.environ))

    def _unhealthy(self, check: str, why: str, found: str) -> None:
        self._fail(why, unhealthy={"node": health.node_name(os.environ), "check": check, "found": found})

    def _choose_address(self) -> None:
        """Choose the address that Ray uses on this node, and start Ray.

        If there is no address, for example because the configured network interface does not exist, Ray is not started, and the
        failure is passed to the callback `on_event`.
        """
        try:
            if self._gcs is None and self.spec.node_ip_address:
                self._address = self.spec.node_ip_address
            elif self.spec.network_interface:
                self._address = address_of(self.spec.network_interface)
            elif self._gcs is not None:
                self._address = route_address(split_host_port(self._gcs)[0])
        except OSError as error:  # The interface does not exist, or has no address.
            return self._fail(str(error))
        self._start_ray()

    def _start_ray(self) -> None:
        try:
            self._run_ray()
        except OSError as error:  # No ports are free, or a file or process cannot be made.
            self._fail("node %s: Ray cannot be started: %s" % (self.machine.name, error))

    def _run_ray(self) -> None:
        self._attempt += 1
        self.ports.release()
        spec, head, temp_dir = self.spec, self._gcs is None, self.scratch.ray_temp_dir
        self.ports = choose_ports(spec.port_range, head=head)
        shutil.rmtree(temp_dir, ignore_errors=True)
        os.mkdir(temp_dir, 0o700)
        with open(self.token_path, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(self.token)
        gcs = self._gcs or join_host_port(self._address or "127.0.0.1", self.ports.gcs)
        if head:
            self.on_event({"event": Report.STARTING, "gcs": gcs})
        command = start_arguments(spec, self.machine, self.ports, temp_dir, self._address, self._gcs)
        env = {name: value for name, value in os.environ.items() if name not in RAY_COORDINATES}
        env = self._daemon_environ({**RAYLET_ENVIRON, **env})
        cpus, existing = _scheduled_cpus(spec, self.machine), os.cpu_count() or 1
        if cpus > existing:
            env.setdefault(PRESTART_AT_FIRST_DRIVER, "0")  # More CPUs are simulated than exist; not each needs a worker.
        env.update(self.ports.environ)
        env.update(ray_environment(spec, self.token_path))
        entrypoint = os.path.join(temp_dir, "entrypoint") if self._symmetric else None  # Each attempt has a new one.
        if entrypoint:
            command = symmetric_arguments(command, gcs, self.nodes, [*_HOLD, entrypoint])
            env["PATH"] = os.pathsep.join([self._write_shim(), env.get("PATH", os.defpath)])
            env["RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT"] = str(int(spec.startup_timeout))
            env["RAY_ADDRESS"] = gcs  # Otherwise the `ray.init` in `ray symmetric-run` finds other clusters.
            env["TMPDIR"] = temp_dir  # Otherwise Ray's dashboard leaves files; see `internals.move_dashboard_files`.
        prestarts = head and _KEEPS_WORKERS_READY in self.runtime.preload and not self.key
        order = {
            "gcs": gcs,
            "head": head,
            "expected": self.nodes,
            "ray_version": spec.ray_version,
            "token": spec.auth == "token",
            "command": ["symmetric-run" if entrypoint else "start", *command],
            "entrypoint": entrypoint,
            "idle_workers": min(cpus, existing) if prestarts else 0,
            "temp_dir": temp_dir,
        }
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._socket.setblocking(False)
            self._partial = b""
            self.loop.on_readable(self._socket.fileno(), self._read_reports)
            program = [sys.executable, sys.argv[0], "ray-node", json.dumps(dict(order, fd=theirs.fileno()))]
            self._spawn(program, self._exited, self._log, env, cwd=self.scratch.path, pass_fds=[theirs.fileno()])

    def _spawn(self, argv: List[str], on_exit: Callable[[int, Any], None], log: str, env: Dict[str, str], **options: Any) -> None:
        with open(log, "ab") as output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            self.pid = self.loop.spawn(argv, on_exit, env=env, preexec_fn=processes.die_with_parent(), **streams, **options)

    def _daemon_environ(self, environ: Mapping[str, str]) -> Dict[str, str]:
        """Returns the environment variables for Ray's daemons on this node, from which Ray's workers inherit them.

        The result is a copy of `environ` with the directory of this Python at the start of PATH, and with the variables of the
        start record (`worker_env`) and of the field `environ`.
        """
        # The command of a job that `ray job submit` starts finds the environment's `python`, as payloads do.
        path = os.pathsep.join([os.path.dirname(sys.executable), environ.get("PATH", os.defpath)])
        wanted = {**environ, "PATH": path, **self.runtime.worker_env, **self.environ}
        return {name: value for name, value in wanted.items() if value is not None}

    def _write_shim(self) -> str:
        """Write a shell script `ray` that `ray symmetric-run` calls instead of the installed one.

        Returns the directory of the script. The caller must put the directory at the start of PATH. The script ignores `ray
        stop`, which would end other Ray clusters.
        """
        directory = self.scratch.join("bin")
        os.makedirs(directory, exist_ok=True)
        with open(os.path.join(directory, "ray"), "w", opener=lambda name, flags: os.open(name, flags, 0o700)) as file:
            file.write(_SHIM % shlex.quote(sys.executable))
        return directory

    def _read_reports(self) -> None:
        while self._socket is not None:
            try:
                data = self._socket.recv(65536)
            except BlockingIOError:
                return  # No more reports have arrived.
            except OSError:
                data = b""  # The process ended before it had read a request.
            if not data:
                self.loop.forget(self._socket.fileno())
                self._socket.close()
                self._socket = None
            lines, self._partial = split_lines(self._partial + data)
            for line in lines:
                self._handle(json.loads(line.decode("utf-8")))

    def _handle(self, event: Event) -> None:
        kind = event["event"]
        if kind == Report.FAILED:
            self._fail("node %s: %s" % (self.machine.name, event["message"]), event["reason"] and EndReason(event["reason"]))
        elif kind == Report.GCS_LOST and self.ready:
            self._fail("the GCS on node %s is gone" % self.machine.name)
        elif not self._over:
            self.on_event(event)

    def _exited(self, code: int, _: Any) -> None:
        self.pid = None
        self._read_reports()  # The last reports may say why.
        if self._over:
            return
        node, how = self.machine.name, "signal %d" % -code if code < 0 else "exit code %d" % code
        if self.ready or (self._gcs and _UP in tail_file(self._log, lines=200)):
            full = "; the disk of %s is full" % self.scratch.path if is_full(self.scratch.path) else ""
            return self._fail("Ray on node %s ended with %s%s" % (node, how, full))
        temporary = any(_TEMPORARY.search(tail_file(path, lines=200)) for path in self._log_paths.values())
        if self._attempt < _ATTEMPTS and temporary:
            why = "a port was taken, or Ray's agents were slow; trying Ray on node %s again" % node
            self.on_event({"event": Report.PHASE, "phase": "cluster-start", "message": why})
            return self._start_ray()
        what = "`ray symmetric-run`" if self._symmetric else "`ray start`"
        said = last_error_line(tail_file(self._log))
        self._fail("%s on node %s ended with %s before Ray was up%s" % (what, node, how, said and ": " + said))

    def _fail(self, why: str, reason: Optional[EndReason] = None, unhealthy: Optional[Unhealthy] = None) -> None:
        if not self._over:
            self._over = True
            self._kill()
            reason = reason or (EndReason.CLUSTER_LOST if self.ready else EndReason.CLUSTER_START)
            self.on_event({"event": Report.FAILED, "error": ClusterError(reason, why, unhealthy)})

    def _kill(self) -> None:
        """Send SIGKILL to the process that runs Ray or a health check on this node, and to all processes below it.

        The process group alone would not contain Ray's daemons.
        """
        if self.pid is not None:
            below = [process.pid for process in processes.descendants(self.pid)]
            processes.signal_group(self.pid, signal.SIGKILL)
            processes.kill_all(below)


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LOG_PREFIX = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+\t[A-Z]+ \S+ -- ")  # Time, level and source of a line that Ray logs.
# Matches log lines that report no error, and lines in which `ray start` prints a placeholder without its value.
_NO_ERROR = re.compile(r"\b(DEBUG|INFO)\b|`\{\}`")


def last_error_line(log: str) -> str:
    """Returns the last line of `log`, the text that `ray start` printed, that may say why Ray ended; "" if there is none.

    Time, log level and colours are removed, and at most 500 characters are left.
    """
    lines = [line for line in map(str.strip, _COLOURS.sub("", log).splitlines()) if line and not _NO_ERROR.search(line)]
    return _LOG_PREFIX.sub("", lines[-1])[:500] if lines else ""
