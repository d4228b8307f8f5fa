"""Looks at a Python environment: the path of its Python, its versions of Python, Ray and Dagster Pipes. A file keeps answers."""

import contextlib
import json
import os
import time

from . import files, processes, slurm

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Paths of Python below the prefix of an environment; the first that exists is used.
_PYTHONS = ("bin/python", "bin/python3", "env/bin/python")
# Shell script that sources its first argument and then runs the command in the other arguments.
ACTIVATE = '. "$1" && shift && exec "$@"'
# The program that reports the versions in an environment, and the paths whose change outdates them. It imports none of the
# packages, and runs in every Python, even one that is too old.
PROBE = """\
import json, os, sys

def version(module, distribution):
    from importlib import metadata, util
    spec = util.find_spec(module)
    if spec is None or spec.origin is None:  # Not found, or only a directory with that name.
        return None
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""

if sys.path[:1] == [""]:
    del sys.path[0]  # The current directory is not part of the environment.
facts, paths = {"python": list(sys.version_info[:3])}, []
if sys.version_info >= (3, 8):
    facts.update(ray=version("ray", "ray"), pipes=version("dagster_pipes", "dagster-pipes"))
    paths = [sys.executable, os.path.realpath(sys.executable), os.path.join(sys.prefix, "pyvenv.cfg")] + sys.path
sys.stdout.write(word + json.dumps([facts, paths]))
"""


def find(prefix: str) -> "tuple[str, str]":
    """The Python and the `activate.sh` in an environment's directory; "" for what it lacks."""
    paths = [os.path.join(prefix, name) for name in _PYTHONS]
    script = os.path.join(prefix, "activate.sh")
    python = next((path for path in paths if os.path.isfile(path) and os.access(path, os.X_OK)), "")
    return python, script if os.path.isfile(script) else ""


def look(prefix: str, python: str, cache: str, age: float, timeout: float) -> "dict[str, Any]":
    """Look at the environment in the directory `prefix`, or if that is "" at the one of `python`.

    Facts in the file `cache` count for `age` seconds, as long as the environment's paths do not change. `activate.sh` and Python
    may take `timeout` seconds to start.

    Returns `python`, `activate`, `facts`, and whether these were `cached`. For an environment that cannot be used `problem`; if
    it does not start, also `code` and `error`, what it said.
    """
    activate = ""
    if prefix:
        python, activate = find(prefix)
        first = os.path.join(prefix, _PYTHONS[0])
        if not os.path.isdir(prefix):
            return {"problem": "file" if os.path.isfile(prefix) else "absent"}
        if not python and not activate:
            return {"problem": "broken" if os.path.islink(first) and not os.path.exists(first) else "empty"}
    found = {"python": python or "python3", "activate": activate}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with open(cache, encoding="utf-8") as file:
            known = json.load(file)
        if os.stat(cache).st_mtime > time.time() - age and known["states"] == _states(known["paths"]):
            return dict(found, facts=known["facts"], cached=True)
    files.make_dir(os.path.dirname(cache))
    # The word separates the answer from what start-up scripts print.
    word = os.urandom(16).hex()
    command = [found["python"], "-c", "word = %r\n%s" % (word, PROBE)]
    if activate:
        command = ["bash", "-c", ACTIVATE, "rayslurm", activate, "sh", "-c", 'echo "$0"; exec "$@"', word, *command]
    environ = slurm.without_options(slurm.login_environment())
    code, out, error = processes.run(command, b"", timeout, environ, "/")
    said = out.decode("utf-8", "replace").split(word)
    if code is None:
        return {"problem": "late"}
    if not said[-1].startswith("["):
        started = not activate or len(said) > 1
        return {"problem": "python" if started else "activate", "code": code, "error": error.decode("utf-8", "replace")[-1000:]}
    facts, paths = json.loads(said[-1])
    paths += [os.path.join(prefix or python, name) for name in ("activate.sh", *_PYTHONS)]
    known = {"facts": facts, "paths": paths, "states": _states(paths)}
    files.write(cache, json.dumps(known).encode(), 0o600)
    return dict(found, facts=facts, cached=False)


def _states(paths: "list[str]") -> "list[list[int] | None]":
    """What changes when a file or the entries of a directory change, for each path; None for a path that does not exist."""
    states = []  # type: list[list[int] | None]
    for path in paths:
        try:
            status = os.stat(path)
            states.append([status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns])
        except (OSError, ValueError):
            states.append(None)
    return states
