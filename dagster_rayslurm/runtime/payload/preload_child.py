"""The program of a preload process: it imports modules once, and forks a process for each payload; the fork runs the payload.

`preload_server` starts the program as `python DIRECTORY/python.py FD MODULE…` from a copy of this file, so the program imports
nothing else of the package. `FD` is the file descriptor of a socket; over it the runtime sends another socket for each payload.
The preload process forks a child, and the child forks a grandchild and ends, so that the runtime, a subreaper, adopts the
grandchild. The grandchild reads the request from the payload's socket, and answers with its process id. Then the runtime sends
the word "go" and the descriptors for stdout and stderr, and the grandchild begins to run the payload. So the runtime waits for a
payload as for any other child, and a preload process that dies takes no payload with it.

A payload differs from `python script.py` only in the modules that are imported already, and in the stack frames of this file.
Functions return a problem as a clause that can follow "because".
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
from typing import Any, Dict, List, Optional, Tuple

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
_FD_SIZE = array.array("i").itemsize

FileStates = Dict[str, Tuple[int, int]]  # Modification time in nanoseconds and size in bytes, by path; zeros for a missing file.


def main() -> None:
    """Run a preload process: import the modules named in `sys.argv`, and fork a process for each payload until the runtime ends.

    In each forked process, the function runs the payload and then returns.
    """
    names = sys.argv[2:]
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    del sys.path[0]  # Python put the directory of this script there.
    try:
        problem = _load(names)
        files, directory = file_states(names), os.getcwd()
        gc.collect()
        gc.freeze()  # Memory that the garbage collector never touches stays shared with forked processes.
        connection = _serve(control, problem)
    except (KeyboardInterrupt, OSError):
        os._exit(1)
    run(_begin(connection, files, directory))


# ---- The preload process


def _load(names: List[str]) -> Optional[str]:
    """Import the modules `names`; returns None, or why no payload can be forked from this process, such as a failed import."""
    for name in names:
        try:
            __import__(name)
        except BaseException as error:  # A module may even call `sys.exit`.
            traceback.print_exc()
            return "%s cannot be imported: %s" % (name, traceback.format_exception_only(type(error), error)[-1].strip())
    for lazy in [lazy for name in names for lazy in _LAZY_IMPORTS.get(name, ())]:
        with contextlib.suppress(Exception):  # Not installed, or broken; the payload will get the same error from Ray.
            __import__(lazy)
    # What this process has, from /proc (proc(5)). A thread without a name of its own has the name of the main thread.
    python = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    threads = {task: _read_text("/proc/self/task/%s/comm" % task) for task in sorted(os.listdir("/proc/self/task"))}
    own = threads.pop(str(os.getpid()))
    native = ["" if name == own else name.strip() for name in threads.values()]
    libraries = {line.split(None, 5)[5].strip() for line in _read_text("/proc/self/maps").splitlines() if ".so" in line}
    opened = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            opened.append(os.readlink("/proc/self/fd/%s" % fd))
    return fork_problem(python, native, sorted(libraries), sorted(opened), os.cpu_count() or 1)


def fork_problem(python: List[str], native: List[str], libraries: List[str], opened: List[str], cpus: int) -> Optional[str]:
    """Returns why a process with these threads, libraries and open files must not be forked; None if it may be forked.

    Args:
        python: The names of the threads that Python knows, without the main thread.
        native: The names of the threads that the kernel lists, without the main thread; "" for a thread without its own name.
        libraries: The paths of the loaded libraries. Some libraries have a pool of threads that a fork does not harm. Each of
            these libraries accounts for at most `cpus` - 1 threads without names.
        opened: The paths of the open files.
        cpus: The number of the machine's CPUs.
    """
    devices = [path for path in opened if path.startswith(("/dev/nvidia", "/dev/kfd"))]
    if devices:
        return "importing them opened a GPU (%s), which no forked process can use" % devices[0]
    native = [name for name in native if name not in _FORK_SAFE_THREADS]
    named = [name for name in python + native if name]
    if named:
        return "importing them started the thread %r, which no forked process has" % named[0]
    ends = ["/".join(library.split("/")[-2:]) for library in libraries]  # Debian: openblas-pthread/libblas.so.3
    pools = [end for end in ends if any(pool in end for pool in _FORK_SAFE_POOLS)]
    if len(native) > len(pools) * max(cpus - 1, 1):
        return "importing them started %d threads, which no forked process has" % len(native)
    return None


def _serve(control: socket.socket, problem: Optional[str]) -> socket.socket:
    """Wait for requests on the socket `control`, and fork a process for each; returns only in a forked process.

    The result is the socket of the forked process's request. The preload process itself never returns: it exits when the runtime
    has ended. If there is a `problem`, no process is forked, and each request is answered with the problem.
    """
    while True:
        data, ancillary, _, _ = control.recvmsg(1, socket.CMSG_SPACE(_FD_SIZE), socket.MSG_CMSG_CLOEXEC)
        if not data or not ancillary:
            os._exit(0)  # The runtime has ended.
        with socket.socket(fileno=array.array("i", ancillary[0][2])[0]) as connection:
            if problem is not None:
                _answer(connection, None, problem)
                continue
            child = _fork()
            if child == 0:
                if _fork() != 0:
                    os._exit(0)
                control.close()
                return connection.dup()
        os.waitpid(child, 0)


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns of all threads alike; the threads of this process were checked.
        warnings.simplefilter("ignore")
        return os.fork()


def _answer(connection: socket.socket, pid: Optional[int], problem: Optional[str], stale: bool = False) -> None:
    """Send the runtime the answer to a request. If the runtime has cancelled the request, nothing is sent.

    Args:
        connection: The socket of the request.
        pid: The id of the forked process; None if no process was forked.
        problem: Why the payload cannot run in a forked process; None if the payload can run there.
        stale: Whether an imported file has changed since the import.
    """
    with contextlib.suppress(OSError):  # The request was cancelled.
        connection.sendall(json.dumps({"pid": pid, "problem": problem, "stale": stale}).encode("ascii"))


# ---- From the fork to the payload's first line


def _begin(connection: socket.socket, files: FileStates, directory: str) -> List[str]:
    """Read the request in a forked process, prepare the process for the payload, answer, and wait for the word "go".

    Returns the payload's command. If another word comes, or if the request is cancelled, the process exits.

    Args:
        connection: The socket of the request.
        files: The states of the imported files after the imports, to notice changes.
        directory: The working directory during the imports.
    """
    with connection:
        line = connection.makefile("rb").readline()
        if not line.endswith(b"\n"):
            os._exit(0)  # The request was cancelled.
        request = json.loads(line)
        stale = changed_file(files)
        try:
            problem = "%s changed since it was imported" % stale if stale is not None else _become(request, directory)
        except Exception as error:
            problem = "the preloaded one failed: %s" % error
        _answer(connection, os.getpid(), problem, stale is not None)
        word, ancillary, _, _ = connection.recvmsg(2, socket.CMSG_SPACE(2 * _FD_SIZE), socket.MSG_CMSG_CLOEXEC)
        if word != b"go":
            os._exit(0)
        for number, fd in enumerate(array.array("i", ancillary[0][2]), 1):
            os.dup2(fd, number)
            os.close(fd)
    command: List[str] = request["argv"]
    return command


def _become(request: Dict[str, Any], directory: str) -> Optional[str]:
    """Make this forked process like a fresh interpreter that is about to run the payload.

    Returns None, or why this is impossible. `request` has the payload's command `argv` (`python SCRIPT …` or `python -m MODULE
    …`), working directory `cwd` and environment `env`, and `parent`, the process id of the runtime. `directory` was the working
    directory during the imports.
    """
    os.chdir(request["cwd"])
    cwd, script = os.getcwd(), request["argv"][1]
    # The directory of the script, links resolved, or for `-m` the working one.
    first = cwd if script == "-m" else os.path.dirname(os.path.realpath(script))
    name = shadowed_module(first, {name: getattr(module, "__file__", None) for name, module in sys.modules.items()})
    if name is not None:
        return "%s has a module %r of its own, and another one is imported already" % (first, name)
    if script != "-m" and not os.access(script, os.R_OK):
        return "the script %s cannot be read" % script
    until = time.monotonic() + 1.0  # The kernel needs microseconds to make this process a child of the runtime.
    while os.getppid() != request["parent"] and time.monotonic() < until:
        time.sleep(0.0002)
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG: die with the runtime.
    if os.getppid() != request["parent"]:
        return "the forked one is no child of the runtime"
    os.setsid()
    # When the preload process started, relative entries of PYTHONPATH were made absolute, below its own working directory.
    below = directory + "/"
    sys.path[:] = [cwd + path[len(directory) :] if (path + "/").startswith(below) else path for path in sys.path]
    sys.path.insert(0, first)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = request["argv"][1:]
    if hasattr(sys, "orig_argv"):
        vars(sys)["orig_argv"] = list(request["argv"])  # From Python 3.10 on.
    _reset_inherited_state(cwd)
    return None


def _reset_inherited_state(cwd: str) -> None:
    """Reset what imported modules (numpy, torch, multiprocessing, ray) keep from the preload process, such as random seeds.

    `cwd` is the payload's working directory. The module `random` needs no reset: Python seeds it anew after a fork.
    """
    numpy_random, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    if numpy_random is not None:
        numpy_random.seed()
    if torch is not None and hasattr(torch, "default_generator"):
        torch.default_generator.seed()  # As in a fresh interpreter, where every process has another seed (torch 2.x).
    for path in [path for path, finder in sys.path_importer_cache.items() if finder is None]:
        del sys.path_importer_cache[path]  # A path that was no directory during the imports may be one by now.
    process: Any = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.ORIGINAL_DIR = cwd  # `multiprocessing` looks here for the script when it imports it again.
    if "ray" in sys.modules:
        atexit.register(leave_ray)
        # The generator of Ray's random ids is in C++ and has no seed. Without different ids, one of two drivers that begin at the
        # same moment aborts, because both make the same object to warm up the object store (Ray 2.60).
        with contextlib.suppress(Exception):
            for _ in range(os.getpid() % 4096):
                sys.modules["ray"].ObjectRef.from_random()


def shadowed_module(directory: str, modules: Dict[str, Optional[str]]) -> Optional[str]:
    """Returns the name of an imported module of which `directory` has another version; None if there is none.

    `directory` is the first entry of the payload's `sys.path`, so a fresh interpreter would import its version. `modules` has the
    file of each imported module by the module's name; None for a module without a file.
    """
    for entry in os.scandir(directory) if os.path.isdir(directory) else ():
        name, dot, extension = entry.name.partition(".")
        if name == "__main__" or name not in modules or (modules[name] or "").startswith(os.path.join(directory, "")):
            continue
        is_package = not dot and os.path.exists(os.path.join(entry.path, "__init__.py"))
        if is_package or extension == "py" or extension.endswith("so"):
            return name
    return None


def changed_file(files: FileStates) -> Optional[str]:
    """Returns the path of a file whose modification time or size differs from that in `files`; None if no file has changed."""
    return next((path for path, state in files.items() if _file_state(path) != state), None)


def file_states(names: List[str]) -> FileStates:
    """Returns the modification time and the size of the files of imported modules, by path, to notice later changes.

    The result has the files of the modules `names`, and of all modules that are neither in the standard library nor installed
    packages, because only those are likely to change.
    """
    installed = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    paths = {name: str(getattr(module, "__file__", None) or _OWN) for name, module in list(sys.modules.items())}
    concerned = {path for name, path in paths.items() if name in names or not path.startswith(installed)}
    return {path: _file_state(path) for path in concerned if not path.startswith(_OWN)}


def _file_state(path: str) -> Tuple[int, int]:
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return found.st_mtime_ns, found.st_size
    return 0, 0


def _read_text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


# ---- The payload


def run(argv: List[str]) -> None:
    """Run a Python script or module in this process, as `python SCRIPT …` or `python -m MODULE …` would (CPython 3.8 to 3.14).

    `argv` is this command; its first word is ignored. If the script raises an exception, the function writes the traceback to
    stderr and raises SystemExit.
    """
    # The present module, which has only what Python gave it, is frozen: the garbage collector would never clear it.
    bare, path = vars(sys.modules["__main__"]), argv[1]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    names = vars(module)
    names.update(bare)
    if path != "-m" and sys.version_info >= (3, 9) and not os.path.isabs(path):
        path = os.path.join(os.getcwd(), path[2:] if path.startswith("./") else path)
    try:
        if path == "-m":
            sys.argv = ["-m", *argv[3:]]
            runpy._run_module_as_main(argv[2])  # type: ignore[attr-defined]
        elif os.path.isdir(path) or pkgutil.get_importer(path) is not None:
            sys.path[0] = path  # A directory or an archive with a __main__.py in it.
            runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        else:
            names.update(__file__=path, __loader__=type(names["__loader__"])("__main__", path))
            with open(path, "rb") as file:
                code = compile(file.read(), path, "exec", dont_inherit=True)
            exec(code, names)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OWN):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def leave_ray() -> None:
    """Exit handler of a payload: shuts Ray down before Ray's own exit handler would, which sleeps for half a second first.

    Ray sleeps so that the last lines that its workers printed reach this process. If a worker has printed a line just now, or if
    the Ray cluster has several nodes, this handler therefore does nothing, and Ray's handler shuts Ray down (Ray 2.60).
    """
    with contextlib.suppress(Exception):  # Another version of Ray: Ray's own exit handler shuts it down.
        ray: Any = sys.modules["ray"]
        if ray.is_initialized() and sum(node["Alive"] for node in ray.nodes()) == 1:  # Other nodes' logs cannot be read here.
            logs = ray._private.worker._global_node.get_logs_dir_path()
            if not printed_since(logs, time.time() - _IN_TRANSIT):
                ray.shutdown()


def printed_since(logs: str, since: float) -> bool:
    """Whether a Ray worker, or a failing daemon of Ray, has printed a line since the Unix time `since`.

    `logs` is the path of Ray's log directory.
    """
    for entry in os.scandir(logs):
        relevant = entry.name.endswith(".err") or (entry.name.startswith("worker-") and entry.name.endswith(".out"))
        if relevant and entry.stat().st_mtime >= since:
            with open(entry.path, "rb") as file:
                text = file.read(65536)  # A larger file counts as having lines of its own.
            if len(text) == 65536 or any(line and not line.startswith(_LOG_PREFIXES) for line in text.split(b"\n")):
                return True
    return False
