"""A place behind SSH: all that does not depend on the SSH client, which only makes logins and opens channels."""

from __future__ import annotations

import abc
import contextlib
import hashlib
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
from .backoff import Backoff
from .base import Completed, ConnectionFailed, ConnectionGone, ConnectionLost, Progress, ServerBusy, Stat
from .channels import ChannelPool
from .config import SSHConnectionResource
from .forward import ListeningForward
from .framed_command import BYE, Frame, Output, frame
from .local import LocalConnection
from .sftp import Sftp, SftpLost
from .transport import Process, Refused, Transport

T = TypeVar("T")

_QUICK = 3.0
"""Seconds for which a first login that fails is tried again: what fails longer is more likely a mistake."""
_AT_ONCE = 32768
"""Bytes of input that pipes and channels take without anybody reading."""
_BLOCK = 1024 * 1024
_LONG = 3600.0
_PROGRESS = 5.0
"""An attempt that lasted so many seconds before it broke counts as progress: a new outage begins."""


class SSHConnection(abc.ABC):
    """An edge node behind SSH. One login serves all threads; it is made at first use, and again after a loss.

    Args:
        ssh: the server and how to log in.
    """

    def __init__(self, ssh: SSHConnectionResource) -> None:
        self.ssh = ssh
        self._lock = threading.Lock()
        self._who_lock = threading.Lock()
        self._sessions: ChannelPool | None = None
        self._ever_connected = False
        self._failed: tuple[float, ConnectionFailed] | None = None
        self._account: tuple[int, str] | None = None

    @property
    def place(self) -> str:
        return errors.spell(self.ssh)

    @abc.abstractmethod
    def _login(self) -> Transport:
        """Log in anew.

        Raises:
            ConnectionFailed: it does not work out.
        """

    def run(self, command: Sequence[str], stdin: bytes = b"", timeout: float | None = None) -> Completed:
        # A command that may have run is not repeated here: only its caller knows whether that does harm.
        return self._run(command, stdin, timeout, repeatable=False)

    def _run(self, command: Sequence[str], stdin: bytes, timeout: float | None, repeatable: bool) -> Completed:
        framed = frame(command, stdin)
        deadline = None if timeout is None else time.monotonic() + timeout

        def attempt(sessions: ChannelPool) -> Completed:
            with sessions.for_command(deadline) as link, contextlib.closing(link.execute(framed.command)) as process:
                return _finish(self.ssh, process, framed, deadline)

        try:
            return self._retrying(attempt, repeatable, deadline)
        except TimeoutError:
            raise TimeoutError(f"{self.place}: {shlex.join(command)[:200]} took over {timeout:g} s and was ended") from None

    def home(self) -> str:
        home = self._who()[1]
        if not home.startswith("/"):
            raise OSError(f"{self.place}: the login has no HOME; the account needs a home directory")
        return home

    def user_id(self) -> int:
        return self._who()[0]

    def _who(self) -> tuple[int, str]:
        """User id and home directory, in one command for both."""
        with self._who_lock:
            if self._account is None:
                done = self._run(["sh", "-c", 'id -u && printf %s "$HOME"'], b"", None, repeatable=True)
                number, _, home = done.stdout.partition(b"\n")
                if done.returncode or not number.isdigit():
                    said = done.stderr.decode("utf-8", "replace").strip()[-300:]
                    raise OSError(f"{self.place}: `id -u` does not say who logs in: {said}")
                self._account = (int(number), os.fsdecode(home))
            return self._account

    def stat(self, path: str) -> Stat | None:
        try:
            found = self._on_files(f"looking at {path}", lambda sftp: sftp.stat(os.fsencode(path)))
        except FileNotFoundError:
            return None
        if found.st_uid is None or found.st_mtime is None:
            raise OSError(f"{self.place}: the SFTP server does not say whose {path} is, and of when")
        return Stat(found.st_uid, found.st_mtime)

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
        seen: list[object] = []

        def get(sftp: Sftp) -> None:
            with open(temporary, "ab") as target:  # After a loss, from where it ended.
                sftp.copy_out(os.fsencode(path), target, progress, seen)

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
        # Most of what is removed is a file or a few of them; a shell on the edge node, which many share, costs more.
        if self._on_files(f"removing {path}", lambda sftp: _remove_few(sftp, os.fsencode(path))):
            return
        done = self._run(["rm", "-rf", "--", path], b"", None, repeatable=True)
        if done.returncode:
            raise OSError(f"{self.place}: removing {path} failed: {done.stderr.decode('utf-8', 'replace')[-500:].strip()}")

    def forward(self, host: str, port: int) -> ListeningForward:
        def carry(client: socket.socket) -> None:
            sessions = self._logged_in()
            try:
                sessions.link.tunnel(host, port, client)
            except ConnectionGone:
                self._forget(sessions)
                self._logged_in().link.tunnel(host, port, client)

        return ListeningForward(carry)

    def close(self) -> None:
        with self._lock:
            if self._sessions is not None:
                self._sessions.close()
                self._sessions = None

    def _replace(self, doing: str, source: Callable[[], BinaryIO], path: str, progress: Progress | None, mode: int) -> None:
        """Write to a temporary name, from where the last try ended, and rename."""
        temporary, target = os.fsencode(temporary_name(path)), os.fsencode(path)
        arrived, resumed, renamed = 0, False, False

        def put(sftp: Sftp) -> None:
            nonlocal arrived, resumed
            with source() as file:
                size = file.seek(0, os.SEEK_END)
                resumed |= arrived > 0
                for done in sftp.copy_in(file, size, temporary, arrived, progress, mode):
                    arrived = done

        def rename(sftp: Sftp) -> None:
            nonlocal renamed
            try:
                sftp.replace(temporary, target)
            except FileNotFoundError:
                if not renamed:  # Nobody else knows the name: a lost try has done it.
                    raise
            except SftpLost:
                renamed = True
                raise

        def discard(sftp: Sftp) -> None:
            with contextlib.suppress(FileNotFoundError):
                sftp.remove(temporary)

        try:
            self._on_files(doing, put)
            while resumed and not self._same(source, temporary):
                # The server lost what it had taken; another edge node may go by the same name.
                arrived, resumed = 0, False
                self._on_files(doing, put)
            self._on_files(doing, rename)
        except ConnectionFailed:
            raise
        except BaseException:
            with contextlib.suppress(OSError):
                self._on_files(f"removing {os.fsdecode(temporary)}", discard)
            raise

    def _same(self, source: Callable[[], BinaryIO], path: bytes) -> bool:
        """Whether a file there has the content of one here."""
        digest = hashlib.sha256()
        with source() as file:
            while data := file.read(_BLOCK):
                digest.update(data)
        done = self._run(["sha256sum", "--", os.fsdecode(path)], b"", None, repeatable=True)
        return digest.hexdigest().encode() in done.stdout[:66]

    def _on_files(self, doing: str, action: Callable[[Sftp], T]) -> T:
        """Do something with files, again if the connection breaks; what the server refuses is said in a sentence."""

        def attempt(sessions: ChannelPool) -> T:
            try:
                with sessions.for_files() as sftp:
                    return action(sftp)
            except SftpLost as error:
                raise errors.lost(self.ssh, str(error)) from None

        try:
            return self._retrying(attempt, repeatable=True)
        except ConnectionFailed:
            raise
        except OSError as error:
            named = type(error)(f"{self.place}: {doing} failed: {error.strerror or error}")
            named.errno = error.errno
            raise named from None

    def _retrying(self, attempt: Callable[[ChannelPool], T], repeatable: bool, deadline: float | None = None) -> T:
        outage: Backoff | None = None
        while True:
            sessions, began = None, time.monotonic()
            try:
                sessions = self._logged_in()
                return attempt(sessions)
            except Refused:
                failure = errors.no_sessions(self.ssh)
            except ConnectionFailed as error:
                failure = error
                if sessions is not None and (isinstance(error, ConnectionGone) or not sessions.link.alive()):
                    self._forget(sessions)  # Else the login still serves other threads.
                if isinstance(error, ConnectionLost) and not repeatable:
                    raise
            if outage is None or (sessions is not None and time.monotonic() - began > _PROGRESS):
                outage = Backoff(began if sessions is None else time.monotonic())
            patient = self._ever_connected or isinstance(failure, ServerBusy)
            patience = self.ssh.connect_timeout if patient else min(_QUICK, self.ssh.connect_timeout)
            pause = outage.pause()
            over = deadline is not None and time.monotonic() + pause > deadline
            if not failure.temporary or outage.seconds + pause > patience or over:
                raise failure from None
            time.sleep(pause)

    def _logged_in(self) -> ChannelPool:
        asked = time.monotonic()
        with self._lock:
            if self._sessions is not None and self._sessions.link.alive():
                return self._sessions
            if self._failed is not None and self._failed[0] > asked:
                raise self._failed[1]  # Another thread has just tried; all of them in turn would take for ever.
            if self._sessions is not None:
                self._sessions.close()
                self._sessions = None
            try:
                self._sessions = ChannelPool(self._login())
            except OSError as error:
                failure = error if isinstance(error, ConnectionFailed) else errors.other(self.ssh, str(error), temporary=False)
                self._failed = (time.monotonic(), failure)
                raise failure from None
            self._ever_connected = True
            return self._sessions

    def _forget(self, sessions: ChannelPool) -> None:
        with self._lock:
            if self._sessions is sessions:
                self._sessions = None
        sessions.close()


