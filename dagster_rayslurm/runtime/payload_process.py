"""The process of one payload: started, or forked from one that has imported its modules; what it prints, and its signals."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import List, Optional

from . import processes
from .loop import ExitCallback, Loop
from .spec import PayloadSpec
from .streams import Streams
from .templates import Templates
from .workspace import Environment


class PayloadProcess:
    """Starts the process and ends it, with all that is its own.

    Args:
        loop: where everything happens.
        run_dir: the run directory, which the environment of all its processes names.
        streams: reads what it prints.
    """

    def __init__(self, loop: Loop, run_dir: str, streams: Streams) -> None:
        self.pid: Optional[int] = None
        """The process, which is its process group too; None before it has started."""
        self.why_fresh: Optional[str] = None
        """Why it was not forked although modules are to be preloaded, after "because"."""
        self._loop = loop
        self._run_dir = run_dir
        self._streams = streams

    def start(
        self,
        spec: PayloadSpec,
        argv: List[str],
        work_dir: str,
        env: Environment,
        secret_env: Environment,
        exited: ExitCallback,
        templates: Optional[Templates],
    ) -> None:
        """Start the process.

        Args:
            spec: the payload.
            argv: its command.
            work_dir: its working directory.
            env: its environment, without what is secret.
            secret_env: variables that no other process shall have.
            exited: called when it has ended.
            templates: what it may be forked from.

        Raises:
            OSError: it cannot be started.
            ValueError: nor could it ever be.
        """
        env = {**env, **secret_env}
        out, err = os.pipe(), os.pipe()
        try:
            if templates is not None and spec.preload:
                forked = templates.spawn(
                    spec.preload, argv, exited, cwd=work_dir, env=env, secrets=secret_env, stdout=out[1], stderr=err[1]
                )
                if isinstance(forked, int):
                    self.pid = forked
                else:
                    self.why_fresh = forked
            if self.pid is None:
                self.pid = self._loop.spawn(
                    argv,
                    exited,
                    cwd=work_dir,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=out[1],
                    stderr=err[1],
                    preexec_fn=processes.die_with_parent(),
                )
        except BaseException:
            os.close(out[0])
            os.close(err[0])
            raise
        finally:
            os.close(out[1])
            os.close(err[1])
        self._streams.add("stdout", out[0])
        self._streams.add("stderr", err[0])

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
