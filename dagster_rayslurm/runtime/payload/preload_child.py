"""What runs in a preload process: it imports modules once, and forks itself for each payload, which goes on from there.

`preload_server` starts the process as `python DIRECTORY/python.py FD MODULE… PADDING` from copies of this file and
`preload_run`, so these two import nothing else of the package. `FD` is a socket to the runtime. On it the process says once
whether it can be forked (`{"problem": null}`). For each payload it receives one byte with three file descriptors: a socket for
this payload, its stdout and its stderr. Then it forks a child, and the child forks a grandchild and ends. The runtime is a
subreaper, so it adopts the grandchild. The grandchild reads the request from the payload's socket, answers with its process id,
and begins at the word "go". So the runtime waits for a payload as for any other child, and a preload process that dies takes
no payload with it.

A payload differs from `python script.py` only in what has been imported, and in the stack frames of these two files.
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
import sysconfig
import threading
import time
import traceback
import warnings
from typing import AbstractSet, Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

from . import preload_run

PADDING = " " * 1500
"""The last argument of a preload process; a forked payload writes its own command over it, for `ps` to show."""
RUN_DIR_VARIABLE = "RAYSLURM_RUN_DIR"
"""The environment variable by which the runtime finds all processes of a run."""
RUN_DIR_PADDING = "/" * 4096
"""The value of `RUN_DIR_VARIABLE` in a preload process; a forked payload writes its run directory over it."""

_ADOPTION_TIMEOUT = 1.0
"""Seconds in which the runtime must become the parent of a forked payload; the kernel needs microseconds."""
_LAZY_IMPORTS = {
    "ray": (
        *("pydantic", "ray._common.pydantic_compat", "starlette.datastructures", "pyarrow", "ray._private.arrow_serialization"),
        "ray.dag.compiled_dag_node",
    )
}
"""Modules to import along with a module that imports them only when used: Ray at the first task and at the end (Ray 2.60)."""
_FORK_SAFE_POOLS = ("openblas", "libmkl", "libiomp5", "libomp")
"""Libraries whose threads end before a fork and restart on demand after it (pthread_atfork); libgomp's do not."""
_FORK_SAFE_THREADS = ("jemalloc_bg_thd",)
"""Names of threads that their library does not need in a forked process (jemalloc 5, which pyarrow brings)."""
_DEVICES = ("/dev/nvidia", "/dev/kfd")
"""What the paths of GPU devices begin with."""
_PR_SET_PDEATHSIG = 1
"""The option of prctl(2) with which a process is signalled when its parent ends."""

FileStates = Dict[str, Tuple[int, int]]
"""Modification time in nanoseconds and size in bytes of files, by path; zeros for a missing file."""


class Imports(NamedTuple):
    """What this process has imported; a payload can be forked only if it would import the same."""

    files: FileStates
    """Files of imported modules that may change later."""
    startup: AbstractSet[str]
    """Names of modules that every interpreter has at its first line; files beside the payload's script cannot replace these."""
    directory: str
    """The working directory in which they were imported."""


def _send(connection: socket.socket, **message: Any) -> None:
    connection.sendall(json.dumps(message).encode("ascii") + b"\n")


def _load(names: List[str]) -> Optional[str]:
    """Import modules; returns why this process cannot be forked then, in words that follow "because", or None if it can."""
    for name in names:
        try:
            __import__(name)
        except BaseException as error:  # A module may even call `sys.exit`.
            traceback.print_exc()
            return "%s cannot be imported: %s" % (name, traceback.format_exception_only(type(error), error)[-1].strip())
    for lazy in [lazy for name in names for lazy in _LAZY_IMPORTS.get(name, ())]:
        with contextlib.suppress(Exception):  # Not installed, or broken; the payload will get the same error from Ray.
            __import__(lazy)
    return fork_problem(process_threads())


