"""Start processes that import modules once, and fork payloads from them.

One process that has imported modules, and the payloads that are forked from it; the runtime's side of `template`.

Nothing here blocks: a template that hangs must not stop what else the runtime does.

Interpreters that have imported modules once, from which payloads are forked; the runtime's side of `template`.

A payload is forked only if nobody could tell the difference to a fresh interpreter but by its speed. Whatever is in
doubt runs in a fresh interpreter, and the user reads why.
"""

from __future__ import annotations

import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
from array import array
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple, Union

from ..process import processes
from ..process.loop import ExitCallback, Loop
from ..protocol.spec import PayloadSpec, RaySpec
from ..ray.start_arguments import ray_environment
from .environment import Environment, payload_environment
from .preload_child import MARK, MARK_ROOM, PAD

Forked = Union[int, str]
"""The process id of a forked payload, which is its process group too; or why it needs a fresh interpreter, after "because"."""

_PATIENCE = 1.5
"""Seconds that a payload waits for a template in all: for its imports to end, and for its answer. A fresh interpreter takes
about that long."""

_SILENT = "the preloaded one does not answer"


class Template:
    """One process that has imported modules, or still does.

    Args:
        loop: where everything happens.
        script: what it runs.
        python: the environment's Python.
        modules: what it imports.
        env: its environment.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, loop: Loop, script: str, python: str, modules: Tuple[str, ...], env: Environment) -> None:
        self.env = env
        self.ended = False
        """Whether there must be another one; one that cannot serve says so once, and is asked no more."""
        self.running = True
        self.served = False
        """Whether it got as far as to say whether it can serve."""
        self._loop = loop
        self._modules = ", ".join(modules)
        self._ready = False
        self._problem: Optional[str] = None
        self._said = b""
        self._waiting: List[Callable[[Optional[str]], None]] = []
        self._control, other = socket.socketpair()
        self._control.setblocking(False)
        out = os.pipe()
        try:
            self.pid = loop.spawn(
                [python, script, str(other.fileno()), *modules, PAD],
                self._exited,
                cwd=os.path.dirname(script),
                env={**env, MARK: MARK_ROOM},
                stdin=subprocess.DEVNULL,
                stdout=out[1],
                stderr=out[1],
                pass_fds=(other.fileno(),),
                preexec_fn=processes.die_with_parent(),
            )
        except BaseException:
            self._control.close()
            os.close(out[0])
            raise
        finally:
            other.close()
            os.close(out[1])
        loop.on_readable(out[0], lambda: self._pass_on(out[0]))
        loop.on_readable(self._control.fileno(), self._hear)

    @property
    def importing(self) -> str:
        """Why a payload waits for it no longer."""
        return "importing %s is not done yet" % self._modules

    def when_ready(self, call: Callable[[Optional[str]], None]) -> None:
        """Have something called, perhaps at once, when this serves, or with why it does not."""
        if self._ready or self.ended:
            call(self._problem)
        else:
            self._waiting.append(call)

    def _hear(self) -> None:
        """Take in whether it can serve, which it says once, or that it has ended."""
        try:
            data = self._control.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.forget(self._control.fileno())
            return self.end() if self._problem is None else None
        self._said += data
        if not self._ready and self._said.endswith(b"\n"):
            self._problem = json.loads(self._said.decode("ascii"))["problem"]
            self._ready = self.served = True
            self._tell(self._problem)

    def _tell(self, problem: Optional[str]) -> None:
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call(problem)

    def send(self, connection: socket.socket, streams: Tuple[int, int]) -> None:
        """Have a process forked that talks over a connection.

        Raises:
            OSError: it does not listen.
        """
        fds = array("i", [connection.fileno(), *streams])
        self._control.sendmsg([b"f"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])

    def end(self) -> None:
        """End it at once; payloads that were forked from it go on."""
        if not self.ended:
            self.ended = True
            self._loop.forget(self._control.fileno())
            self._control.close()
            if self.running:
                processes.signal_group(self.pid, signal.SIGKILL)
            self._tell("the process that imports %s ended" % self._modules)

    def _exited(self, *_: Any) -> None:
        self.running = False  # From here on its process id may be another one's.
        if self._problem is None:
            self.end()

    def _pass_on(self, fd: int) -> None:
        """Pass on what modules print when they are imported: it belongs to no payload."""
        data = os.read(fd, 65536)
        if data:
            sys.stderr.write(data.decode("utf-8", "replace"))
        else:
            self._loop.forget(fd)
            os.close(fd)


class Fork:
    """A payload on its way: waits until the template is ready, sends the request, and takes the answer.

    Args:
        loop: where everything happens.
        template: what it is forked from.
        request: what the forked process shall become.
        streams: descriptors of its output and errors.
        on_exit: called when it has ended.
        done: called once with what has become of it, unless `cancel` is called before.
    """

    def __init__(
        self,
        loop: Loop,
        template: Template,
        request: Dict[str, Any],
        streams: Tuple[int, int],
        on_exit: ExitCallback,
        done: Callable[[Forked], None],
    ) -> None:
        self._loop = loop
        self._template = template
        self._streams = streams
        self._on_exit = on_exit
        self._done: Optional[Callable[[Forked], None]] = done
        self._connection: Optional[socket.socket] = None
        self._unsent = json.dumps(request).encode("ascii") + b"\n"
        self._answer = b""
        self._timer = loop.call_later(_PATIENCE, self._give_up)
        template.when_ready(self._begin)

    def cancel(self) -> None:
        """Have no payload: a process that nobody tells to go ends by itself."""
        self._done = None
        self._close()

    def _finish(self, forked: Forked) -> None:
        self._close()
        done, self._done = self._done, None
        if done is not None:
            done(forked)

    def _close(self) -> None:
        self._timer.cancel()
        if self._connection is not None:
            self._loop.forget(self._connection.fileno())
            self._connection.close()
            self._connection = None

    def _give_up(self) -> None:
        if self._connection is None:
            return self._finish(self._template.importing)
        self._fail()

    def _fail(self) -> None:
        """Nothing has begun, as nobody said "go"; who does not answer is asked no more."""
        self._template.end()
        self._finish(_SILENT)

    def _begin(self, problem: Optional[str]) -> None:
        if self._done is None:
            return
        if problem is not None:
            return self._finish(problem)
        self._connection, theirs = socket.socketpair()
        self._connection.setblocking(False)
        try:
            with theirs:
                self._template.send(theirs, self._streams)
        except OSError:
            return self._fail()
        self._loop.on_writable(self._connection.fileno(), self._send)

    def _send(self) -> None:
        assert self._connection is not None
        try:
            self._unsent = self._unsent[self._connection.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            return self._finish(_SILENT)
        if not self._unsent:
            self._loop.forget(self._connection.fileno())
            self._loop.on_readable(self._connection.fileno(), self._receive)

    def _receive(self) -> None:
        assert self._connection is not None
        try:
            data = self._connection.recv(65536)
            self._answer += data
            if not data:  # The forked process has ended, which says nothing about the template.
                return self._finish(_SILENT)
            if not self._answer.endswith(b"\n"):
                return
            answer = json.loads(self._answer.decode("ascii"))
            if answer["problem"] is None:
                self._connection.send(b"go")  # It lives, so nobody has collected it before it is adopted.
        except BlockingIOError:
            return
        except OSError:
            return self._finish(_SILENT)
        if answer["problem"] is not None:
            if answer["stale"]:
                self._template.end()
            return self._finish(str(answer["problem"]))
        self._loop.adopt(answer["pid"], self._on_exit)
        self._finish(int(answer["pid"]))


_PACKAGE = "rayslurm_template"
_SOURCES = ("preload_child", "fork_safety", "run_as_main", "leave_ray")
_SCRIPT = """\
import sys
bare, startup = {name: value for name, value in globals().items() if name.startswith("__")}, frozenset(sys.modules)
from rayslurm_template.preload_child import main
main(bare, startup)
"""

_ATTEMPTS = 3
"""Templates that may end before they have imported their modules, until nobody starts another one."""

_AT_IMPORT = (
    *("PYTHON", "LD_", "DYLD_", "GLIBC_", "MALLOC_", "LC_", "COVERAGE_", "COV_CORE_"),
    *("OMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "NUMEXPR_", "NUMBA_", "KMP_", "GOMP_", "ARROW_"),
    *("CUDA_", "CUDNN_", "CUBLAS_", "NVIDIA_", "NCCL_", "HIP_", "ROCR_", "HSA_"),
    *("TORCH", "PYTORCH_", "XLA_", "TF_", "JAX_", "TRITON_", "HF_", "TRANSFORMERS_", "RAY_"),
)
"""Prefixes of variables that interpreters and libraries look at when they start or are imported."""

_AT_IMPORT_NAMES = ("HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP")

_LATER = (
    *("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN_PATH"),
    *("RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_OVERRIDE_JOB_RUNTIME_ENV", "HF_TOKEN"),
)
"""Variables that such a prefix fits and that are read only when they are needed (Ray 2.60: in `ray.init`)."""


def command_problem(argv: Sequence[str], python: str) -> Optional[str]:
    """Why a command cannot be forked, in the words that follow "because"; None for a script or module of `python`."""
    if not argv or argv[0] not in ("python", "python3", python):
        return "the command is none of the environment's Python"
    if len(argv) > 1 and argv[1] == "-m":
        return None if len(argv) > 2 and argv[2] else "the command names no module"
    if len(argv) < 2 or argv[1].startswith("-"):
        return "the command is neither `python SCRIPT` nor `python -m MODULE`"
    if argv[1].endswith(".pyc"):
        return "the script is bytecode"
    return None


def acts_at_import(name: str) -> bool:
    """Whether a variable may make a difference when modules are imported."""
    return name not in _LATER and (name in _AT_IMPORT_NAMES or name.startswith(_AT_IMPORT))


def environment_problem(template: Environment, payload: Environment) -> Optional[str]:
    """Why a payload's environment needs imports of its own; values are not told, as they may be secret."""
    names = sorted(name for name in {*template, *payload} if acts_at_import(name) and template.get(name) != payload.get(name))
    if not names:
        return None
    return "%s may matter when modules are imported and differ%s" % (", ".join(names), "s" if len(names) == 1 else "")


