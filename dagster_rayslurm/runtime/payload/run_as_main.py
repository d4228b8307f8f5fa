"""Being `__main__` as `python script.py` and `python -m module` are, to the exit code and the last line of a traceback.

Part of the template; see `template`. The ways of CPython 3.8 to 3.14 are in Python/pythonrun.c and Modules/main.c.
"""

from __future__ import annotations

import os
import pkgutil
import runpy
import sys
import traceback
import types
from typing import Any, Dict, List, Optional


def _new_main(bare: Dict[str, Any], path: Optional[str]) -> Dict[str, Any]:
    """Put a new `__main__` in place, with the names that this Python's own has at its first line."""
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
    """Run a payload as the last thing that this interpreter does: returning, or what is raised, ends it.

    Args:
        argv: its command, `python SCRIPT …` or `python -m MODULE …`; `sys.argv`, `sys.path` and all else are set.
        bare: the names that `__main__` has at its first line, of this process's own.
    """
    try:
        return _run(argv, bare)
    except SystemExit:
        raise
    except BaseException as error:
        interrupted = type(error) is KeyboardInterrupt
        _tell(error)
    if not interrupted:
        sys.exit(1)
    sys.excepthook = _silent  # Python itself then ends by SIGINT, after all that it does at its end.
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


def _tell(error: BaseException) -> None:
    """Say what an interpreter would say of an exception that nobody caught."""
    trace = _beyond(error.__traceback__)
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
        traceback.print_exception(type(failed), failed, _beyond(failed.__traceback__))
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, trace)


def _beyond(trace: Optional[types.TracebackType]) -> Optional[types.TracebackType]:
    """A traceback without the frames that begin it here."""
    own = os.path.dirname(os.path.dirname(__file__))
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(own):
        trace = trace.tb_next
    return trace


def _silent(*_: object) -> None:
    """An excepthook for what has been said already."""
