"""`SSHConnection`, a `Connection` over SSH: one agent on the edge node, retries, and port forwards.

Nothing here depends on the SSH client, which only logs in and opens channels.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from ..edge import files
from . import errors
from .agent_client import AgentClient, Refused, Stream, agent_command
from .base import Backoff, Connection, ConnectionFailed, ConnectionGone, ConnectionLost, ServerBusy, Submit
from .config import SSHConnectionResource

T = TypeVar("T")

_FIRST_LOGIN_PATIENCE = 3.0
"""Seconds for which a failed first login is tried again; if it still fails, the configuration is probably wrong."""
_PROGRESS = 5.0
"""Seconds that an attempt must last before it breaks, so that its end counts as the start of a new outage."""
_SILENCE = 5.0
"""Seconds without an answer after which the agent is asked whether it lives before it gets a request that cannot be repeated."""


class Transport(Protocol):
    """One login to an SSH server, as an SSH client provides it."""

    def alive(self) -> bool:
        """Whether the login still works, as far as this process knows without asking the server."""
        ...

    def start(self, command: str) -> Iterator[Stream]:
        """Start a command in the login shell of the server; yields further channels if sessions are refused on the first.

        Raises:
            Refused, ConnectionFailed: nothing was started.
        """
        ...

    def tunnel(self, host: str, port: int, client: socket.socket) -> None:
        """Copy bytes between a local client and `host:port`, which the server can reach, until both directions have ended.

        Raises:
            ConnectionGone: nothing was copied.
        """
        ...

    def close(self) -> None:
        """Log out."""
        ...


class SSHConnection(Connection):
    """Files and commands of an edge node, by SSH. All threads share one login and one agent.

    Args:
        ssh: the server and how to log in.
        log_in: logs in with one of the two SSH clients; raises `ConnectionFailed`.
    """

    def __init__(self, ssh: SSHConnectionResource, log_in: Callable[[SSHConnectionResource], Transport]) -> None:
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
    def _account(self) -> tuple[int, str]:
        return super()._account

    def attempt(self, doing: str, operation: Callable[[Submit], T], repeat: bool, deadline: float | None = None) -> T:
        outage: Backoff | None = None
        while True:
            agent, began = None, time.monotonic()
            try:
                agent = self._connected()
                if not repeat and time.monotonic() - agent.heard > _SILENCE:
                    self._ask_for_life(agent)
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

    def _ask_for_life(self, agent: AgentClient) -> None:
        try:
            agent.submit(None, files.account)()
        except ConnectionLost as error:
            raise ConnectionGone(str(error)) from None

    def _named(self, error: OSError, doing: str) -> OSError:
        """An error of the edge node, with a message that says where and what."""
        if isinstance(error, TimeoutError) and error.errno is None:
            return error
        what = f"{doing} failed: " if doing else f"{error.filename}: " if error.filename else ""
        failure = type(error)(f"{self.place}: {what}{error.strerror or error}")
        failure.errno = error.errno
        return failure

    def _connected(self) -> AgentClient:
        """An agent that runs; logs in and starts one if there is none.

        Raises:
            Refused, ConnectionFailed: in this thread, or just before in another one.
        """
        called_at = time.monotonic()
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
        """A login that works. The caller holds the lock."""
        if self._transport is None or not self._transport.alive():
            self._log_out()
            self._transport = self._log_in(self.ssh)
            self._ever_connected = True
        return self._transport

    def _start_agent(self, transport: Transport) -> AgentClient:
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
        for each in (self._agent, self._transport):
            if each is not None:
                each.close()
        self._agent = self._transport = None

    def forward(self, host: str, port: int) -> ListeningForward:
        def tunnel(client: socket.socket) -> None:
            try:
                with self._lock:
                    transport = self._logged_in()
                transport.tunnel(host, port, client)
            except ConnectionGone:
                with self._lock:
                    if self._transport is transport:
                        self._log_out()
                    transport = self._logged_in()
                transport.tunnel(host, port, client)

        return ListeningForward(tunnel)

    def close(self) -> None:
        with self._lock:
            self._log_out()


class ListeningForward:
    """A port on 127.0.0.1 that is forwarded over SSH. Other users of this machine can connect to the port as well.

    Args:
        tunnel: copies the bytes of one client over SSH until both directions have ended.
    """

    def __init__(self, tunnel: Callable[[socket.socket], None]) -> None:
        self._tunnel = tunnel
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._clients: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._accept, name="rayslurm-forward", daemon=True).start()

    @property
    def host(self) -> str:
        return "127.0.0.1"

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # Wakes the thread in accept, which a close alone does not.
        self._listener.close()
        with self._lock:
            clients = list(self._clients)
        for client in clients:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> ListeningForward:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                self._closed.wait(0.1)  # The listener is closed, or file descriptors have run out for now.
                continue
            with self._lock:
                self._clients.add(client)
            threading.Thread(target=self._serve, args=(client,), name="rayslurm-forward", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            # A failure closes the client's connection, as a direct connection would fail.
            with contextlib.suppress(OSError, EOFError, Refused):
                self._tunnel(client)
        finally:
            client.close()
            with self._lock:
                self._clients.discard(client)
