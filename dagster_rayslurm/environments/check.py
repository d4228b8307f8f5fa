"""Check a Python environment on the Slurm cluster before submission, not after hours in the queue."""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import secrets
import time
import weakref
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..errors import FailureKind, StartError
from ..runtime.protocol.spec import RaySpec
from ..runtime.ray.node_main import refuse_version
from ..slurm.commands import run_slurm
from ..ssh.base import Connection, expand_home
from ..ssh.local import LocalConnection
from . import ACTIVATE, PYTHONS, Environment, Interpreter, path_on_cluster

_TIMEOUT = 120.0
"""Seconds in which `activate.sh` and Python must start and the probe must end."""
_CACHE_MINUTES = 24 * 60
"""Minutes for which the cluster's cache of an answer is valid.

The fingerprint of a cache file does not notice changes in modules that an `activate.sh` loads; this bound does.
"""
_CACHE_SECONDS = 300.0
"""Seconds for which this process's cache of an answer is valid."""

# The shell script that looks for the environment, answers from its cache file, or runs the probe and writes the cache file.
# A cache file holds a fingerprint, the answer, and the paths whose state makes up the fingerprint. It has a temporary name until
# it is complete. The probe writes to file descriptor 3, because start-up scripts print to stdout.
_CHECK = """\
prefix=$1 python=$2 directory=$3 kept=$3/$4 work=$3/.rs-$5 age=$6 probe=$7 activate_text=$8
shift 8
cd / || exit
found=- activate=
if [ -z "$python" ]; then
    [ -d "$prefix" ] || { [ -f "$prefix" ] && echo file || echo absent; exit; }
    for name; do
        if [ -z "$python" ] && [ -f "$prefix/$name" ] && [ -x "$prefix/$name" ]; then found=$name python=$prefix/$name; fi
    done
    if [ -f "$prefix/activate.sh" ]; then activate=$prefix/activate.sh; fi
    if [ -z "$python$activate" ]; then
        if [ -L "$prefix/$1" ] && [ ! -e "$prefix/$1" ]; then echo broken; else echo empty; fi
        exit
    fi
fi
echo "found $found $activate"
state() { tail -n +3 "$1" | xargs -r -d '\\n' stat -L -c '%i %s %.9Y %.9Z' -- 2>/dev/null | sha256sum; }
if [ -n "$(find "$kept" -mmin "-$age" 2>/dev/null)" ] && [ "$(head -n 1 "$kept")" = "$(state "$kept")" ]; then
    echo kept
    sed -n 2p "$kept"
    exit
fi
umask 077
mkdir -p -- "$directory" || exit
trap 'rm -f "$work.tmp" "$work.new"' EXIT
trap 'exit 143' HUP INT TERM
if [ -n "$activate" ]; then
    bash -c "$activate_text" rayslurm "$activate" sh -c 'echo >&3 && exec "$@"' sh "${python:-python3}" -c "$probe" \
        3>"$work.tmp" >&2 </dev/null
else
    { echo >&3 && "$python" -c "$probe"; } 3>"$work.tmp" >&2 </dev/null
fi
code=$?
lines=$(wc -l <"$work.tmp") || exit
case $lines in
0) echo "activate $code" ;;
1) echo "python $code" ;;
*)
    if [ -z "$prefix" ]; then prefix=$python; fi
    for name in activate.sh "$@"; do printf '%s\\n' "$prefix/$name"; done >>"$work.tmp"
    { state "$work.tmp"; tail -n +2 "$work.tmp"; } >"$work.new" && mv -f -- "$work.new" "$kept"
    echo asked
    sed -n 2p "$work.tmp"
    ;;
esac
"""


@dataclass(frozen=True)
class Facts:
    """What the probe found in an environment on the cluster.

    Attributes:
        interpreter: starts the environment's Python.
        python: the version of Python.
        ray: the version of Ray; "" if Ray is there in an unknown version, None if Ray is not there.
        pipes: the version of Dagster Pipes; "" and None as for `ray`.
    """

    interpreter: Interpreter
    python: tuple[int, ...]
    ray: str | None
    pipes: str | None


_known: weakref.WeakKeyDictionary[Connection, dict[str, tuple[float, Facts]]] = weakref.WeakKeyDictionary()
"""This process's cache, by connection and path of the environment: the time of the answer (`time.monotonic()`), and the facts."""


def check_environment_on(
    connection: Connection, environment: Environment, ray: RaySpec | None, needs_pipes: bool, cache_dir: str
) -> Interpreter:
    """The interpreter of an environment on the Slurm cluster, after a check that the environment can run a payload.

    The edge node caches the facts for up to a day, while Python and the directories on its import path do not change; the
    next check then takes one command and does not start Python. This process caches the facts for five minutes. A refusal
    by cached facts is checked again.

    Args:
        connection: the connection to the edge node.
        environment: the environment on the cluster.
        ray: the Ray cluster that the payload needs, if any.
        needs_pipes: whether the payload opens Dagster Pipes.
        cache_dir: the absolute directory of the cache on the cluster.

    Raises:
        StartError: the environment does not exist, does not start, lacks a package, or cannot be on the cluster.
        OSError: the edge node cannot be reached, or the cache cannot be written.
    """
    try:
        path = expand_home(connection, path_on_cluster(environment, over_ssh=not isinstance(connection, LocalConnection)))
    except ValueError as error:
        raise StartError(FailureKind.CONFIGURATION, str(error)) from None
    at, known = _known.get(connection, {}).get(path, (0.0, None))
    if known is not None and time.monotonic() - at < _CACHE_SECONDS and refusal(known, path, ray, needs_pipes) is None:
        return known.interpreter
    is_python = environment.kind == "inherited"
    facts, cached = _probe_environment(connection, path, is_python, cache_dir, _CACHE_MINUTES)
    problem = refusal(facts, path, ray, needs_pipes)
    if problem is not None and cached:
        facts, _ = _probe_environment(connection, path, is_python, cache_dir, 0)
        problem = refusal(facts, path, ray, needs_pipes)
    if problem is not None:
        raise _failed(problem, connection)
    _known.setdefault(connection, {})[path] = (time.monotonic(), facts)
    return facts.interpreter


