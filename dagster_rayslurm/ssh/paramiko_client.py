"""The SSH client for `client="paramiko"`: logs in through jump hosts, and opens channels, with the paramiko library.

Each process has one login for each configured connection.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import paramiko

from . import errors, login, terminal
from .base import ConnectionFailed
from .connection import Refused, copy_data
from .fields import SSHLogin, key_path
from .openssh import master_command

_LOG = "dagster_rayslurm.paramiko"  # Name of paramiko's logger, which is silenced.
# Seconds for one TCP connection attempt. TCP repeats a lost packet later and later, so a new attempt succeeds earlier.
_ATTEMPT = 4.0
_OPEN_TIMEOUT = 60.0  # Seconds for the server to open a channel.
_SETTLE = 0.3  # Seconds that paramiko may take from the end of the channels to the end of the transport.
_WINDOW, _PACKET = 8 * 1024 * 1024, 64 * 1024  # Bytes that the server may send ahead on a channel, and in one message.
_ADMINISTRATIVELY_PROHIBITED, _CONNECT_FAILED = 1, 2  # RFC 4254, section 5.1

# Private keys to try if no key is configured, after those of the agent.
_DEFAULT_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
# Number of keys of the agent to try: sshd disconnects after six failures (`MaxAuthTries`, sshd_config(5) of OpenSSH 9.2).
_MAX_AGENT_KEYS = 4
# Names by which a server offers a host key, where they differ from the key's type in known_hosts.
_SIGNATURES = {"ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256")}


def log_in(ssh: SSHLogin) -> ParamikoTransport:
    """Log in to a server through its jump hosts; returns the transport of the server.

    The login to each host on the way may take the `connect_timeout` of this host. Raises `ConnectionFailed` if a login fails.
    """
    login.check_files(ssh)
    transport: ParamikoTransport | None = None
    for hop in ssh.hops():
        try:
            with login.login_slot(hop):
                transport = _log_in_to(hop, transport)
        finally:
            if transport is not None and transport.ssh is not hop:
                transport.close()  # The login to this host failed: log out from the jump host before it.
    assert transport is not None
    return transport


def _log_in_to(ssh: SSHLogin, jump: ParamikoTransport | None) -> ParamikoTransport:
    """Log in to one server; returns the transport of the server. Raises `ConnectionFailed` if the login fails.

    `jump` is the transport of the jump host to go through; None to connect directly.
    """
    deadline = time.monotonic() + ssh.connect_timeout
    transport: Any = None
    try:
        stream = jump.open_tcp(ssh) if jump else _connect(ssh, deadline)
        transport = paramiko.Transport(stream, packetizer_class=_Packetizer)
        transport.set_log_channel(_LOG)
        transport.logger.setLevel(100)  # paramiko logs tracebacks of failures that `errors` reports in a sentence.
        transport.daemon = True
        transport.banner_timeout = transport.handshake_timeout = transport.auth_timeout = _left(deadline)
        _prefer_known_types(transport, ssh)
        transport.start_client(timeout=_left(deadline))
        if not transport.initial_kex_done:
            raise errors.no_answer(ssh)
        shown = transport.get_remote_server_key()
        login.check_host_key(ssh, shown.get_name(), shown.get_base64())
        transport.auth_timeout = _left(deadline)
        _authenticate(transport, ssh, ssh.user or getpass.getuser())
    except BaseException as error:
        if transport is not None:
            transport.close()
        if isinstance(error, (paramiko.SSHException, EOFError, OSError, UnicodeError)) and not isinstance(
            error, ConnectionFailed
        ):
            raise _explain(ssh, error, deadline) from None
        raise
    return ParamikoTransport(ssh, transport, jump)


def _left(deadline: float) -> float:
    """Returns the seconds until `deadline`, a value of `time.monotonic()`; at least 0.1."""
    return max(0.1, deadline - time.monotonic())


def _connect(ssh: SSHLogin, deadline: float) -> socket.socket:
    """Returns a TCP connection to a server; until `deadline`, repeats each attempt that gets no answer. Raises `OSError`.

    `deadline` is a value of `time.monotonic()`.
    """
    while True:
        try:
            stream = socket.create_connection((ssh.host, ssh.port), timeout=min(_ATTEMPT, _left(deadline)))
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return stream
        except TimeoutError:
            if time.monotonic() >= deadline:
                raise


def _explain(ssh: SSHLogin, error: Exception, deadline: float) -> ConnectionFailed:
    """Returns the `ConnectionFailed`, with a sentence for the user, to raise in place of the exception `error` of a login.

    `deadline` is the time by `time.monotonic()` at which the login's `connect_timeout` is over. If this time has come, the result
    says that the server gave no answer.
    """
    text = str(error) or type(error).__name__
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return errors.unknown_host(ssh)
    if time.monotonic() >= deadline - 0.05 or isinstance(error, TimeoutError):
        return errors.no_answer(ssh)
    if isinstance(error, ConnectionRefusedError):
        return errors.nothing_listens(ssh)
    if "Invalid SSH banner" in text or "not a SSH server" in text or "Indecipherable protocol version" in text:
        return errors.not_ssh(ssh)
    if isinstance(error, paramiko.IncompatiblePeer):
        return errors.failed(ssh, f"no cipher or key exchange in common ({text}); the server is too old or too new")
    if "SSH protocol banner" in text or isinstance(error, (EOFError, ConnectionResetError)):
        return errors.busy(ssh)
    if isinstance(error, OSError) and error.strerror:
        return errors.unreachable(ssh, error.strerror)
    return errors.failed(ssh, f"the login broke off ({text})", temporary=True)


def _prefer_known_types(transport: Any, ssh: SSHLogin) -> None:
    """Make `transport` prefer host keys of the types for which a key of the server is known.

    A server may have keys of several types. A key of a type that is not known would look like a changed key.
    """
    types = [key.key_type for key in login.expected_keys(ssh) if not key.revoked]
    known = [name for each in types for name in _SIGNATURES.get(each, (each,))]
    options = transport.get_security_options()
    options.key_types = tuple(sorted(options.key_types, key=lambda name: name not in known))


# -- authentication ------------------------------------------------------------------------------------------------------


def _authenticate(transport: Any, ssh: SSHLogin, user: str) -> None:
    """Authenticate by keys, then by password, as OpenSSH does; by several methods if the server requires more than one.

    `transport` is the transport of paramiko, and `user` the user name on the server. Raises `ConnectionFailed` if the server does
    not accept the login, or if the connection is lost before the server answers.
    """
    tried: list[str] = []
    answered = (
        False  # Whether the server has answered. After an answer, a closed connection means that no more tries are allowed.
    )
    offered: list[str] = []  # The methods that the server takes next; empty after an accepted one if the login is complete.
    prompts = login.Prompts([ssh])

    def accepts(method: Callable[..., list[str]], *arguments: Any) -> bool | None:
        """Try to authenticate by `method(user, *arguments)`, where `method` is for instance `transport.auth_password`.

        Returns True if the server accepts, even if it then requires a further kind of authentication. Returns False if the server
        refuses, and None if the server does not offer this kind of authentication.
        """
        nonlocal offered, answered
        try:
            offered = method(user, *arguments)
        except paramiko.BadAuthenticationType as error:
            offered, answered = error.allowed_types, True
            return None
        except paramiko.AuthenticationException as error:
            # paramiko raises this exception, too, if the connection is lost, or if no answer comes within `auth_timeout`.
            if "timeout" in str(error):
                raise errors.no_answer(ssh) from None
            if not answered and not transport.is_active():
                raise errors.failed(ssh, "the connection was lost during the login", temporary=True) from None
            answered = True
            return False
        answered = True
        return True

    def answers(title: str, instructions: str, fields: list[tuple[str, bool]]) -> list[str]:  # noqa: ARG001
        """Returns an answer to each prompt in `fields`; "" if there is no secret for the prompt. paramiko calls this function.

        Each item of `fields` is a prompt, and whether a terminal would show the answer.
        """
        return [prompts.answer(f"({login.login_name(ssh)}) {prompt}") or "" for prompt, _ in fields]

    for name, key in _keys(ssh):
        tried.append(name)
        accepted = accepts(transport.auth_publickey, key)
        if accepted and not offered:
            return
        if accepted is not False or not transport.is_active():  # An inactive transport: the server allows no more tries.
            break
    methods: list[tuple[Any, ...]] = []
    if ssh.password is not None or "keyboard-interactive" in offered:
        methods.append((transport.auth_interactive, answers))
    if ssh.password is not None:
        tried.append("the password")
        methods.append((transport.auth_password, ssh.password, None, False))
    for method in methods if transport.is_active() else ():
        accepted = accepts(*method)
        if accepted and not offered:
            return
        if accepted is False:
            break
    if prompts.unanswered and not login.asks_password(prompts.unanswered):
        raise errors.prompt_unanswered(ssh, prompts.unanswered, command=master_command(ssh))
    if not offered:
        with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
            accepts(transport.auth_none)
    takes = offered and f"; it takes {', '.join(offered)}"
    nothing = "nothing, for no key, agent or password is there"
    raise errors.login_refused(ssh, " and ".join(tried) or nothing, offered=takes or "")


def _keys(ssh: SSHLogin) -> Iterator[tuple[str, Any]]:
    """Yields the private keys to try in a login, in order: for each key, a name for messages and the key object of paramiko.

    Raises `ConnectionFailed` if the configured key cannot be used.
    """
    path = key_path(ssh)
    if path:
        key = login.load_key(ssh, path)
        if key is None:
            raise errors.failed(
                ssh, f'the key {path} is of a kind that paramiko does not know; use client="openssh"', subject="authentication"
            )
        yield f"the key {path}", key
        return
    for key in login.agent_keys()[:_MAX_AGENT_KEYS]:
        yield f"the agent's key {key.comment or key.fingerprint}", key
    for default in map(os.path.expanduser, _DEFAULT_KEYS):
        if os.path.exists(default):
            with contextlib.suppress(ConnectionFailed):  # The user did not configure this key.
                if (key := login.load_key(ssh, default)) is not None:
                    yield f"the key {default}", key


# -- the authenticated transport -----------------------------------------------------------------------------------------


class ParamikoStream:
    """The standard input and output of a remote command, which runs on a channel of paramiko."""

    def __init__(self, transport: ParamikoTransport, channel: Any) -> None:
        self._transport, self._channel = transport, channel
        self.recv: Callable[[int], bytes] = channel.recv
        self.sendall: Callable[[bytes], None] = channel.sendall

    def close(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            self._channel.close()

    def failure(self, noise: str) -> ConnectionFailed:
        ssh = self._transport.ssh
        code = self._channel.recv_exit_status() if self._channel.exit_status_ready() else -1
        if not self._transport.settled_alive():
            return errors.gone(ssh)
        return errors.not_started(ssh, code, noise)


class ParamikoTransport:
    """One login to a server. `transport` is the authenticated transport object of paramiko.

    `jump` is the login to the jump host, which `close` closes as well; None for a direct connection.
    """

    def __init__(self, ssh: SSHLogin, transport: Any, jump: ParamikoTransport | None) -> None:
        self.ssh = ssh
        self._transport = transport
        self._jump = jump
        self._closed = threading.Event()
        if ssh.keepalive:
            threading.Thread(target=self._keep_alive, name="rayslurm-keepalive", daemon=True).start()

    def alive(self) -> bool:
        return bool(self._transport.is_active())

    def settled_alive(self) -> bool:
        """Wait up to `_SETTLE` seconds for the end of this login; returns True if the login still works then.

        After the end of a channel, only this wait shows whether the whole login has ended: paramiko ends the channels of a login
        first, and the transport a little later.
        """
        self._transport.join(_SETTLE)
        return self.alive()

    def start(self, command: str) -> Iterator[ParamikoStream]:
        try:
            channel = self._open("session")
        except paramiko.ChannelException as error:
            # OpenSSH 9.2 answers a session beyond MaxSessions with CONNECT_FAILED "open failed".
            if error.code in (_ADMINISTRATIVELY_PROHIBITED, _CONNECT_FAILED):
                raise Refused from None
            raise errors.failed(self.ssh, f"the server opens no session ({error.text})", temporary=True) from None
        try:
            channel.set_combine_stderr(True)
            channel.exec_command(command)
        except (paramiko.SSHException, EOFError, OSError) as error:
            channel.close()
            raise errors.not_started(self.ssh, -1, str(error)) if self.alive() else errors.gone(self.ssh) from None
        yield ParamikoStream(self, channel)

    def tunnel(self, host: str, port: int, client: socket.socket) -> None:
        try:
            channel = self._open("direct-tcpip", (host, port), ("127.0.0.1", 0))
        except paramiko.ChannelException as error:
            raise errors.failed(self.ssh, f"{host}:{port} cannot be reached from there ({error.text})", temporary=True) from None
        with contextlib.closing(channel):
            upward = (client.recv, channel.sendall, channel.shutdown_write)
            thread = threading.Thread(target=copy_data, args=upward, daemon=True)
            thread.start()
            copy_data(channel.recv, client.sendall, lambda: client.shutdown(socket.SHUT_WR))
            thread.join()

    def interact(self, command: str) -> int:
        try:
            with contextlib.closing(self._open("session")) as channel:
                return terminal.relay(channel, command)
        except paramiko.ChannelException:
            raise Refused from None
        except (paramiko.SSHException, EOFError) as error:
            raise errors.gone(self.ssh, str(error)) from None

    def open_tcp(self, target: SSHLogin) -> Any:
        """Returns a channel to the SSH server `target`, for which the server of this login is the jump host.

        Raises `ConnectionFailed` if the jump host cannot reach `target`.
        """
        try:
            return self._open("direct-tcpip", (target.host, target.port), ("127.0.0.1", 0), target.connect_timeout)
        except paramiko.ChannelException as error:
            raise errors.jump_refused(target, error.text or "refused") from None
        except ConnectionFailed:
            if not self.alive():
                raise
            raise errors.jump_refused(target, f"no answer within {target.connect_timeout} s") from None

    def close(self) -> None:
        self._closed.set()
        self._transport.close()
        if self._jump is not None:
            self._jump.close()

    def _open(self, kind: str, target: Any = None, source: Any = None, timeout: float = _OPEN_TIMEOUT) -> Any:
        """Open a channel by `open_channel` of paramiko's transport; `kind`, `target` and `source` are its first three arguments.

        `timeout` is in seconds. Raises `paramiko.ChannelException` if the server refuses, and `ConnectionGone` if the server does
        not answer, or if the login has ended.
        """
        try:
            return self._transport.open_channel(
                kind, target, source, window_size=_WINDOW, max_packet_size=_PACKET, timeout=timeout
            )
        except paramiko.ChannelException:
            raise
        except (paramiko.SSHException, EOFError, OSError) as error:
            if self.alive() and "Unable to open channel" in str(error):
                # The server refused the channel, but another thread, also refused, has taken paramiko's exception about it.
                raise paramiko.ChannelException(_CONNECT_FAILED, "refused") from None
            raise errors.gone(self.ssh, "" if isinstance(error, EOFError) else str(error)) from None

    def _keep_alive(self) -> None:
        """Request an answer after `keepalive` seconds of the server's silence, and close the transport after twice this time.

        Runs in a thread of its own until the login ends. TCP does not notice a loss behind a jump host. paramiko's own
        `set_keepalive` requests no answer; `global_request` does.
        """
        asked, interval = threading.Thread(), self.ssh.keepalive
        while not self._closed.wait(interval / 4) and self.alive():
            silence = time.monotonic() - self._transport.packetizer.last_message
            if silence > 2 * interval:
                self._transport.close()
            elif silence > interval and not asked.is_alive():
                asked = threading.Thread(target=self._ask, daemon=True)
                asked.start()

    def _ask(self) -> None:
        """Send a request that every SSH server answers, and wait for the answer."""
        with contextlib.suppress(Exception):  # The transport has ended.
            self._transport.global_request("keepalive@openssh.com")


class _Packetizer(paramiko.packet.Packetizer):  # type: ignore[misc]
    """Packet reader and writer of paramiko that also records the time of the server's last message in `last_message`."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self.last_message = time.monotonic()

    def read_message(self) -> Any:
        message = super().read_message()
        self.last_message = time.monotonic()
        return message