def _remove_few(sftp: Sftp, path: bytes) -> bool:
    """Remove what can be removed piece by piece; False if something stays, or it is too much for that."""
    try:
        return sftp.remove_few(path)
    except OSError:
        return False  # rm knows why, if it cannot do it either.


def _finish(ssh: SSHConnectionResource, process: Process, framed: Frame, deadline: float | None) -> Completed:
    """Feed a framed command and read until it has said that it ended.

    Raises:
        TimeoutError: the deadline passed.
        Refused, ConnectionFailed: it was cut off.
    """
    feeder = None
    if len(framed.stdin) <= _AT_ONCE:
        process.write(framed.stdin)
    else:
        feeder = threading.Thread(target=process.write, args=(framed.stdin,), daemon=True)
        feeder.start()
    output = Output(framed)
    complete = False
    while not complete:
        remaining = _LONG if deadline is None else min(_LONG, deadline - time.monotonic())
        if remaining <= 0:
            raise TimeoutError
        try:
            complete = output.feed(*process.read(remaining))
        except EOFError:
            # Whatever it was that ended it: what may have run must not look as if it had not.
            if output.began:
                raise errors.lost(ssh, "the command was cut off") from None
            raise process.why(*output.noise()) from None
    took_it_all = feeder is None or not feeder.is_alive()
    if took_it_all:  # Else the end of the channel is goodbye enough.
        process.write(BYE)
    return output.completed()
