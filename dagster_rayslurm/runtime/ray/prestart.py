"""Workers of Ray that wait for the next payload: a driver that finds none waits until Ray has started some.

Ray's workers belong to one job and end with it; one that has no job yet takes the first that asks. The raylet starts
such workers when it is asked by its RPC `PrestartWorkers`. Facts about Ray's private API were read in and tried on Ray
2.60; a Ray without it, or without `grpcio` (which comes with `ray[default]`), starts its workers when it needs them.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import threading
import time
from typing import Any, Dict, List, Set

from ..process import processes

MOST = 4
"""Workers that wait at most; each takes some 60 MB of memory."""

_KEEP_ALIVE = 600
"""Seconds until Ray may end a waiting worker if there are more of them than CPUs."""

_TIMEOUT = 5.0
_COME_UP = 60.0
"""Seconds in which a worker has certainly begun to write its log."""

_LOOK_AGAIN = 0.1

AT_FIRST_DRIVER = "RAY_prestart_worker_first_driver"
"""Option of the raylet: every driver that comes makes it start one worker for each CPU, whether any wait or not, and
these take the CPU that the driver needs for its first task."""

_LOG = re.compile(r"worker-[0-9a-f]+-f+-([0-9]+)\.out")
"""Log of a worker that had no job when it was started, with its process id."""

_HAS_JOB = b":job_id:"
"""What a worker writes into its log when it gets one."""


def logs_of(ray_temp_dir: str) -> str:
    """Ray's directory of logs."""
    return os.path.join(ray_temp_dir, "session_latest", "logs")


def waiting(logs: str) -> Set[int]:
    """The processes of this node's workers that have no job yet.

    Args:
        logs: Ray's directory of logs.
    """
    return {pid for name, pid in _logs(logs).items() if _is_worker(pid) and not _has_job(os.path.join(logs, name))}


def serve(fd: int, gcs: str, logs: str, cpus: int) -> None:
    """See to it that workers wait on this node, in a thread of its own, after each byte that comes in.

    Args:
        fd: where the bytes come from.
        gcs: "HOST:PORT" of the GCS.
        logs: Ray's directory of logs.
        cpus: how many workers Ray has at work here at most; no more than that wait.
    """
    os.set_inheritable(fd, False)
    if cpus < 1 or not _can_be_asked():
        return os.close(fd)
    if cpus <= MOST:
        # One waits for each CPU, so Ray's own would only be in the way; on a larger node a driver gets more of them so.
        os.environ.setdefault(AT_FIRST_DRIVER, "0")
    threading.Thread(target=_serve, args=(fd, gcs, logs, min(cpus, MOST)), daemon=True).start()


def _serve(fd: int, gcs: str, logs: str, workers: int) -> None:
    try:
        raylet: Any = None
        with open(fd, "rb", buffering=0) as asked:
            while asked.read(4096):
                missing = workers - len(waiting(logs))
                if missing < 1:
                    continue
                raylet = _connect(gcs) if raylet is None else raylet
                before = len(_logs(logs))
                _ask(raylet, missing)
                if not _appear(logs, before + missing):
                    return  # Nobody could tell how many there are, and each time there would be more.
    except Exception as error:  # Ray's errors have no common public base, and other versions other modules.
        print("rayslurm: no workers are kept ready: %s: %s" % (type(error).__name__, error), file=sys.stderr)


def _can_be_asked() -> bool:
    try:
        importlib.import_module("grpc")
        importlib.import_module("ray._private.grpc_utils")
        return hasattr(importlib.import_module("ray.core.generated.node_manager_pb2"), "PrestartWorkersRequest")
    except Exception:  # Whatever is there instead is none of ours.
        return False


def _connect(gcs: str) -> Any:
    """The head's raylet, as `ray._private.grpc_utils` reaches it: with the cluster's token."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    grpc_utils: Any = importlib.import_module("ray._private.grpc_utils")
    stubs: Any = importlib.import_module("ray.core.generated.node_manager_pb2_grpc")
    nodes: List[Any] = list(GcsClient(address=gcs).get_all_node_info(timeout=_TIMEOUT).values())
    head = next(node for node in nodes if node.is_head_node)
    host = head.node_manager_address
    address = "%s:%d" % ("[%s]" % host if ":" in host else host, head.node_manager_port)
    return stubs.NodeManagerServiceStub(grpc_utils.init_grpc_channel(address))


def _ask(raylet: Any, workers: int) -> None:
    messages: Any = importlib.import_module("ray.core.generated.node_manager_pb2")
    request = messages.PrestartWorkersRequest(num_workers=workers, keep_alive_duration_secs=_KEEP_ALIVE)
    raylet.PrestartWorkers(request, timeout=_TIMEOUT)


def _appear(logs: str, number: int) -> bool:
    """Wait until so many workers have come, those included that are gone."""
    until = time.monotonic() + _COME_UP
    while len(_logs(logs)) < number:
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK_AGAIN)
    return True


def _logs(logs: str) -> Dict[str, int]:
    """Process ids by name of log."""
    try:
        matches = [_LOG.fullmatch(name) for name in os.listdir(logs)]
    except OSError:
        return {}
    return {match.group(0): int(match.group(1)) for match in matches if match is not None}


def _is_worker(pid: int) -> bool:
    """Whether a process still is a worker of Ray, all of which change their command line."""
    return processes.command_line(pid).startswith(b"ray::")


def _has_job(log: str) -> bool:
    try:
        with open(log, "rb") as file:
            return file.read(len(_HAS_JOB)) == _HAS_JOB
    except OSError:
        return False
