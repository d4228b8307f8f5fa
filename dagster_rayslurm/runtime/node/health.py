"""Built-in health checks of a node: number of GPUs, GPU memory errors, disk space, clock and network interfaces.

Each check has a pure function that returns an error text or None, and a function that reads the state of the node and passes this
state to the pure function. The checks run in a separate process (`main`), because a broken GPU driver or file system may not
answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .interfaces import address_of

_TIMEOUT = 30.0  # Seconds in which `nvidia-smi` must answer; it is slow on a node without NVIDIA's persistence daemon.
_MOST_WORDS = 500  # Most characters of the error text of a check.
_LEAST_FREE = 0.05  # Share of a disk that must be free: Ray 2.60 writes to no disk that is more than 95 % full.
_CLOCK_LIMIT = 5.0  # Seconds by which the node's clock may be off.
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(?:(?P<path>/.*):)?(?P<number>[0-9]+(?:\.[0-9]+)?)(?P<unit>[KMGT])")
# One line of `nvidia-smi -L`: a GPU, or a MIG instance of the GPU before it.
_GPU_LINE = re.compile(r"\s*(?P<kind>GPU|MIG)\b.*\(UUID: (?P<uuid>[^)]+)\)")
_PORT_STATE = re.compile(r"[0-9]+: ")  # Before the word in the file `state` of an InfiniBand port, such as "4: ACTIVE".


@dataclass(frozen=True)
class Order:
    """What the process that runs the health checks must do: the checks, such as "clock=10", and facts that the checks need."""

    checks: List[str]
    gpus: Optional[int] = None  # GPUs that the node must have; None where they are simulated.
    visible: List[str] = field(default_factory=list)  # Indices or UUIDs of the GPUs that were granted; [] if none or unknown.
    scratch: str = "/tmp"  # Directory on the node's own disk; "disk-space" checks this disk by default.
    shared: Optional[str] = None  # Directory on the shared file system, for "clock"; None if there is none.
    interface: Optional[str] = None  # The launcher's `network_interface`; None if it is not set.

    def to_json(self) -> str:
        return json.dumps(asdict(self))


# ---- Names and values of checks, and the decision of each check: pure functions that return an error text or None


def name_of(check: str) -> str:
    """Returns the name of a check: for a built-in check the part before "=", such as "clock" for "clock=10".

    For any other text, which is a shell command of the user, the name is "command".
    """
    name = check.partition("=")[0]
    return name if name in CHECKS else "command"


def value_error(check: str) -> Optional[str]:
    """Returns an error text if `check`, such as "clock=soon", gives a built-in check a value that it cannot take; otherwise None.

    The value is the text after "=". For a built-in check that takes no value, every value is an error. If `check` has no "=",
    the result is None.
    """
    name, equals, value = check.partition("=")
    if not equals:
        return None
    wanted = {
        "gpu-count": ("a number of GPUs", r"[0-9]+"),
        "clock": ("seconds", r"[0-9]+(\.[0-9]+)?"),
        "disk-space": ("SIZE or PATH:SIZE with K, M, G or T", _SIZE.pattern),
        "interface": ("the name of an interface, such as ib0", r"[^\s/=,]+"),
    }
    if name not in wanted:
        return "%s takes no value" % name
    what, pattern = wanted[name]
    return None if re.fullmatch(pattern, value) else "%r is not %s" % (value, what)


def gpu_count_problem(wanted: int, listed: str, visible: Sequence[str]) -> Optional[str]:
    """Returns an error text if the GPU driver lists fewer than `wanted` GPUs, or lacks a GPU in `visible`; None otherwise.

    `listed` is the output of `nvidia-smi -L`. `visible` has the names of the GPUs that were granted to the job; only names that
    are UUIDs ("GPU-…", "MIG-…") are looked up.
    """
    lines = [match for match in map(_GPU_LINE.match, listed.splitlines()) if match]
    kind = "MIG" if any(name.startswith("MIG-") for name in visible) else "GPU"
    uuids = [match["uuid"] for match in lines if match["kind"] == kind]
    if len(uuids) < wanted:
        return "%d of %d GPUs are there" % (len(uuids), wanted)
    missing = [name for name in visible if name[:4] in ("GPU-", "MIG-") and not any(uuid.startswith(name) for uuid in uuids)]
    return "GPU %s is not there" % ", ".join(missing) if missing else None


def gpu_ecc_problem(errors: str, remapped: str) -> Optional[str]:
    """Returns an error text about GPUs whose memory has uncorrected errors or broken rows; None without such GPUs.

    Both arguments are CSV output of `nvidia-smi` with one line for each GPU. A line of `errors` has the GPU's index and the
    number of memory errors that ECC could not correct since the last reset. A line of `remapped` has an id of the GPU, and
    whether the GPU failed to replace a broken row of its memory.
    """
    problems = []
    for index, count in _rows(errors):
        if count.isdigit() and int(count):
            problems.append("GPU %s has %s uncorrected memory errors" % (index, count))
    for index, failed in _rows(remapped):
        if failed.lower() == "yes" or (failed.isdigit() and int(failed)):
            problems.append("GPU %s could not replace a broken row of its memory" % index)
    return "; ".join(problems) or None


def _rows(text: str) -> List[List[str]]:
    """The columns of each line in `text`, CSV output of `nvidia-smi`; lines without exactly two columns are left out."""
    rows = [[word.strip() for word in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == 2]


class Disk(NamedTuple):
    """The size and the free space of the file system that contains `path`, and its number of inodes.

    Free space and free inodes do not include what is reserved for root.
    """

    path: str
    total: int  # Bytes.
    free: int  # Bytes.
    nodes: int  # Number of inodes, which is the most files that the file system can have; 0 if there is no limit.
    free_nodes: int  # Number of free inodes.


def disk_space_problem(disk: Disk, wanted: Optional[int]) -> Optional[str]:
    """An error text if a file system has fewer than `wanted` free bytes, or no free inodes; None otherwise.

    If `wanted` is None, 5 % of the file system must be free.
    """
    least = int(disk.total * _LEAST_FREE) if wanted is None else wanted
    if disk.free < least:
        share = " (%g %%)" % (100 * _LEAST_FREE) if wanted is None else ""
        return "%s has %s free, and %s%s are needed" % (disk.path, _size(disk.free), _size(least), share)
    if disk.nodes and not disk.free_nodes:
        return "%s can take no more files: it has no free inodes" % disk.path
    return None


def _size(count: int) -> str:
    unit = next((unit for unit in "TGM" if count >= _UNITS[unit]), "K")
    return "%.1f %siB" % (count / _UNITS[unit], unit)


def clock_problem(ahead: float, limit: float) -> Optional[str]:
    """An error text if this node's clock is off by more than `limit` seconds; None otherwise.

    `ahead` is the time of this node's clock minus the time of the shared file system's clock, in seconds.
    """
    if abs(ahead) <= limit:
        return None
    where = "ahead of" if ahead > 0 else "behind"
    return "its clock is %.1f s %s that of the shared file system, and %g s are allowed" % (abs(ahead), where, limit)


class Interface(NamedTuple):
    """The state of a network interface such as "eth0", or of a port of an InfiniBand device."""

    name: str
    state: Optional[str]  # The kernel's word, such as "up" or "ACTIVE"; None if the interface does not exist.
    has_address: bool = True


def interface_problem(interfaces: Sequence[Interface], known: Sequence[str]) -> Optional[str]:
    """Returns an error text about the first of `interfaces` that is missing, is down or has no address; None if all are usable.

    If `interfaces` is empty, the error text says that the node has no InfiniBand port. `known` has the names of all network
    interfaces of the node, which the error text lists.
    """
    if not interfaces:
        return "it has no InfiniBand port; it has: %s" % ", ".join(known)
    for each in interfaces:
        if each.state is None:
            return "there is no interface %s; there are: %s" % (each.name, ", ".join(known))
        # Loopback and tunnels are "unknown" when they are up (operstates of the kernel's networking documentation).
        if each.state.lower() not in ("up", "unknown", "active"):
            return "interface %s is %s" % (each.name, each.state.lower())
        if not each.has_address:
            return "interface %s has no address" % each.name
    return None


# ---- The state of this node


class _NoAnswer(Exception):
    """Raised when a program that a check needs is missing, fails or hangs; the text is the error text of the check."""


def _ask(*command: str) -> str:
    """Run a program, wait for its end, and return its output, error output included, without white space at the ends.

    Raises _NoAnswer if the program is missing, has an exit code other than 0, or runs longer than `_TIMEOUT` seconds.
    """
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        raise _NoAnswer("%s cannot be run: %s" % (command[0], error.strerror)) from None
    try:
        output, _ = process.communicate(timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()  # Without a wait: if the GPU driver hangs, no signal ends a process that has called it.
        raise _NoAnswer("%s does not answer within %g s" % (command[0], _TIMEOUT)) from None
    text = output.decode("utf-8", "replace").strip()
    if process.returncode:
        said = " ".join(text.split())[-300:] or "it printed nothing"
        raise _NoAnswer("%s ended with exit code %d: %s" % (command[0], process.returncode, said))
    return text


def _gpu_count(order: Order, value: str) -> Optional[str]:
    wanted = int(value) if value else order.gpus
    return gpu_count_problem(wanted, _ask("nvidia-smi", "-L"), order.visible) if wanted else None


def _gpu_ecc(order: Order, value: str) -> Optional[str]:  # noqa: ARG001
    if not order.gpus:
        return None
    chosen = [name for name in order.visible if name.isdigit() or name.startswith("GPU-")]
    which = ["--id=" + ",".join(chosen)] if chosen and len(chosen) == len(order.visible) else []
    table = "--format=csv,noheader,nounits"
    errors = _ask("nvidia-smi", *which, "--query-gpu=index,ecc.errors.uncorrected.volatile.total", table)
    try:  # GPUs before Ampere replace no rows, and old drivers do not know the query.
        remapped = _ask("nvidia-smi", *which, "--query-remapped-rows=gpu_bus_id,remapped_rows.failure", table)
    except _NoAnswer:
        remapped = ""
    return gpu_ecc_problem(errors, remapped)


def _disk(path: str) -> Disk:
    found = os.statvfs(path)
    return Disk(path, found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, found.f_files, found.f_favail)


def _disk_space(order: Order, value: str) -> Optional[str]:
    match = _SIZE.fullmatch(value)
    path = (match and match["path"]) or order.scratch
    wanted = int(float(match["number"]) * _UNITS[match["unit"]]) if match else None
    problem = disk_space_problem(_disk(path), wanted)
    if problem is None and os.path.isdir("/dev/shm"):  # Where Ray's object store is.
        problem = disk_space_problem(_disk("/dev/shm"), None)
    return problem


def _clock(order: Order, value: str) -> Optional[str]:
    if order.shared is None:
        return None
    probe = os.path.join(order.shared, ".rs-%s.probe" % os.urandom(8).hex())
    os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        ahead = time.time() - os.stat(probe).st_mtime
    finally:
        os.unlink(probe)
    return clock_problem(ahead, float(value) if value else _CLOCK_LIMIT)


_INFINIBAND, _NETWORK = "/sys/class/infiniband", "/sys/class/net"


def _interface(order: Order, value: str) -> Optional[str]:
    wanted = value or order.interface
    devices, networks = _names(_INFINIBAND), _names(_NETWORK)
    if wanted and wanted not in devices:
        return interface_problem([_network_interface(wanted)], networks)
    ports = [_port(device, port) for device in ([wanted] if wanted else devices) for port in _names(_INFINIBAND, device, "ports")]
    return interface_problem(ports, networks)


def _network_interface(name: str) -> Interface:
    try:
        with open(os.path.join(_NETWORK, name, "operstate")) as file:
            state = file.read().strip()
    except OSError:
        return Interface(name, None)
    try:
        return Interface(name, state, bool(address_of(name)))
    except OSError:
        return Interface(name, state, False)


def _port(device: str, port: str) -> Interface:
    try:
        with open(os.path.join(_INFINIBAND, device, "ports", port, "state")) as file:
            return Interface("%s port %s" % (device, port), _PORT_STATE.sub("", file.read().strip()))
    except OSError:
        return Interface("%s port %s" % (device, port), None)


def _names(*path: str) -> List[str]:
    with contextlib.suppress(OSError):
        return sorted(os.listdir(os.path.join(*path)))
    return []


Check = Callable[[Order, str], Optional[str]]
# The built-in checks by name. Each gets the text after "=" in the user's value, "" if there is none.
CHECKS: Dict[str, Check] = {
    "gpu-count": _gpu_count,
    "gpu-ecc": _gpu_ecc,
    "disk-space": _disk_space,
    "clock": _clock,
    "interface": _interface,
}


def first_problem(order: Order) -> Optional[Tuple[str, str]]:
    """Run the checks of `order` one after another, until one fails; returns this check, such as "clock=10", and its error text.

    A check that cannot be carried out counts as failed. Returns None if the node passes all checks.
    """
    for check in order.checks:
        name, _, value = check.partition("=")
        try:
            problem = CHECKS[name](order, value)
        except _NoAnswer as error:
            problem = str(error)
        except OSError as error:
            problem = "%s: %s" % (error.filename or name, error.strerror or error)
        if problem:
            return check, problem[:_MOST_WORDS]
    return None


def node_name(environ: Mapping[str, str]) -> str:
    """Returns this node's name in Slurm, from the environment variables `environ`; outside of Slurm, the host name."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def main(arguments: List[str]) -> int:
    """Run the health checks of an `Order`, and write the first failed check with its error text, as JSON, to a file descriptor.

    `arguments` has two texts: the order as JSON, and the number of the descriptor. If no check fails, `null` is written. Returns
    the exit code: 1 if a check failed, else 0. The descriptor is a pipe, because the disk may be full.
    """
    order: Any = json.loads(arguments[0])
    found = first_problem(Order(**order))
    os.write(int(arguments[1]), json.dumps(found).encode("utf-8"))
    return 1 if found else 0
