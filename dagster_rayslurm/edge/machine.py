"""Collects facts of one machine for `rayslurm doctor`: clock, limits, directories, programs, network.

The agent calls `look` on the edge node. A Slurm job of `rayslurm doctor`, the probe, runs this file on compute nodes as a program
without the rest of the package. The program writes the node's facts into the probe's directory, and then answers the edge node
and the other nodes for a while.
"""

import contextlib
import json
import os
import pwd
import random
import resource
import runpy
import shutil
import socket
import subprocess
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

# Limits of resource(3), by the letter of `ulimit` in bash.
_LIMITS = {
    "n": resource.RLIMIT_NOFILE,
    "u": resource.RLIMIT_NPROC,
    "v": resource.RLIMIT_AS,
    "f": resource.RLIMIT_FSIZE,
    "t": resource.RLIMIT_CPU,
}
_CONTAINERS = ("apptainer", "singularity", "enroot", "podman", "docker", "ch-run", "shifter", "sarus")
_MODULES = ("LMOD_CMD", "MODULESHOME", "MODULES_CMD")
_VARIABLES = (
    *("PYTHONPATH", "PYTHONHOME", "TMPDIR", "RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_TMPDIR", "LD_PRELOAD"),
    *("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "no_proxy", "NO_PROXY", "grpc_proxy"),
)
_PREFIXES = ("SLURM_", "SRUN_", "SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_", "SINFO_")
_WRITTEN = 64 * 1024  # Bytes of the file that shows whether a directory takes files.
_COMMAND_TIMEOUT = 20.0  # Seconds for a command that this module runs.
# Seconds for the environment's Python to report facts; the edge node waits longer for the facts of a node.
_ENVIRONMENT_TIMEOUT = 60.0

# Files in the directory of a probe. The edge node makes the empty ones before the job starts: on NFS a name that was looked for
# in vain stays missing for a while.
FACTS, GO, SEEN, STOP = "facts-%d.json", "go", "seen-%d", "stop"
INTERFACES = "interfaces.py"  # The file in the directory of a probe that finds the address of a network interface.
# Ports below the usual ephemeral range of Linux (ip(7)), from which the runtime chooses if it may use any.
_PORTS = (10000, 32767)
_TRIED = 200  # Most ports of a range that are tried.
GREETING = b"rayslurm"


def look(base: str) -> "dict[str, Any]":
    """Return facts about this machine for `rayslurm doctor`, such as the host name, the limits and the directories.

    `base` is the absolute path of the base directory.
    """
    directories = {name: directory(path, name != "tmpdir") for name, path in _directories(base).items()}
    return {
        "host": socket.gethostname(),
        "user": _user(),
        "python": list(sys.version_info[:3]),
        "executable": sys.executable,
        "limits": {letter: _limit(kind) for letter, kind in _LIMITS.items()},
        "directories": directories,
        "variables": {name: os.environ[name] for name in sorted(os.environ) if name in _VARIABLES or name.startswith(_PREFIXES)},
        "containers": [name for name in _CONTAINERS if shutil.which(name)],
        "modules": any(name in os.environ for name in _MODULES) or os.path.exists("/etc/profile.d/modules.sh"),
        "user_namespaces": _user_namespaces(),
        "address": _own_address(),
    }


def _directories(base: str) -> "dict[str, str]":
    """Return the paths of the directories to examine, by the names "base", "tmp", "shm" and, if TMPDIR is set, "tmpdir"."""
    found = {"base": base, "tmp": "/tmp", "shm": "/dev/shm"}
    if os.environ.get("TMPDIR"):
        found["tmpdir"] = os.environ["TMPDIR"]
    return found


def directory(path: str, write: bool = True) -> "dict[str, Any]":
    """Return facts about the directory `path`, such as mode and free space.

    The facts of a missing directory are those of the nearest existing parent. If `write` is True, the function also writes and
    removes a small file there. The dict then has as `clock` the seconds by which the file system's clock is ahead of this
    machine's clock. If the directory cannot be examined or written to, the dict has an `error`, which is a text.
    """
    facts = {"path": path, "exists": os.path.isdir(path), "parent": path}  # type: dict[str, Any]
    if os.path.lexists(path) and not facts["exists"]:
        return dict(facts, error="it is not a directory")
    while not os.path.isdir(facts["parent"]) and facts["parent"] != os.path.dirname(facts["parent"]):
        facts["parent"] = os.path.dirname(facts["parent"])
    try:
        status, disk = os.stat(facts["parent"]), os.statvfs(facts["parent"])
        facts.update(
            free=disk.f_bavail * disk.f_frsize,
            total=disk.f_blocks * disk.f_frsize,
            files_free=disk.f_favail if disk.f_files else None,  # Some file systems count no files.
            noexec=bool(disk.f_flag & os.ST_NOEXEC),
            mode=status.st_mode & 0o7777,
            mine=status.st_uid == os.geteuid(),
        )
        if write:
            facts["clock"] = _try_to_write(facts["parent"])
    except OSError as error:
        facts["error"] = error.strerror or str(error)
    return facts


def _try_to_write(path: str) -> float:
    """Write, rename and remove a file in the directory `path`; raises OSError if the file cannot be written or renamed.

    Returns the seconds by which the file system's clock is ahead of this machine's clock; a negative number if the clock is
    behind.
    """
    name = os.path.join(path, ".rs-doctor-" + os.urandom(6).hex())
    try:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, b"x" * _WRITTEN)
            os.fsync(fd)
            now = time.time()
            late = os.fstat(fd).st_mtime - now
        finally:
            os.close(fd)
        os.rename(name, name + "-2")
        return late
    finally:
        for each in (name, name + "-2"):
            with contextlib.suppress(OSError):
                os.unlink(each)


