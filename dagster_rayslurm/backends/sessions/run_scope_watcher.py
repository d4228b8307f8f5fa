"""Watcher process: waits for the end of a Dagster run, then ends the run's session (`python -I -S FILE`).

The first line of its input says what to wait for, as JSON. A second line says that the run has ended although the run's process
goes on. The end of the input means nothing. Until the run ends, the watcher is a bare interpreter (about 10 MB) without the
package.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
import traceback
import types

_POLL = 1.0
"""Seconds between two checks whether the run's process lives, where the kernel has no pidfd (before Linux 5.3, macOS)."""


def start_time(pid: int) -> "str | None":
    """When a process started, in the kernel's ticks since boot; None if the process has ended, "" where there is no /proc.

    State and start are fields 3 and 22 of proc_pid_stat(5); the name before them may hold anything but ends with the last
    parenthesis.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return None if fields[0] in b"ZX" else fields[19].decode()
    except (OSError, IndexError):
        pass
    if os.path.exists("/proc/self/stat"):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return ""
    return ""


def read_line(fd: int) -> bytes:
    """The next line from a descriptor, without reading any byte beyond it."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            break
        line += byte
    return line


def wait(pid: int, started: "str | None", input_fd: int) -> None:
    """Wait until a process has ended, or a line arrives on a descriptor.

    If the process `pid` started at another time than `started` (see `start_time`), the awaited process has ended, and another
    one has got its id.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except (AttributeError, OSError):
        pidfd = -1
    watched = [fd for fd in (pidfd, input_fd) if fd >= 0]
    while started is not None and start_time(pid) == started:
        ready = select.select(watched, [], [], None if pidfd >= 0 else _POLL)[0]
        if input_fd in ready:
            if read_line(input_fd):
                return
            watched.remove(input_fd)  # The step that started the watcher may end long before the run.
        if pidfd in ready:
            return


def main() -> None:
    """Wait for the end of the run, then end the session; errors go to the log file."""
    # A service manager that stops Dagster signals its whole group; the session must be ended after that.
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: None)
    order = json.loads(read_line(0))

    def log_error(kind: "type[BaseException]", error: BaseException, trace: "types.TracebackType | None") -> None:
        with open(order["log"], "a", encoding="utf-8") as log:
            log.write(time.strftime("%Y-%m-%d %H:%M:%S ") + "".join(traceback.format_exception(kind, error, trace)))

    sys.excepthook = log_error
    os.chdir("/")
    try:
        wait(order["pid"], order["started"], 0)
        import site

        site.main()  # As at a usual start, without `-S`.
        sys.path[:] = [*order["path"], *(path for path in sys.path if path not in order["path"])]
        from dagster_rayslurm.backends.sessions.run_scope_end import end_session

        end_session(order["session"])
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(order["lock"])


if __name__ == "__main__":
    main()
