"""Lists, starts and kills processes on this node, and implements the keeper, which cleans up after the runtime.

The keeper (`guard`) is the parent process of a runtime. The keeper is a subreaper: when the runtime ends, the orphans that it
leaves become the keeper's children, and the keeper kills these orphans. If the keeper is killed instead, the kernel sends the
runtime SIGTERM. In a Slurm job step, the keeper's parent is slurmstepd, Slurm's process for the step. If slurmstepd is killed,
the keeper sends the runtime SIGTERM, because nothing else would end the runtime.

The functions need /proc and prctl of Linux. On other systems (macOS) the functions only use process groups, and find no
descendants.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from . import scratch
from .loop import Loop, Timer

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # Operations of prctl(2).
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")


class Process(NamedTuple):
    """One process of this machine, as /proc/PID/stat describes it."""

    pid: int
    parent: int  # Process id of the parent.
    cpu_seconds: float  # CPU time that the process has used, in user and kernel mode.
    started: float = 0.0  # Start time on the clock of `uptime`, to a hundredth of a second.
    name: str = ""  # Name of the program, cut off after 15 bytes.


def table() -> Dict[int, Process]:
    """All processes of this machine, by process id; processes that end during the call may be missing."""
    if sys.platform != "linux":
        return {}
    tick = os.sysconf("SC_CLK_TCK")
    found = {}
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        stat = _read(pid, "stat")
        if stat:  # The process may have ended meanwhile.
            called, _, rest = stat.partition(b"(")[2].rpartition(b")")  # The name may contain any character.
            fields = rest.split()
            cpu = (int(fields[11]) + int(fields[12])) / tick
            found[pid] = Process(pid, int(fields[1]), cpu, int(fields[19]) / tick, called.decode("utf-8", "replace"))
    return found


_latest: Tuple[float, Dict[int, Process]] = (float("-inf"), {})


def recent_table(max_age: float = 0.0) -> Tuple[float, Dict[int, Process]]:
    """Returns a tuple: when a table of all processes was read, and this table, which is at most `max_age` seconds old.

    The time is one of `time.monotonic`. If `max_age` is 0, the table is read now. All parts of the runtime share the table, so
    callers must not change it.
    """
    global _latest
    now = time.monotonic()
    if now - _latest[0] >= max_age:
        _latest = now, table()
    return _latest


def descendants(root: int, processes: Optional[Dict[int, Process]] = None) -> List[Process]:
    """Returns all processes below the process `root` (children, their children and so on), zombies included, without `root`.

    `processes` is a result of `table`; None means to read the table now.
    """
    below: Dict[int, List[Process]] = {}
    for process in (table() if processes is None else processes).values():
        below.setdefault(process.parent, []).append(process)
    found = list(below.get(root, []))
    for process in found:
        found += below.get(process.pid, [])
    return found


def resident_and_shared(pid: int) -> Tuple[int, int]:
    """Returns the bytes of resident memory of a process, and how many of these may be shared with other processes.

    Both are 0 if the process has ended.
    """
    fields = _read(pid, "statm").split() or [b"0"] * 3
    return int(fields[1]) * _PAGE_SIZE, int(fields[2]) * _PAGE_SIZE


def environment(pid: int) -> List[bytes]:
    """Returns the environment with which a process was started, as a list of entries `NAME=value`; later changes are not visible.

    The result is [b""] if the process is gone or belongs to another user.
    """
    return _read(pid, "environ").split(b"\0")


def has_environment(pid: int, entry: str) -> bool:
    """Whether the environment with which a process was started has the entry `entry`, a text `NAME=value`.

    The result is False if the process is gone or belongs to another user.
    """
    return os.fsencode(entry) in environment(pid)


def with_environment(entry: str) -> List[int]:
    """Returns the ids of the processes below this process that were started with `entry` in their environment.

    `entry` is a text `NAME=value`.
    """
    return [process.pid for process in descendants(os.getpid()) if has_environment(process.pid, entry)]


def command_line(pid: int) -> bytes:
    """Returns the arguments of a process, each followed by a NUL byte; b"" if the process is gone.

    A process may change its own arguments, as Ray workers do.
    """
    return _read(pid, "cmdline")


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or is a zombie."""
    state = _read(pid, "stat").rpartition(b")")[2].split()[:1]
    return state in ([], [b"Z"], [b"X"])


def _read(pid: int, name: str) -> bytes:
    """The content of /proc/PID/NAME; b"" if the file cannot be read."""
    try:
        with open("/proc/%d/%s" % (pid, name), "rb") as file:
            return file.read()
    except OSError:
        return b""


def uptime() -> float:
    """Seconds since this machine booted; `Process.started` is a time on the same clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


def signal_name(signum: int) -> str:
    """The name of a signal, such as "SIGUSR1"; "signal 35" for signals without a name, such as real-time signals."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return "signal %d" % signum


# ---- Starting and ending processes


