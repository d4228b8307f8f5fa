"""`SSHConnection`, a `Connection` over SSH. The connection starts an agent on the server, and sends all calls to the agent.

The agent is a program that calls functions of the package `edge`. Nothing here depends on the SSH client (paramiko or OpenSSH),
which only logs in and opens channels (`Transport`, `Stream`).
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import itertools
import os
import re
import secrets
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from .. import edge
from ..edge.agent import Sender, command_line, messages, program
from . import errors
from .base import Backoff, Connection, ConnectionFailed, ConnectionGone, ConnectionLost, ServerBusy, Submit
from .fields import SSHLogin

T = TypeVar("T")

# Seconds for which a failed first login is tried again; if it still fails, the configuration is probably wrong.
_FIRST_LOGIN_PATIENCE = 3.0
_PROGRESS = 5.0  # Seconds that an attempt must last before it breaks, so that its end counts as the start of a new outage.
_MAX_NOISE = 1024 * 1024  # Most bytes of output of the shell's start-up files before the agent's hello.
_MIN_PYTHON = (3, 6)
_GRACE = 5.0  # Seconds after the deadline of a request in which the agent should have said so itself.
_BUFFER = 256 * 1024


class Refused(Exception):
    """Raised when the server opens no further session on a login (`MaxSessions`, sshd_config(5)). No command was started."""


class Stream(Protocol):
    """Interface to the standard input and output of a remote command that an SSH client has started.

    All methods raise `OSError` or `EOFError` once the command or the connection has ended.
    """

    def sendall(self, data: bytes) -> None: ...

    def recv(self, size: int) -> bytes: ...

    def close(self) -> None:
        """End the connection to the command, which ends the command's standard input."""
        ...

    def failure(self, noise: str) -> Exception:
        """Returns the exception that explains why the command ended at once; `noise` is the output of the command."""
        ...


class Transport(Protocol):
    """Interface of an SSH client for one login to a server."""

    def alive(self) -> bool:
        """Whether the login still works, as far as this process knows without a query to the server."""
        ...

    def start(self, command: str) -> Iterator[Stream]:
        """Start a command in the login shell, and yield a stream to the command.

        Each item of the iterator is a new attempt to start the command. If the server refuses the attempt at once, the iterator
        raises `Refused`, and no further attempt follows. If the server refuses it later, `Stream.failure` returns `Refused`; then
        the caller takes the next item, for which the iterator opens a further connection to the server. The iterator ends if it
        opens no more connections. Raises `ConnectionFailed` for any other failure.
        """
        ...

    def tunnel(self, host: str, port: int, client: socket.socket) -> None:
        """Copy data between the socket `client` and `host:port`, to which the server connects, until both ends have closed.

        Raises `ConnectionGone` if the login had ended before any bytes were copied.
        """
        ...

    def interact(self, command: str) -> int:
        """Run a command in the login shell with this process's terminal, if there is one; returns the command's exit code."""
        ...

    def close(self) -> None: ...


def agent_command(ssh: SSHLogin) -> tuple[str, bytes]:
    """Returns the command that starts an agent on the server `ssh`, and the bytes with which the agent's output begins.

    The start-up files of the login shell may print other text before these bytes.
    """
    word = secrets.token_hex(8)
    return command_line(ssh.python, word), f"\n{word}{word} ".encode()


@functools.cache
def _program() -> bytes:
    """Returns the agent's program, which contains the whole package `edge`, as bytes for the agent's standard input."""
    return program(os.path.dirname(edge.__file__))


