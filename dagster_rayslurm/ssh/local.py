"""Access to this machine without SSH, and a private directory with locks that all processes of the user on this machine share."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from .base import Connection, Submit
from .terminal import has_terminal, shell_status

T = TypeVar("T")

# Characters of XDG_RUNTIME_DIR up to which `private_dir` lies in it; the path of a control socket must stay short.
_LONGEST_DIR = 40


class LocalConnection(Connection):
    """Access to the files and commands of this machine, without SSH."""

    @property
    def place(self) -> str:
        return "this machine"

    def attempt(self, doing: str, operation: Callable[[Submit], T], repeat: bool, deadline: float | None = None) -> T:  # noqa: ARG002
        """Call `operation`, and run the functions of `edge` that it starts in the calling thread; see `Connection.attempt`.

        `deadline` has no effect, because nothing can interrupt these functions. They end their own commands and waits after
        timeouts of their own; only their work on files has no limit, for example if the file system does not answer.
        """
        return operation(_submit)

    def connect(self, host: str, port: int, timeout: float) -> socket.socket:
        stream = socket.create_connection((host, port), timeout)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return stream

    def interact(self, command: Sequence[str]) -> int:
        process = subprocess.Popen(list(command))
        try:
            while True:
                try:
                    return shell_status(process.wait())
                except KeyboardInterrupt:
                    if not has_terminal():  # Otherwise the terminal has interrupted the command, too.
                        process.send_signal(signal.SIGINT)
        except BaseException:
            process.kill()
            process.wait()
            raise

    def stream(self, command: Sequence[str]) -> socket.socket:
        stream, other = socket.socketpair()
        with other:
            fd = other.fileno()
            process = subprocess.Popen(command, stdin=fd, stdout=fd, stderr=fd, start_new_session=True)
        threading.Thread(target=process.wait, name="rayslurm-stream", daemon=True).start()
        return stream

    def close(self) -> None: ...


def _submit(function: Callable[..., T], *arguments: object) -> Callable[[], T]:
    """Call a function of the package `edge` in this process; returns a function that returns the result, as `Submit` requires."""
    result = function(*arguments)
    return lambda: result


def private_dir() -> str:
    """Returns the directory for sockets and locks that only this user's processes can access; creates the directory if missing.

    The path is short, because the path of a control socket in the directory may not exceed 107 bytes (unix(7)). Raises `OSError`
    if the directory cannot be made, or if other users can access the directory.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    # After `su` or `sudo -E`, the variable names the directory of another user.
    usable = 0 < len(runtime) <= _LONGEST_DIR and os.path.isdir(runtime) and os.stat(runtime).st_uid == os.getuid()
    path = f"{runtime}/rayslurm" if usable else f"/tmp/rayslurm-{os.getuid()}"
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise OSError(f"{path} is not a directory of user {os.getuid()} alone; remove it or mend its owner and mode")
    return path


@contextlib.contextmanager
def locked(name: str, count: int = 1, timeout: float = float("inf")) -> Iterator[None]:
    """Inside the block, hold one of the `count` locks called `name`, which all processes of this user on this machine share.

    Raises `TimeoutError` if no lock was free for `timeout` seconds; by default, the function waits without a limit.
    """
    paths = [os.path.join(private_dir(), f"{name}-{index}") for index in range(count)]
    deadline = time.monotonic() + timeout
    while True:
        for path in random.sample(paths, count):
            with open(path, "a") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                try:
                    yield
                    return
                finally:
                    fcntl.flock(lock, fcntl.LOCK_UN)  # Closing is not enough: a forked child holds the file open as well.
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(random.uniform(0.02, 0.1))
