"""Check a Python environment on the cluster before a job is submitted, so that errors show before the job waits in the queue."""

from __future__ import annotations

import hashlib
import json
import os
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..edge.environment import PROBE, look
from ..errors import FailureKind, StartError
from ..runtime.protocol.spec import RaySpec
from ..runtime.ray.node_main import refuse_version
from ..ssh.base import Connection, expand_home
from ..ssh.local import LocalConnection
from . import COMMAND_FAILED, Environment, Interpreter, path_on_cluster
from .container import REFUSED, explain

# Seconds in which `activate.sh` and Python must start and the probe must end; and again for the imports.
_TIMEOUT = 120.0
_MARGIN = 10.0  # Further seconds for the answer of the edge node.
# Seconds for which facts in the cluster's cache are valid: the cache does not notice changes in modules that `activate.sh` loads.
_CACHE_AGE = 86400.0
_OWN_CACHE_AGE = 300.0  # Seconds for which facts in this process's cache are valid.
# Error messages for environments that cannot be used, by the `problem` that `look` returns.
_PROBLEMS = {
    "absent": "there is no directory {path}, or this user cannot enter it; name a prefix that the edge node and the compute "
    "nodes see",
    "file": "{path} is a file; name the prefix, the directory that has bin/python in it",
    "empty": "{path} has neither bin/python nor activate.sh; point it at a conda prefix, a venv, or a directory with an "
    "activate.sh",
    "broken": "{path}/bin/python is a link that leads nowhere; make the environment anew, with a Python that is still there",
    "activate": "{path}/activate.sh failed with exit code {code}",
    "python": "the Python of {path} cannot be started, it ended with exit code {code}",
    "image": "{path} is not there; name one that the edge node and the compute nodes see",
    "pyxis": "srun knows no --container-image, so Pyxis is not installed; choose another runtime of ContainerEnvironment",
    "late": "{path}/activate.sh or its Python does not come to an end within {timeout:g} s",
}


@dataclass(frozen=True)
class Facts:
    """The interpreter of an environment, and the versions of Python, Ray and dagster-pipes there.

    The version of a package is "" if the version is unknown, and None if the package is missing.
    """

    interpreter: Interpreter
    python: tuple[int, ...]  # Version of Python, such as (3, 11, 4); empty if it is unknown.
    ray: str | None
    pipes: str | None  # Version of dagster-pipes.
    unimportable: str = ""  # Why one of the environment's `imports` cannot be imported; "" if all can.
    in_image: bool = False  # Whether the environment is in a container image, so that nothing can be installed there.


# This process's cache, by connection and environment: the time of the answer (`time.monotonic()`), and the facts.
_known: weakref.WeakKeyDictionary[Connection, dict[str, tuple[float, Facts]]] = weakref.WeakKeyDictionary()


def check_environment_on(
    connection: Connection, environment: Environment, ray: RaySpec | None, needs_pipes: bool, cache_dir: str
) -> Interpreter:
    """Return the interpreter of an environment on the cluster; the parameters and exceptions are those of `facts_of`."""
    return facts_of(connection, environment, ray, needs_pipes, cache_dir)[1].interpreter


