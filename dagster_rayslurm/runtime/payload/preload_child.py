"""What runs in a preload process: it imports modules once, and forks itself for each payload, which goes on from there.

`preload_server` starts the process as `python DIRECTORY/python.py FD MODULE… PADDING` from a copy of this file, so it imports
nothing else of the package. `FD` is a socket to the runtime. On it the process says once whether it can be forked
(`{"problem": null}`). For each payload it receives one byte with three file descriptors: a socket for this payload, its stdout
and its stderr. Then it forks a child, and the child forks a grandchild and ends. The runtime is a subreaper, so it adopts the
grandchild. The grandchild reads the request from the payload's socket, answers with its process id, and begins at the word "go".
So the runtime waits for a payload as for any other child, and a preload process that dies takes no payload with it.

A payload differs from `python script.py` only in what has been imported, and in the stack frames of this file. Problems are in
words that follow "because".
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import json
import os
import pkgutil
import runpy
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
import types
import warnings
from typing import AbstractSet, Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

# The last argument of a preload process; a forked payload writes its own command over it, for `ps` to show.
PADDING = " " * 1500
RUN_DIR_VARIABLE = "RAYSLURM_RUN_DIR"  # The environment variable by which the runtime finds all processes of a run.
# The value of `RUN_DIR_VARIABLE` in a preload process; a forked payload writes its run directory over it.
RUN_DIR_PADDING = "/" * 4096

# Modules to import along with a module that imports them only when used: Ray at the first task and at the end (Ray 2.60).
_LAZY_IMPORTS = {
    "ray": (
        *("pydantic", "ray._common.pydantic_compat", "starlette.datastructures", "pyarrow", "ray._private.arrow_serialization"),
        "ray.dag.compiled_dag_node",
    )
}
# Libraries whose threads end before a fork and restart on demand after it (pthread_atfork); libgomp's do not.
_FORK_SAFE_POOLS = ("openblas", "libmkl", "libiomp5", "libomp")
# Names of threads that their library does not need in a forked process (jemalloc 5, which pyarrow brings).
_FORK_SAFE_THREADS = ("jemalloc_bg_thd",)
# Seconds after which a line that a Ray worker printed has reached the driver: Ray looks for new log files every half second,
# and reads them ten times a second (Ray 2.60: `_private/log_monitor.py`).
_IN_TRANSIT = 1.0
# Beginnings of the lines that Ray itself writes into a worker's log (Ray 2.60: `LOG_PREFIX_*`).
_LOG_PREFIXES = (b":job_id:", b":actor_name:", b":task_name:")

_OWN = os.path.join(os.path.dirname(__file__), "")  # The directory of the files that preload processes run.

# Modification time in nanoseconds and size in bytes of files, by path; zeros for a missing file.
FileStates = Dict[str, Tuple[int, int]]


class Imports(NamedTuple):
    """What this process has imported; a payload can be forked only if it would import the same.

    `files` may change later. Files beside the payload's script cannot replace the modules `startup`, which every interpreter has
    at its first line. `directory` was the working directory.
    """

    files: FileStates
    startup: AbstractSet[str]
    directory: str


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
    run(_read_request(connection, streams, imports), bare)


# ---- The preload process


def _send(connection: socket.socket, **message: Any) -> None:
    connection.sendall(json.dumps(message).encode("ascii"))


def _load(names: List[str]) -> Optional[str]:
    """Import modules; returns why this process cannot be forked then, or None if it can."""
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


class Threads(NamedTuple):
    """The facts that decide whether a process can be forked: its threads, libraries and GPU devices.

    `python` are the names of the threads that Python started, `others` those that the kernel has, without the main thread. The
    kernel calls the main thread, and each thread without a name of its own, `name`. `cpus` of the machine bound a pool's threads.
    """

    python: List[str]
    others: List[str]
    name: str
    libraries: List[str]
    devices: List[str]
    cpus: int


def process_threads() -> Threads:
    """The threads, libraries and GPU devices of this process, from /proc (proc(5))."""
    main_thread, me = threading.main_thread(), str(os.getpid())
    names = {task: _read_text("/proc/self/task/%s/comm" % task).strip() for task in os.listdir("/proc/self/task")}
    mapped = {line.split(None, 5)[5].strip() for line in _read_text("/proc/self/maps").splitlines() if ".so" in line}
    opened = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            opened.append(os.readlink("/proc/self/fd/%s" % fd))
    return Threads(
        [thread.name for thread in threading.enumerate() if thread is not main_thread],
        [name for task, name in sorted(names.items()) if task != me],
        names[me],
        sorted(mapped),
        sorted(path for path in opened if path.startswith(("/dev/nvidia", "/dev/kfd"))),
        os.cpu_count() or 1,
    )


def fork_problem(threads: Threads) -> Optional[str]:
    """Why a process with such threads and devices must not be forked; None if it may be."""
    if threads.devices:
        return "importing them opened a GPU (%s), which no forked process can use" % threads.devices[0]
    others = [name for name in threads.others if name not in _FORK_SAFE_THREADS]
    strange = threads.python + [name for name in others if name != threads.name]
    if strange:
        return "importing them started the thread %r, which no forked process has" % strange[0]
    ends = ["/".join(library.split("/")[-2:]) for library in threads.libraries]  # Debian: openblas-pthread/libblas.so.3
    pools = [end for end in ends if any(pool in end for pool in _FORK_SAFE_POOLS)]
    if len(others) > len(pools) * max(threads.cpus - 1, 1):
        return "importing them started %d threads, which no forked process has" % len(others)
    return None


def _serve(control: socket.socket) -> Tuple[socket.socket, List[int]]:
    """Serve fork requests; returns only in the process of a payload, with its socket and descriptors of its stdout and stderr."""
    size = array.array("i").itemsize
    while True:
        data, ancillary, _, _ = control.recvmsg(1, socket.CMSG_SPACE(3 * size), socket.MSG_CMSG_CLOEXEC)
        if not data or not ancillary:
            os._exit(0)  # The runtime has ended.
        fds = array.array("i", ancillary[0][2])
        child = _fork()
        if child == 0:
            if _fork() != 0:
                os._exit(0)
            control.close()
            return socket.socket(fileno=fds[0]), list(fds[1:])
        for fd in fds:
            os.close(fd)
        os.waitpid(child, 0)


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns of all threads alike; the threads of this process were checked.
        warnings.simplefilter("ignore")
        return os.fork()


# ---- From the fork to the payload's first line


def _read_request(connection: socket.socket, streams: List[int], imports: Imports) -> List[str]:
    """Read what payload to run, make this process the payload's, and wait for the word "go"; returns the payload's command."""
    try:
        with connection.makefile("rb") as reader:
            line = reader.readline()
            if not line.endswith(b"\n"):
                os._exit(0)  # The request was cancelled.
            request = json.loads(line)
            stale = changed_file(imports.files)
            problem = "%s changed since it was imported" % stale if stale is not None else _become(request, imports, streams)
            _send(connection, pid=os.getpid(), problem=problem, stale=stale is not None)
            if problem is not None or reader.read(2) != b"go":
                os._exit(0)
        connection.close()
        command: List[str] = request["argv"]
        return command
    except BaseException:
        traceback.print_exc()
        os._exit(70)  # EX_SOFTWARE of sysexits(3): the runtime sees the closed socket, and knows that no payload has begun.


def _become(request: Dict[str, Any], imports: Imports, streams: List[int]) -> Optional[str]:
    """Make this process what a fresh interpreter would be at the payload's first line; returns why that cannot be, or None."""
    os.chdir(request["cwd"])
    cwd, script = os.getcwd(), request["argv"][1]
    # The directory of the script, links resolved, or for `-m` the working one.
    first = cwd if script == "-m" else os.path.dirname(os.path.realpath(script))
    files = {name: getattr(sys.modules[name], "__file__", None) for name in set(sys.modules) - imports.startup}
    name = shadowed_module(first, files)
    if name is not None:
        return "%s has a module %r of its own, and another one is imported already" % (first, name)
    if script != "-m" and not os.access(script, os.R_OK):
        return "the script %s cannot be read" % script
    os.setsid()
    for number, fd in enumerate(streams, 1):
        os.dup2(fd, number)
        os.close(fd)
    # When the preload process started, relative entries of PYTHONPATH were made absolute, below its own working directory.
    here = imports.directory
    sys.path[:] = [cwd + entry[len(here) :] if entry == here or entry.startswith(here + "/") else entry for entry in sys.path]
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
        atexit.register(leave_ray)