def _serve(control: socket.socket) -> Tuple[socket.socket, List[int]]:
    """Serve fork requests; returns only in the process of a payload, with its socket and descriptors of its stdout and stderr."""
    while True:
        fds = _receive(control)
        child = _fork()
        if child == 0:
            if _fork() != 0:
                os._exit(0)  # If this fork failed, the runtime notices that the socket is closed.
            control.close()
            return socket.socket(fileno=fds[0]), fds[1:]
        for fd in fds:
            os.close(fd)
        if child is not None:
            os.waitpid(child, 0)


def _fork() -> Optional[int]:
    """The result of `os.fork`, or None if the fork failed."""
    with warnings.catch_warnings():
        # Python 3.12 warns of all threads alike; the threads of this process were checked.
        warnings.simplefilter("ignore")
        try:
            return os.fork()
        except OSError as error:
            print("rayslurm: a preloaded interpreter cannot be forked: %s" % error, file=sys.stderr)
            return None


def _receive(control: socket.socket) -> List[int]:
    """The file descriptors that the runtime sends for the next payload; ends this process if the runtime has ended."""
    size = array.array("i").itemsize
    data, ancillary, _, _ = control.recvmsg(1, socket.CMSG_SPACE(3 * size), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for _, _, content in ancillary:
        fds.frombytes(content[: len(content) - len(content) % size])
    if not data or len(fds) != 3:
        os._exit(0)
    return list(fds)


def _become(request: Dict[str, Any], imports: Imports, streams: List[int]) -> Optional[str]:
    """Make this process what a fresh interpreter would be at the first line of the payload.

    Returns:
        Why that cannot be done, in words that follow "because"; None if it is done.
    """
    os.chdir(request["cwd"])
    first = None if getattr(sys.flags, "safe_path", False) else _first_of_path(request)
    if first is not None:
        files = {name: getattr(sys.modules[name], "__file__", None) for name in set(sys.modules) - imports.startup}
        name = shadowed_module(first, files)
        if name is not None:
            return "%s has a module %r of its own, and another one is imported already" % (first, name)
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
    # When the preload process started, relative entries of PYTHONPATH were made absolute, below its own working directory.
    here, cwd = imports.directory, os.getcwd()
    sys.path[:] = [cwd + entry[len(here) :] if entry == here or entry.startswith(here + "/") else entry for entry in sys.path]
    if first is not None:
        sys.path.insert(0, first)
    os.environ.clear()
    os.environ.update(request["env"])
    _set_title(request["argv"], request["env"].get(RUN_DIR_VARIABLE))
    sys.argv = request["argv"][1:]
    if hasattr(sys, "orig_argv"):
        vars(sys)["orig_argv"] = list(request["argv"])  # From Python 3.10 on.
    _reset_inherited_state(cwd)
    _wait_for_parent(request["parent"])
    return None


def _first_of_path(request: Dict[str, Any]) -> str:
    """The first entry of the payload's `sys.path`: the directory of its script, links resolved, or for `-m` the working one."""
    return os.getcwd() if request["argv"][1] == "-m" else os.path.dirname(os.path.realpath(request["argv"][1]))


def _reset_inherited_state(cwd: str) -> None:
    """Reset what imported modules keep from the preload process, such as random generators and the working directory.

    The generator of `random` needs no reset, because Python seeds it anew after a fork.
    """
    numpy_random, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    if numpy_random is not None:
        numpy_random.seed()
    if torch is not None and hasattr(torch, "default_generator"):
        torch.default_generator.seed()  # As in a fresh interpreter, where every process has another seed (torch 2.x).
    main_thread: Any = threading.main_thread()
    if hasattr(main_thread, "_set_native_id"):
        main_thread._set_native_id()  # Python 3.11 leaves the id of the parent's main thread.
    for path in [path for path, finder in sys.path_importer_cache.items() if finder is None]:
        del sys.path_importer_cache[path]  # A path that was no directory during the imports may be one by now.
    process: Any = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.ORIGINAL_DIR = cwd  # `multiprocessing` looks here for the script when it imports it again.
        process.current_process().authkey = os.urandom(32)
    if "ray" in sys.modules:
        atexit.register(preload_run.leave_ray)


def _wait_for_parent(parent: int) -> None:
    """Wait until the runtime, whose process id is `parent`, has adopted this process; from then on die with the runtime."""
    until = time.monotonic() + _ADOPTION_TIMEOUT
    while os.getppid() != parent:
        if time.monotonic() > until:
            os._exit(71)  # EX_OSERR of sysexits(3): the runtime would not notice the end of this process.
        time.sleep(0.0002)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(71)


def _set_title(argv: List[str], run_dir: Optional[str] = None) -> None:
    """Make /proc, and so `ps`, show another command and run directory for this process.

    The kernel reads both from the memory where they were when the process was started (proc(5)). By the run directory the
    runtime finds the processes that the payload forks, as long as they run no other program.
    """
    stat = _read_text("/proc/self/stat")
    fields = stat[stat.rindex(")") + 2 :].split()
    arg_start, arg_end, env_start, env_end = (int(field) for field in fields[45:49])
    room = arg_end - arg_start
    if room > len(PADDING):
        # If the last byte is not NUL, the kernel shows everything up to the first NUL as one title.
        title = b" ".join(os.fsencode(word) for word in argv)[: room - 2]
        ctypes.memmove(arg_start, title.ljust(room - 1, b"\0") + b" ", room)
    if run_dir is not None and 0 < env_start < env_end:
        memory = ctypes.string_at(env_start, env_end - env_start)
        at = memory.find(b"%s=%s\0" % (RUN_DIR_VARIABLE.encode(), RUN_DIR_PADDING.encode()))
        value = os.fsencode(run_dir)
        if at >= 0 and len(value) <= len(RUN_DIR_PADDING):
            ctypes.memmove(
                env_start + at + len(RUN_DIR_VARIABLE) + 1, value.ljust(len(RUN_DIR_PADDING), b"\0"), len(RUN_DIR_PADDING)
            )


class Threads(NamedTuple):
    """What decides whether a process can be forked: its threads, libraries and GPU devices."""

    python: List[str]
    """Names of the threads that Python started, without the main thread."""
    others: List[str]
    """Names that the kernel has for all threads, without the main thread."""
    name: str
    """The kernel's name of the main thread; a thread without a name of its own has the same."""
    libraries: List[str]
    """Paths of the shared libraries that the process has loaded."""
    devices: List[str]
    """Paths of the GPU devices that the process has opened."""
    cpus: int
    """Number of CPUs of the machine, which bounds the threads of a pool."""


def fork_problem(threads: Threads) -> Optional[str]:
    """Why a process with such threads and devices must not be forked, in words that follow "because"; None if it may be."""
    if threads.devices:
        return "importing them opened a GPU (%s), which no forked process can use" % threads.devices[0]
    if threads.python:
        return "importing them started the thread %r, which no forked process has" % threads.python[0]
    others = [name for name in threads.others if name not in _FORK_SAFE_THREADS]
    strange = [name for name in others if name != threads.name]
    if strange:
        return "importing them started the thread %r, which no forked process has" % strange[0]
    ends = ["/".join(library.split("/")[-2:]) for library in threads.libraries]  # Debian: openblas-pthread/libblas.so.3
    pools = [end for end in ends if any(pool in end for pool in _FORK_SAFE_POOLS)]
    if len(others) > len(pools) * max(threads.cpus - 1, 1):
        return "importing them started %d threads, which no forked process has" % len(others)
    return None


def process_threads() -> Threads:
    """The threads, libraries and GPU devices of this process, from /proc (proc(5))."""
    main = threading.main_thread()
    me = str(os.getpid())
    names = {task: _read_text("/proc/self/task/%s/comm" % task).strip() for task in os.listdir("/proc/self/task")}
    mapped = {line.split(None, 5)[5].strip() for line in _read_text("/proc/self/maps").splitlines() if ".so" in line}
    opened = {_link("/proc/self/fd/%s" % fd) for fd in os.listdir("/proc/self/fd")}
    return Threads(
        [thread.name for thread in threading.enumerate() if thread is not main],
        [name for task, name in sorted(names.items()) if task != me],
        names[me],
        sorted(mapped),
        sorted(path for path in opened if path.startswith(_DEVICES)),
        os.cpu_count() or 1,
    )


def shadowed_module(directory: str, modules: Dict[str, Optional[str]]) -> Optional[str]:
    """The name of an imported module that the payload would import from its own directory instead; None if there is none.

    Args:
        directory: the first entry of the payload's `sys.path`.
        modules: files of the imported modules by module name, without modules that every interpreter imports at its start.
    """
    try:
        entries = list(os.scandir(directory))
    except OSError:
        return None
    for entry in entries:
        name, dot, extension = entry.name.partition(".")
        if name not in modules or (modules[name] or "").startswith(os.path.join(directory, "")):
            continue
        is_package = not dot and os.path.exists(os.path.join(entry.path, "__init__.py"))
        if is_package or extension == "py" or extension.endswith("so"):
            return name
    return None


def changed_file(files: FileStates) -> Optional[str]:
    """The path of one of the files that has changed since it was imported; None if all are the same."""
    return next((path for path, state in files.items() if _file_state(path) != state), None)


def file_states(names: Iterable[str]) -> FileStates:
    """The state of each file that may change between two payloads.

    These are the files of the modules `names` and of all imported modules outside the standard library and installed packages.
    """
    installed = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    own, found = os.path.dirname(os.path.dirname(__file__)), {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and not path.startswith(own) and (name in names or not path.startswith(installed)):
            found[path] = _file_state(path)
    return found


def _file_state(path: str) -> Tuple[int, int]:
    try:
        found = os.stat(path)
        return found.st_mtime_ns, found.st_size
    except OSError:
        return 0, 0


def _read_text(path: str) -> str:
    """The text of a file of /proc."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _link(path: str) -> str:
    """The target of a symbolic link; "" if it cannot be read."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def main(bare: Dict[str, Any], startup: AbstractSet[str]) -> None:
    """Run a preload process: import modules, and fork for each payload. In a forked process, run the payload.

    Args:
        bare: the variables of the module `__main__` at its first line.
        startup: names of the modules that are imported at that line.
    """
    names = sys.argv[2:-1]
    os.environ.pop(RUN_DIR_VARIABLE, None)
    os.set_inheritable(int(sys.argv[1]), False)
    control = socket.socket(fileno=int(sys.argv[1]))
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # Python put the directory of this script there.
    _set_title(["rayslurm-preload", *names])
    try:
        problem = _load(names)
        imports = Imports(file_states(names), startup, os.getcwd())
        gc.collect()
        gc.freeze()  # Memory that the garbage collector never touches stays shared with forked processes.
        _send(control, problem=problem)
        if problem is not None:
            os._exit(0)
        connection, streams = _serve(control)
    except (KeyboardInterrupt, OSError):
        os._exit(1)
    preload_run.run(_read_request(connection, streams, imports), bare)


def _read_request(connection: socket.socket, streams: List[int], imports: Imports) -> List[str]:
    """Read what payload to run, make this process the payload's, and wait for the word "go"; returns the payload's command."""
    try:
        with connection.makefile("rb") as reader:
            request = json.loads(reader.readline() or b"null")
            if request is None:
                os._exit(0)
            stale = changed_file(imports.files)
            if stale is not None:
                problem: Optional[str] = "%s changed since it was imported" % stale
            else:
                problem = _become(request, imports, streams)
            _send(connection, pid=os.getpid(), problem=problem, stale=stale is not None)
            if problem is not None or reader.read(2) != b"go":
                os._exit(0)
        connection.close()
        command: List[str] = request["argv"]
        return command
    except BaseException:
        traceback.print_exc()
        os._exit(70)  # EX_SOFTWARE of sysexits(3): the runtime sees the closed socket, and knows that no payload has begun.
