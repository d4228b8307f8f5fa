"""`SSHConnection`, a `Connection` over SSH: retries, file transfers, commands and port forwards.

Nothing here depends on the SSH client, which only logs in and opens channels.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import BinaryIO, TypeVar

from ..runtime.protocol.record import temporary_name
from . import errors
from .base import Backoff, Completed, ConnectionFailed, ConnectionGone, ConnectionLost, Progress, ServerBusy, Stat
from .channels import ChannelPool, Process, Refused, Transport
from .config import SSHConnectionResource
from .framed_command import BYE, Frame, Output, frame
from .local import LocalConnection
from .sftp import Sftp, SftpLost

T = TypeVar("T")

_FIRST_LOGIN_PATIENCE = 3.0
"""Seconds for which a failed first login is tried again; if it still fails, the configuration is probably wrong."""
_PIPE_SIZE = 32768
"""Bytes of input that pipes and channels accept before the command reads any; a thread sends longer input."""
_LONGEST_WAIT = 3600.0
"""Seconds for which one call waits for output of a command."""
_PROGRESS = 5.0
"""Seconds that an attempt must last before it breaks, so that its end counts as the start of a new outage."""


class SSHConnection:
    """Files and commands of an edge node, by SSH. All threads share one login.

    Args:
        ssh: the server and how to log in.
        log_in: logs in with one of the two SSH clients; raises `ConnectionFailed`.
    """

    def __init__(self, ssh: SSHConnectionResource, log_in: Callable[[SSHConnectionResource], Transport]) -> None:
        self.ssh = ssh
        self._log_in = log_in
        self._lock = threading.Lock()
        self._channels: ChannelPool | None = None
        self._ever_connected = False
        self._login_failure: tuple[float, ConnectionFailed] | None = None
        self._account_lock = threading.Lock()
        self._account: tuple[int, str] | None = None

    @property
    def place(self) -> str:
        return errors.address(self.ssh)

    def run(self, command: Sequence[str], stdin: bytes = b"", timeout: float | None = None) -> Completed:
        return self._run(command, stdin, timeout, repeatable=False)

    def _run(
        self, command: Sequence[str], stdin: bytes = b"", timeout: float | None = None, repeatable: bool = True
    ) -> Completed:
        framed = frame(command, stdin)
        deadline = None if timeout is None else time.monotonic() + timeout

        def attempt(channels: ChannelPool) -> Completed:
            with (
                channels.for_command(deadline) as transport,
                contextlib.closing(transport.execute(framed.command)) as process,
            ):
                return _complete(self.ssh, process, framed, deadline)

        try:
            return self._retry(attempt, repeatable, deadline)
        except TimeoutError:
            raise TimeoutError(f"{self.place}: {shlex.join(command)[:200]} took over {timeout:g} s and was ended") from None

    def home(self) -> str:
        home = self._user_and_home()[1]
        if not home.startswith("/"):
            raise OSError(f"{self.place}: the login has no HOME; the account needs a home directory")
        return home

    def user_id(self) -> int:
        return self._user_and_home()[0]

    def _user_and_home(self) -> tuple[int, str]:
        with self._account_lock:
            if self._account is None:
                done = self._run(["sh", "-c", 'id -u && printf %s "$HOME"'])
                number, _, home = done.stdout.partition(b"\n")
                if done.returncode or not number.isdigit():
                    said = done.stderr.decode("utf-8", "replace").strip()[-300:]
                    raise OSError(f"{self.place}: `id -u` does not say who logs in: {said}")
                self._account = (int(number), os.fsdecode(home))
            return self._account

    def stat(self, path: str) -> Stat | None:
        try:
            attributes = self._on_files(f"looking at {path}", lambda sftp: sftp.stat(os.fsencode(path)))
        except FileNotFoundError:
            return None
        if attributes.st_uid is None or attributes.st_mtime is None:
            raise OSError(f"{self.place}: the SFTP server does not say whose {path} is, and of when")
        return Stat(attributes.st_uid, attributes.st_mtime)

    def read(self, path: str, offset: int, limit: int) -> bytes:
        try:
            return self._on_files(f"reading {path}", lambda sftp: sftp.read_file(os.fsencode(path), offset, limit))
        except FileNotFoundError:
            return b""

    def write(self, path: str, data: bytes, mode: int = 0o600) -> None:
        self._replace(f"writing {path}", lambda: io.BytesIO(data), path, None, mode)

    def upload(self, local_path: str, path: str, progress: Progress | None = None, mode: int = 0o600) -> None:
        self._replace(f"copying {local_path} to {path}", lambda: open(local_path, "rb"), path, progress, mode)

    def download(self, path: str, local_path: str, progress: Progress | None = None) -> None:
        LocalConnection().make_dir(os.path.dirname(local_path))
        temporary = temporary_name(local_path)
        version: list[object] = []

        def get(sftp: Sftp) -> None:
            with open(temporary, "ab") as target:  # After a loss the download continues.
                sftp.copy_out(os.fsencode(path), target, progress, version)

        try:
            self._on_files(f"copying {path} to {local_path}", get)
            os.replace(temporary, local_path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)

    def make_dir(self, path: str) -> None:
        self._on_files(f"making the directory {path}", lambda sftp: sftp.make_dirs(os.fsencode(path)))

    def rename(self, old: str, new: str) -> None:
        self._on_files(f"renaming {old}", lambda sftp: sftp.replace(os.fsencode(old), os.fsencode(new)))

    def remove(self, path: str) -> None:
        # Most calls remove a few files, and SFTP costs the edge node, which many users share, less than a shell does.
        if self._on_files(f"removing {path}", lambda sftp: _remove_few(sftp, os.fsencode(path))):
            return
        done = self._run(["rm", "-rf", "--", path])
        if done.returncode:
            raise OSError(f"{self.place}: removing {path} failed: {done.stderr.decode('utf-8', 'replace')[-500:].strip()}")

    def forward(self, host: str, port: int) -> ListeningForward:
        def tunnel(client: socket.socket) -> None:
            channels = self._logged_in()
            try:
                channels.transport.tunnel(host, port, client)
            except ConnectionGone:
                self._forget(channels)
                self._logged_in().transport.tunnel(host, port, client)

        return ListeningForward(tunnel)

    def close(self) -> None:
        with self._lock:
            if self._channels is not None:
                self._channels.close()
                self._channels = None

    def _replace(self, action: str, source: Callable[[], BinaryIO], path: str, progress: Progress | None, mode: int) -> None:
        """Write a file under a temporary name and rename it.

        After a lost connection the upload continues behind the bytes that the server has confirmed.

        Args:
            action: what the caller does, for error messages, such as "writing /a/b".
            source: opens the content.
            path: the file to create or replace.
            progress: called as bytes arrive.
            mode: permissions of the file.
        """
        temporary, target = os.fsencode(temporary_name(path)), os.fsencode(path)
        written, rename_lost = 0, False

        def put(sftp: Sftp) -> None:
            nonlocal written
            with source() as file:
                for confirmed in sftp.copy_in(file, temporary, written, progress, mode):
                    written = confirmed

        def rename(sftp: Sftp) -> None:
            nonlocal rename_lost
            try:
                sftp.replace(temporary, target)
            except FileNotFoundError:
                if not rename_lost:  # Otherwise the lost try has renamed it: no other process knows the temporary name.
                    raise
            except SftpLost:
                rename_lost = True
                raise

        def discard(sftp: Sftp) -> None:
            with contextlib.suppress(FileNotFoundError):
                sftp.remove(temporary)

        try:
            self._on_files(action, put)
            self._on_files(action, rename)
        except ConnectionFailed:
            raise
        except OSError:
            with contextlib.suppress(OSError):
                self._on_files(action, discard)
            raise

    def _on_files(self, action: str, operation: Callable[[Sftp], T]) -> T:
        """The result of a file operation, which is repeated after a lost connection.

        An error of the server is raised with a message that names `action`, such as "reading /a/b".
        """

        def attempt(channels: ChannelPool) -> T:
            try:
                with channels.for_files() as sftp:
                    return operation(sftp)
            except SftpLost as error:
                raise errors.lost(self.ssh, str(error)) from None

        try:
            return self._retry(attempt, repeatable=True)
        except ConnectionFailed:
            raise
        except OSError as error:
            failure = type(error)(f"{self.place}: {action} failed: {error.strerror or error}")
            failure.errno = error.errno
            raise failure from None

    def _retry(self, attempt: Callable[[ChannelPool], T], repeatable: bool, deadline: float | None = None) -> T:
        """The result of `attempt`, which is tried again after a temporary failure.

        Args:
            attempt: uses the channels of a login.
            repeatable: whether to try again after `ConnectionLost` too, when the server may have carried out the attempt.
            deadline: value of `time.monotonic()` after which no new attempt begins.
        """
        outage: Backoff | None = None
        while True:
            channels, began = None, time.monotonic()
            try:
                channels = self._logged_in()
                return attempt(channels)
            except Refused:
                failure = errors.no_sessions(self.ssh)
            except ConnectionFailed as error:
                failure = error
                if channels is not None and (isinstance(error, ConnectionGone) or not channels.transport.alive()):
                    self._forget(channels)  # Otherwise the login still serves other threads.
                if isinstance(error, ConnectionLost) and not repeatable:
                    raise
            if outage is None or (channels is not None and time.monotonic() - began > _PROGRESS):
                outage = Backoff(began if channels is None else time.monotonic())
            patient = self._ever_connected or isinstance(failure, ServerBusy)
            patience = self.ssh.connect_timeout if patient else min(_FIRST_LOGIN_PATIENCE, self.ssh.connect_timeout)
            pause = outage.pause()
            too_late = deadline is not None and time.monotonic() + pause > deadline
            if not failure.temporary or outage.seconds + pause > patience or too_late:
                raise failure from None
            time.sleep(pause)

    def _logged_in(self) -> ChannelPool:
        """The channels of a login that works; logs in if there is none.

        Raises:
            ConnectionFailed: the login failed, in this thread or just before in another one.
        """
        called_at = time.monotonic()
        with self._lock:
            if self._channels is not None and self._channels.transport.alive():
                return self._channels
            if self._login_failure is not None and self._login_failure[0] > called_at:
                raise self._login_failure[1]  # Another thread has just tried; waiting threads do not try one by one.
            if self._channels is not None:
                self._channels.close()
                self._channels = None
            try:
                self._channels = ChannelPool(self._log_in(self.ssh))
            except OSError as error:
                failure = error if isinstance(error, ConnectionFailed) else errors.failed(self.ssh, str(error))
                self._login_failure = (time.monotonic(), failure)
                raise failure from None
            self._ever_connected = True
            return self._channels

    def _forget(self, channels: ChannelPool) -> None:
        """Close the channels of a broken login, so that the next use logs in again."""
        with self._lock:
            if self._channels is channels:
                self._channels = None
        channels.close()


def _remove_few(sftp: Sftp, path: bytes) -> bool:
    """Remove a path by SFTP. Returns whether it is gone; an error counts as no."""
    try:
        return sftp.remove_few(path)
    except OSError:
        return False  # `rm` removes it, or tells the reason.


def _complete(ssh: SSHConnectionResource, process: Process, framed: Frame, deadline: float | None) -> Completed:
    """Send a framed command its input, read its output until it ends, and return its exit code and output.

    Raises:
        TimeoutError: the deadline passed.
        Refused, ConnectionFailed: the streams ended before the command did.
    """
    sender = None
    if len(framed.stdin) <= _PIPE_SIZE:
        process.write(framed.stdin)
    else:
        sender = threading.Thread(target=process.write, args=(framed.stdin,), daemon=True)
        sender.start()
    output = Output(framed)
    complete = False
    while not complete:
        remaining = _LONGEST_WAIT if deadline is None else min(_LONGEST_WAIT, deadline - time.monotonic())
        if remaining <= 0:
            raise TimeoutError
        try:
            complete = output.feed(*process.read(remaining))
        except EOFError:
            if output.began:  # The command may have run.
                raise errors.lost(ssh, "the command was cut off") from None
            raise process.why(*output.noise()) from None
    if sender is None or not sender.is_alive():  # Otherwise the end of the channel ends the remote script.
        process.write(BYE)
    return output.completed()


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
