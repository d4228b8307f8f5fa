"""An interpreter that has imported what payloads ask for, and forks one process per payload that goes on from there.

`templates` starts it as `python DIRECTORY/python.py FD MODULE… PADDING` from copies of this file, `forkable` and
`as_main`, so these import nothing else of the package. `FD` is a socket: the template says on it once whether it can
serve (`{"problem": null}`), and for each payload it receives one byte with three descriptors: the payload's own socket,
its stdout, its stderr. A grandchild takes the request from that socket, is adopted by the runtime (a subreaper) as soon
as the child in between ends, says its process id, and begins at the word "go". So the runtime waits for it as for any
other child, and a template that dies takes no payload with it.

What a payload finds differs from `python script.py` only in what has been imported, and in the frames of these files
below its own.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from typing import AbstractSet, Any, Dict, List, NamedTuple, Optional, Tuple

from . import leave_ray, run_as_main
from .fork_safety import Status, changed, fork_problem, look_at_threads, read, shadowed, sources

PAD = " " * 1500
"""The last argument: room for the command that a payload's process shows in `ps`."""

MARK = "RAYSLURM_RUN_DIR"
"""The variable that tells whose process it is; the template is started with `MARK_ROOM` as its value."""

MARK_ROOM = "/" * 4096

_ADOPTION = 1.0
"""Seconds in which the runtime must have become the parent: the kernel needs microseconds."""

_LATER = {
    "ray": (
        *("pydantic", "ray._common.pydantic_compat", "starlette.datastructures", "pyarrow", "ray._private.arrow_serialization"),
        "ray.dag.compiled_dag_node",
    )
}
"""What a module imports only when it is used, as far as that is installed: Ray at the first task and at the end (Ray 2.60)."""

_PR_SET_PDEATHSIG = 1


class Imported(NamedTuple):
    """What payloads are judged by."""

    files: Status
    startup: AbstractSet[str]
    """Modules that every interpreter has at its first line; what stands beside the script cannot take their place."""
    directory: str
    """Where the template was started."""


def _say(connection: socket.socket, **message: Any) -> None:
    connection.sendall(json.dumps(message).encode("ascii") + b"\n")


def _load(names: List[str]) -> Optional[str]:
    """Import modules; why that failed, or why this process must not be forked afterwards."""
    for name in names:
        try:
            __import__(name)
        except BaseException as error:  # A module may even call sys.exit.
            traceback.print_exc()
            return "%s cannot be imported: %s" % (name, traceback.format_exception_only(type(error), error)[-1].strip())
    for later in [later for name in names for later in _LATER.get(name, ())]:
        with contextlib.suppress(Exception):  # The payload will meet it where Ray does.
            __import__(later)
    return fork_problem(look_at_threads())


def _serve(control: socket.socket) -> Tuple[socket.socket, List[int]]:
    """Fork for each payload; returns in the payload's process alone, with its socket, stdout and stderr."""
    while True:
        fds = _receive(control)
        child = _fork()
        if child == 0:
            if _fork() != 0:
                os._exit(0)  # A grandchild that could not be forked closes its socket.
            control.close()
            return socket.socket(fileno=fds[0]), fds[1:]
        for fd in fds:
            os.close(fd)
        if child is not None:
            os.waitpid(child, 0)


def _fork() -> Optional[int]:
    with warnings.catch_warnings():
        # Python 3.12 warns of all threads alike; those that are here have been looked at.
        warnings.simplefilter("ignore")
        try:
            return os.fork()
        except OSError as error:
            print("rayslurm: a preloaded interpreter cannot be forked: %s" % error, file=sys.stderr)
            return None


