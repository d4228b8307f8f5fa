"""The process of one payload: its start, its output and its end."""

from __future__ import annotations

import codecs
import os
import signal
import subprocess
from typing import Any, Callable, Dict, List, Optional, Protocol, Tuple

from ..process import processes
from ..process.loop import Loop
from ..protocol.spec import PayloadSpec
from .environment import Environment
from .preload_server import ForkRequest, ForkResult, PreloadServer

_CHUNK = 256 * 1024
"""Most bytes of output that are read at a time."""


class ProcessListener(Protocol):
    """The object that a `PayloadProcess` tells of its events; `Payload` implements and documents the methods.

    Every event is delivered by way of `safely`, which handles errors of the listener.
    """

    def safely(self, call: Callable[[], None]) -> None: ...
    def process_started(self, error: Optional[Exception]) -> None: ...
    def process_output(self, stream: str, text: str) -> None: ...
    def process_stream_ended(self) -> None: ...
    def process_exited(self, code: int, rusage: Any) -> None: ...


class PayloadProcess:
    """Starts one payload's process, passes on its output, and kills it with all processes that it has started.

    Those are found by their environment, which names `run_dir`. The listener may receive events before `start` returns.
    """

    def __init__(self, loop: Loop, run_dir: str, listener: ProcessListener) -> None:
        self.pid: Optional[int] = None
        """Id of the process and of its process group; None before the process has started."""
        self.not_forked_because: Optional[str] = None
        """Why a payload with modules to preload was not forked from a preload process, in words that follow "because"."""
        self._loop = loop
        self._run_dir = run_dir
        self._listener = listener
        self._fork: Optional[ForkRequest] = None
        self._pipes: List[int] = []
        """File descriptors of all ends of the output pipes; empty once the process has started."""
        self._streams: Dict[int, Tuple[str, codecs.IncrementalDecoder]] = {}
        """Name and decoder of each open output pipe, by file descriptor."""

    @property
    def streams_open(self) -> bool:
        """Whether there may be more output to read."""
        return bool(self._streams)

    def start(
        self,
        spec: PayloadSpec,
        argv: List[str],
        work_dir: str,
        env: Environment,
        secret_env: Environment,
        preload_server: Optional[PreloadServer],
    ) -> None:
        """Start the process, or request a fork of a preload process if the payload has modules to preload."""
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        self._pipes = [out, err, out_end, err_end]
        env = {**env, **secret_env}

        def begin(result: Optional[ForkResult]) -> None:
            self._fork, self._pipes = None, []
            error: Optional[Exception] = None
            try:
                if isinstance(result, int):
                    self.pid = result
                else:
                    self.not_forked_because = result
                    self.pid = self._loop.spawn(
                        argv,
                        exited,
                        cwd=work_dir,
                        env=env,
                        stdin=subprocess.DEVNULL,
                        stdout=out_end,
                        stderr=err_end,
                        preexec_fn=processes.die_with_parent(),
                    )
            except Exception as failure:
                error = failure
                os.close(out)
                os.close(err)
            finally:
                os.close(out_end)
                os.close(err_end)
            if error is None:
                self.read_stream("stdout", out)
                self.read_stream("stderr", err)
            self._listener.safely(lambda: self._listener.process_started(error))

        def exited(code: int, rusage: Any) -> None:
            self._listener.safely(lambda: self._listener.process_exited(code, rusage))

        if preload_server is None or not spec.preload:
            return begin(None)
        request = preload_server.fork(
            spec.preload,
            argv,
            exited,
            cwd=work_dir,
            env=env,
            secrets=secret_env,
            streams=(out_end, err_end),
            done=begin,
        )
        self._fork = request if self._pipes else None

    def cancel_start(self) -> None:
        """Cancel a start that is still under way, such as a requested fork; afterwards no process starts."""
        if self._fork is not None:
            self._fork.cancel()
        for fd in self._pipes:
            os.close(fd)
        self._fork, self._pipes = None, []

    def signal(self, signum: int) -> None:
        """Send a signal to the process group; does nothing before the process has started."""
        if self.pid is not None:
            processes.signal_group(self.pid, signum)

    def kill(self) -> None:
        """Send SIGKILL to the process group."""
        self.signal(signal.SIGKILL)

    def kill_leftovers(self) -> None:
        """Send SIGKILL to all processes of this run, which are found by the run directory in their environment."""
        processes.kill_all(processes.with_environment("RAYSLURM_RUN_DIR=" + self._run_dir))

    def read_stream(self, name: str, fd: int) -> None:
        """Pass on the text of an output pipe to the listener until the pipe ends. Bytes that are not UTF-8 become U+FFFD."""
        self._streams[fd] = (name, codecs.getincrementaldecoder("utf-8")("replace"))
        self._loop.on_readable(fd, lambda: self._listener.safely(lambda: self._read(fd)))

    def close_streams(self) -> None:
        """Close the output pipes without reading the rest."""
        for fd in list(self._streams):
            self._close_stream(fd)

    def _close_stream(self, fd: int) -> None:
        self._loop.forget(fd)
        os.close(fd)
        del self._streams[fd]

    def _read(self, fd: int) -> None:
        data = os.read(fd, _CHUNK)
        name, decoder = self._streams[fd]
        text = decoder.decode(data, final=not data)
        if not data:
            self._close_stream(fd)
        if text:
            self._listener.process_output(name, text)
        if not data:
            self._listener.process_stream_ended()


def spawn_error(error: Exception, command: str, work_dir: str) -> str:
    """The part of an error message that says why a command cannot be started in a directory and, if known, what to do."""
    why = str(error.strerror if isinstance(error, OSError) else error)
    if not isinstance(error, FileNotFoundError):
        return why
    if os.path.exists(os.path.join(work_dir, command)):
        return why + "; the file is there, but not the interpreter that its first line names"
    return why + '; the PATH there has no such program, and no shell reads the command: for that use ["bash", "-c", "…"]'