class Answer:
    """The result or the exception of a call; one thread sets the result or the exception, and another thread waits.

    This class is no `Future`, because an interrupt in the main thread could leave the lock of a `Future` held. The other thread
    would then wait for ever.
    """

    def __init__(self) -> None:
        self._come = threading.Lock()
        self._come.acquire()
        self._value: Any = None
        self._failure: BaseException | None = None

    def put(self, value: Any, failure: BaseException | None = None) -> None:
        """Set the result, or the exception `failure`; to be called only once."""
        self._value, self._failure = value, failure
        self._come.release()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until there is a result or an exception; raises `TimeoutError` after `timeout` seconds, None for no limit."""
        if not self._come.acquire(timeout=-1 if timeout is None else timeout):
            raise TimeoutError
        self._come.release()

    def get(self) -> Any:
        """Returns the result, or raises the exception; to be called only after `wait`."""
        if self._failure is not None:
            raise self._failure
        return self._value


class AgentClient:
    """Calls functions of `edge` on a server, for many threads at once, by an agent that runs on the server.

    The constructor starts the agent. `stream` is the stream of the command from `agent_command`, and `hello` are the bytes from
    `agent_command`. The constructor raises `Refused` or `ConnectionFailed` if the agent does not start; no function was called
    then.
    """

    def __init__(self, ssh: SSHLogin, stream: Stream, hello: bytes) -> None:
        self._ssh, self._stream = ssh, stream
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Answer] = {}
        self.lost = False
        self._deadline = time.monotonic() + ssh.connect_timeout
        alarm = threading.Timer(ssh.connect_timeout, stream.close)
        alarm.daemon = True
        alarm.start()
        try:
            with contextlib.suppress(OSError, EOFError):
                stream.sendall(_program())
            self._rest = self._skip_noise(hello)
        except BaseException:
            stream.close()
            raise
        finally:
            alarm.cancel()
        self._sender = Sender(stream.sendall, stream.close)
        threading.Thread(target=self._receive, name="rayslurm-agent", daemon=True).start()

    def submit(self, deadline: float | None, function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
        """Start a call of a function of `edge`, and return a function that waits for the call's result.

        The returned function returns the result, or raises the exception of the call. The returned function waits until a few
        seconds after `deadline`, a value of `time.monotonic()`, and then raises `TimeoutError`; None for no limit. `submit`
        raises `ConnectionGone` if the agent had ended before the call.
        """
        number, answer = next(self._numbers), Answer()
        self._waiting[number] = answer
        if self.lost:
            raise errors.gone(self._ssh)
        name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        header = {"id": number, "call": name}
        sending = _in_thread(lambda: self._sender.send(header, list(arguments)))

        def cancel() -> None:
            sending.wait()
            self._sender.send({"id": number, "cancel": True}, [])

        def result_of(given: Answer, timeout: float | None = None) -> Any:
            try:
                given.wait(timeout)
            except BaseException:  # Nobody waits for the call any more. Sending may block on a broken link.
                _thread.start_new_thread(cancel, ())
                raise
            return given.get()

        result_of(sending)
        return lambda: result_of(answer, None if deadline is None else max(0.0, deadline - time.monotonic()) + _GRACE)

    def close(self) -> None:
        """End the agent, and the commands that the agent runs."""
        self._stream.close()

    def _skip_noise(self, hello: bytes) -> bytes:
        """Read the stream up to the end of the agent's first line; returns the bytes that have arrived after this line.

        The first line consists of `hello` and the version of Python. Output of start-up files before the line is dropped. Raises
        `ConnectionFailed` or `Refused` if the line does not come, and `ConnectionFailed` if the version is too old.
        """
        received = b""
        pattern = re.compile(re.escape(hello) + rb"(\d+)\.(\d+)\n")
        while not (found := pattern.search(received)):
            data = b""
            with contextlib.suppress(OSError, EOFError):
                data = self._stream.recv(_BUFFER)
            if not data and time.monotonic() >= self._deadline:
                raise errors.no_answer(self._ssh)
            if not data or len(received) > _MAX_NOISE:
                raise self._stream.failure(received.decode("utf-8", "replace")[-300:].strip())
            received += data
        version = int(found[1]), int(found[2])
        if version < _MIN_PYTHON:
            raise errors.no_python(self._ssh, f"it is Python {version[0]}.{version[1]}")
        return received[found.end() :]

    def _read(self, size: int) -> bytes:
        """Returns the next `size` bytes of the agent's output; fewer bytes at the end of the output."""
        parts, self._rest = [self._rest[:size]], self._rest[size:]
        missing = size - len(parts[0])
        while missing:
            data = self._stream.recv(min(missing, _BUFFER))
            if not data:
                break
            parts.append(data)
            missing -= len(data)
        return b"".join(parts)

    def _receive(self) -> None:
        """Give each answer of the agent to the thread that waits for this answer, until the agent's output ends.

        Each call that has no answer then fails with `ConnectionLost`.
        """
        with contextlib.suppress(Exception):  # Whatever ended the channel: who waits gets `ConnectionLost` below.
            for header, values in messages(self._read):
                answer = self._waiting.pop(header["id"], None)
                if answer is not None:
                    answer.put(*_result(header, values))
        self.lost = True
        for answer in list(self._waiting.values()):
            answer.put(None, errors.lost(self._ssh))
        self.close()


