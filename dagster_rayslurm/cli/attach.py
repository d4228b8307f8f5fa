"""`rayslurm attach` opens a shell on the head node of a run, session or job, in the payload's environment.

In this module, the parameter `one` is the `Entry` of the run, session or job that the user has named.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import click

from ..access.find import Found, choose, cluster_name
from ..access.head import ClusterEnded
from ..access.serve import Service, served
from ..backends.listing import Entry, Kind, find, json_object, named
from ..backends.sessions.request import send_request
from ..edge import slurm
from ..edge.environment import ACTIVATE
from ..runtime.protocol.messages import Operation
from ..runtime.protocol.record import JOURNAL, RUNTIME, STATUS, LineReader
from ..runtime.protocol.rpc import derive_key
from ..slurm.steps import step_on_head
from ..ssh.base import Connection
from ..ssh.terminal import has_terminal
from .common import one_sentence_errors
from .options import cluster_options
from .ps import entries, ident_argument, refuse_arrays

_PORTS = range(20000, 32000)  # Outside of the ephemeral range of Linux (ip(7)).
_NOT_THERE = 127  # The exit code of a shell that does not find a command.

# Shell code that exports the environment variables of a process, except those that belong to that process alone.
_TAKE_OVER = """\
environ=/proc/{pid}/environ
if ! [ -r "$environ" ]; then
    echo "rayslurm: {what} is not on $(hostname), or has just ended" >&2
    exit 1
fi
while IFS= read -r -d '' variable; do
    case $variable in
        DAGSTER_PIPES_* | RAY_JOB_CONFIG_JSON_ENV_VAR=* | RAY_OVERRIDE_JOB_RUNTIME_ENV=* | SLURM_* | SLURMD_* | BASH_* | PS1=*) ;;
        TERM=* | PWD=* | OLDPWD=* | SHLVL=* | _=* | PYTHONUNBUFFERED=*) ;;
        [A-Za-z_]*=*) export "$variable" 2>/dev/null ;;
    esac
