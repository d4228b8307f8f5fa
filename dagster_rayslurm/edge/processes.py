"""Runs commands, and kills the processes of a command's Unix session if the command takes too long."""

import contextlib
import errno
import os
import selectors
import signal
import subprocess
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_GRACE = 2.0  # Seconds from SIGTERM to SIGKILL.
_LONGEST_PAUSE = 0.1  # Most seconds until the end of a command is noticed whose background processes hold its output open.
_PIPE = 1024 * 1024  # Most bytes that a pipe holds (pipe(7)).

# The running commands, by name of the thread that waits for each.
_running = {}  # type: dict[str, subprocess.Popen[bytes]]
_ended = set()  # type: set[str]  # Names of threads whose commands are to be killed, even commands that have not begun.
_starting = set()  # type: set[str]  # Names of threads whose commands may have begun, and are not in `_running` yet.
_all_ended = threading.Event()  # Set when no further command may begin.


def run(
    command: "Sequence[str]",
    stdin: bytes = b"",
    timeout: "float | None" = None,
    environ: "Mapping[str, str] | None" = None,
    directory: str = "",
) -> "tuple[int | None, bytes, bytes]":
    """Run a command until the command ends; returns the exit code, the output, and the error output.

    The code is 128 + N if signal N ended the command, 127 if the program does not exist, and 126 if the program cannot be started
    for another reason. The code is None if the command took over `timeout` seconds and was killed, or if `end_all` was called
    before the command began. The function does not wait for background processes that the command leaves behind, and drops the
    output of such processes.

    `stdin` is the input of the command. Without a `timeout`, the command may take any time. `environ` are the environment
    variables of the command; None for the variables of this process. `directory` is the command's working directory; "" for the
    directory of this process.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    words = [word.encode("utf-8", "surrogateescape") for word in command]
    pipe = subprocess.PIPE
    name = threading.current_thread().name
    _starting.add(name)
    try:
        if _all_ended.is_set():
            return None, b"", b""
        process = subprocess.Popen(
            words,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            bufsize=0,
            start_new_session=True,
            env=environ and dict(environ),
            cwd=directory or None,
        )
        _running[name] = process
    except OSError as error:
        return 127 if error.errno == errno.ENOENT else 126, b"", words[0] + b": " + os.strerror(error.errno or 0).encode()
    finally:
        _starting.discard(name)
    if name in _ended:
        end(name)
    try:
        out, err = _communicate(process, stdin, deadline)
        timed_out = process.returncode is None
    finally:
        _running.pop(name, None)
        if process.returncode is None:
            _end(process)
        for stream in (process.stdin, process.stdout, process.stderr):
            stream.close()  # type: ignore[union-attr]
    if timed_out:
        return None, out, err
    return 128 - process.returncode if process.returncode < 0 else process.returncode, out, err


def _communicate(process: "subprocess.Popen[bytes]", stdin: bytes, deadline: "float | None") -> "tuple[bytes, bytes]":
    """Send `stdin` to a process, and read its output and error output, until it ends or until the deadline; returns both outputs.

    `deadline` is a time by `time.monotonic()`, or None for no deadline. The function does not end a process that still runs at
    the deadline.
    """
    assert process.stdin and process.stdout and process.stderr
    outputs = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    rest, pause = memoryview(stdin), 0.005
    with selectors.DefaultSelector() as selector:
        for stream in (process.stdin, process.stdout, process.stderr):
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_WRITE if stream is process.stdin else selectors.EVENT_READ)
        while deadline is None or time.monotonic() < deadline:
            if not selector.get_map():
                _wait(process, deadline)
                break
            ended = process.poll() is not None
            wait = 0.0 if ended else pause if deadline is None else max(0.0, min(pause, deadline - time.monotonic()))
            ready = selector.select(wait)
            for key, _ in ready:
                if key.fileobj is process.stdin:
                    try:
                        rest = rest[os.write(key.fd, rest[:65536]) :] if rest else rest
                    except OSError:
                        rest = rest[:0]
                    if not rest:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                    continue
                data = os.read(key.fd, _PIPE)
                outputs[key.fd] += data
                if not data:
                    selector.unregister(key.fileobj)
            if ended:
                break
            pause = 0.005 if ready else min(2 * pause, _LONGEST_PAUSE)
    return tuple(map(bytes, outputs.values()))  # type: ignore[return-value]


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill all processes of a command's Unix session: by SIGTERM, and two seconds later by SIGKILL."""
    _kill_session(process.pid, signal.SIGTERM)
    _wait(process, time.monotonic() + _GRACE)
    _kill_session(process.pid, signal.SIGKILL)
    _wait(process, time.monotonic() + _GRACE)


def _wait(process: "subprocess.Popen[bytes]", deadline: "float | None") -> None:
    """Wait until `process` ends, or until `deadline`, a value of `time.monotonic()`; None for no deadline."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(None if deadline is None else deadline - time.monotonic())


def _kill_session(session: int, signum: int) -> None:
    """Send the signal `signum` to all processes of the Unix session `session`."""
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.getsid(int(name)) == session:
                os.kill(int(name), signum)
        except OSError:
            pass


def end(name: str) -> None:
    """Kill the command that the thread called `name` runs now, or as soon as the thread starts one; return at once."""
    _ended.add(name)
    process = _running.get(name)
    if process is not None:
        threading.Thread(target=_end, args=(process,), daemon=True).start()


def end_all() -> None:
    """Kill all running commands, also those that are just beginning, and wait a few seconds for the commands to end.

    After this call, no command can begin.
    """
    _all_ended.set()
    deadline = time.monotonic() + _GRACE
    while _starting and time.monotonic() < deadline:
        time.sleep(0.005)
    threads = [threading.Thread(target=_end, args=(process,), daemon=True) for process in list(_running.values())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _GRACE)