def _result(header: dict[str, Any], values: list[Any]) -> tuple[Any, Exception | None]:
    """Returns the result of a call and the exception that the call raised, from an answer of the agent.

    The exception is None if the call succeeded, and the result is None if the call failed. `header` and `values` are the two
    parts of the answer, as `edge.agent.messages` yields them.
    """
    if "failure" in header:
        return None, RuntimeError(f"{header['failure']} on the edge node: {values[0]}")
    if "errno" in header:
        said, name = values
        return None, OSError(header["errno"], said, name) if header["errno"] is not None else OSError(said)
    return tuple(values) if header["tuple"] else values[0], None


def _in_thread(work: Callable[[], T]) -> Answer:
    """Start `work` in a new thread, where Python raises no interrupts, and return the `Answer` that will have the result.

    An interrupt may be raised between any two instructions of the main thread, also where paramiko or `Sender` has just taken a
    lock. The lock would never be released, and the code that cleans up after the interrupt would wait for ever.
    """
    answer = Answer()

    def run() -> None:
        try:
            answer.put(work())
        except BaseException as error:  # noqa: BLE001 - the thread that waits raises it
            answer.put(None, error)

    # The start of a `threading.Thread` waits under a lock, and its end runs code in which Python ignores exceptions.
    _thread.start_new_thread(run, ())
    return answer


def copy_data(receive: Callable[[int], bytes], send: Callable[[bytes], Any], end: Callable[[], Any]) -> None:
    """Copy data from `receive` to `send` until `receive` returns b"" or one of them fails; then call `end`."""
    with contextlib.suppress(OSError, EOFError):
        while data := receive(_BUFFER):
            send(data)
    with contextlib.suppress(OSError, EOFError):
        end()