def template_environment(base: Environment, payload: Environment, secrets: Iterable[str]) -> Environment:
    """The environment of a template for payloads like this one: nothing of its own but what acts at import."""
    env = {name: value for name, value in base.items() if not acts_at_import(name)}
    hidden = set(secrets)
    env.update({name: value for name, value in payload.items() if acts_at_import(name) and name not in hidden})
    return env


class Templates:
    """The templates of one runtime, by the modules that they have imported.

    Args:
        loop: where everything happens.
        directory: a private directory of their own, which is made.
        python: the environment's Python.
    """

    def __init__(self, loop: Loop, directory: str, python: str = sys.executable) -> None:
        self._loop = loop
        self._directory = directory
        self._python = python
        self._all: Dict[Tuple[str, ...], Template] = {}
        self._failures: Dict[Tuple[str, ...], int] = {}

    def warm(self, modules: Sequence[str], ray_env: Optional[Environment] = None, environ: Optional[Environment] = None) -> None:
        """Begin to import modules for payloads that are yet to come.

        Args:
            modules: what to import; nothing happens if that is nothing.
            ray_env: how those payloads reach their cluster; None if each of them has its own.
            environ: what their environment is made from; None for this process's own.
        """
        if modules and sys.platform == "linux":
            some = PayloadSpec(argv=[], nonce="", uses_ray=True)
            ray_env = ray_environment(RaySpec(), "") if ray_env is None else ray_env
            base = dict(os.environ) if environ is None else environ
            self._start(tuple(modules), payload_environment(some, base, self._python, "", "", ray_env), ())

    def _start(self, key: Tuple[str, ...], env: Environment, secrets: Iterable[str]) -> None:
        env = template_environment(dict(os.environ), env, secrets)
        try:
            self._all[key] = Template(self._loop, self._script(), self._python, key, env)
        except OSError as error:
            print("rayslurm: no interpreter can be preloaded: %s" % error, file=sys.stderr)

    def spawn(
        self,
        modules: Sequence[str],
        argv: Sequence[str],
        on_exit: ExitCallback,
        *,
        cwd: str,
        env: Environment,
        secrets: Iterable[str] = (),
        stdout: int,
        stderr: int,
        done: Callable[[Forked], None],
    ) -> Optional[Fork]:
        """Fork a payload with /dev/null as its stdin.

        Args:
            modules: what must have been imported.
            argv: its command, whose first word is this runtime's Python.
            on_exit: called when it has ended, as by `Loop.spawn`.
            cwd: its working directory.
            env: its environment.
            secrets: names of variables in it that no other process shall have.
            stdout: descriptor of its output, which stays open until `done` is called.
            stderr: descriptor of its errors, likewise.
            done: called once, perhaps before this returns, with what has become of it.

        Returns:
            The fork, to be cancelled while it is under way; None if there is none.
        """
        template = self._template_for(modules, argv, env, secrets)
        if isinstance(template, str):
            done(template)
            return None
        request = {"argv": [self._python, *argv[1:]], "cwd": cwd, "env": env, "parent": os.getpid()}
        return Fork(self._loop, template, request, (stdout, stderr), on_exit, done)

    def _template_for(
        self, modules: Sequence[str], argv: Sequence[str], env: Environment, secrets: Iterable[str]
    ) -> Union[Template, str]:
        """What a payload can be forked from; or why it needs a fresh interpreter."""
        if sys.platform != "linux":
            return "only Linux has what forking from a preloaded one takes"
        problem = command_problem(argv, self._python)
        if problem is not None:
            return problem
        key = tuple(modules)
        if key not in self._all or self._all[key].ended:
            again = self._count_failure(key)
            if again is not None:
                return again
            self._start(key, env, secrets)
        template = self._all.get(key)
        if template is None:
            return "no interpreter can be preloaded"
        return environment_problem(template.env, env) or template

    def pids(self) -> List[int]:
        """The templates that run, which belong to no payload."""
        return [template.pid for template in self._all.values() if template.running]

    def close(self) -> None:
        """End them all."""
        for template in self._all.values():
            template.end()

    def _count_failure(self, key: Tuple[str, ...]) -> Optional[str]:
        """Remember a template that never got to serve; why there is no other one, if it was one too many."""
        last = self._all.get(key)
        if last is None or last.served:
            self._failures[key] = 0
            return None
        self._failures[key] = min(self._failures.get(key, 0) + 1, _ATTEMPTS)
        if self._failures[key] < _ATTEMPTS:
            return None
        return "the process that imports %s ended %d times" % (", ".join(key), _ATTEMPTS)

    def _script(self) -> str:
        """Lay out the files that a template consists of; the script."""
        script, package = os.path.join(self._directory, "python.py"), os.path.join(self._directory, _PACKAGE)
        if not os.path.exists(script):
            os.makedirs(package, 0o700, exist_ok=True)
            _write(os.path.join(package, "__init__.py"), b"")
            for name in _SOURCES:
                source = pkgutil.get_data(__package__ or "", name + ".py")
                assert source is not None
                _write(os.path.join(package, name + ".py"), source)
            _write(script, _SCRIPT.encode())
        return script


def _write(path: str, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
