"""Starts payloads fast: preload processes import modules once, and the payloads' processes are forked from preload processes.

A payload is forked only if it cannot notice the difference from a fresh interpreter. In case of doubt, the payload runs in a
fresh interpreter, and the Dagster log says why; functions return this reason as a clause that can follow "because". The preload
processes run `preload_child`.
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
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple, Union

from ..process import processes
from ..process.loop import ExitCallback, Loop
from ..protocol.spec import PayloadSpec, RaySpec
from ..ray.ray_node import ray_environment
from .environment import Environment, payload_environment

ForkResult = Union[int, str]  # The process id of a forked payload, or why the payload needs a fresh interpreter.
Done = Callable[[ForkResult], None]
Cancel = Callable[[], None]

# Seconds for which a payload waits to be forked; a fresh interpreter takes about as long to import such modules.
_TIMEOUT = 1.5
_NO_ANSWER = "the preloaded one does not answer"
# The script that a preload process runs. It leaves no names in the module `__main__`, which becomes that of the payload.
_SCRIPT = b'__import__("rayslurm_preload").main()\n'

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
    """Returns why a payload with the command `argv` must not be forked from a preload process; None if it may be.

    Only `python SCRIPT` and `python -m MODULE` may be forked. The first word of `argv` must be "python", "python3", or the text
    of the parameter `python`, the path of the environment's Python.
    """
    if not argv or argv[0] not in ("python", "python3", python):
        return "the command is none of the environment's Python"
    is_module = len(argv) > 2 and argv[1] == "-m" and bool(argv[2])
    if not is_module and (len(argv) < 2 or argv[1].startswith("-")):
        return "the command is neither `python SCRIPT` nor `python -m MODULE`"
    return "the script is bytecode" if argv[1].endswith(".pyc") else None


def affects_imports(name: str) -> bool:
    """Whether the value of the environment variable `name` may make a difference while modules are imported."""
    return name not in _LATE_NAMES and (name in _IMPORT_NAMES or name.startswith(_IMPORT_PREFIXES))


def environment_problem(preloaded: Environment, payload: Environment) -> Optional[str]:
    """Returns why a payload with the environment `payload` must not be forked from a process with the environment `preloaded`.

    The reason names the variables that affect imports and differ, without their values. Returns None if all such variables are
    the same.
    """
    names = {name for name in {*preloaded, *payload} if affects_imports(name) and preloaded.get(name) != payload.get(name)}
    if not names:
        return None
    return "%s may matter when modules are imported and differ%s" % (", ".join(sorted(names)), "s" if len(names) == 1 else "")


def preload_environment(base: Environment, payload: Environment, secrets: Iterable[str]) -> Environment:
    """Returns the environment for a new preload process: variables that affect imports from `payload`, all others from `base`.

    `payload` is the environment of a payload. `secrets` are names of variables that must not be taken from it.
    """
    own = {name: value for name, value in payload.items() if affects_imports(name) and name not in set(secrets)}
    return {**{name: value for name, value in base.items() if not affects_imports(name)}, **own}


@dataclass(eq=False)
class _Process:
    """What the runtime knows about one preload process, which imports `modules` and then forks itself for payloads."""

    modules: Tuple[str, ...]
    env: Environment  # The environment of the preload process.
    control: socket.socket  # Over this socket, the runtime sends a socket for each request to fork.
    pid: Optional[int] = None  # None once the process has ended, because another one may get its id.
    imported: bool = False  # Whether a fork has succeeded, so that the imports are done.
    problem: Optional[str] = None  # Why no payload can be forked from this process or another one with these modules.


@dataclass(eq=False)
class PreloadServer:
    """Keeps one preload process for each set of modules to import, and forks payloads of this runtime from these processes.

    Works only on Linux; elsewhere, each payload needs a fresh interpreter.
    """

    loop: Loop
    directory: str  # Directory into which the script of the preload processes is written.
    python: str = sys.executable  # Interpreter of the preload processes and the payloads.
    _processes: Dict[Tuple[str, ...], _Process] = field(default_factory=dict)

    def preload(self, modules: Sequence[str], ray_env: Optional[Environment], environ: Environment) -> None:
        """Start a preload process that imports `modules`, without waiting, so that a later `fork` finds the imports done.

        Does nothing if `modules` is empty. `environ` has the variables on which the environment of the payloads is based.
        `ray_env` has the variables by which the payloads reach the warm Ray cluster; None if each payload has a Ray cluster of
        its own.
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
        done: Done,
        *,
        cwd: str,
        env: Environment,
        secrets: Iterable[str] = (),
        streams: Tuple[int, int],
    ) -> Union[Cancel, str]:
        """Request a fork of a preload process for one payload, without waiting; starts the preload process if there is none.

        Args:
            modules: Names of the modules that the preload process must have imported.
            argv: The payload's command, a list of words.
            on_exit: Called when the forked process has ended, with the exit code and the resource usage of the process.
            done: Called once, after this method has returned. The argument is the id of the forked process, or a text that says
                why the payload needs a fresh interpreter, which the caller must then start.
            cwd: The payload's working directory.
            env: The payload's environment.
            secrets: Names of the variables in `env` that no other process may have.
            streams: File descriptors for the payload's stdout and stderr; they must stay open until `done` is called.

        Returns:
            A function that cancels the request, or a text that says why no fork is possible. If the result is a text, `done` is
            not called. After a cancellation, `done` is not called, and a process that was already forked ends by itself.
        """
        if sys.platform != "linux":
            return "only Linux has what forking from a preloaded one takes"
        problem = command_problem(argv, self.python)
        if problem is not None:
            return problem
        process = self._processes.get(tuple(modules)) or self._start(tuple(modules), env, secrets)
        if process is None:
            return "no interpreter can be preloaded"
        problem = process.problem or environment_problem(process.env, env)
        if problem is not None:
            return problem
        request = {"argv": [self.python, *argv[1:]], "cwd": cwd, "env": env, "parent": os.getpid()}
        line = json.dumps(request).encode("ascii") + b"\n"
        connection, child_end = socket.socketpair()
        connection.setblocking(False)
        with child_end:
            if connection.send(line) < len(line):  # Its buffer takes some 200 KiB.
                connection.close()
                return "its environment is too large to be sent to the preloaded one"
            try:
                # The process handles the request when its imports are done.
                process.control.sendmsg([b"f"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [child_end.fileno()]))])
            except OSError:
                connection.close()
                return self.end_process(process)
        return self._await_fork(process, connection, streams, on_exit, done)

    def _await_fork(
        self, process: _Process, connection: socket.socket, streams: Tuple[int, int], on_exit: ExitCallback, done: Done
    ) -> Cancel:
        """Have the event loop wait for the answer of a forked process, and then tell this process to begin. Does not block.

        If the answer names a problem, or does not come within `_TIMEOUT` seconds, the forked process never begins, so that the
        payload cannot run twice. Returns a function that cancels the wait.

        Args:
            process: The preload process.
            connection: The socket over which the forked process answers.
            streams: File descriptors for the payload's stdout and stderr.
            on_exit: Called when the forked process has ended.
            done: Called with the id of the forked process, or with the reason why the payload needs a fresh interpreter.
        """

        def cancel() -> None:
            timer.cancel()
            self.loop.forget(connection.fileno())
            connection.close()

        def receive() -> ForkResult:
            try:
                data = connection.recv(65536)
            except OSError:
                data = b""
            if not data:
                return self.end_process(process)
            answer = json.loads(data.decode("ascii"))
            pid, problem = answer["pid"], answer["problem"]
            process.imported = pid is not None
            if problem is not None:
                if pid is None or answer["stale"]:
                    self.end_process(process, problem)
                return str(problem)
            try:
                # The process cannot have ended, and its id be another's: it waits for this word.
                connection.sendmsg([b"go"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", streams))])
            except OSError:
                return _NO_ANSWER
            self.loop.adopt(pid, on_exit)
            return int(pid)

        def give_up() -> ForkResult:
            return self.end_process(process) if process.imported else "importing %s is not done yet" % ", ".join(process.modules)

        def finish(result: Callable[[], ForkResult]) -> None:
            found = result()
            cancel()
            done(found)

        self.loop.on_readable(connection.fileno(), lambda: finish(receive))
        timer = self.loop.call_later(_TIMEOUT, lambda: finish(give_up))
        return cancel

    def end_process(self, process: _Process, why: Optional[str] = None) -> str:
        """Kill a preload process, and return the reason why a payload that waits for a fork needs a fresh interpreter.

        Payloads that were forked from the preload process go on. If a fork of this process has succeeded before, the next request
        for the same modules starts a new preload process. Otherwise no new one is started, and later requests get the same
        reason. `why` is the reason, if the caller knows one; None if the preload process has ended or does not answer.
        """
        process.control.close()
        if process.pid is not None:
            processes.signal_group(process.pid, signal.SIGKILL)
        if not process.imported:
            process.problem = process.problem or why or "the process that imports %s ended" % ", ".join(process.modules)
        elif self._processes.get(process.modules) is process:
            del self._processes[process.modules]
        return process.problem or _NO_ANSWER

    def pids(self) -> List[int]:
        """Returns the process ids of all running preload processes, without the payloads forked from them."""
        return [process.pid for process in self._processes.values() if process.pid is not None]

    def close(self) -> None:
        """End all preload processes."""
        for process in list(self._processes.values()):
            self.end_process(process)

    def _start(self, modules: Tuple[str, ...], env: Environment, secrets: Iterable[str]) -> Optional[_Process]:
        """Start a preload process that imports `modules`, for payloads with the environment `env`; returns it without waiting.

        Returns None if the process cannot be started. `secrets` are names of variables in `env` that it must not get.
        """
        control, child_end = socket.socketpair()
        control.setblocking(False)
        process = _Process(modules, preload_environment(dict(os.environ), env, secrets), control)

        def exited(*_: Any) -> None:
            process.pid = None
            self.end_process(process)

        try:
            os.makedirs(self.directory, 0o700, exist_ok=True)
            source = pkgutil.get_data(__package__ or "", "preload_child.py") or b""
            for name, content in (("rayslurm_preload.py", source), ("python.py", _SCRIPT)):
                with open(os.path.join(self.directory, name), "wb") as file:
                    file.write(content)
            process.pid = self.loop.spawn(
                [self.python, os.path.join(self.directory, "python.py"), str(child_end.fileno()), *modules],
                exited,
                cwd=self.directory,
                env=process.env,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,  # What modules print when they are imported belongs to no payload.
                pass_fds=(child_end.fileno(),),
                preexec_fn=processes.die_with_parent(),
            )
        except OSError as error:
            print("rayslurm: no interpreter can be preloaded: %s" % error, file=sys.stderr)
            control.close()
            return None
        finally:
            child_end.close()
        self._processes[modules] = process
        return process