def _limit(kind: int) -> "list[int | None]":
    """Return the soft and the hard limit of the resource `kind`, such as `RLIMIT_NOFILE`; None stands for no limit."""
    return [None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(kind)]


def _user() -> str:
    """Return the name of this user; the number if the user has no name."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _user_namespaces() -> bool:
    """Return True if this user can create a user namespace, which rootless containers need."""
    try:
        command = ["unshare", "--user", "--map-root-user", "true"]
        null = subprocess.DEVNULL
        done = subprocess.run(command, stdin=null, stdout=null, stderr=null, timeout=_COMMAND_TIMEOUT)
        return done.returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


def _own_address() -> "str | None":
    """Return the IP address that this machine's host name resolves to; None if the name does not resolve."""
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


# -- on a compute node ---------------------------------------------------------------------------------------------------


def main(
    run_dir: str,
    base: str,
    rank: int,
    nodes: int,
    seconds: float,
    probe: str,
    environment: "Sequence[str]",
    port_range: "Sequence[int] | None",
    network_interface: "str | None",
) -> None:
    """Examine one node in a job of `rayslurm doctor`: write the node's facts, answer connections, and connect to the first node.

    Returns `seconds` seconds after the facts are written, or earlier if the edge node writes into the file `STOP` in `run_dir`.

    Args:
        run_dir: the directory of the job.
        base: the base directory.
        rank: the number of this node in the job, from 0.
        nodes: the number of nodes of the job.
        seconds: the time for which the function answers.
        probe: the source text of a program that reports facts about the environment (`edge.environment.PROBE`).
        environment: the command that starts the environment's Python, which runs `probe`; an empty command if there is no
            environment.
        port_range: the first and the last port that Ray may use; None for any ports.
        network_interface: the interface whose address Ray uses on each node; None if no interface is configured.
    """
    low, high = port_range or _PORTS
    chosen, tried, free = _listen(range(low, high + 1))
    # Without a range of ports, the kernel chooses most of Ray's ports.
    others = [] if port_range else _listen(range(1))[0]
    facts = look(base)
    facts["environment"] = _environment(environment, probe) if environment else None
    facts["listens"] = chosen + others if chosen else []
    facts["ports"] = {"range": [low, high], "tried": tried, "free": free, "ephemeral": _ephemeral_range()}
    facts["addresses"] = _addresses()
    facts["interface"] = _interface(run_dir, network_interface) if network_interface else None
    facts["peers"] = {}
    path = os.path.join(run_dir, FACTS % rank)
    _append(path, facts)
    deadline, seen = time.monotonic() + seconds, False
    while time.monotonic() < deadline and not _content(os.path.join(run_dir, STOP)):
        if not seen and _content(os.path.join(run_dir, GO)):
            seen = True
            with open(os.path.join(run_dir, SEEN % rank), "ab", 0) as file:
                file.write(b"%.6f\n" % time.time())
                os.fsync(file.fileno())
        if rank and not facts["peers"] and nodes > 1:
            first = last_line(_content(os.path.join(run_dir, FACTS % 0)))
            if first is not None:
                by_interface = first["interface"] is not None
                ports = [] if by_interface and "error" in first["interface"] else first["listens"]
                found = [reach(first, port, by_interface) for port in ports]
                facts["peers"] = {"0": next((each for each in found if "error" in each), found[0] if found else {})}
                _append(path, facts)
        time.sleep(0.02)


def _listen(ports: "Sequence[int]") -> "tuple[list[int], int, int]":
    """Start a server on one of `ports` (0: on a port that the kernel chooses); the server sends `GREETING` to each client.

    Returns a list with the port, which is empty if no port is free; the number of ports that were tried; and the number of free
    ports among them.
    """
    tried = random.sample(ports, min(_TRIED, len(ports)))
    chosen, free = [], 0  # type: list[int], int
    for port in tried:
        server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            server.bind(("", port))
            free += 1
            if not chosen:
                chosen.append(_serve(server))
                with contextlib.suppress(OSError):  # A node without IPv6, or another program has the port there.
                    other = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
                    other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                    other.bind(("", chosen[0]))
                    _serve(other)
                continue
        except OSError:
            pass
        server.close()
    return chosen, len(tried), free


def _serve(server: socket.socket) -> int:
    """Listen on a bound socket, and send `GREETING` to each client from now on; return the port at once."""
    server.listen(5)
    threading.Thread(target=_greet, args=(server,), daemon=True).start()
    return int(server.getsockname()[1])


