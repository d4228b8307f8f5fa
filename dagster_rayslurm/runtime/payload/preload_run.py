"""Runs a payload in a forked interpreter as `python script.py` and `python -m module` do, up to its exit code and traceback.

Part of the preload process; see `preload_child`. CPython 3.8 to 3.14 does this in Python/pythonrun.c and Modules/main.c.
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
"""Seconds after which a printed line has reached the driver: Ray looks for new files every half second, and reads them ten
times a second (Ray 2.60: `_private/log_monitor.py`)."""
_TAIL = 65536
_LOG_PREFIXES = (b":job_id:", b":actor_name:", b":task_name:")
"""What Ray itself writes into a worker's log (Ray 2.60: `LOG_PREFIX_*`)."""


def _new_main(bare: Dict[str, Any], path: Optional[str]) -> Dict[str, Any]:
    """Install a new `__main__` module with the names of this Python's own at its first line."""
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
    """Run a payload; the interpreter must end right after the return or the exception.

    Args:
        argv: its command, `python SCRIPT …` or `python -m MODULE …`; everything else, such as `sys.path`, is set.
        bare: the names of this process's own `__main__` at its first line.
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
    sys.excepthook = lambda *_: None  # It is printed. Python itself then ends by SIGINT, after its exit handlers.
    raise KeyboardInterrupt


def _run(argv: List[str], bare: Dict[str, Any]) -> None:
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
    """Print an uncaught exception as the interpreter does."""
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
    """A traceback without the frames of this package at its beginning."""
    own = os.path.dirname(os.path.dirname(__file__))
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(own):
        trace = trace.tb_next
    return trace


def leave_ray() -> None:
    """An exit handler that shuts Ray down without the half second that Ray's own exit handler sleeps.

    Ray sleeps so that the last lines of its workers reach the driver (Ray 2.60: `ray.shutdown` in `_private/worker.py`). This
    handler runs after the user's own, which may still use Ray, and before Ray's. It does nothing if lines may be in transit.
    """
    ray = sys.modules.get("ray")
    try:
        if ray is not None and ray.is_initialized() and not _may_be_in_transit(ray):
            ray.shutdown()
    except Exception:
        return  # Another version of Ray: its own exit handler does it.


def _may_be_in_transit(ray: Any) -> bool:
    """Whether a worker may have printed lines that are not here yet; always true with other nodes, whose logs are elsewhere."""
    if sum(node["Alive"] for node in ray.nodes()) != 1:
        return True
    return printed_since(ray._private.worker._global_node.get_logs_dir_path(), time.time() - _IN_TRANSIT)


def printed_since(logs: str, since: float) -> bool:
    """Whether a worker, or a daemon that fails, has printed a line into a directory of logs since a time."""
    with os.scandir(logs) as entries:
        for entry in entries:
            stem, extension = os.path.splitext(entry.name)
            relevant = extension in (".out", ".err") if stem.startswith("worker-") else extension == ".err"
            if relevant and entry.stat().st_mtime >= since and _has_lines(entry.path):
                return True
    return False


def _has_lines(path: str) -> bool:
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL))
        return size > _TAIL or any(line and not line.startswith(_LOG_PREFIXES) for line in file.read().split(b"\n"))