def _wait_for_parent(parent: int) -> None:
    """Wait until the runtime, whose process id is `parent`, has adopted this process; from then on die with the runtime."""
    until = time.monotonic() + 1.0  # The kernel needs microseconds.
    while os.getppid() != parent and time.monotonic() < until:
        time.sleep(0.0002)
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(71)  # EX_OSERR of sysexits(3): the runtime would not notice the end of this process.


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
    value, size = os.fsencode(run_dir or ""), len(RUN_DIR_PADDING)
    if value and len(value) <= size and 0 < env_start < env_end:
        memory = ctypes.string_at(env_start, env_end - env_start)
        at = memory.find(b"%s=%s\0" % (RUN_DIR_VARIABLE.encode(), RUN_DIR_PADDING.encode()))
        if at >= 0:
            ctypes.memmove(env_start + at + len(RUN_DIR_VARIABLE) + 1, value.ljust(size, b"\0"), size)


def shadowed_module(directory: str, modules: Dict[str, Optional[str]]) -> Optional[str]:
    """The name of an imported module that the payload would import from its own directory instead; None if there is none.

    `directory` is the first entry of the payload's `sys.path`. `modules` has the files of the imported modules by name.
    """
    for entry in os.scandir(directory) if os.path.isdir(directory) else ():
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
    found = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and not path.startswith(_OWN) and (name in names or not path.startswith(installed)):
            found[path] = _file_state(path)
    return found


