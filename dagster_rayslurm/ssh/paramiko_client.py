"""SSH by paramiko: one authenticated transport per process and host, jump hosts included."""

from __future__ import annotations

import contextlib
import getpass
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import paramiko

from . import errors
from .base import ConnectionFailed
from .config import SSHConnectionResource
from .connection import SSHConnection
from .forward import pump
from .login_files import check_files
from .login_slots import login_slot
from .paramiko_auth import authenticate, check_host_key, keys_known, prefer_types
from .transport import Refused

_LOG = "dagster_rayslurm.paramiko"
_CONNECT_SLICE = 4.0
"""Seconds after which a TCP connection is tried anew: the kernel waits ever longer between its own tries."""
_OPEN_TIMEOUT = 60.0
_SETTLE = 0.3
_ADMINISTRATIVELY_PROHIBITED, _CONNECT_FAILED = 1, 2  # RFC 4254, section 5.1


class ParamikoConnection(SSHConnection):
    """An edge node reached by paramiko.

    Args:
        ssh: the server and how to log in.
    """

    def _login(self) -> ParamikoLink:
        check_files(self.ssh)
        return login(self.ssh)


def login(ssh: SSHConnectionResource) -> ParamikoLink:
    """Log in to a server, through its jump hosts.

    Raises:
        ConnectionFailed: it does not work out within `connect_timeout` for each server.
    """
    via: ParamikoLink | None = None
    for hop in ssh.hops():
        try:
            with login_slot(f"{hop.host}:{hop.port}", hop.connect_timeout):
                via = _login_to(hop, via)
        except TimeoutError as error:
            raise errors.other(hop, str(error), temporary=True) from None
        finally:
            if via is not None and via.ssh is not hop:
                via.close()  # The way there is of no use without the end.
    assert via is not None
    return via


def _login_to(ssh: SSHConnectionResource, via: ParamikoLink | None) -> ParamikoLink:
    deadline = time.monotonic() + ssh.connect_timeout
    stream = via.open_tcp(ssh, deadline) if via else _connect(ssh, deadline)
    transport = _quiet_transport(stream)
    try:
        remaining = max(0.1, deadline - time.monotonic())
        transport.banner_timeout = transport.handshake_timeout = transport.auth_timeout = remaining
        known = keys_known(ssh)
        prefer_types(transport, known)
        transport.start_client(timeout=remaining)
        if not transport.initial_kex_done:
            raise errors.no_answer(ssh)
        check_host_key(transport, ssh, known)
        transport.auth_timeout = max(0.1, deadline - time.monotonic())
        authenticate(transport, ssh, ssh.user or getpass.getuser())
    except BaseException as error:
        transport.close()
        if isinstance(error, (paramiko.SSHException, EOFError, OSError)) and not isinstance(error, ConnectionFailed):
            raise _explain(ssh, error, deadline) from None
        raise
    return ParamikoLink(ssh, transport, via)


def _connect(ssh: SSHConnectionResource, deadline: float) -> socket.socket:
    while True:
        remaining = deadline - time.monotonic()
        try:
            stream = socket.create_connection((ssh.host, ssh.port), timeout=max(0.1, min(_CONNECT_SLICE, remaining)))
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return stream
        except socket.gaierror:
            raise errors.unknown_host(ssh) from None
        except UnicodeError:
            raise errors.unknown_host(ssh) from None
        except ConnectionRefusedError:
            raise errors.nothing_listens(ssh) from None
        except TimeoutError:
            if time.monotonic() >= deadline:
                raise errors.no_answer(ssh) from None
        except OSError as error:
            raise errors.unreachable(ssh, error.strerror or str(error)) from None


def _quiet_transport(stream: Any) -> Any:
    transport = paramiko.Transport(stream, packetizer_class=_Packetizer)
    transport.set_log_channel(_LOG)  # It logs tracebacks of what is said in a sentence here.
    transport.logger.setLevel(100)
    transport.daemon = True
    return transport


def _explain(ssh: SSHConnectionResource, error: Exception, deadline: float) -> ConnectionFailed:
    """What an exception during the login means. Pure but for the clock."""
    if time.monotonic() >= deadline - 0.05 or isinstance(error, TimeoutError):
        return errors.no_answer(ssh)
    text = str(error) or type(error).__name__
    if "Invalid SSH banner" in text or "not a SSH server" in text or "Indecipherable protocol version" in text:
        return errors.not_ssh(ssh)
    if isinstance(error, paramiko.IncompatiblePeer):
        return errors.other(
            ssh, f"no cipher or key exchange in common ({text}); the server is too old or too new", temporary=False
        )
    if "SSH protocol banner" in text or isinstance(error, (EOFError, ConnectionResetError)):
        return errors.busy(ssh)
    return errors.other(ssh, f"the login broke off ({text})", temporary=True)