def facts_of(
    connection: Connection, environment: Environment, ray: RaySpec | None, needs_pipes: bool, cache_dir: str
) -> tuple[str, Facts]:
    """Return the path of an environment on the cluster and the environment's `Facts`.

    `ray` is None for a payload without Ray, and `needs_pipes` is True for a payload with Dagster Pipes. Raises `StartError` if
    the environment cannot run such a payload. For a container that Pyxis (a plugin of srun) starts, the facts have no versions,
    because only a job can look into the image. The function then checks only whether srun has Pyxis, and whether the image exists
    if the image is a path.

    The edge node caches the facts in the directory `cache_dir` for up to a day, as long as Python and the directories on the
    import path do not change. This process caches the facts for five minutes. Before cached facts lead to an error, the
    environment is examined again.
    """
    try:
        path = expand_home(connection, path_on_cluster(environment, over_ssh=not isinstance(connection, LocalConnection)))
    except ValueError as error:
        raise StartError(FailureKind.CONFIGURATION, str(error)) from None
    imports = list(getattr(environment, "imports", []))
    question = json.dumps([path, imports, PROBE])
    at, known = _known.get(connection, {}).get(question, (0.0, None))
    if known is not None and time.monotonic() - at < _OWN_CACHE_AGE and refusal(known, path, ray, needs_pipes) is None:
        return path, known
    key = hashlib.sha256(question.encode("utf-8", "surrogateescape")).hexdigest()[:32]
    where = ("", path) if environment.kind == "inherited" else (path, "")
    timeout = _TIMEOUT * (2 if imports else 1) + _MARGIN
    problem = None
    for age in (_CACHE_AGE, 0.0):
        arguments = *where, imports, os.path.join(cache_dir, key), age, _TIMEOUT
        try:
            found = connection.call(look, *arguments, repeat=True, timeout=timeout)
        except TimeoutError:
            found = {"problem": "late"}
        container = found.get("container")
        named = path if container is None else f"the image {container['image']}"
        if "problem" in found:
            problem = _problem(found, path, named)
            break
        versions = found["facts"]
        interpreter = Interpreter(found["python"], found["activate"] or None, tuple((container or {}).get("srun", ())))
        if versions is None:  # Only a job can look into this container.
            return path, Facts(interpreter, (), None, None, in_image=True)
        known_facts = tuple(versions["python"]), versions.get("ray"), versions.get("pipes"), versions["unimportable"]
        facts = Facts(interpreter, *known_facts, container is not None)
        problem = refusal(facts, named, ray, needs_pipes)
        if problem is None:
            _known.setdefault(connection, {})[question] = (time.monotonic(), facts)
            return path, facts
        if not found["cached"]:
            break
    raise StartError(FailureKind.ENVIRONMENT, f"environment: on {connection.place} {problem}")


def _problem(found: Mapping[str, Any], path: str, named: str) -> str:
    """Return an error message about `found`, a result of `edge.environment.look` that has the key "problem".

    `path` is the path of the environment. `named` is the name of the environment in the message: the container image, or `path`
    for an environment without a container.
    """
    said, failed, command = str(found.get("error", "")).partition(COMMAND_FAILED)
    said, kind = " ".join(said.split()), found["problem"]
    if named != path and kind == "python":
        if found["code"] == REFUSED:
            return said
        said = explain(said, found["container"]["program"])
    named = path if kind in ("activate", "late") else named
    problem = _PROBLEMS[kind].format(path=named, timeout=_TIMEOUT, code=found.get("code"))
    if failed:
        problem = f"the command `{command.strip()}` of the environment failed with exit code {found.get('code')}"
    return problem + (f": {said}" if said else "")


def refusal(facts: Facts, path: str, ray: RaySpec | None, needs_pipes: bool) -> str | None:
    """Return a sentence with the reason why an environment cannot run a payload, and with the remedy; None if there is no reason.

    `path` is the name of the environment in the sentence. `ray` is None for a payload without Ray, and `needs_pipes` is True for
    a payload with Dagster Pipes.
    """
    how = "have it installed when the image is made" if facts.in_image else "install it there"
    install = f"{how}: {'python3' if facts.in_image else facts.interpreter.python} -m pip install"
    if facts.python < (3, 8):
        version = ".".join(map(str, facts.python))
        return f"{path} has Python {version}, and 3.8 or newer is needed; make the environment anew"
    if ray is not None and facts.ray is None:
        wanted = f"=={ray.ray_version}" if ray.ray_version else ">=2.52"
        return f"{path} has no Ray; {install} 'ray[default]{wanted}', or use a BashLauncher for a payload that needs none"
    if ray is not None and facts.ray:
        if ray.ray_version and facts.ray != ray.ray_version:
            what = f"{path} has Ray {facts.ray}, and ray_version asks for {ray.ray_version}"
            return f"{what}; install that one or change ray_version"
        if too_old := refuse_version(facts.ray, None, ray.auth == "token"):
            return f"{path}: {too_old}"
    if needs_pipes and facts.pipes is None:
        return f"{path} has no Dagster Pipes; {install} dagster-pipes, or run the payload with uses_pipes=False"
    if facts.unimportable:
        return f"{path} lacks what its `imports` list: {facts.unimportable}; add it, or take it off the list"
    return None
