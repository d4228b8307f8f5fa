"""The sessions of this machine: the directory of their files, and a test whether a session lives."""

from __future__ import annotations

import os
import socket

from ...ssh.local import LocalConnection
from ..layout import Layout
from .registry import Generation, list_generations


def sessions_base(layout: Layout) -> str:
    """Returns the base directory of this host's sessions."""
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
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return os.fsencode(directory) in file.read().split(b"\0")
    except OSError:
        if os.path.exists("/proc/self/cmdline"):
            return False
    return directory in LocalConnection().run(["ps", "-ww", "-o", "args=", "-p", str(pid)]).stdout.decode("utf-8", "replace")