def _file_state(path: str) -> Tuple[int, int]:
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return found.st_mtime_ns, found.st_size
    return 0, 0


def _read_text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


# ---- The payload


def run(argv: List[str], bare: Dict[str, Any]) -> None:
    """Run a payload as `python SCRIPT …` or `python -m MODULE …` would, exit code and traceback included.

    CPython 3.8 to 3.14 does the same in Python/pythonrun.c and Modules/main.c. However this ends, by return or exception, the
    caller must end the interpreter at once.
    """
    try:
        return _run(argv, bare)
    except SystemExit:
        raise
    except BaseException as error:
        interrupted = type(error) is KeyboardInterrupt
        _print_exception(error)
    if not interrupted:
        sys.exit(1)
    sys.excepthook = lambda *_: None  # The exception is printed already. Python itself ends by SIGINT, after its exit handlers.
    raise KeyboardInterrupt


def _run(argv: List[str], bare: Dict[str, Any]) -> None:
    path = argv[1]
    if path == "-m":
        sys.argv = ["-m", *argv[3:]]
        _new_main(bare)
        return runpy._run_module_as_main(argv[2])  # type: ignore[attr-defined, no-any-return]
    if sys.version_info >= (3, 9) and not os.path.isabs(path):
        path = os.path.join(os.getcwd(), path[2:] if path.startswith("./") else path)
    if os.path.isdir(path) or pkgutil.get_importer(path) is not None:
        sys.path[0] = path  # A directory or an archive with a __main__.py in it.
        _new_main(bare)
        return runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined, no-any-return]
    names = _new_main(bare)
    names.update(__file__=path, __loader__=type(bare["__loader__"])("__main__", path))
    if "__cached__" in bare:
        names["__cached__"] = None
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, names)


def _new_main(bare: Dict[str, Any]) -> Dict[str, Any]:
    """Replace the module `__main__` by a new one, and return its variables; those that depend on its path are missing."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    names = module.__dict__
    names.update(bare, __doc__=None)
    if "__annotations__" in bare:
        names["__annotations__"] = {}
    for name in ("__file__", "__cached__"):
        names.pop(name, None)
    return names


def _print_exception(error: BaseException) -> None:
    """Print an uncaught exception of the payload as the interpreter does."""
    trace = _without_own_frames(error.__traceback__)
    error = error.with_traceback(trace)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        vars(sys)["last_exc"] = error
    try:
        sys.excepthook(type(error), error, trace)
    except SystemExit:
        raise
    except BaseException as failed:
        print("Error in sys.excepthook:", file=sys.stderr)
        failed.__context__ = None
        traceback.print_exception(type(failed), failed, _without_own_frames(failed.__traceback__))
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, trace)


def _without_own_frames(trace: Optional[types.TracebackType]) -> Optional[types.TracebackType]:
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OWN):
        trace = trace.tb_next
    return trace


def leave_ray() -> None:
    """Shut Ray down when the payload exits, without the half second for which Ray's own exit handler sleeps.

    Ray sleeps so that the last lines of its workers reach the driver (Ray 2.60: `ray.shutdown` in `_private/worker.py`). This
    exit handler runs after those of the payload, which may still use Ray, and before Ray's. It does nothing if lines of workers
    may still be on their way, as they always may be if the Ray cluster has several nodes.
    """
    with contextlib.suppress(Exception):  # Another version of Ray: Ray's own exit handler shuts it down.
        ray: Any = sys.modules["ray"]
        if ray.is_initialized() and sum(node["Alive"] for node in ray.nodes()) == 1:
            logs = ray._private.worker._global_node.get_logs_dir_path()
            if not printed_since(logs, time.time() - _IN_TRANSIT):
                ray.shutdown()


def printed_since(logs: str, since: float) -> bool:
    """Whether a Ray worker, or a failing daemon of Ray, has printed a line since a time; `logs` is Ray's log directory."""
    with os.scandir(logs) as entries:
        for entry in entries:
            stem, extension = os.path.splitext(entry.name)
            relevant = extension in (".out", ".err") if stem.startswith("worker-") else extension == ".err"
            if relevant and entry.stat().st_mtime >= since and _has_lines(entry.path):
                return True
    return False


def _has_lines(path: str) -> bool:
    """Whether a log file has lines other than those of Ray itself."""
    with open(path, "rb") as file:
        text = file.read(65536)  # A larger file counts as having some.
        return len(text) == 65536 or any(line and not line.startswith(_LOG_PREFIXES) for line in text.split(b"\n"))
