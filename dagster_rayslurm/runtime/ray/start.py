"""`ray start --block` on this node, head or worker: health check, ports, process, reports and log."""

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

from ..node import ports
from ..node.addresses import join_host_port
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
_CLASH = re.compile(r"address already in use|port \d+ is already|already occupied|Failed to bind", re.IGNORECASE)
_SLOW_AGENT = re.compile(r"Timed out waiting for file \S*_port_")
"""A raylet dies with this when its agents are not up within 15 s; Ray 2.60 has no setting for that limit."""
KEEPS_WORKERS_READY = "ray"
"""A runtime that preloads this module keeps Ray's workers ready as well."""
_LOGS = ("gcs_server.out", "gcs_server.err", "raylet.out", "raylet.err", "dashboard.log", "ray_process_exit.log")
_SHIM = """#!/bin/sh
# `ray stop` would end every Ray of this user on this node, also other clusters; this one ends with its runtime.
[ "$1" = stop ] && exit 0
exec %s -m ray.scripts.scripts "$@"
"""

Event = Dict[str, Any]


class RayListener:
    """Told what becomes of Ray on a node, or of a cluster; the base class ignores it."""

    def on_gcs(self, gcs: str) -> None:
        """The port of this node's head was chosen, first or anew: "HOST:PORT"."""

    def on_report(self, event: Event) -> None:
        """The process that runs Ray on this node reports something; see `node_main`."""

    def on_ready(self) -> None:
        """The cluster is complete; called once."""

    def on_failed(self, error: ClusterError) -> None:
        """Ray or the cluster did not start, or was lost; called once."""

    def on_node_lost(self, name: str) -> None:
        """A worker was lost after the cluster was ready."""

    def on_phase(self, phase: str, message: str) -> None:
        """Something happens that the user should see."""


class RayStart:
    """Starts Ray on this node, and again with other ports if one was taken meanwhile.

    Args:
        loop: where everything happens.
        runtime: the start record.
        spec: the cluster as this node shall start it.
        key: the cluster's key; see `cluster_dir`.
        machine: what this node grants.
        scratch: private directory for Ray's files and the token.
        nodes: number of nodes of the complete cluster.
        listener: told what becomes of it.
        environ: variables for Ray's daemons on this node; None for one that must not be set.
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
        """Whether the cluster counts this node in; from then on its end is a loss."""
        self.started = False
        """Whether the health check is over."""
        self.ports: Optional[ports.Ports] = None
        self.pid: Optional[int] = None
        """The process below which all of Ray on this node is."""
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
        """Ray's daemons that are children of this runtime; none where `ray start` itself runs on."""
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
        """Ask for the tables of the leak check; a report with this id answers. False if no process can answer."""
        if self._audit_fd is None or self.pid is None:
            return False
        try:
            os.write(self._audit_fd, json.dumps({"id": query}).encode("utf-8") + b"\n")
        except OSError:
            return False  # The process is gone, or has not read for long.
        return True

    def prestart(self) -> None:
        """Have Ray start idle workers for the next payload, if payloads begin with Ray imported."""
        if self._prestart_fd is not None:
            with contextlib.suppress(OSError):  # The process is gone, or has not read for long.
                os.write(self._prestart_fd, b"\n")

    def start(self, address: Optional[str], gcs: Optional[str] = None) -> None:
        """Check the node and start Ray on it.

        Args:
            address: the node's own address; None for the one that Ray finds.
            gcs: "HOST:PORT" of the head to join; None on the head.
        """
        self._address, self._gcs = address, gcs
        if self._spec.health_check:
            self._check_health(self._spec.health_check)
        else:
            self._start_ray()

    def end(self) -> None:
        """End every process of Ray on this node at once; the listener is told no more."""
        self._over = True
        self._kill()
        self._close_pipes()
        if self.ports is not None and self.ports.lock is not None:
            os.close(self.ports.lock)
            self.ports = replace(self.ports, lock=None)

    def log_tails(self) -> Dict[str, str]:
        """The last lines of the logs that tell why Ray failed here."""
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
        except ports.PortError as error:
            self._fail(ClusterError(EndReason.CLUSTER_START, "node %s: %s" % (self._machine.name, error)))
        except OSError as error:
            self._fail(ClusterError(EndReason.CLUSTER_START, "node %s: Ray cannot be started: %s" % (self._machine.name, error)))

    def _prepare_and_spawn(self) -> None:
        self.started = True
        self._attempt += 1
        if self.ports is not None and self.ports.lock is not None:
            os.close(self.ports.lock)
        self.ports = ports.choose(self._spec.port_range, head=self._gcs is None)
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
            env.setdefault(PRESTART_AT_FIRST_DRIVER, "0")  # Simulated CPUs need no worker each.
        env.update(self.ports.environ)
        env.update(ray_environment(self._spec, self.token_path))
        if entrypoint:
            env["RAY_ADDRESS"] = gcs  # Its own `ray.init` finds other clusters otherwise.
            # Otherwise its dashboard leaves files behind: see `internals.move_dashboard_files`.
            env["TMPDIR"] = self._scratch.ray_temp_dir
        self._spawn(order, env)

    def _environ(self, environ: Mapping[str, str]) -> Dict[str, str]:
        """An environment plus the variables for Ray's daemons on this node."""
        wanted = {**environ, **self._worker_env}
        return {name: value for name, value in wanted.items() if value is not None}

    def _symmetric_arguments(self, gcs: str, head: bool, entrypoint: str) -> List[str]:
        assert self.ports is not None
        hold = [sys.executable, sys.argv[0], "hold", entrypoint]
        where = self._scratch.ray_temp_dir
        return symmetric_arguments(self._spec, self._machine, self.ports, where, gcs, head, self._nodes, hold)

    def _write_shim(self) -> str:
        """A directory with the `ray` program that `ray symmetric-run` calls."""
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
        """A pipe to the process that never blocks here. Its reading end is added to `kept`, to be closed after the start."""
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
            return  # No more for now.

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
        """Count Ray's daemons as children of this runtime, because `ray symmetric-run` orphans them and strays are ended."""
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
        # The logs of late agents may mention ports as well.
        why = "Ray's agents were not up within its own limit of 15 s" if slow else "a port was taken meanwhile"
        if self._attempt < _ATTEMPTS and (clash or slow):  # The next attempt reads files faster.
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
        """SIGKILL `ray start` and all below it; Ray's daemons are in sessions of their own."""
        roots = [*self._daemons, *([] if self.pid is None else [self.pid])]
        below = [process.pid for root in roots for process in processes.descendants(root)]
        if self.pid is not None:
            processes.signal_group(self.pid, signal.SIGKILL)
        processes.kill_all([*below, *self._daemons])


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LOG_PREFIX = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+\t[A-Z]+ \S+ -- ")
_NO_ERROR = re.compile(r"\b(DEBUG|INFO)\b|`\{\}`")
"""Lines that are no errors, and those in which `ray start` prints a format without its values."""


def last_error_line(log: str) -> str:
    """The last line of a log of `ray start` that may say why it ended; "" if there is none."""
    lines = [line for line in map(str.strip, _COLOURS.sub("", log).splitlines()) if line and not _NO_ERROR.search(line)]
    return _LOG_PREFIX.sub("", lines[-1])[:500] if lines else ""
