"""The program of a payload with partitions: it runs the payload's command once for each chunk of partitions, several at a time.

A chunk is one partition, or several that follow each other (`run_partitions(chunk=…)`). The runtime starts the program as `python
partition_runner.py LIMIT COMMAND…`. A copy of this file and a copy of `preload_child` lie in the same directory, so this program
imports nothing else of the package. The keys of the partitions are in the run directory's Pipes context. Each chunk has a forked
process with a Pipes context and messages of its own. When the process of a chunk has ended, the chunk's output is written to this
program's stdout and stderr as one section, and one Pipes message tells how the process ended.

This program exits with 0 although chunks have failed. At SIGTERM, the program starts no more chunks, passes SIGTERM on to the
running chunks, and waits for their end. The program also passes on other signals, such as the warning before the job's time
limit, and goes on. If Slurm has requeued the job, the program runs only the chunks that have no exit code in the run record.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import types
import zlib
from typing import Any, Dict, Iterable, List, Optional, Set, Tuple

Chunk = Dict[str, Optional[Dict[str, str]]]  # By partition key: the time window, or None for a partition without one.

PARTITIONS = "partitions"  # Key in the Pipes context of the run directory: the list of chunks.
METHOD = "partition"  # The `method` of the Pipes message that tells how the process of a chunk ended.

_CONTEXT, _JOURNAL = "pipes_context.json", "journal.jsonl"  # Files in the run directory.
_TAIL = 8192  # Most bytes of the end of each output stream in the message, from which Dagster's side explains a failure.
_STREAMS = (("stdout", 1), ("stderr", 2))
# Signals that this program does not pass on to the chunks: those of its own faults, its children and job control, those that
# Python ignores, and those that no program can handle.
_OWN_SIGNALS = {
    *(signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ),
    *(signal.SIGCONT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGKILL, signal.SIGSTOP),
}


class _CannotFork(Exception):
    """Raised in the runner's process if the system refuses another process."""


