"""Starts payloads fast: preload processes import modules once, and payloads are forked from these processes.

A payload is forked only if it cannot tell the difference to a fresh interpreter, except by its speed. In case of doubt the
payload runs in a fresh interpreter, and the Dagster log says why. Nothing here blocks, because a preload process that hangs
must not stop the runtime. `preload_child` is what runs in the preload process.
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
from ..ray.ray_node import ray_environment
from .environment import Environment, payload_environment
from .preload_child import PADDING, RUN_DIR_PADDING, RUN_DIR_VARIABLE

ForkResult = Union[int, str]
"""The process id of a forked payload, or why the payload needs a fresh interpreter, in words that follow "because"."""

_TIMEOUT = 1.5
"""Seconds for which a payload waits to be forked; a fresh interpreter takes about as long to import such modules."""
_NO_ANSWER = "the preloaded one does not answer"
_MAX_FAILURES = 3
"""Number of preload processes that may end before they have imported the same modules; after that no further one is started."""

_PACKAGE = "rayslurm_preload"
"""Name of the package that a preload process runs; it has nothing but copies of the modules `_SOURCES`."""
_SOURCES = ("preload_child", "preload_run")
_SCRIPT = """\
import sys
bare, startup = {name: value for name, value in globals().items() if name.startswith("__")}, frozenset(sys.modules)
from rayslurm_preload.preload_child import main
main(bare, startup)
"""
"""The script that a preload process runs; it notes what every interpreter has at its first line."""

_IMPORT_PREFIXES = (
    *("PYTHON", "LD_", "DYLD_", "GLIBC_", "MALLOC_", "LC_", "COVERAGE_", "COV_CORE_"),
    *("OMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "NUMEXPR_", "NUMBA_", "KMP_", "GOMP_", "ARROW_"),
    *("CUDA_", "CUDNN_", "CUBLAS_", "NVIDIA_", "NCCL_", "HIP_", "ROCR_", "HSA_"),
    *("TORCH", "PYTORCH_", "XLA_", "TF_", "JAX_", "TRITON_", "HF_", "TRANSFORMERS_", "RAY_"),
)
"""Prefixes of environment variables that an interpreter reads when it starts, or a library when it is imported."""
_IMPORT_NAMES = ("HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP")
"""Other environment variables that an interpreter reads when it starts, or a library when it is imported."""
_LATE_NAMES = (
    *("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN_PATH"),
    *("RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_OVERRIDE_JOB_RUNTIME_ENV", "HF_TOKEN"),
)
"""Environment variables with one of `_IMPORT_PREFIXES` that are read only after the imports (Ray 2.60: in `ray.init`)."""


def command_problem(argv: Sequence[str], python: str) -> Optional[str]:
    """Why a payload with a command cannot be forked, in words that follow "because"; None if it can be.

    A script or module that the interpreter `python` runs can be forked.
    """
    if not argv or argv[0] not in ("python", "python3", python):
        return "the command is none of the environment's Python"
    if len(argv) > 1 and argv[1] == "-m":
        return None if len(argv) > 2 and argv[2] else "the command names no module"
    if len(argv) < 2 or argv[1].startswith("-"):
        return "the command is neither `python SCRIPT` nor `python -m MODULE`"
    if argv[1].endswith(".pyc"):
        return "the script is bytecode"
    return None


def affects_imports(name: str) -> bool:
    """Whether the value of an environment variable may make a difference when modules are imported."""
    return name not in _LATE_NAMES and (name in _IMPORT_NAMES or name.startswith(_IMPORT_PREFIXES))


def environment_problem(preloaded: Environment, payload: Environment) -> Optional[str]:
    """Why a payload with such an environment cannot use what a preload process has imported; None if it can.

    The text names variables but not their values, which may be secret.
    """
    names = {name for name in {*preloaded, *payload} if affects_imports(name) and preloaded.get(name) != payload.get(name)}
    if not names:
        return None
    return "%s may matter when modules are imported and differ%s" % (", ".join(sorted(names)), "s" if len(names) == 1 else "")


def preload_environment(base: Environment, payload: Environment, secrets: Iterable[str]) -> Environment:
    """The environment for a new preload process: variables that affect imports from `payload`, all others from `base`.

    Args:
        base: the environment of this runtime.
        payload: the environment of the payloads to fork.
        secrets: names of variables in `payload` that the preload process must not have.
    """
    env = {name: value for name, value in base.items() if not affects_imports(name)}
    hidden = set(secrets)
    env.update({name: value for name, value in payload.items() if affects_imports(name) and name not in hidden})
    return env


class PreloadProcess:
    """The runtime's side of one preload process, which imports modules and is forked for payloads.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, loop: Loop, script: str, python: str, modules: Tuple[str, ...], env: Environment) -> None:
        self.env = env
        self.running = True
        """Whether the process has not ended yet."""
        self.closed = False
        """Whether the process takes no more fork requests."""
        self.answered = False
        """Whether the process has done its imports and has said if it can be forked."""
        self._loop = loop
        self._modules = ", ".join(modules)
        self._problem: Optional[str] = None
        """Why the process cannot be forked, in words that follow "because"; None if it can be, or has not answered."""
        self._received = b""
        self._waiting: List[Callable[[Optional[str]], None]] = []
        self._control, child_end = socket.socketpair()
        self._control.setblocking(False)
        output, output_end = os.pipe()
        try:
            self.pid = loop.spawn(
                [python, script, str(child_end.fileno()), *modules, PADDING],
                self._exited,
                cwd=os.path.dirname(script),
                env={**env, RUN_DIR_VARIABLE: RUN_DIR_PADDING},
                stdin=subprocess.DEVNULL,
                stdout=output_end,
                stderr=output_end,
                pass_fds=(child_end.fileno(),),
                preexec_fn=processes.die_with_parent(),
            )
        except BaseException:
            self._control.close()
            os.close(output)
            raise
        finally:
            child_end.close()
            os.close(output_end)
        loop.on_readable(output, lambda: self._forward_output(output))
        loop.on_readable(self._control.fileno(), self._receive)

    @property
    def import_timeout(self) -> str:
        """Why a payload is not forked if the imports take too long, in words that follow "because"."""
        return "importing %s is not done yet" % self._modules

    def when_ready(self, call: Callable[[Optional[str]], None]) -> None:
        """Call with None as soon as the process can be forked, or with the reason as soon as it is clear that it cannot be.

        That may be at once, before this returns.
        """
        if self.answered or self.closed:
            call(self._problem)
        else:
            self._waiting.append(call)

    def request_fork(self, connection: socket.socket, streams: Tuple[int, int]) -> None:
        """Have the process fork itself.

        Args:
            connection: the socket from which the forked process reads what payload to run.
            streams: file descriptors of the payload's stdout and stderr.

        Raises:
            OSError: the process does not take the request.
        """
        fds = array("i", [connection.fileno(), *streams])
        self._control.sendmsg([b"f"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])

    def close(self) -> None:
        """End the process; payloads that were forked from it go on."""
        if self.closed:
            return
        self.closed = True
        self._loop.forget(self._control.fileno())
        self._control.close()
        if self.running:
            processes.signal_group(self.pid, signal.SIGKILL)
        self._notify("the process that imports %s ended" % self._modules)

    def _receive(self) -> None:
        """Read from the process its only message, whether it can be forked, or notice that the process has ended."""
        try:
            data = self._control.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.forget(self._control.fileno())
            return self.close() if self._problem is None else None
        self._received += data
        if not self.answered and self._received.endswith(b"\n"):
            self._problem = json.loads(self._received.decode("ascii"))["problem"]
            self.answered = True
            self._notify(self._problem)

    def _notify(self, problem: Optional[str]) -> None:
        """Make the calls that wait for the process's answer."""
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call(problem)

    def _exited(self, *_: Any) -> None:
        self.running = False  # From here on, another process may get its id.
        if self._problem is None:
            self.close()

    def _forward_output(self, fd: int) -> None:
        """Print to the runtime's log what modules print when they are imported, because it belongs to no payload."""
        data = os.read(fd, 65536)
        if data:
            sys.stderr.write(data.decode("utf-8", "replace"))
        else:
            self._loop.forget(fd)
            os.close(fd)


