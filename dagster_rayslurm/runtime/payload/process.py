"""The process of one payload: started, or forked from one that has imported its modules; what it prints, and its signals."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Callable, List, Optional

from ..process import processes
from ..process.loop import ExitCallback, Loop
from ..protocol.spec import PayloadSpec
from .environment import Environment
from .output_streams import OutputStreams
from .preload_server import Fork, Forked, Templates


class PayloadProcess:
    """Starts the process and ends it, with all that is its own.

    Args:
        loop: where everything happens.
        run_dir: the run directory, which the environment of all its processes names.
        streams: reads what it prints.
    """

    def __init__(self, loop: Loop, run_dir: str, streams: OutputStreams) -> None:
        self.pid: Optional[int] = None
        """The process, which is its process group too; None before it has started."""
        self.why_fresh: Optional[str] = None
        """Why it was not forked although modules are to be preloaded, after "because"."""
        self._loop = loop
        self._run_dir = run_dir
        self._streams = streams
        self._fork: Optional[Fork] = None
        self._pipes: List[int] = []
        """Their ends for reading and writing, while the process is yet to start."""

    def start(
        self,
        spec: PayloadSpec,
        argv: List[str],
        work_dir: str,
        env: Environment,
        secret_env: Environment,
        exited: ExitCallback,
        templates: Optional[Templates],
        started: Callable[[Optional[Exception]], None],
    ) -> None:
        """Start the process; one that is forked starts a moment later.

        Args:
            spec: the payload.
            argv: its command.
            work_dir: its working directory.
            env: its environment, without what is secret.
            secret_env: variables that no other process shall have.
            exited: called when it has ended.
            templates: what it may be forked from.
            started: called once, perhaps before this returns: with None, or with what keeps it from starting.
        """
        env = {**env, **secret_env}
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        self._pipes = [out, err, out_end, err_end]

        def begin(forked: Optional[Forked]) -> None:
            self._fork, self._pipes = None, []
            try:
                if isinstance(forked, int):
                    self.pid = forked
                else:
                    self.why_fresh = forked
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
            except Exception as error:
                os.close(out)
                os.close(err)
                return started(error)
            finally:
                os.close(out_end)
                os.close(err_end)
            self._streams.add("stdout", out)
            self._streams.add("stderr", err)
            started(None)

        if templates is None or not spec.preload:
            return begin(None)
        fork = templates.spawn(
            spec.preload, argv, exited, cwd=work_dir, env=env, secrets=secret_env, stdout=out_end, stderr=err_end, done=begin
        )
        self._fork = fork if self._pipes else None

    def give_up(self) -> None:
        """Start no process that has yet to start."""
        if self._fork is not None:
            self._fork.cancel()
        for fd in self._pipes:
            os.close(fd)
        self._fork, self._pipes = None, []

    def signal(self, signum: int) -> None:
        """Signal its process group, if it has started."""
        if self.pid is not None:
            processes.signal_group(self.pid, signum)

    def kill(self) -> None:
        """SIGKILL its process group."""
        self.signal(signal.SIGKILL)

    def kill_leftovers(self) -> None:
        """End what it left behind in other process groups; its environment names this run."""
        processes.kill_all(processes.with_environment("RAYSLURM_RUN_DIR=" + self._run_dir))


def why_not_started(error: Exception, command: str, work_dir: str) -> str:
    """Why a command cannot be started, and what to do.

    Args:
        error: what starting it raised.
        command: its first word.
        work_dir: where it is started.
    """
    why = str(error.strerror if isinstance(error, OSError) else error)
    if not isinstance(error, FileNotFoundError):
        return why
    if os.path.exists(os.path.join(work_dir, command)):
        return why + "; the file is there, but not the interpreter that its first line names"
    return why + '; the PATH there has no such program, and no shell reads the command: for that use ["bash", "-c", "…"]'
