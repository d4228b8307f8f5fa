"""Runs a payload in a forked interpreter as `python script.py` or `python -m module` would, exit code and traceback included.

This module runs in the processes that `preload_child` forks. CPython 3.8 to 3.14 does the same in Python/pythonrun.c and
Modules/main.c.
"""

from __future__ import annotations

import os
import pkgutil
import runpy
import sys
import time
import traceback
import types
from typing import Any, Dict, List, Optional

_IN_TRANSIT = 1.0
"""Seconds after which a line that a Ray worker printed has reached the driver: Ray looks for new log files every half second,
and reads them ten times a second (Ray 2.60: `_private/log_monitor.py`)."""
_TAIL = 65536
"""Bytes at the end of a log file in which printed lines are looked for; a larger file counts as having some."""
_LOG_PREFIXES = (b":job_id:", b":actor_name:", b":task_name:")
"""Beginnings of the lines that Ray itself writes into a worker's log (Ray 2.60: `LOG_PREFIX_*`)."""


def _new_main(bare: Dict[str, Any], path: Optional[str]) -> Dict[str, Any]:
    """Replace the module `__main__` by a new one, and return its variables.

    Args:
        bare: the variables that `__main__` has in this Python at its first line.
        path: the script; None if `runpy` sets what depends on the path.
    """
    module = types.ModuleType("__main__")
    names = module.__dict__
    names.update(bare, __doc__=None)
    if "__annotations__" in bare:
        names["__annotations__"] = {}
    if path is None:
        names.pop("__file__", None)
        names.pop("__cached__", None)
    else:
        names["__file__"] = path
        names["__loader__"] = type(bare["__loader__"])("__main__", path)
    sys.modules["__main__"] = module
    return names


def run(argv: List[str], bare: Dict[str, Any]) -> None:
    """Run a payload. However this ends, by return or exception, the caller must end the interpreter at once.

    Args:
        argv: the payload's command, `python SCRIPT …` or `python -m MODULE …`; `sys.path` and the like are set already.
        bare: the variables of this process's module `__main__` at its first line.
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
    """Run the script or module; its exceptions pass through."""
    path = argv[1]
    if path == "-m":
        sys.argv = ["-m", *argv[3:]]
        _new_main(bare, None)
        return runpy._run_module_as_main(argv[2])  # type: ignore[attr-defined, no-any-return]
    if sys.version_info >= (3, 9) and not os.path.isabs(path):
        path = os.path.join(os.getcwd(), path[2:] if path.startswith("./") else path)
    if os.path.isdir(path) or pkgutil.get_importer(path) is not None:
        sys.path[0] = path  # A directory or an archive with a __main__.py in it.
        _new_main(bare, None)
        return runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined, no-any-return]
    names = _new_main(bare, path)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, names)


def _print_exception(error: BaseException) -> None:
    """Print an uncaught exception of the payload as the interpreter does."""
    trace = _own_frames(error.__traceback__)
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
        traceback.print_exception(type(failed), failed, _own_frames(failed.__traceback__))
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, trace)


def _own_frames(trace: Optional[types.TracebackType]) -> Optional[types.TracebackType]:
    """The part of a traceback that is the payload's own: without the frames of this package at its beginning."""
    own = os.path.dirname(os.path.dirname(__file__))
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(own):
        trace = trace.tb_next
    return trace


def leave_ray() -> None:
    """Shut Ray down when the payload exits, without the half second for which Ray's own exit handler sleeps.

    Ray sleeps so that the last lines of its workers reach the driver (Ray 2.60: `ray.shutdown` in `_private/worker.py`). This
    exit handler runs after those of the payload, which may still use Ray, and before Ray's. It does nothing if lines of
    workers may still be on their way.
    """
    ray = sys.modules.get("ray")
    try:
        if ray is not None and ray.is_initialized() and not _may_be_in_transit(ray):
            ray.shutdown()
    except Exception:
        return  # Another version of Ray: Ray's own exit handler shuts it down.


def _may_be_in_transit(ray: Any) -> bool:
    """Whether lines of Ray's workers may not have reached the driver yet; always True if the Ray cluster has several nodes."""
    if sum(node["Alive"] for node in ray.nodes()) != 1:
        return True
    return printed_since(ray._private.worker._global_node.get_logs_dir_path(), time.time() - _IN_TRANSIT)


def printed_since(logs: str, since: float) -> bool:
    """Whether a Ray worker, or a failing daemon of Ray, has printed a line since a time.

    Args:
        logs: the directory of Ray's log files.
        since: seconds since the epoch.
    """
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
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL))
        return size > _TAIL or any(line and not line.startswith(_LOG_PREFIXES) for line in file.read().split(b"\n"))
