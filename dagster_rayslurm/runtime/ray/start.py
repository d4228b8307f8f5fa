"""Start and end Ray on this node, as head or worker: health check, ports, the process that runs Ray, its reports and logs."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Dict, List, Mapping, Optional, Set, Tuple

from ..node import network
from ..node.network import join_host_port
from ..node.resources import NodeResources
from ..process import processes
from ..process.loop import Loop
from ..process.scratch import Scratch
from ..protocol.end import ClusterError, EndReason
from ..protocol.record import split_lines, tail_file
from ..protocol.spec import RAY_COORDINATES, RaySpec, RuntimeSpec
from .cluster_dir import token_of, worker_env_of
from .internals import PRESTART_AT_FIRST_DRIVER, RAYLET_ENVIRON
from .prestart import logs_of
from .reports import Report
from .start_arguments import ray_environment, scheduled_cpus, start_arguments, symmetric_arguments

_ATTEMPTS = 3
"""Most attempts to start Ray on this node; another attempt follows only a taken port or slow agents of Ray."""
_CLASH = re.compile(r"address already in use|port \d+ is already|already occupied|Failed to bind", re.IGNORECASE)
"""What Ray's logs contain when a port was taken."""
_SLOW_AGENT = re.compile(r"Timed out waiting for file \S*_port_")
"""What the raylet logs when it ends because its agents were not up within 15 s; Ray 2.60 has no setting for that limit."""
KEEPS_WORKERS_READY = "ray"
"""Name of a module: a runtime that preloads it for payloads also keeps idle Ray workers ready."""
_LOGS = ("gcs_server.out", "gcs_server.err", "raylet.out", "raylet.err", "dashboard.log", "ray_process_exit.log")
"""Ray's logs that may tell why Ray failed on a node."""
_SHIM = """#!/bin/sh
# `ray stop` would end every Ray of this user on this node, also other clusters; this one ends with its runtime.
[ "$1" = stop ] && exit 0
exec %s -m ray.scripts.scripts "$@"
"""
"""The `ray` program that `ray symmetric-run` finds in its PATH; %s is the Python to use."""

Event = Dict[str, Any]
"""A report of the process that runs Ray, or a message of a worker node; its field `event` names the kind."""


class RayListener:
    """Callbacks for what happens to Ray on a node, or to a Ray cluster; in this base class they do nothing."""

    def on_gcs(self, gcs: str) -> None:
        """Called when the address of this node's head, "HOST:PORT", is chosen; again when a new attempt changes it."""

    def on_report(self, event: Event) -> None:
        """Called when the process that runs Ray on this node (`node_main`) reports something; see `reports`."""

    def on_ready(self) -> None:
        """Called once, when enough nodes have joined the Ray cluster."""

    def on_failed(self, error: ClusterError) -> None:
        """Called once, when Ray on this node, or the Ray cluster, did not start or was lost."""

    def on_node_lost(self, name: str) -> None:
        """Called when a worker node was lost after the Ray cluster was ready."""

    def on_phase(self, phase: str, message: str) -> None:
        """Called when something happens that the Dagster log should show.

        Args:
            phase: what the cluster is doing, such as "cluster-start".
            message: the line for the log.
        """


