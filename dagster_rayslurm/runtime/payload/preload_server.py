"""Starts payloads fast: preload processes import modules once, and payloads are forked from these processes.

A payload is forked only if it cannot tell the difference to a fresh interpreter, except by its speed. In case of doubt the
payload runs in a fresh interpreter, and the Dagster log says why, in words that follow "because". Nothing here blocks, because a
preload process that hangs must not stop the runtime. `preload_child` is what runs in the preload process.
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
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple, Union

from ..process import processes
from ..process.loop import ExitCallback, Loop
from ..protocol.spec import PayloadSpec, RaySpec
from ..ray.ray_node import ray_environment
from .environment import Environment, payload_environment
from .preload_child import PADDING, RUN_DIR_PADDING, RUN_DIR_VARIABLE

ForkResult = Union[int, str]  # The process id of a forked payload, or why the payload needs a fresh interpreter.

# Seconds for which a payload waits to be forked; a fresh interpreter takes about as long to import such modules.
_TIMEOUT = 1.5
_POLL = 0.01  # Seconds between two looks whether the imports are done.
_NO_ANSWER = "the preloaded one does not answer"

# The script that a preload process runs; it notes what every interpreter has at its first line.
_SCRIPT = b"""\
import sys
bare, startup = {name: value for name, value in globals().items() if name.startswith("__")}, frozenset(sys.modules)
from rayslurm_preload import main
main(bare, startup)
"""

# Prefixes of environment variables that an interpreter reads when it starts, or a library when it is imported.
_IMPORT_PREFIXES = (
    *("PYTHON", "LD_", "DYLD_", "GLIBC_", "MALLOC_", "LC_", "COVERAGE_", "COV_CORE_"),
    *("OMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "NUMEXPR_", "NUMBA_", "KMP_", "GOMP_", "ARROW_"),
    *("CUDA_", "CUDNN_", "CUBLAS_", "NVIDIA_", "NCCL_", "HIP_", "ROCR_", "HSA_"),
    *("TORCH", "PYTORCH_", "XLA_", "TF_", "JAX_", "TRITON_", "HF_", "TRANSFORMERS_", "RAY_"),
)
# Other environment variables that an interpreter reads when it starts, or a library when it is imported.
_IMPORT_NAMES = ("HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP")
# Environment variables with one of `_IMPORT_PREFIXES` that are read only after the imports (Ray 2.60: in `ray.init`).
_LATE_NAMES = (
    *("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN_PATH"),
    *("RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_OVERRIDE_JOB_RUNTIME_ENV", "HF_TOKEN"),
)


def command_problem(argv: Sequence[str], python: str) -> Optional[str]:
    """Why a payload with a command cannot be forked; None if it can be, as a script or module that `python` runs."""
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
    """Why a payload with such an environment cannot use what a preload process has imported; names no values, but variables."""
    names = {name for name in {*preloaded, *payload} if affects_imports(name) and preloaded.get(name) != payload.get(name)}
    if not names:
        return None
    return "%s may matter when modules are imported and differ%s" % (", ".join(sorted(names)), "s" if len(names) == 1 else "")


def preload_environment(base: Environment, payload: Environment, secrets: Iterable[str]) -> Environment:
    """The environment for a new preload process: what affects imports is that of the payload, without secrets; else `base`."""
    own = {name: value for name, value in payload.items() if affects_imports(name) and name not in set(secrets)}
    return {**{name: value for name, value in base.items() if not affects_imports(name)}, **own}


@dataclass(eq=False)
class PreloadProcess:
    """The runtime's side of one preload process, which imports modules and is forked for payloads.

    `problem` says why the process cannot be forked now, `served` whether it could be before. `pid` is None when it does not run:
    another process may get its id.
    """

    loop: Loop
    modules: str
    env: Environment
    problem: Optional[str] = None
    importing: bool = True
    served: bool = False
    closed: bool = False
    pid: Optional[int] = None

    def start(self, python: str, script: str, modules: Sequence[str]) -> None:
        """Start the process; raises `OSError` if that fails."""
        self.problem = "importing %s is not done yet" % self.modules
        self.control, child_end = socket.socketpair()
        self.control.setblocking(False)
        with child_end:
            self.pid = self.loop.spawn(
                [python, script, str(child_end.fileno()), *modules, PADDING],
                self._exited,
                cwd=os.path.dirname(script),
                env={**self.env, RUN_DIR_VARIABLE: RUN_DIR_PADDING},
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,  # What modules print when they are imported belongs to no payload.
                pass_fds=(child_end.fileno(),),
                preexec_fn=processes.die_with_parent(),
            )
        self.loop.on_readable(self.control.fileno(), self._receive)

    def close(self, why: str) -> None:
        """End the process; payloads that were forked from it go on."""
        if self.closed:
            return
        self.closed = True
        self.loop.forget(self.control.fileno())
        self.control.close()
        if self.pid is not None:
            processes.signal_group(self.pid, signal.SIGKILL)
        if self.importing or self.problem is None:
            self.importing, self.problem = False, why

    def _receive(self) -> None:
        """Read the process's only message, whether it can be forked, or notice that the process has ended."""
        try:
            data = self.control.recv(65536)
        except OSError:
            data = b""
        if not data:
            return self.close("the process that imports %s ended" % self.modules)
        self.importing, self.problem = False, json.loads(data.decode("ascii"))["problem"]
        self.served = self.problem is None

    def _exited(self, *_: Any) -> None:
        self.pid = None