class SSHConnection(Connection):
    """Access to the files and commands of an edge node, by SSH. All threads share one login and one agent.

    `log_in` is the function of an SSH client that logs in to a server; `log_in` raises `ConnectionFailed` if the login fails.
    """

    def __init__(self, ssh: SSHLogin, log_in: Callable[[SSHLogin], Transport]) -> None:
        self.ssh = ssh
        self._log_in = log_in
        self._lock = threading.Lock()
        self._transport: Transport | None = None
        self._agent: AgentClient | None = None
        self._ever_connected = False
        self._failed: tuple[float, Exception] | None = None

    @property
    def place(self) -> str:
        return errors.address(self.ssh)

    @functools.cached_property
    def _home(self) -> str:
        return super()._home

    def attempt(self, doing: str, operation: Callable[[Submit], T], repeat: bool, deadline: float | None = None) -> T:
        outage: Backoff | None = None
        while True:
            agent, began = None, time.monotonic()
            try:
                agent = self._connected()
                return operation(functools.partial(agent.submit, deadline))
            except Refused:
                failure = errors.no_sessions(self.ssh)
            except ConnectionFailed as error:
                failure = error
                if isinstance(error, ConnectionLost) and not repeat:
                    raise
            except OSError as error:
                raise self._named(error, doing) from None
            if outage is None or (agent is not None and time.monotonic() - began > _PROGRESS):
                outage = Backoff(began if agent is None else time.monotonic())
            patient = self._ever_connected or isinstance(failure, ServerBusy)
            patience = self.ssh.connect_timeout if patient else min(_FIRST_LOGIN_PATIENCE, self.ssh.connect_timeout)
            pause = outage.pause()
            too_late = deadline is not None and time.monotonic() + pause > deadline
            if not failure.temporary or outage.seconds + pause > patience or too_late:
                raise failure from None
            time.sleep(pause)

    def _named(self, error: OSError, doing: str) -> OSError:
        """Returns a copy of an error from the edge node, with a message that names the node and the operation that failed.

        `doing` is the operation, such as "reading /a/b". If `doing` is "", the message has the file that the error names, if any.
        A `TimeoutError` that this process has raised because no answer came in time is returned unchanged.
        """
        if isinstance(error, TimeoutError) and error.errno is None:
            return error
        what = f"{doing} failed: " if doing else f"{error.filename}: " if error.filename else ""
        failure = type(error)(f"{self.place}: {what}{error.strerror or error}")
        failure.errno = error.errno
        return failure

    def _connected(self) -> AgentClient:
        """Returns a running agent; logs in and starts an agent if none runs. Raises `Refused` or `ConnectionFailed`."""
        agent, called_at = self._agent, time.monotonic()
        if agent is not None and not agent.lost:
            return agent
        answer = _in_thread(lambda: self._connect(called_at))
        answer.wait()
        return answer.get()  # type: ignore[no-any-return]

    def _connect(self, called_at: float) -> AgentClient:
        """Returns a running agent; logs in and starts an agent if none runs. Only one thread at a time logs in.

        If the attempt of another thread has failed since `called_at`, a value of `time.monotonic()`, the function makes no
        attempt of its own and raises the exception of the other attempt. Raises `Refused` or `ConnectionFailed`.
        """
        with self._lock:
            if self._agent is not None and not self._agent.lost:
                return self._agent
            if self._failed is not None and self._failed[0] > called_at:
                raise self._failed[1]  # Another thread has just tried; waiting threads do not try one by one.
            try:
                self._agent = self._start_agent(self._logged_in())
            except (OSError, Refused) as error:
                failure = error if isinstance(error, (ConnectionFailed, Refused)) else errors.failed(self.ssh, str(error))
                self._failed = (time.monotonic(), failure)
                raise failure from None
            return self._agent

    def _logged_in(self) -> Transport:
        """Returns the transport of a login that works; logs in if there is none. Raises `ConnectionFailed` if the login fails.

        The caller holds `_lock`.
        """
        if self._transport is None or not self._transport.alive():
            self._log_out()
            self._transport = self._log_in(self.ssh)
            self._ever_connected = True
        return self._transport

    def _start_agent(self, transport: Transport) -> AgentClient:
        """Returns the client of a new agent on the server; raises `Refused` or `ConnectionFailed` if the agent does not start."""
        command, hello = agent_command(self.ssh)
        try:
            for stream in transport.start(command):
                with contextlib.suppress(Refused):
                    return AgentClient(self.ssh, stream, hello)
        except ConnectionGone:
            self._log_out()
            raise
        raise Refused

    def _log_out(self) -> None:
        """Close the agent and the login, if there are any. The caller holds `_lock`."""
        for each in (self._agent, self._transport):
            if each is not None:
                each.close()
        self._agent = self._transport = None

    def connect(self, host: str, port: int, timeout: float) -> socket.socket:
        stream, client = socket.socketpair()
        stream.settimeout(timeout)
        threading.Thread(target=self._tunnel, args=(host, port, client), name="rayslurm-tunnel", daemon=True).start()
        return stream

    def stream(self, command: Sequence[str]) -> socket.socket:
        stream, client = socket.socketpair()
        arguments = ("exec " + shlex.join(command), client)
        threading.Thread(target=self._run_on_stream, args=arguments, name="rayslurm-stream", daemon=True).start()
        return stream

    def _run_on_stream(self, command: str, client: socket.socket) -> None:
        """Run a command whose input and output is `client`; close `client` when the command ends, or if it cannot be started."""
        with client, contextlib.suppress(OSError, EOFError, Refused):  # A failure ends the stream.
            with self._lock:
                transport = self._logged_in()
            channel = next(iter(transport.start(command)))
            with contextlib.closing(channel):
                upward = (client.recv, channel.sendall, channel.close)
                threading.Thread(target=copy_data, args=upward, name="rayslurm-stream", daemon=True).start()
                try:
                    while data := channel.recv(_BUFFER):
                        client.sendall(data)
                finally:  # Closing alone would not end the stream while the other thread waits for data from it.
                    with contextlib.suppress(OSError):
                        client.shutdown(socket.SHUT_RDWR)

    def _tunnel(self, host: str, port: int, client: socket.socket) -> None:
        """Copy data between the socket `client` and `host:port` until both ends have closed; finally close `client`.

        If the login had ended before, the method logs in again and tries once more.
        """
        with client, contextlib.suppress(OSError, EOFError, Refused):  # A failure ends the stream.
            for last in (False, True):
                with self._lock:
                    transport = self._logged_in()
                try:
                    return transport.tunnel(host, port, client)
                except ConnectionGone:
                    if last:
                        raise
                    with self._lock:
                        if self._transport is transport:
                            self._log_out()

    def interact(self, command: Sequence[str]) -> int:
        with self._lock:
            transport = self._logged_in()
        try:
            return transport.interact(shlex.join(command))
        except Refused:
            raise errors.no_sessions(self.ssh) from None

    def close(self) -> None:
        with self._lock:
            self._log_out()