def _receive(control: socket.socket) -> List[int]:
    """The descriptors of the next payload; ends this process when the runtime has gone."""
    size = array.array("i").itemsize
    data, ancillary, _, _ = control.recvmsg(1, socket.CMSG_SPACE(3 * size), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for _, _, content in ancillary:
        fds.frombytes(content[: len(content) - len(content) % size])
    if not data or len(fds) != 3:
        os._exit(0)
    return list(fds)


def _become(request: Dict[str, Any], imported: Imported, streams: List[int]) -> Optional[str]:
    """Make this process what the payload's own would be when its first line runs; why that cannot be, or None."""
    os.chdir(request["cwd"])
    first = None if getattr(sys.flags, "safe_path", False) else _first_of_path(request)
    if first is not None:
        files = {name: getattr(sys.modules[name], "__file__", None) for name in set(sys.modules) - imported.startup}
        taken = shadowed(first, files)
        if taken is not None:
            return "%s has a module %r of its own, and another one is imported already" % (first, taken)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda._is_in_bad_fork():
        return "importing them initialized CUDA, which no forked process can use"
    script = request["argv"][1]
    if script != "-m" and not os.access(script, os.R_OK):
        return "the script %s cannot be read" % script
    os.setsid()
    for number, fd in enumerate(streams, 1):
        os.dup2(fd, number)
        os.close(fd)
    # Relative entries of PYTHONPATH were made absolute when the interpreter started, in its own directory.
    here, cwd = imported.directory, os.getcwd()
    sys.path[:] = [cwd + entry[len(here) :] if entry == here or entry.startswith(here + "/") else entry for entry in sys.path]
    if first is not None:
        sys.path.insert(0, first)
    os.environ.clear()
    os.environ.update(request["env"])
    _show(request["argv"], request["env"].get(MARK))
    sys.argv = request["argv"][1:]
    if hasattr(sys, "orig_argv"):
        vars(sys)["orig_argv"] = list(request["argv"])  # Python 3.10.
    _forget_the_template(cwd)
    _wait_for_parent(request["parent"])
    return None


def _first_of_path(request: Dict[str, Any]) -> str:
    """The search path's first entry: the directory of the script itself, not of a link to it, or the current one."""
    return os.getcwd() if request["argv"][1] == "-m" else os.path.dirname(os.path.realpath(request["argv"][1]))


def _forget_the_template(cwd: str) -> None:
    """Undo what modules took over from the process that imported them: its directory, its state of random generators.

    Python's own `random` is seeded anew by the fork itself.
    """
    numpy_random, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    if numpy_random is not None:
        numpy_random.seed()
    if torch is not None and hasattr(torch, "default_generator"):
        torch.default_generator.seed()  # Without a seed of the user's, each process begins elsewhere (torch 2.x).
    main_thread: Any = threading.main_thread()
    if hasattr(main_thread, "_set_native_id"):
        main_thread._set_native_id()  # Python 3.11 leaves it that of the process that forked.
    for path in [path for path, finder in sys.path_importer_cache.items() if finder is None]:
        del sys.path_importer_cache[path]  # What was no directory when the template looked may be one by now.
    process: Any = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.ORIGINAL_DIR = cwd  # Where `multiprocessing` looks for the script that it imports again.
        process.current_process().authkey = os.urandom(32)
    if "ray" in sys.modules:
        atexit.register(leave_ray.leave)


def _wait_for_parent(parent: int) -> None:
    """Wait until the runtime is the parent, and die with it (prctl(2))."""
    until = time.monotonic() + _ADOPTION
    while os.getppid() != parent:
        if time.monotonic() > until:
            os._exit(71)  # EX_OSERR of sysexits(3): there is nobody who would wait for this process.
        time.sleep(0.0002)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(71)


def _show(argv: List[str], run_dir: Optional[str] = None) -> None:
    """Have /proc, and with it `ps`, tell the payload's command and its run directory.

    The kernel reads them from the memory where they were when the process was started (proc(5)). Processes that are
    forked from here, and never exec, are known by that run directory.
    """
    stat = read("/proc/self/stat")
    fields = stat[stat.rindex(")") + 2 :].split()
    arg_start, arg_end, env_start, env_end = (int(field) for field in fields[45:49])
    room = arg_end - arg_start
    if room > len(PAD):
        # Without a NUL as its last byte the kernel takes all of it for one title that ends at the first NUL.
        title = b" ".join(os.fsencode(word) for word in argv)[: room - 2]
        ctypes.memmove(arg_start, title.ljust(room - 1, b"\0") + b" ", room)
    if run_dir is not None and 0 < env_start < env_end:
        memory = ctypes.string_at(env_start, env_end - env_start)
        at = memory.find(b"%s=%s\0" % (MARK.encode(), MARK_ROOM.encode()))
        value = os.fsencode(run_dir)
        if at >= 0 and len(value) <= len(MARK_ROOM):
            ctypes.memmove(env_start + at + len(MARK) + 1, value.ljust(len(MARK_ROOM), b"\0"), len(MARK_ROOM))


def main(bare: Dict[str, Any], startup: AbstractSet[str]) -> None:
    """Serve, and in a payload's process be the payload.

    Args:
        bare: the names of `__main__` at its first line.
        startup: the modules that were there at that line.
    """
    names = sys.argv[2:-1]
    os.environ.pop(MARK, None)
    os.set_inheritable(int(sys.argv[1]), False)
    control = socket.socket(fileno=int(sys.argv[1]))
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # The template's own directory.
    _show(["rayslurm-preload", *names])
    try:
        problem = _load(names)
        imported = Imported(sources(names), startup, os.getcwd())
        gc.collect()
        gc.freeze()  # What the collector never looks at stays shared by all processes.
        _say(control, problem=problem)
        if problem is not None:
            os._exit(0)
        connection, streams = _serve(control)
    except (KeyboardInterrupt, OSError):
        os._exit(1)
    run_as_main.run(_take(connection, streams, imported), bare)


def _take(connection: socket.socket, streams: List[int], imported: Imported) -> List[str]:
    """Become the payload that the runtime asks for, and wait for the word to begin; its command."""
    try:
        with connection.makefile("rb") as reader:
            request = json.loads(reader.readline() or b"null")
            if request is None:
                os._exit(0)
            stale = changed(imported.files)
            if stale is not None:
                problem: Optional[str] = "%s changed since it was imported" % stale
            else:
                problem = _become(request, imported, streams)
            _say(connection, pid=os.getpid(), problem=problem, stale=stale is not None)
            if problem is not None or reader.read(2) != b"go":
                os._exit(0)
        connection.close()
        command: List[str] = request["argv"]
        return command
    except BaseException:
        traceback.print_exc()
        os._exit(70)  # EX_SOFTWARE of sysexits(3); the runtime learns that nothing has begun.