@dataclass(eq=False)
class ForkRequest:
    """Has one payload forked: waits until the preload process is ready, sends the request, reads the answer.

    Instead of a process, `process` may be the reason why the payload needs a fresh interpreter.
    """

    loop: Loop
    process: Union[PreloadProcess, str]
    request: Dict[str, Any]
    streams: Tuple[int, int]
    on_exit: ExitCallback
    done: Optional[Callable[[ForkResult], None]]

    def __post_init__(self) -> None:
        self._connection: Optional[socket.socket] = None
        self._deadline = self.loop.now() + _TIMEOUT
        self._timer = self.loop.call_later(0.0, self._begin)

    def cancel(self) -> None:
        """Cancel the request: no payload runs and `done` is not called. A process that is already forked ends by itself."""
        self.done = None
        self._timer.cancel()
        if self._connection is not None:
            self.loop.forget(self._connection.fileno())
            self._connection.close()
            self._connection = None

    def _finish(self, result: ForkResult) -> None:
        done = self.done
        self.cancel()
        if done is not None:
            done(result)

    def _begin(self) -> None:
        """Request the fork as soon as the imports are done."""
        process = self.process
        if isinstance(process, str):
            return self._finish(process)
        if process.importing and self.loop.now() < self._deadline:
            self._timer = self.loop.call_later(_POLL, self._begin)
            return
        if process.problem is not None:
            return self._finish(process.problem)
        self._timer = self.loop.call_later(self._deadline - self.loop.now(), self._replace_process)
        self._connection, child_end = socket.socketpair()
        self._connection.setblocking(False)
        self.loop.on_readable(self._connection.fileno(), self._receive)
        request = json.dumps(self.request).encode("ascii") + b"\n"
        try:
            with child_end:
                fds = array("i", [child_end.fileno(), *self.streams])
                process.control.sendmsg([b"f"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            if self._connection.send(request) < len(request):  # Its buffer takes some 200 KiB.
                self._finish("its environment is too large to be sent to the preloaded one")
        except OSError:
            self._replace_process()

    def _replace_process(self, why: str = _NO_ANSWER) -> None:
        """End a preload process that hangs or is outdated, and have the payload run in a fresh interpreter.

        The payload cannot run twice: a forked process begins only at the word "go".
        """
        assert isinstance(self.process, PreloadProcess)
        self.process.close(why)
        self._finish(why)

    def _receive(self) -> None:
        """Receive the forked process's answer, and tell it to begin unless it has a problem."""
        assert self._connection is not None
        try:
            data = self._connection.recv(65536)
            answer: Dict[str, Any] = json.loads(data.decode("ascii")) if data else {"problem": _NO_ANSWER, "stale": False}
            if answer["problem"] is None:
                self._connection.send(b"go")  # Its parent cannot have collected it yet: it waits for this word.
        except OSError:
            return self._finish(_NO_ANSWER)
        if answer["stale"]:
            self._replace_process(answer["problem"])
        elif answer["problem"] is not None:
            self._finish(str(answer["problem"]))
        else:
            self.loop.adopt(answer["pid"], self.on_exit)
            self._finish(int(answer["pid"]))


@dataclass(eq=False)
class PreloadServer:
    """Forks payloads for this runtime, and keeps one preload process for each set of modules.

    `directory` is private and takes the script that preload processes run. `python` runs these processes and the payloads.
    """

    loop: Loop
    directory: str
    python: str = sys.executable

    def __post_init__(self) -> None:
        self._processes: Dict[Tuple[str, ...], PreloadProcess] = {}

    def preload(self, modules: Sequence[str], ray_env: Optional[Environment], environ: Environment) -> None:
        """Start a preload process, if there are modules to import, for payloads that come when its imports are done.

        Their environment will be based on `environ`. By `ray_env` they reach their Ray cluster; None if each has its own.
        """
        if modules and sys.platform == "linux":
            spec = PayloadSpec(argv=[], nonce="", uses_ray=True)
            ray_env = ray_environment(RaySpec(), "") if ray_env is None else ray_env
            self._start(tuple(modules), payload_environment(spec, environ, self.python, "", "", ray_env), ())

    def fork(
        self,
        modules: Sequence[str],
        argv: Sequence[str],
        on_exit: ExitCallback,
        done: Callable[[ForkResult], None],
        *,
        cwd: str,
        env: Environment,
        secrets: Iterable[str] = (),
        streams: Tuple[int, int],
    ) -> ForkRequest:
        """Request a fork for one payload from a process that has imported these modules; its stdin is /dev/null.

        `done` is called with the result, after this returns; until then the payload's stdout and stderr, `streams`, must stay
        open. `on_exit` is called when the forked process has ended. No other process may have the variables `secrets`.
        """
        process = self._process_for(tuple(modules), argv, env, secrets)
        request = {"argv": [self.python, *argv[1:]], "cwd": cwd, "env": env, "parent": os.getpid()}
        return ForkRequest(self.loop, process, request, streams, on_exit, done)

    def pids(self) -> List[int]:
        """Process ids of the preload processes that run; they belong to no payload."""
        return [process.pid for process in self._processes.values() if process.pid is not None]

    def close(self) -> None:
        """End all preload processes."""
        for process in self._processes.values():
            process.close("the runtime ends")

    def _process_for(
        self, modules: Tuple[str, ...], argv: Sequence[str], env: Environment, secrets: Iterable[str]
    ) -> Union[PreloadProcess, str]:
        """The preload process for a payload, started if need be; or why the payload needs a fresh interpreter."""
        if sys.platform != "linux":
            return "only Linux has what forking from a preloaded one takes"
        problem = command_problem(argv, self.python)
        if problem is not None:
            return problem
        process = self._processes.get(modules)
        if process is None or (process.closed and process.served):  # One that never served would not serve the next time.
            process = self._start(modules, env, secrets)
        if process is None:
            return "no interpreter can be preloaded"
        return environment_problem(process.env, env) or process

    def _start(self, modules: Tuple[str, ...], env: Environment, secrets: Iterable[str]) -> Optional[PreloadProcess]:
        """A new preload process for payloads with the environment `env`; None if it cannot be started."""
        process = PreloadProcess(self.loop, ", ".join(modules), preload_environment(dict(os.environ), env, secrets))
        script = os.path.join(self.directory, "python.py")
        try:
            os.makedirs(self.directory, 0o700, exist_ok=True)
            source = pkgutil.get_data(__package__ or "", "preload_child.py") or b""
            for path, content in ((os.path.join(self.directory, "rayslurm_preload.py"), source), (script, _SCRIPT)):
                with open(path, "wb") as file:
                    file.write(content)
            process.start(self.python, script, modules)
        except OSError as error:
            print("rayslurm: no interpreter can be preloaded: %s" % error, file=sys.stderr)
            return None
        self._processes[modules] = process
        return process