class RayStart:
    """Starts Ray on this node, as head or worker, watches it and ends it; tries again with other ports if a port was taken.

    Args:
        loop: the event loop.
        runtime: the start record.
        spec: describes the Ray cluster, with the settings for this node.
        key: the cluster's key; see `cluster_dir`.
        machine: the resources of this node.
        scratch: private directory for Ray's files and the token.
        nodes: number of nodes of the complete cluster.
        listener: gets the events of Ray on this node.
        environ: environment variables for Ray's daemons on this node; the value None removes a variable.
    """

    def __init__(
        self,
        loop: Loop,
        runtime: RuntimeSpec,
        spec: RaySpec,
        key: str,
        machine: NodeResources,
        scratch: Scratch,
        nodes: int,
        listener: RayListener,
        environ: Mapping[str, Optional[str]] = MappingProxyType({}),
    ) -> None:
        self.ready = False
        """Whether the Ray cluster uses this node; from then on an end of Ray here is a loss, not a failed start."""
        self.started = False
        """Whether the start of Ray has begun, after the health check."""
        self.ports: Optional[network.Ports] = None
        self.pid: Optional[int] = None
        """Id of the process of which all of Ray's processes on this node are descendants; None while there is none."""
        self._loop = loop
        self._spec = spec
        self._machine = machine
        self._scratch = scratch
        self._nodes = nodes
        self._listener = listener
        self._worker_env = {**worker_env_of(runtime, key), **environ}
        self._prestart = KEEPS_WORKERS_READY in runtime.preload and not key
        self._audit_fd: Optional[int] = None
        self._prestart_fd: Optional[int] = None
        self._daemons: Set[int] = set()
        """Ids of Ray's daemons that are children of this runtime, which `ray symmetric-run` causes; else empty."""
        self._report_fd: Optional[int] = None
        self._report = b""
        self._problem: Optional[ClusterError] = None
        self._attempt = 0
        self._over = False
        self._gcs: Optional[str] = None
        self._address: Optional[str] = None
        with open(self.token_path, "x", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(token_of(runtime, key))

    @property
    def token_path(self) -> str:
        return self._scratch.join("ray.token")

    def query_tables(self, query: int) -> bool:
        """Ask Ray's process for the tables of the leak check; a report with the id `query` answers.

        Returns:
            Whether a process got the query.
        """
        if self._audit_fd is None or self.pid is None:
            return False
        try:
            os.write(self._audit_fd, json.dumps({"id": query}).encode("utf-8") + b"\n")
        except OSError:
            return False  # The process has ended, or the pipe is full because it has not read for a while.
        return True

    def prestart(self) -> None:
        """Have Ray start idle worker processes for the next payload, if the runtime preloads Ray for payloads."""
        if self._prestart_fd is not None:
            with contextlib.suppress(OSError):  # The process has ended, or the pipe is full because it has not read for a while.
                os.write(self._prestart_fd, b"\n")

    def start(self, address: Optional[str], gcs: Optional[str] = None) -> None:
        """Run the health check, if there is one, and start Ray on this node.

        Args:
            address: the address of this node; None for the one that Ray finds.
            gcs: "HOST:PORT" of the head to join; None on the head.
        """
        self._address, self._gcs = address, gcs
        if self._spec.health_check:
            self._check_health(self._spec.health_check)
        else:
            self._start_ray()

    def end(self) -> None:
        """End every process of Ray on this node at once; the listener gets no more events."""
        self._over = True
        self._kill()
        self._close_pipes()
        if self.ports is not None and self.ports.lock is not None:
            os.close(self.ports.lock)
            self.ports = replace(self.ports, lock=None)

    def log_tails(self) -> Dict[str, str]:
        """The last lines of the logs that may tell why Ray failed on this node, by name of log."""
        paths = {"ray start": self._log_path, **{name: os.path.join(self._logs, name) for name in _LOGS}}
        tails = {name: tail_file(path, lines=15) for name, path in paths.items()}
        return {name: text for name, text in tails.items() if text.strip()}

    @property
    def _cpus(self) -> int:
        return scheduled_cpus(self._spec, self._machine)

    @property
    def _logs(self) -> str:
        return logs_of(self._scratch.ray_temp_dir)

    @property
    def _log_path(self) -> str:
        return self._scratch.join("ray-start.log")

    def _check_health(self, command: str) -> None:
        log = self._scratch.join("health-check.log")

        def done(code: int, _: Any) -> None:
            self.pid = None
            if self._over:
                return
            if code != 0:
                why = "the health check failed with exit code %d on node %s: %s" % (
                    code,
                    self._machine.name,
                    tail_file(log, lines=5).strip() or "it printed nothing",
                )
                return self._fail(ClusterError(EndReason.CLUSTER_START, why))
            self._start_ray()

        with open(log, "wb") as output:
            self.pid = self._loop.spawn(
                ["/bin/sh", "-c", command],
                done,
                env=self._environ(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=processes.die_with_parent(),
            )

    def _start_ray(self) -> None:
        try:
            self._prepare_and_spawn()
        except network.PortError as error:
            self._fail(ClusterError(EndReason.CLUSTER_START, "node %s: %s" % (self._machine.name, error)))
        except OSError as error:
            self._fail(ClusterError(EndReason.CLUSTER_START, "node %s: Ray cannot be started: %s" % (self._machine.name, error)))

    def _prepare_and_spawn(self) -> None:
        self.started = True
        self._attempt += 1
        if self.ports is not None and self.ports.lock is not None:
            os.close(self.ports.lock)
        self.ports = network.choose_ports(self._spec.port_range, head=self._gcs is None)
        shutil.rmtree(self._scratch.ray_temp_dir, ignore_errors=True)
        os.mkdir(self._scratch.ray_temp_dir, 0o700)
        head = self._gcs is None
        gcs = self._gcs or join_host_port(self._address or "127.0.0.1", self.ports.gcs)
        if head:
            self._listener.on_gcs(gcs)
        entrypoint, command, env = None, ["start"], dict(os.environ)
        if self._spec.launch_style == "symmetric-run":
            entrypoint = self._scratch.join("entrypoint")
            command = ["symmetric-run", *self._symmetric_arguments(gcs, head, entrypoint)]
            env["PATH"] = os.pathsep.join([self._write_shim(), env.get("PATH", os.defpath)])
            env["RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT"] = str(int(self._spec.startup_timeout))
        else:
            command += start_arguments(
                self._spec, self._machine, self.ports, self._scratch.ray_temp_dir, self._address, self._gcs
            )
        order = {
            "gcs": gcs,
            "head": head,
            "expected": self._nodes,
            "ray_version": self._spec.ray_version,
            "token": self._spec.auth == "token",
            "command": command,
            "entrypoint": entrypoint,
        }
        env = self._environ({**RAYLET_ENVIRON, **{name: value for name, value in env.items() if name not in RAY_COORDINATES}})
        if self._cpus > (os.cpu_count() or 1):
            env.setdefault(PRESTART_AT_FIRST_DRIVER, "0")  # More CPUs are simulated than exist; not each needs a worker.
        env.update(self.ports.environ)
        env.update(ray_environment(self._spec, self.token_path))
        if entrypoint:
            env["RAY_ADDRESS"] = gcs  # Otherwise the `ray.init` in `ray symmetric-run` finds other clusters.
            # Otherwise Ray's dashboard leaves files in TMPDIR; see `internals.move_dashboard_files`.
            env["TMPDIR"] = self._scratch.ray_temp_dir
        self._spawn(order, env)

    def _environ(self, environ: Mapping[str, str]) -> Dict[str, str]:
        """`environ` with the variables for Ray's daemons on this node."""
        wanted = {**environ, **self._worker_env}
        return {name: value for name, value in wanted.items() if value is not None}

    def _symmetric_arguments(self, gcs: str, head: bool, entrypoint: str) -> List[str]:
        assert self.ports is not None
        hold = [sys.executable, sys.argv[0], "hold", entrypoint]
        where = self._scratch.ray_temp_dir
        return symmetric_arguments(self._spec, self._machine, self.ports, where, gcs, head, self._nodes, hold)

    def _write_shim(self) -> str:
        """Write the `ray` program that `ray symmetric-run` calls. Returns its directory, which must be the first in PATH."""
        directory = self._scratch.join("bin")
        os.makedirs(directory, exist_ok=True)
        path = os.path.join(directory, "ray")
        with open(path, "w") as file:
            file.write(_SHIM % shlex.quote(sys.executable))
        os.chmod(path, 0o700)
        return directory

    def _spawn(self, order: Dict[str, Any], env: Dict[str, str]) -> None:
        self._report_fd, writer = os.pipe()
        os.set_blocking(self._report_fd, False)
        self._report = b""
        self._loop.on_readable(self._report_fd, self._read_report)
        kept = [writer]
        self._close_pipes()
        order = dict(order, report_fd=writer, audit_fd=None, prestart=None)
        if self._gcs is None:
            order["audit_fd"], self._audit_fd = self._pipe(kept)
        if self._gcs is None and self._prestart:
            fd, self._prestart_fd = self._pipe(kept)
            order["prestart"] = {"fd": fd, "logs": self._logs, "cpus": min(self._cpus, os.cpu_count() or 1)}
        try:
            with open(self._log_path, "ab") as log:
                self.pid = self._loop.spawn(
                    [sys.executable, sys.argv[0], "ray-node", json.dumps(order)],
                    self._exited,
                    cwd=self._scratch.path,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=kept,
                    preexec_fn=processes.die_with_parent(),
                )
        except OSError as error:
            self._fail(ClusterError(EndReason.ENVIRONMENT, "%s cannot be started: %s" % (sys.executable, error.strerror)))
        finally:
            for fd in kept:
                os.close(fd)

    def _pipe(self, kept: List[int]) -> Tuple[int, int]:
        """Make a pipe to Ray's process; writing to it never blocks.

        Args:
            kept: gets the reading end, which Ray's process inherits and this one closes after the start.

        Returns:
            The reading and the writing end.
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        kept.append(reader)
        return reader, writer

    def _close_pipes(self) -> None:
        for fd in (self._audit_fd, self._prestart_fd):
            if fd is not None:
                os.close(fd)
        self._audit_fd = self._prestart_fd = None

    def _read_report(self) -> None:
        """Handle the reports that have arrived."""
        try:
            while self._report_fd is not None:
                data = os.read(self._report_fd, 65536)
                if not data:
                    self._loop.forget(self._report_fd)
                    os.close(self._report_fd)
                    self._report_fd = None
                lines, self._report = split_lines(self._report + data)
                for line in lines:
                    self._handle(json.loads(line.decode("utf-8")))
        except BlockingIOError:
            return  # No more reports have arrived.

    def _handle(self, event: Event) -> None:
        if event["event"] == Report.ENVIRONMENT:
            self._problem = ClusterError(EndReason.ENVIRONMENT, "node %s: %s" % (self._machine.name, event["message"]))
        elif event["event"] == Report.WATCH_FAILED:
            self._problem = ClusterError(EndReason.CLUSTER_START, "the GCS cannot be asked for its nodes: " + event["message"])
            self._kill()
        elif not self._over:
            if event["event"] == Report.ENTRYPOINT:
                self._adopt_daemons()
            self._listener.on_report(event)

    def _adopt_daemons(self) -> None:
        """Record Ray's daemons as children of this runtime, so that they are not ended as strays.

        `ray symmetric-run` leaves them without a parent, so they become children of this process.
        """
        mark, own = "TMPDIR=" + self._scratch.ray_temp_dir, os.getpid()
        for process in processes.table().values():
            if process.parent == own and process.pid != self.pid and processes.has_environment(process.pid, mark):
                self._daemons.add(process.pid)
                self._loop.adopt(process.pid, functools.partial(self._daemon_ended, process.pid))

    def _daemon_ended(self, pid: int, *_: Any) -> None:
        self._daemons.discard(pid)

    def _exited(self, code: int, _: Any) -> None:
        self.pid = None
        self._close_pipes()
        self._read_report()  # The last reports may say why.
        if self._over:
            return
        how = "signal %d" % -code if code < 0 else "exit code %d" % code
        what = "`ray symmetric-run`" if self._spec.launch_style == "symmetric-run" else "`ray start`"
        node = self._machine.name
        if self.ready:
            return self._fail(ClusterError(EndReason.CLUSTER_LOST, "Ray on node %s ended with %s" % (node, how)))
        if self._problem is not None:
            return self._fail(self._problem)
        clash = any(_CLASH.search(text) for text in self.log_tails().values())
        slow = _SLOW_AGENT.search(tail_file(os.path.join(self._logs, "raylet.err"), lines=200)) is not None
        # Slow agents come first, because Ray's logs may mention ports in that case as well.
        why = "Ray's agents were not up within its own limit of 15 s" if slow else "a port was taken meanwhile"
        if self._attempt < _ATTEMPTS and (clash or slow):  # A second start is faster, because files are in the cache.
            self._listener.on_phase("cluster-start", "%s; trying Ray on node %s again" % (why, node))
            return self._start_ray()
        if slow:
            why += " on node %s, %d times: it is overloaded, or the file system of its environment is slow"
            return self._fail(ClusterError(EndReason.CLUSTER_START, why % (node, self._attempt)))
        said = last_error_line(tail_file(self._log_path))
        how += " before Ray was up" + (said and ": " + said)
        self._fail(ClusterError(EndReason.CLUSTER_START, "%s on node %s ended with %s" % (what, node, how)))

    def _fail(self, error: ClusterError) -> None:
        if not self._over:
            self._over = True
            self._kill()
            self._listener.on_failed(error)

    def _kill(self) -> None:
        """Send SIGKILL to `ray start` and all its descendants; its process group alone would not contain Ray's daemons."""
        roots = [*self._daemons, *([] if self.pid is None else [self.pid])]
        below = [process.pid for root in roots for process in processes.descendants(root)]
        if self.pid is not None:
            processes.signal_group(self.pid, signal.SIGKILL)
        processes.kill_all([*below, *self._daemons])


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LOG_PREFIX = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+\t[A-Z]+ \S+ -- ")
"""Time, level and source at the start of a line that Ray logs."""
_NO_ERROR = re.compile(r"\b(DEBUG|INFO)\b|`\{\}`")
"""Matches log lines that report no error, and lines in which `ray start` prints a placeholder without its value."""


def last_error_line(log: str) -> str:
    """The last line in the log of `ray start` that may say why Ray ended, without time and colours; "" if there is none."""
    lines = [line for line in map(str.strip, _COLOURS.sub("", log).splitlines()) if line and not _NO_ERROR.search(line)]
    return _LOG_PREFIX.sub("", lines[-1])[:500] if lines else ""