def become_subreaper() -> None:
    """Make this process a subreaper: orphans below it become its children, not those of PID 1 (prctl(2), Linux 3.4).

    Does nothing on systems other than Linux.
    """
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def raise_file_limit(wanted: int = 65535) -> None:
    """Raise this process's soft limit of open files to `wanted` or, if that is lower, to the hard limit; children inherit it.

    A failure is ignored, and a higher soft limit stays. Ray opens some thousands of files on a large node (Ray 2.60 warns below
    8192), and the head has a connection to each node.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        with contextlib.suppress(OSError, ValueError):  # macOS has an even lower limit, which only the kernel knows.
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def die_with_parent(signum: int = signal.SIGKILL) -> Callable[[], None]:
    """Returns a function for `subprocess.Popen` (`preexec_fn`) that makes the child receive `signum` when this process ends.

    The kernel sends the signal (prctl(2), PR_SET_PDEATHSIG). On systems other than Linux, the returned function does nothing.
    """
    parent = os.getpid()

    def arrange() -> None:
        if _libc is not None:
            _libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
            if os.getppid() != parent:  # The parent ended before the prctl call.
                os.kill(os.getpid(), signum)

    return arrange


def query_program(loop: Loop, argv: Sequence[str], timeout: float, on_answer: Callable[[Optional[str]], None]) -> None:
    """Start a program without waiting; after its end, the loop calls `on_answer` with its output, or with None if it failed.

    A program fails by an exit code other than 0, or if it is killed because it runs longer than `timeout` seconds. While a killed
    program hangs in an uninterruptible wait, `on_answer` is not called. Raises OSError if the program cannot be started. The
    output must fit into a pipe (64 KiB on Linux), because it is read only after the program's end.
    """
    reader, writer = os.pipe()
    os.set_blocking(reader, False)  # A process that the program left behind may keep the other end open.

    def ended(code: int, _: Any) -> None:
        timer.cancel()
        with os.fdopen(reader, "rb") as file:
            text = (file.read() or b"").decode("utf-8", "replace")
        on_answer(text if code == 0 else None)

    nothing = subprocess.DEVNULL
    try:
        pid = loop.spawn(argv, ended, stdin=nothing, stdout=writer, stderr=nothing, preexec_fn=die_with_parent())
    except OSError:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    timer = loop.call_later(timeout, lambda: signal_group(pid, signal.SIGKILL))


def signal_group(pid: int, signum: int) -> None:
    """Send a signal to a process group, if the group still exists; `pid` is the process id of the group's leader."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM when only zombies are left.
        os.killpg(pid, signum)


def kill_all(pids: Iterable[int]) -> None:
    """Send SIGKILL to the processes `pids`.

    Processes that are gone are ignored, and so are processes of another user, such as programs that a payload runs with `sudo`.
    """
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def kill_descendants(root: int, collect: Callable[[], None], timeout: float = 5.0) -> List[int]:
    """Send SIGKILL to all processes below `root`, again and again, until none is left or `timeout` seconds are over. Blocks.

    Returns the ids of the processes that are still left, such as processes in uninterruptible sleep. `root` must be a subreaper,
    so that orphans stay below it. `collect` is called before each round and must reap zombies, because a zombie counts as left.
    """
    deadline = time.monotonic() + timeout
    pause = 0.001
    while True:
        collect()
        left = [process.pid for process in descendants(root)]
        if not left or time.monotonic() > deadline:
            return left
        kill_all(left)
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


# Seconds within which the starts of two processes cannot be ordered, because the kernel counts start times in ticks.
_CLOCK_STEP = 0.05
# Seconds before the second and the third search for strays: a payload's last processes may leave orphans when they end.
_LATER_SWEEPS = (1.0, 5.0)