def refusal(facts: Facts, path: str, ray: RaySpec | None, needs_pipes: bool) -> str | None:
    """The reason why an environment cannot run a payload, and what to do; None if it can."""
    python = facts.interpreter.python
    if facts.python < (3, 8):
        version = ".".join(map(str, facts.python))
        return f"{path} has Python {version}, and 3.8 or newer is needed; make the environment anew"
    if ray is not None and facts.ray is None:
        wanted = ray.ray_version and f"=={ray.ray_version}"
        return (
            f"{path} has no Ray; install it there: {python} -m pip install 'ray[default]{wanted or '>=2.52'}', or "
            "use a BashLauncher for a payload that needs none"
        )
    if ray is not None and facts.ray:
        if ray.ray_version and facts.ray != ray.ray_version:
            return (
                f"{path} has Ray {facts.ray}, and ray_version asks for {ray.ray_version}; install that one or change ray_version"
            )
        too_old = refuse_version(facts.ray, None, ray.auth == "token")
        if too_old:
            return f"{path}: {too_old}"
    if needs_pipes and facts.pipes is None:
        return (
            f"{path} has no Dagster Pipes; install it there: {python} -m pip install dagster-pipes, or run the "
            "payload with uses_pipes=False"
        )
    return None


def _probe_environment(connection: Connection, path: str, is_python: bool, cache_dir: str, age: int) -> tuple[Facts, bool]:
    """The facts about an environment, and whether they come from the cache on the cluster.

    Args:
        path: the absolute prefix of the environment, or its Python if `is_python`.
        age: the minutes for which a cache file is valid; 0 to ignore the cache.

    Raises:
        StartError: the environment does not exist, or does not start.
        OSError: the edge node cannot be reached, or the cache cannot be written.
    """
    prefix, python = ("", path) if is_python else (path, "")
    probe = _probe()
    key = hashlib.sha256("\0".join([path, _CHECK, probe]).encode("utf-8", "surrogateescape")).hexdigest()[:32]
    arguments = [prefix, python, cache_dir, key, secrets.token_hex(8), str(age), probe, ACTIVATE, *PYTHONS]
    try:
        # With the variables that jobs get: the PYTHONPATH of Dagster's own process must not count.
        done = run_slurm(connection, ["sh", "-c", _CHECK, "sh", *arguments], timeout=_TIMEOUT)
    except TimeoutError:
        raise _failed(f"{path}/activate.sh or its Python does not come to an end within {_TIMEOUT:g} s", connection) from None
    error = done.stderr.decode("utf-8", "replace")[-1000:].strip()
    first, how, answer = (*done.stdout.decode("utf-8", "surrogateescape").split("\n"), "", "")[:3]
    if first in _NOT_FOUND:
        raise _failed(_NOT_FOUND[first].format(path=path), connection)
    how, _, code = how.partition(" ")
    if how in _NOT_STARTED:
        sentence = _NOT_STARTED[how].format(path=path, code=code)
        raise _failed(f"{sentence}: {error}" if error else sentence, connection)
    if how not in ("kept", "asked"):
        raise OSError(f"{connection.place}: {cache_dir} cannot be used: {error or f'exit code {done.returncode}'}")
    return _parse(first, answer, path, is_python), how == "kept"


_NOT_FOUND = {
    "absent": "there is no directory {path}, or this user cannot enter it; name a prefix that the edge node and the compute "
    "nodes see",
    "file": "{path} is a file; name the prefix, the directory that has bin/python in it",
    "empty": "{path} has neither bin/python nor activate.sh; point it at a conda prefix, a venv, or a directory with an "
    "activate.sh",
    "broken": "{path}/bin/python is a link that leads nowhere; make the environment anew, with a Python that is still there",
}
"""Error messages for environments that do not exist, by the word that `_CHECK` prints."""
_NOT_STARTED = {
    "activate": "{path}/activate.sh failed with exit code {code}",
    "python": "the Python of {path} cannot be started, it ended with exit code {code}",
}
"""Error messages for environments that do not start, by the word that `_CHECK` prints."""


def _failed(sentence: str, connection: Connection) -> StartError:
    """The exception for an environment that cannot be used; its message names the edge node."""
    return StartError(FailureKind.ENVIRONMENT, f"environment: on {connection.place} {sentence}")


def _parse(found: str, answer: str, path: str, is_python: bool) -> Facts:
    """The facts in the output of `_CHECK`: `found` is its first line, `answer` the JSON that the probe printed."""
    _, name, activate = found.split(" ", 2)
    versions = json.loads(answer)
    python = path if is_python else "python3" if name == "-" else posixpath.join(path, name)
    interpreter = Interpreter(python, activate or None)
    return Facts(interpreter, tuple(versions["python"]), versions.get("ray"), versions.get("pipes"))


@lru_cache(maxsize=1)
def _probe() -> str:
    """The source text of `probe.py`."""
    return Path(os.path.dirname(__file__), "probe.py").read_text(encoding="utf-8")
