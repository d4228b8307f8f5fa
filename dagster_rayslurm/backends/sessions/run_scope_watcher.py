"""Waits for the end of a Dagster run and then ends its session: `python -I -S FILE`.

It reads its order as JSON from its standard input. While it waits it is a bare interpreter (about 10 MB); only then does
it import the package. A line after the order says that the run has ended although its process goes on; the end of the
input says nothing.
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
"""Seconds between two looks at the process where the kernel does not tell of its end (before Linux 5.3, macOS)."""


def start_time(pid: int) -> "str | None":
    """When a process started, in the kernel's ticks since boot; "" where there is no /proc, None if it has ended.

    Its state and its start are fields 3 and 22 of proc_pid_stat(5); a name before them may hold anything but ends with
    the last parenthesis.
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
    """A line, without taking more of the input than it."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            break
        line += byte
    return line


def wait(pid: int, started: "str | None", told: int) -> None:
    """Wait until a process has ended, or a line arrives on the descriptor `told`.

    Args:
        pid: the process.
        started: its start as `start_time` gave it; None if it had ended before. A process of another start is another.
        told: a descriptor.
    """
    try:
        ended = os.pidfd_open(pid)
    except (AttributeError, OSError):
        ended = -1
    watched = [fd for fd in (ended, told) if fd >= 0]
    while started is not None and start_time(pid) == started:
        ready = select.select(watched, [], [], None if ended >= 0 else _POLL)[0]
        if told in ready:
            if read_line(told):
                return
            watched.remove(told)  # The end of the input: whoever started this may be gone long before the run.
        if ended in ready:
            return


def main() -> None:
    """Wait, then end the session; whatever goes wrong goes into a file."""
    # A service manager that ends Dagster signals its whole group; the session still has to be ended then.
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: None)
    order = json.loads(read_line(0))

    def complain(kind: "type[BaseException]", error: BaseException, trace: "types.TracebackType | None") -> None:
        with open(order["log"], "a", encoding="utf-8") as log:
            log.write(time.strftime("%Y-%m-%d %H:%M:%S ") + "".join(traceback.format_exception(kind, error, trace)))

    sys.excepthook = complain
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