class StrayProcesses:
    """Kills stray processes on this node: processes of ended payloads that are now children of this process (orphans).

    A payload that started an orphan was running when the orphan started. So an orphan counts as stray when all payloads that were
    running at that time have ended. The environment of an orphan does not identify its payload, because a process may change its
    environment.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._running: Dict[str, float] = {}  # Start time of each running payload, by its nonce.
        self._timer = Timer()

    def begin(self, nonce: str) -> None:
        """Record that a payload may start processes from now on; must be called before the payload starts.

        `nonce` is the random name of the payload. A second call for the same payload changes nothing.
        """
        self._running.setdefault(nonce, uptime())

    def end(self, nonce: str) -> None:
        """Record that a payload has ended, and kill the stray processes now and twice some seconds later.

        `nonce` is the random name of the payload.
        """
        self._running.pop(nonce, None)
        self._sweep(_LATER_SWEEPS)

    def _sweep(self, later: Sequence[float]) -> None:
        with contextlib.suppress(OSError):  # Such as no free file descriptor; the next sweep may succeed.
            everything, kept = table(), self._loop.children()
            before = min(self._running.values(), default=float("inf")) - _CLOCK_STEP
            orphans = [each for each in everything.values() if each.parent == os.getpid() and each.pid not in kept]
            strays = [each for each in orphans if each.started < before]
            for process in strays:
                kill_all([process.pid, *(below.pid for below in descendants(process.pid, everything))])
            if strays:
                names = ", ".join("%s (pid %d)" % (process.name, process.pid) for process in strays)
                print("rayslurm: ended stray processes of finished payloads: %s" % names, file=sys.stderr, flush=True)
        self._timer.cancel()
        if later:
            self._timer = self._loop.call_later(later[0], lambda: self._sweep(later[1:]))


# ---- The keeper

# Seconds between two checks whether slurmstepd still lives. The kernel's own signal (prctl(2), PR_SET_PDEATHSIG) is of no use
# here: it comes already when the thread of slurmstepd ends that forked the keeper.
_PARENT_CHECK_INTERVAL = 2.0
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # The signals that the keeper passes on to the runtime.
# Seconds before the keeper cancels its job: until then Dagster asks Slurm why the payload ended, and must not see a cancel.
_SCANCEL_DELAY = 25.0
_SCANCEL_TIMEOUT = 60.0


def guard(
    main: Callable[[], int],
    excused: Callable[[], bool] = lambda: False,
    in_a_step: bool = False,
    orphaned: Callable[[], None] = lambda: None,
) -> int:
    """Turn this process into the keeper: run `main` in a forked child, wait, and kill all processes left below this process.

    Args:
        main: The function to run in the child, which is the runtime; returns an exit code.
        excused: Called after the cleanup if the child has failed. It returns True if the other nodes can go on without this one.
        in_a_step: Whether this process belongs to a Slurm job step, so that slurmstepd is its parent. Then the keeper sends
            SIGTERM to the child when slurmstepd ends. If a container runs this process, the parent may be another process; the
            environment variable `RAYSLURM_PARENT` then has the id of slurmstepd, and the keeper watches both processes. If
            slurmstepd is not visible from here, the keeper watches only the parent.
        orphaned: Called after the cleanup if `in_a_step` is True and the parent or slurmstepd has ended.

    Returns:
        The exit code of `main`, 70 if `main` raised an exception, or 128 + N if signal N ended the child. Instead of a code that
        is not 0, the result is 0 if `excused` returns True.
    """
    become_subreaper()
    arrange = die_with_parent(signal.SIGTERM)
    parent, outer = os.getppid(), "/proc/" + os.environ.pop("RAYSLURM_PARENT", "self")
    # A mount of /proc with hidepid=2, and a container's own PID namespace, hide slurmstepd (proc(5)).
    outer = outer if os.path.exists(outer) else "/proc/self"

    def has_parent() -> bool:
        return os.getppid() == parent and os.path.exists(outer)

    # Signals are blocked until the handlers are set: a signal before that would end the keeper but not its child.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    child = os.fork()
    if child == 0:
        code = 70  # EX_SOFTWARE of sysexits(3), unless `main` returns. The child never runs the code below.
        try:
            arrange()
            become_subreaper()
            code = main()
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(code)

    scratch.release()  # The child has it.

    def forward(signum: int, _: object = None) -> None:
        with contextlib.suppress(ProcessLookupError):  # The child may just have ended.
            os.kill(child, signum)

    def check_parent(*_: object) -> None:
        if not has_parent():
            signal.setitimer(signal.ITIMER_REAL, 0)  # Once: a second signal would cut the payload's grace period short.
            forward(signal.SIGTERM)

    for signum in _FORWARDED:
        signal.signal(signum, forward)
    if in_a_step:
        signal.signal(signal.SIGALRM, check_parent)
        signal.setitimer(signal.ITIMER_REAL, _PARENT_CHECK_INTERVAL, _PARENT_CHECK_INTERVAL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    # Standard input is the control channel. Only the runtime may hold it: the other end must see EOF when the runtime ends.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = _wait(child)
    signal.setitimer(signal.ITIMER_REAL, 0)
    for signum in _FORWARDED:
        signal.signal(signum, signal.SIG_IGN)  # There is no child to forward to, and the cleanup must not be interrupted.
    kill_descendants(os.getpid(), collect=reap)
    scratch.sweep()
    if in_a_step and not has_parent():
        orphaned()
    if code != 0 and excused():
        print("rayslurm: this node's runtime ended with exit code %d; the other nodes go on without it" % code, file=sys.stderr)
        return 0
    return code


def cancel_own_job(environ: Mapping[str, str], sleep: Callable[[float], None] = time.sleep) -> None:
    """On the first node of this process's Slurm job, wait some seconds and then cancel the job; on other nodes, do nothing.

    To be called after slurmstepd was killed, because srun would then wait for its task for ever. `environ` has Slurm's variables
    of this task. `sleep` replaces `time.sleep` in tests. Errors of scancel are ignored.
    """
    if environ.get("SLURM_NODEID") == "0":
        sleep(_SCANCEL_DELAY)
        command, nothing = ["scancel", "--quiet", environ["SLURM_JOB_ID"]], subprocess.DEVNULL
        # Without slurmstepd nothing reads the output of this process, so scancel gets none of its descriptors.
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            subprocess.call(command, stdin=nothing, stdout=nothing, stderr=nothing, timeout=_SCANCEL_TIMEOUT)


def _wait(child: int) -> int:
    """Wait until the process `child` ends, and reap other children that end earlier.

    Returns the exit code of `child`, or 128 + N after signal N.
    """
    while True:
        pid, status = os.wait()
        if pid == child:
            return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def reap() -> None:
    """Reap the children that have ended, without blocking."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