class ParamikoProcess:
    """A remote command with its streams.

    Args:
        link: the login that it runs on.
        channel: a session channel on which the command was started.
    """

    def __init__(self, link: ParamikoLink, channel: Any) -> None:
        self._link = link
        self._channel = channel
        # A thread for each stream: the descriptor that a channel offers to poll() misses data when both streams have
        # news at the same time (OrPipe in paramiko 5.1 sets and clears without a lock).
        self._news: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self._open = 2
        for number, receive in enumerate((channel.recv, channel.recv_stderr)):
            threading.Thread(target=self._receive, args=(number, receive), daemon=True).start()

    def _receive(self, number: int, receive: Callable[[int], bytes]) -> None:
        data = b"-"
        while data:
            try:
                data = receive(65536)
            except (OSError, EOFError):
                data = b""
            self._news.put((number, data))

    def write(self, data: bytes) -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.sendall(data)

    def read(self, timeout: float) -> tuple[bytes, bytes]:
        if not self._open:
            raise EOFError
        got = [b"", b""]
        with contextlib.suppress(queue.Empty):
            number, got[number] = self._news.get(timeout=max(0.0, timeout))
            self._open -= not got[number]
        return got[0], got[1]

    def why(self, stdout: bytes, stderr: bytes) -> Exception:
        if self._link.settled_alive():
            return errors.no_shell(self._link.ssh, (stdout + stderr).decode("utf-8", "replace")[-300:].strip())
        return errors.lost(self._link.ssh)

    def close(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            self._channel.close()


class ParamikoLink:
    """An authenticated transport.

    Args:
        ssh: the server.
        transport: logged in there.
        via: the link to the jump host that it runs through; it is closed along.
    """

    def __init__(self, ssh: SSHConnectionResource, transport: Any, via: ParamikoLink | None) -> None:
        self.ssh = ssh
        self._transport = transport
        self._via = via
        self._closed = threading.Event()
        if ssh.keepalive:
            threading.Thread(target=self._watch, name="rayslurm-keepalive", daemon=True).start()

    def alive(self) -> bool:
        return bool(self._transport.is_active())

    def settled_alive(self) -> bool:
        """Like `alive`, after a moment: paramiko ends channels just before it says that the transport has ended."""
        self._transport.join(_SETTLE)
        return self.alive()

    def subsystem(self, name: str) -> Any:
        return self._started(lambda channel: channel.invoke_subsystem(name), errors.no_sftp)

    def execute(self, command: str) -> ParamikoProcess:
        return ParamikoProcess(self, self._started(lambda channel: channel.exec_command(command), errors.no_shell))

    def tunnel(self, host: str, port: int, client: socket.socket) -> None:
        try:
            channel = self._open("direct-tcpip", (host, port), ("127.0.0.1", 0))
        except paramiko.ChannelException as error:
            raise errors.other(self.ssh, f"{host}:{port} cannot be reached from there ({error.text})", temporary=True) from None
        pump(client, channel)

    def open_tcp(self, target: SSHConnectionResource, deadline: float) -> Any:
        """A channel to the next hop's SSH server."""
        remaining = max(0.1, deadline - time.monotonic())
        try:
            return self._open("direct-tcpip", (target.host, target.port), ("127.0.0.1", 0), remaining)
        except paramiko.ChannelException as error:
            raise errors.jump_refused(target, self.ssh, error.text or "refused") from None
        except ConnectionFailed:
            raise errors.jump_refused(target, self.ssh, f"no answer within {target.connect_timeout} s") from None

    def close(self) -> None:
        """Log out."""
        self._closed.set()
        self._transport.close()
        if self._via is not None:
            self._via.close()

    def _started(self, start: Callable[[Any], None], refused: Callable[[SSHConnectionResource, str], ConnectionFailed]) -> Any:
        """A session on which something was started; what `refused` says of it if the server does not do so."""
        channel = self._open_session()
        try:
            start(channel)
        except (paramiko.SSHException, EOFError, OSError) as error:
            channel.close()
            raise refused(self.ssh, str(error)) if self.alive() else errors.gone(self.ssh) from None
        return channel

    def _open_session(self) -> Any:
        try:
            return self._open("session")
        except paramiko.ChannelException as error:
            # OpenSSH 9.2 answers a session beyond MaxSessions with CONNECT_FAILED "open failed".
            if error.code in (_ADMINISTRATIVELY_PROHIBITED, _CONNECT_FAILED):
                raise Refused from None
            raise errors.other(self.ssh, f"the server opens no session ({error.text})", temporary=True) from None

    def _open(self, kind: str, target: Any = None, source: Any = None, timeout: float = _OPEN_TIMEOUT) -> Any:
        try:
            return self._transport.open_channel(kind, target, source, timeout=timeout)
        except paramiko.ChannelException:
            raise
        except (paramiko.SSHException, EOFError, OSError) as error:
            if self.alive() and "Unable to open channel" in str(error):
                # The server refused, but another thread, refused as well, has taken the exception that says so.
                raise paramiko.ChannelException(_CONNECT_FAILED, "refused") from None
            raise errors.gone(self.ssh, "" if isinstance(error, EOFError) else str(error)) from None

    def _watch(self) -> None:
        """Close the transport when the server stops answering, so that nobody waits for TCP to give up."""
        every = self.ssh.keepalive
        while not self._closed.wait(every) and self.alive():
            answered = threading.Event()
            threading.Thread(target=self._close_if_silent, args=(answered, every), daemon=True).start()
            with contextlib.suppress(Exception):  # A transport that ends meanwhile is what this is about.
                self._transport.global_request("keepalive@openssh.com")
            answered.set()

    def _close_if_silent(self, answered: threading.Event, every: float) -> None:
        """Close the transport unless something is heard; the answer itself may queue behind much else."""
        asked = time.monotonic()
        while not answered.wait(every):
            if self._transport.packetizer.heard < asked:
                self._transport.close()
                return
            asked = self._transport.packetizer.heard + 1e-6


class _Packetizer(paramiko.packet.Packetizer):  # type: ignore[misc]
    """Notes when the server was heard last."""

    heard = 0.0

    def read_message(self) -> Any:
        message = super().read_message()
        self.heard = time.monotonic()
        return message
