"""The sessions of this machine: the directory of their files, and a test whether a session lives."""

from __future__ import annotations

import os
import socket
import time

from ...runtime.process import processes
from ...ssh.local import LocalConnection
from ..layout import Layout
from .registry import Generation, list_generations

_EXEC_TIMEOUT = 1.0  # Most seconds that a process spends between two programs, without a command line (`is_alive`).


def sessions_base(layout: Layout) -> str:
    """Returns the directory for the sessions of this host: "local/HOSTNAME" below the base directory."""
    return str(layout.base / "local" / socket.gethostname())


def list_sessions(layout: Layout) -> list[Generation]:
    """Returns the sessions on this machine that have announced themselves and whose process lives."""
    generations = list_generations(LocalConnection(), sessions_base(layout))
    return [each for each in generations if each.announcement is not None and is_alive(each.job_id, each.directory)]


def is_alive(pid: int | None, directory: str) -> bool:
    """Returns whether the process `pid` lives and is the runtime of the session with the directory `directory`.

    The result is False if another process has the id `pid` by now.
    """
    if pid is None:
        return False
    if not os.path.exists("/proc/self/cmdline"):
        ps = LocalConnection().run(["ps", "-ww", "-o", "args=", "-p", str(pid)])
        return directory in ps.stdout.decode("utf-8", "replace")
    # In execve(2), Linux takes the old command line away before it sets the new one. Popen returns in between.
    deadline = time.monotonic() + _EXEC_TIMEOUT
    while not (arguments := processes.command_line(pid)) and not processes.has_ended(pid) and time.monotonic() < deadline:
        time.sleep(0.001)
    return os.fsencode(directory) in arguments.split(b"\0")