done <"$environ"
"""


@click.command()
@ident_argument
@click.option("--python", is_flag=True, help="Python instead of a shell.")
@click.option("--jupyter", is_flag=True, help="Start JupyterLab on the head node, and print a URL that works on this machine.")
@cluster_options
@click.argument("command", metavar="[-- COMMAND…]", nargs=-1, type=click.UNPROCESSED)
def attach(ident: str, python: bool, jupyter: bool, command: tuple[str, ...]) -> None:
    """Open a shell on the head node of a run, session or job.

    The shell of a run or session has the payload's environment variables and token, so that `ray.init()` connects to the Ray
    cluster. The shell of a run also has the payload's working directory. If each component of a run has a Ray cluster of its own,
    RUN/COMPONENT names one of them. A command behind `--`, Python (--python) or JupyterLab (--jupyter) runs instead of the shell.
    The exit code is that of the shell or command.
    """
    with one_sentence_errors():
        one = _part(ident)
        if one.over or one.state in ("pending", "starting"):
            raise ValueError(f"{one.name} is {one.state}, so there is nothing to enter; `rayslurm ps` shows when it runs")
        if one.components:  # The entry of a component has no components.
            raise ValueError(f"no component of {one.name} has a Ray cluster now; try again when `rayslurm dashboard` finds one")
        words = list(command) or (["python"] if python else [])
        with _Files(one) as files:
            code = _jupyter(one, files) if jupyter else one.connection.interact([*_step(one), *_shell(one, words, files)])
    sys.exit(code)


def _part(ident: str) -> Entry:
    """Returns the entry of the run, session or job `ident`, or of one component of a run if `ident` is RUN/COMPONENT.

    The entry of a component has the component's own directory, job and Ray cluster. Raises ValueError if each component of the
    run has a Ray cluster of its own, and `ident` names no component.
    """
    there = entries(ident)
    if named(ident, there) or "/" not in ident:
        one = find(ident, there)
        if len(one.clusters) > 1 or (one.components and one.clusters):
            names = ", ".join(cluster_name(one, path) for path in one.clusters)
            raise ValueError(f"{one.name} has a Ray cluster for each component; name one of them: {names}")
        return one
    found = choose(ident, there)
    directory = os.path.dirname(found.path)
    return replace(
        found.entry,
        name=cluster_name(found.entry, found.path),
        state=str(_json(found.connection, f"{directory}/{STATUS}").get("state") or found.entry.state),
        directory=directory,
        job_id=found.access.job_id,
        clusters={found.path: found.access},
        components=(),
    )


class _Files:
    """Context manager that writes files into the directory of a run or session for `attach`, and removes the files at its end.

    SIGTERM and SIGHUP end the block by SystemExit, so that the files are removed. The names of the files are unique, because
    several users of one session may attach at the same time.
    """

    def __init__(self, one: Entry) -> None:
        self._one, self._paths = one, list[str]()
        self._before: dict[int, Any] = {}  # The handlers of the signals outside of the block.

    def __enter__(self) -> _Files:
        self._before = {each: signal.signal(each, _exit) for each in (signal.SIGTERM, signal.SIGHUP)}
        return self

    def __exit__(self, *_: object) -> None:
        for path in self._paths:
            with contextlib.suppress(OSError):
                self._one.connection.remove(path)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def write(self, suffix: str, content: bytes) -> str:
        """Writes a file that only this user can read, and whose name ends with `suffix`; returns the path of the file."""
        self._paths.append(f"{self._one.directory}/attach.{secrets.token_hex(8)}{suffix}")
        self._one.connection.write(self._paths[-1], content)
        return self._paths[-1]


def _exit(signum: int, _: object) -> None:
    sys.exit(128 + signum)


def _jupyter(one: Entry, files: _Files) -> int:
    """Runs JupyterLab on the head node of the Ray cluster of a run, session or job, and returns the exit code.

    The function prints a URL on this machine that leads to JupyterLab. `one` is the run, session or job. `files` writes Jupyter's
    token and the secret of the URL into a private file, because other users can see the arguments of processes. Raises
    ValueError if `one` has no Ray cluster, if the head node cannot be reached, or if JupyterLab is not installed.
    """
    if not one.clusters:
        raise ValueError(f"{one.name} has no Ray cluster, through which JupyterLab would be reached; it is {one.state}")
    ((path, way),) = one.clusters.items()
    service = Service(secrets.choice(_PORTS), secrets.token_hex(24), secrets.token_urlsafe(24))
    server = {
        "ip": "127.0.0.1",
        "port": service.port,
        "port_retries": 0,
        "base_url": f"/{service.secret}/",
        "open_browser": False,
    }
    content = json.dumps({"ServerApp": server, "IdentityProvider": {"token": service.token}})
    config = files.write(".json", content.encode())
    try:
        with served(Found(one, path, way), lambda text: click.echo(f"rayslurm: {text}", err=True), service) as url:
            click.echo(f"{url}/lab")
            code = one.connection.interact([*_step(one), *_shell(one, ["jupyter", "lab", f"--config={config}"], files)])
    except ClusterEnded as error:
        raise ValueError(str(error)) from None
    if code == _NOT_THERE:
        raise ValueError(f"JupyterLab is not in the environment of {one.name}; install `jupyterlab` there")
    return code


def _shell(one: Entry, words: Sequence[str], files: _Files) -> list[str]:
    """Returns the command to run on the head node of `one`: `words`, or an interactive bash if `words` is empty.

    `one` is a run, session or Slurm job. For a run or session, the returned command first sources a script with the text from
    `_environment`; this function writes the script by `files`. For a Slurm job without a run or session, the command sets no
    environment variables.
    """
    if one.kind == Kind.JOB:
        return list(words) or ["bash", "-i"]
    script = files.write(".sh", _environment(one, files).encode("utf-8", "surrogateescape"))
    if words:
        return ["bash", "-c", ACTIVATE, "rayslurm", script, *words]
    return ["bash", "--rcfile", script, "-i"]


def _environment(one: Entry, files: _Files) -> str:
    """Returns a shell script that sets the environment variables of the payload of a run, or of the runtime of a session.

    `one` is the run or session. At its end, the script changes to the working directory of the run's payload or, for a session,
    to the home directory. Raises ValueError if the payload of a run has not started yet.
    """
    head = '[ -z "$PS1" ] || ! [ -r ~/.bashrc ] || . ~/.bashrc\n'
    prompt = f'[ -z "$PS1" ] || PS1={shlex.quote(f"({one.name}) ")}"$PS1"\n'
    if one.kind == Kind.SESSION:
        return head + _of_session(one, files) + prompt
    refuse_arrays(one)
    pid = _json(one.connection, f"{one.directory}/{STATUS}").get("payload_pid")
    if not isinstance(pid, int):
        raise ValueError(f"the payload of {one.name} has not started yet, it is {one.state}; try again when it runs")
    work = shlex.quote(f"{one.directory}/work")
    return f"{head}{_TAKE_OVER.format(pid=pid, what='the payload')}cd {work} || exit\n{prompt}"


def _of_session(one: Entry, files: _Files) -> str:
    """Returns shell commands that set the environment variables of a session's runtime, and the variables to connect to Ray.

    `one` is the session. The last command changes to the home directory. If the Ray cluster has a token, this function also
    writes the token into a file by `files`, and one of the variables is the path of this file.
    """
    assert one.generation is not None and one.generation.announcement is not None
    text = _TAKE_OVER.format(pid=one.generation.announcement.pid, what="the session")
    described = send_request(one.connection, one.generation, {"op": Operation.DESCRIBE})
    spec, manifest = _json(one.connection, f"{one.directory}/{RUNTIME}"), one.generation.manifest
    address, key = described.get("address"), spec.get("token_key") or spec.get("control_key")
    exports: dict[str, Any] = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", **(spec.get("worker_env") or {})}
    if address:
        exports["RAY_ADDRESS"] = address
        exports["RAY_API_SERVER_ADDRESS"] = described.get("dashboard_url")
        if (spec.get("ray") or {}).get("auth") == "token" and key:
            token = files.write(".token", derive_key(key, "ray-token").encode())
            exports |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token}
    lines = [f"export {name}={shlex.quote(str(value))}\n" for name, value in exports.items() if value]
    python = manifest.ask_command[0] if manifest is not None and manifest.ask_command else ""
    if os.path.isabs(python):  # Otherwise bash, which activates an environment; the runtime's PATH has it then.
        lines.append(f'export PATH={shlex.quote(os.path.dirname(python))}:"$PATH"\n')
    return f"{text}{''.join(lines)}cd || exit\n"


def _step(one: Entry) -> list[str]:
    """Returns the words of an srun command to put before a command, so that the command runs on the head node.

    `one` is the run, session or job with the head node. Returns [] if `one` has no Slurm job.
    """
    if one.job_id is None:
        return []
    node, heterogeneous = _head(one)
    step = step_on_head(one.job_id, heterogeneous, node)
    words = [*step, f"--chdir={one.directory or '/'}", *(["--pty"] if has_terminal() else [])]
    return list(one.connection.call(slurm.command_line, words, repeat=True, timeout=60))


def _head(one: Entry) -> tuple[str | None, bool]:
    """Returns the node name of the head node of a run, session or job, and whether the Slurm job is heterogeneous.

    `one` is the run, session or job. The node name is None if it is unknown.
    """
    if one.generation is not None and one.generation.announcement is not None:
        said = one.generation.announcement
        return said.hosts[0], said.heterogeneous
    if one.kind == Kind.JOB:
        return None, one.heterogeneous
    start = next(iter(LineReader().feed(one.connection.read(f"{one.directory}/{JOURNAL}", 0, 65536))), {})
    allocation = start.get("allocation") or {}
    return next(iter(allocation.get("nodes") or ()), one.node), len(allocation.get("components") or ()) > 1


def _json(connection: Connection, path: str) -> Mapping[str, Any]:
    """Returns the JSON object in a file on the cluster; {} if the file is missing or contains anything else."""
    return json_object(connection.read(path, 0, 1024 * 1024))