class ForkRequest:
    """Has one payload forked from a preload process: waits until the process is ready, sends the request, reads the answer.

    Args:
        process: the preload process.
        request: what `preload_child` needs to become the payload's process.
        streams: file descriptors of the payload's stdout and stderr.
        on_exit: called when the forked payload has ended.
        done: called once with the result, unless `cancel` is called before.
    """

    def __init__(
        self,
        loop: Loop,
        process: PreloadProcess,
        request: Dict[str, Any],
        streams: Tuple[int, int],
        on_exit: ExitCallback,
        done: Callable[[ForkResult], None],
    ) -> None:
        self._loop = loop
        self._process = process
        self._streams = streams
        self._on_exit = on_exit
        self._done: Optional[Callable[[ForkResult], None]] = done
        self._connection: Optional[socket.socket] = None
        self._unsent = json.dumps(request).encode("ascii") + b"\n"
        self._received = b""
        self._timer = loop.call_later(_TIMEOUT, self._timed_out)
        process.when_ready(self._connect)

    def cancel(self) -> None:
        """Cancel the request: no payload runs and `done` is not called. A process that is already forked ends by itself."""
        self._done = None
        self._close()

    def _finish(self, result: ForkResult) -> None:
        """Close the connection and pass the result to `done`."""
        self._close()
        done, self._done = self._done, None
        if done is not None:
            done(result)

    def _close(self) -> None:
        self._timer.cancel()
        if self._connection is not None:
            self._loop.forget(self._connection.fileno())
            self._connection.close()
            self._connection = None

    def _timed_out(self) -> None:
        """Called after `_TIMEOUT`: the payload gets a fresh interpreter, and a process that has imported but hangs is ended."""
        if self._connection is None:
            self._finish(self._process.import_timeout)
        else:
            self._replace_process()

    def _replace_process(self) -> None:
        """End a preload process that does not answer, and have the payload run in a fresh interpreter.

        The payload cannot run twice: a forked process begins only at the word "go".
        """
        self._process.close()
        self._finish(_NO_ANSWER)

    def _connect(self, problem: Optional[str]) -> None:
        """Called when the preload process can be forked, or cannot be because of `problem`: requests the fork."""
        if self._done is None:
            return
        if problem is not None:
            return self._finish(problem)
        self._connection, child_end = socket.socketpair()
        self._connection.setblocking(False)
        try:
            with child_end:
                self._process.request_fork(child_end, self._streams)
        except OSError:
            return self._replace_process()
        self._loop.on_writable(self._connection.fileno(), self._send)

    def _send(self) -> None:
        """Send the forked process the rest of the request, as far as its socket takes it."""
        assert self._connection is not None
        try:
            self._unsent = self._unsent[self._connection.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            return self._finish(_NO_ANSWER)
        if not self._unsent:
            self._loop.forget(self._connection.fileno())
            self._loop.on_readable(self._connection.fileno(), self._receive)

    def _receive(self) -> None:
        """Receive the forked process's answer, and tell it to begin unless it has a problem."""
        assert self._connection is not None
        try:
            data = self._connection.recv(65536)
            self._received += data
            if not data:  # The forked process has ended; the preload process need not have a fault.
                return self._finish(_NO_ANSWER)
            if not self._received.endswith(b"\n"):
                return
            answer = json.loads(self._received.decode("ascii"))
            if answer["problem"] is None:
                self._connection.send(b"go")  # Its parent cannot have collected it yet: it waits for this word.
        except BlockingIOError:
            return
        except OSError:
            return self._finish(_NO_ANSWER)
        if answer["problem"] is not None:
            if answer["stale"]:
                self._process.close()
            return self._finish(str(answer["problem"]))
        self._loop.adopt(answer["pid"], self._on_exit)
        self._finish(int(answer["pid"]))


class PreloadServer:
    """Forks payloads for this runtime, and keeps one preload process for each set of modules.

    Args:
        directory: private directory for the files that preload processes run; made when needed.
        python: the interpreter of preload processes and payloads.
    """

    def __init__(self, loop: Loop, directory: str, python: str = sys.executable) -> None:
        self._loop = loop
        self._directory = directory
        self._python = python
        self._processes: Dict[Tuple[str, ...], PreloadProcess] = {}
        self._failures: Dict[Tuple[str, ...], int] = {}

    def preload(
        self, modules: Sequence[str], ray_env: Optional[Environment] = None, environ: Optional[Environment] = None
    ) -> None:
        """Start a preload process for payloads that are yet to come, so that its imports are done when they come.

        Args:
            modules: modules to import; nothing is started if there are none.
            ray_env: variables by which those payloads reach their Ray cluster; None if each has its own cluster.
            environ: variables that the environment of those payloads starts from; None for this process's own.
        """
        if modules and sys.platform == "linux":
            spec = PayloadSpec(argv=[], nonce="", uses_ray=True)
            ray_env = ray_environment(RaySpec(), "") if ray_env is None else ray_env
            base = dict(os.environ) if environ is None else environ
            self._start(tuple(modules), payload_environment(spec, base, self._python, "", "", ray_env), ())

    def fork(
        self,
        modules: Sequence[str],
        argv: Sequence[str],
        on_exit: ExitCallback,
        *,
        cwd: str,
        env: Environment,
        secrets: Iterable[str] = (),
        streams: Tuple[int, int],
        done: Callable[[ForkResult], None],
    ) -> Optional[ForkRequest]:
        """Request a fork for one payload; stdin of the forked process is /dev/null.

        Args:
            modules: modules that the preload process must have imported.
            argv: the payload's command; it can be forked if its first word is this runtime's Python.
            on_exit: called when the forked process has ended, as by `Loop.spawn`.
            cwd: the payload's working directory.
            env: the payload's environment.
            secrets: names of variables in `env` that no other process may have.
            streams: file descriptors of the payload's stdout and stderr, which must stay open until `done` is called.
            done: called once with the result, perhaps before this returns.

        Returns:
            The request, which can be cancelled; None if the payload needs a fresh interpreter and `done` has been called.
        """
        process = self._process_for(tuple(modules), argv, env, secrets)
        if isinstance(process, str):
            done(process)
            return None
        request = {"argv": [self._python, *argv[1:]], "cwd": cwd, "env": env, "parent": os.getpid()}
        return ForkRequest(self._loop, process, request, streams, on_exit, done)

    def pids(self) -> List[int]:
        """Process ids of the preload processes that run; they belong to no payload."""
        return [process.pid for process in self._processes.values() if process.running]

    def close(self) -> None:
        """End all preload processes."""
        for process in self._processes.values():
            process.close()

    def _process_for(
        self, modules: Tuple[str, ...], argv: Sequence[str], env: Environment, secrets: Iterable[str]
    ) -> Union[PreloadProcess, str]:
        """The preload process for a payload, started if need be; or why the payload needs a fresh interpreter."""
        if sys.platform != "linux":
            return "only Linux has what forking from a preloaded one takes"
        problem = command_problem(argv, self._python)
        if problem is not None:
            return problem
        process = self._processes.get(modules)
        if process is None or process.closed:
            self._failures[modules] = 0 if process is None or process.answered else self._failures.get(modules, 0) + 1
            if self._failures[modules] >= _MAX_FAILURES:
                return "the process that imports %s ended %d times" % (", ".join(modules), _MAX_FAILURES)
            process = self._start(modules, env, secrets)
        if process is None:
            return "no interpreter can be preloaded"
        return environment_problem(process.env, env) or process

    def _start(self, modules: Tuple[str, ...], env: Environment, secrets: Iterable[str]) -> Optional[PreloadProcess]:
        """A new preload process for payloads with the environment `env`; None if it cannot be started."""
        env = preload_environment(dict(os.environ), env, secrets)
        try:
            process = PreloadProcess(self._loop, self._lay_out(), self._python, modules, env)
        except OSError as error:
            print("rayslurm: no interpreter can be preloaded: %s" % error, file=sys.stderr)
            return None
        self._processes[modules] = process
        return process

    def _lay_out(self) -> str:
        """Write the files that a preload process runs, unless they exist; returns the path of the script."""
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