def _ephemeral_range() -> "list[int] | None":
    """Return the first and the last port that the kernel uses for outgoing connections (ip(7)); None if they are unknown."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
            low, high = map(int, file.read().split())
            return [low, high]
    except (OSError, ValueError):
        return None


def _greet(server: socket.socket) -> None:
    """Send `GREETING` to each client of `server`."""
    with contextlib.suppress(OSError):
        while True:
            stream, _ = server.accept()
            with contextlib.suppress(OSError), stream:
                stream.sendall(GREETING)


def listen_once(seconds: float) -> int:
    """Listen on a loopback port, and return the port at once.

    A thread sends `GREETING` to the first client. Without a client, the thread closes the port after `seconds` seconds.
    """
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.bind(("127.0.0.1", 0))
    server.listen(1)
    server.settimeout(seconds)

    def answer() -> None:
        with contextlib.suppress(OSError), server:
            stream, _ = server.accept()
            with stream:
                stream.sendall(GREETING)

    threading.Thread(target=answer, daemon=True).start()
    return int(server.getsockname()[1])


def reach(facts: "dict[str, Any]", port: int, by_interface: bool = False, timeout: float = 5.0) -> "dict[str, Any]":
    """Connect to the server that `main` has started on a node, by the node's host name or else by the node's addresses.

    `facts` are the facts that the node has written. `port` is one of the ports in `facts["listens"]`. If `by_interface` is True,
    only the address of the configured network interface is tried. Each attempt may take `timeout` seconds. Returns a dict with
    the `port`, the `host` (the name or address that worked) and the duration of the connection in `seconds`. If all attempts
    failed, the dict has only the `port`, and an `error`, which is a text.
    """
    errors = []
    for host in [facts["interface"]["address"]] if by_interface else [facts["host"], *facts["addresses"]]:
        began = time.monotonic()
        try:
            with socket.create_connection((host, port), timeout) as stream:
                stream.settimeout(timeout)
                if stream.recv(len(GREETING)) == GREETING:
                    return {"seconds": time.monotonic() - began, "host": host, "port": port}
                errors.append("%s: another program answers" % host)
        except OSError as error:
            errors.append("%s: %s" % (host, error.strerror or error))
    return {"error": "; ".join(errors), "port": port}


def _addresses() -> "list[str]":
    """Return this node's IPv4 addresses on the routes to the node that launched the job and to other networks.

    Loopback addresses are left out. Without a route, the result is [].
    """
    found = []
    for target in (os.environ.get("SLURM_LAUNCH_NODE_IPADDR", ""), "192.0.2.1"):  # The second is for documentation (RFC 5737).
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # Nothing is sent: the kernel only looks for a route.
            found.append(str(probe.getsockname()[0]))
    return [each for each in dict.fromkeys(found) if not each.startswith("127.")]


def _interface(run_dir: str, name: str) -> "dict[str, Any]":
    """Return a dict with the `name` of a network interface and its `address` on this node.

    If the interface has no address, the dict has an `error` instead of the `address`. The file `INTERFACES` in the directory
    `run_dir` has the code that finds the address.
    """
    try:
        return {"name": name, "address": runpy.run_path(os.path.join(run_dir, INTERFACES))["address_of"](name)}
    except OSError as error:
        return {"name": name, "error": str(error)}


def _environment(command: "Sequence[str]", probe: str) -> "dict[str, Any]":
    """Run the program text `probe` with the Python that the command `command` starts.

    Returns a dict with the `facts` that the program reports, or with an `error`, which is a text, if the program fails.
    """
    word = os.urandom(8).hex()
    try:
        done = subprocess.run(
            [*command, "-c", "word = %r\n%s" % (word, probe)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=_ENVIRONMENT_TIMEOUT,
            cwd="/",
        )
    except subprocess.TimeoutExpired:
        return {"error": "it gave no answer within %d s" % _ENVIRONMENT_TIMEOUT}
    except OSError as error:
        return {"error": str(error)}
    said = done.stdout.decode("utf-8", "replace").rpartition(word)
    if done.returncode or not said[1]:
        return {"error": "exit code %d: %s" % (done.returncode, done.stderr.decode("utf-8", "replace").strip()[-300:])}
    return {"facts": json.loads(said[2])[0]}


def _content(path: str) -> bytes:
    """Return the content of a file; b"" if the file cannot be read.

    The file is opened anew, so that a network file system looks for changes.
    """
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _append(path: str, value: object) -> None:
    """Append `value` as a line of JSON to a file on the shared file system.

    The edge node has created the file before, because over NFS other machines see a new file late.
    """
    with open(path, "ab", 0) as file:
        file.write(json.dumps(value).encode() + b"\n")
        os.fsync(file.fileno())


def last_line(data: bytes) -> "dict[str, Any] | None":
    """Return the value in the last complete line of JSON in `data`; None if `data` has no complete line."""
    lines = data.split(b"\n")[:-1]
    return json.loads(lines[-1].decode()) if lines else None


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as options:
        main(rank=int(os.environ.get("SLURM_PROCID", "0")), **json.load(options))