class Runner:
    """Runs `command` once for each chunk of partitions of one payload, at most `limit` chunks at a time.

    The chunks come from the Pipes context in the run directory. If the first word of `command` is "python" or "python3", it
    stands for this interpreter.
    """

    def __init__(self, limit: int, command: List[str]) -> None:
        self.command = [sys.executable, *command[1:]] if command[0] in ("python", "python3") else command
        self._limit = limit
        with open(os.path.join(os.environ["RAYSLURM_RUN_DIR"], _CONTEXT), encoding="utf-8") as file:
            self._context: Dict[str, Any] = json.load(file)
        self._chunks: List[Chunk] = self._context.pop(PARTITIONS)
        path = json.loads(zlib.decompress(base64.b64decode(os.environ["DAGSTER_PIPES_MESSAGES"])))["path"]
        self._messages = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._directory = tempfile.mkdtemp(prefix="partitions-", dir=os.path.dirname(path))  # The runtime removes the parent.
        self._started = 0
        # By process id: the chunk, the prefix of the paths of its files, and the time of its start.
        self._running: Dict[int, Tuple[Chunk, str, float]] = {}
        self._stopping = False
        self._handlers: Dict[int, Any] = {}  # The handlers that this program has replaced, by signal.

    def run(self) -> Optional[Dict[str, str]]:
        """Run all chunks, each in a forked process, and block until all have ended; then return None.

        The method also returns in each forked process. There the result is the environment variables for the chunk's command,
        and the caller must then run this command. After SIGTERM, no more chunks start, and the method returns None when the
        running ones have ended. Other signals are passed on to the running chunks.
        """
        for signum in signal.valid_signals() - _OWN_SIGNALS:
            before = signal.signal(signum, self._stop if signum == signal.SIGTERM else self._pass_on)
            self._handlers[signum] = signal.SIG_DFL if before is None else before
        self._send("opened", {"extras": {}})
        recorded = recorded_keys(os.environ["RAYSLURM_RUN_DIR"])
        pending = [chunk for chunk in self._chunks if recorded.isdisjoint(chunk)][::-1]
        while pending or self._running:
            while pending and len(self._running) < self._limit and not self._stopping:
                try:
                    env = self._start(pending[-1])
                except _CannotFork as error:
                    if self._running:
                        break  # The chunk is tried again when a running one has ended.
                    self._not_started(pending.pop(), str(error))
                    continue
                if env is not None:
                    return env
                pending.pop()
            if not self._running:
                break
            pid, status, usage = os.wait3(0)
            if pid in self._running:
                self._ended(pid, status, usage)
        self._send("closed", {})
        shutil.rmtree(self._directory, ignore_errors=True)
        return None

    @property
    def stopped(self) -> bool:
        """Whether this program has received SIGTERM since `run` began."""
        return self._stopping

    def _stop(self, signum: int, frame: Any) -> None:
        self._stopping = True
        self._pass_on(signum, frame)

    def _pass_on(self, signum: int, _: Any) -> None:
        for pid in list(self._running):
            _signal_group(pid, signum)

    def _start(self, chunk: Chunk) -> Optional[Dict[str, str]]:
        """Fork a process for a chunk; the output of the forked process goes to files.

        Returns None in this process; in the forked process, returns the environment variables for the chunk's command. Raises
        _CannotFork, in this process only, if the system refuses the process.
        """
        self._started += 1
        files = os.path.join(self._directory, "%d-" % self._started)
        with open(files + "context", "w", encoding="utf-8") as file:
            json.dump(context_of(self._context, chunk), file)
        with open(files + "keys", "w", encoding="utf-8") as file:
            file.write(lines_of(chunk))
        # Signals wait until this process knows of the forked one, and the forked one has the usual handlers.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._handlers)
        try:
            pid = os.fork()
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.unlink(files + "context")
            os.unlink(files + "keys")
            raise _CannotFork(
                "no process can be forked for it: %s; request more memory, or raise the limit of processes (ulimit -u)"
                % error.strerror
            ) from error
        if pid:
            self._running[pid] = chunk, files, time.time()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if self._stopping:
                _signal_group(pid, signal.SIGTERM)
            return None
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for name, number in _STREAMS:
            fd = os.open(files + name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
            os.dup2(fd, number)
            os.close(fd)
        os.close(self._messages)
        env = {**os.environ, **variables_of(chunk, files + "keys")}
        env["DAGSTER_PIPES_CONTEXT"] = _parameter({"path": files + "context"})
        env["DAGSTER_PIPES_MESSAGES"] = _parameter({"path": files + "messages"})
        return env

    def _not_started(self, chunk: Chunk, why: str) -> None:
        now = time.time()
        end = {"reason": "spawn", "message": why, "exit_code": None, "signal": None, "started_at": now, "ended_at": now}
        figures = {"cpu_seconds": 0.0, "peak_memory": 0}
        self._send(METHOD, {"keys": list(chunk), "end": end, "usage": figures, "messages": [], "output": []})

    def _ended(self, pid: int, status: int, usage: resource.struct_rusage) -> None:
        """Handle the end of a chunk's process: write its output to stdout and stderr, and report the end in a Pipes message.

        The arguments are the results of `os.wait3` for the process. After SIGTERM, a chunk that has not succeeded is not
        reported, because it was ended and has not failed.
        """
        chunk, files, started = self._running.pop(pid)
        _signal_group(pid, signal.SIGKILL)  # What it has left behind.
        ended, by_signal = time.time(), os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        code = None if by_signal else os.WEXITSTATUS(status)
        how = "killed by signal %d" % by_signal if by_signal else "exit code %d" % (code or 0)
        tails = []
        for name, number in _STREAMS:
            tail = _show(files + name, number, title_of(chunk, "%s, %.1f s" % (how, ended - started)))
            if tail:
                tails.append([name, tail])
        lines = []
        if os.path.exists(files + "messages"):
            with open(files + "messages", encoding="utf-8", errors="replace") as file:
                lines = [line.rstrip("\n") for line in file]
        for name in ("messages", "stdout", "stderr", "context", "keys"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(files + name)
        if self._stopping and code != 0:
            return  # It was ended, and has not failed.
        # Both figures include the children for which the chunk's process has waited (wait4(2) in the kernel: RUSAGE_BOTH).
        figures = {"cpu_seconds": usage.ru_utime + usage.ru_stime, "peak_memory": usage.ru_maxrss * 1024}
        end = {"reason": "exit", "exit_code": code, "signal": by_signal, "started_at": started, "ended_at": ended}
        self._send(METHOD, {"keys": list(chunk), "end": end, "usage": figures, "messages": lines, "output": tails})

    def _send(self, method: str, params: Dict[str, Any]) -> None:
        line = json.dumps({"__dagster_pipes_version": "0.1", "method": method, "params": params})
        view = memoryview(line.encode("ascii") + b"\n")
        while view:
            view = view[os.write(self._messages, view) :]


def context_of(context: Dict[str, Any], chunk: Chunk) -> Dict[str, Any]:
    """Returns the Pipes context of one chunk: `context`, which all chunks share, with the chunk's range of keys and time window.

    Only a chunk of one partition has a `partition_key`, as in Dagster.
    """
    first, last = _ends(chunk)
    start, end = chunk[first], chunk[last]
    return {
        **context,
        "partition_key": first if len(chunk) == 1 else None,
        "partition_key_range": {"start": first, "end": last},
        "partition_time_window": {"start": start["start"], "end": end["end"]} if start and end else None,
    }


def lines_of(chunk: Iterable[str]) -> str:
    """Returns the text of the file with a chunk's keys, one a line; Dagster allows no line breaks in keys."""
    return "".join(key + "\n" for key in chunk)


def variables_of(chunk: Chunk, path: str) -> Dict[str, str]:
    """Returns the environment variables that tell a chunk's process its keys; `path` is the path of the file that lists them."""
    single = {"RAYSLURM_PARTITION_KEY": next(iter(chunk))} if len(chunk) == 1 else {}
    return {**single, "RAYSLURM_PARTITION_KEYS": path}


def span_of(keys: Iterable[str]) -> str:
    """Returns the keys of a chunk in words: "a" for the single key a, "a to c" for the keys from a to c."""
    first, last = _ends(keys)
    return first if first == last else "%s to %s" % (first, last)


def title_of(keys: Iterable[str], how: str) -> str:
    """Returns the title line of a chunk's output; `how` tells how the chunk ended."""
    first, last = _ends(keys)
    return "---- partition%s %s: %s ----\n" % ("" if first == last else "s", span_of(keys), how)


def _ends(keys: Iterable[str]) -> Tuple[str, str]:
    listed = list(keys)
    return listed[0], listed[-1]


def recorded_keys(directory: str) -> Set[str]:
    """Returns the keys of the partitions whose processes exited before Slurm requeued the job, by the run record in `directory`.

    If a signal killed the process of a partition, the result lacks the partition's key, because the signal may have come from the
    end of the job. Damaged lines of the record do not count, because Dagster's side drops them, too.
    """
    keys = set()
    with contextlib.suppress(FileNotFoundError), open(os.path.join(directory, _JOURNAL), "rb") as file:
        for line in file:
            body, _, checksum = line.rpartition(b',"crc":"')
            if checksum != b'%08x"}\n' % zlib.crc32(body):
                continue
            with contextlib.suppress(ValueError, KeyError, TypeError):
                message = json.loads(json.loads((body + b"}").decode("utf-8", "surrogatepass"))["line"])
                if message["method"] == METHOD and message["params"]["end"]["exit_code"] is not None:
                    keys.update(message["params"]["keys"])
    return keys


def _show(path: str, number: int, title: str) -> str:
    """Copy the output in the file `path` to the file descriptor `number`, with the line `title` before it.

    Returns the last `_TAIL` bytes of the output, as text. If the file is missing or empty, writes nothing and returns "".
    """
    if not os.path.exists(path) or not os.path.getsize(path):
        return ""
    with open(path, "rb") as file, os.fdopen(os.dup(number), "wb") as stream:
        stream.write(title.encode("utf-8", "replace"))
        shutil.copyfileobj(file, stream)
        file.seek(max(0, file.tell() - _TAIL))
        tail = file.read()
        if not tail.endswith(b"\n"):
            stream.write(b"\n")
    return tail.decode("utf-8", "replace")


def granted_cpus(directory: str) -> int:
    """Returns how many CPUs of this node the payload may use.

    If a session has reserved CPUs for the payload, the result is their number, from the start record in `directory`, the
    payload's run directory. Otherwise the result is the number of CPUs on which this process may run, but at most
    SLURM_CPUS_ON_NODE. This limit matters where Slurm does not bind processes to CPUs (srun(1)).
    """
    with contextlib.suppress(OSError), open(os.path.join(directory, "payload.json"), encoding="utf-8") as file:
        reserved = json.load(file).get("want_cpus")
        if reserved:
            return int(reserved)
    usable, granted = len(os.sched_getaffinity(0)), os.environ.get("SLURM_CPUS_ON_NODE", "")
    return min(usable, int(granted)) if granted.isdigit() and int(granted) else usable


def _signal_group(pid: int, signum: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signum)
        return
    if signum != signal.SIGKILL:  # It has no process group of its own yet.
        with contextlib.suppress(OSError):
            os.kill(pid, signum)


def _parameter(value: Dict[str, Any]) -> str:
    """Returns `value` in the form in which Dagster Pipes passes parameters in environment variables.

    `dagster_pipes.encode_param` does the same.
    """
    return base64.b64encode(zlib.compress(json.dumps(value).encode("utf-8"))).decode("ascii")


def become(command: List[str], env: Dict[str, str], parent: int) -> None:
    """Run a chunk's command in this forked process, with the environment variables `env`.

    If `command` is `[this Python, SCRIPT, …]` or `[this Python, "-m", MODULE, …]`, the function tries to run the script or module
    in this process, and then returns at its end. Otherwise the command replaces this process (`exec`), so that the function never
    returns; if the command cannot be started, the process exits with the code 127. `parent` is the id of the process that forked
    this one.
    """
    preload_child: Any = sys.modules["preload_child"]
    is_python = command[0] == sys.executable and len(command) > 1 and not command[1].endswith(".pyc")
    if is_python and (not command[1].startswith("-") or (command[1] == "-m" and len(command) > 2)):
        bare = types.ModuleType("__main__")
        given = vars(sys.modules["__main__"])
        vars(bare).update({name: given[name] for name in ("__builtins__", "__loader__")})
        sys.modules["__main__"] = bare  # Without the names of this file.
        request = {"argv": command, "cwd": os.getcwd(), "env": env, "parent": parent}
        if preload_child._become(request, os.getcwd()) is None:
            preload_child.run(command)
            return
    with contextlib.suppress(OSError):
        os.setsid()
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the command would inherit that.
        signal.signal(signum, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, env)
    except OSError as error:
        print("the command %r cannot be started: %s" % (command[0], error.strerror), file=sys.stderr, flush=True)
        os._exit(127)


def main() -> int:
    """Run the command of the payload once for each chunk, and return the exit code of this program.

    The exit code is 143 after SIGTERM, otherwise 0, even if chunks have failed. The function also returns in a forked process,
    with 0, when the chunk's script has run in this process and has ended without an exception.
    """
    __import__("preload_child")
    del sys.path[0]  # The directory of this file.
    with contextlib.suppress(ImportError):
        __import__("dagster_pipes")  # Nearly every payload imports it.
    runner, parent = Runner(int(sys.argv[1]) or granted_cpus(os.environ["RAYSLURM_RUN_DIR"]), sys.argv[2:]), os.getpid()
    gc.collect()
    gc.freeze()
    env = runner.run()
    if env is not None:
        become(runner.command, env, parent)
        return 0
    return 128 + signal.SIGTERM if runner.stopped else 0


if __name__ == "__main__":
    sys.exit(main())
