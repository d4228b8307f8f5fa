"""Files over SFTP: paramiko's client, made safe and fast for many threads, and the few operations that are needed.

paramiko's `SFTPClient` lets each caller read the responses itself, so that two threads take each other's. Here one
thread reads them all; requests of any thread are in flight together, which is what makes a slow link bearable.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import stat
import threading
from collections.abc import Iterator
from typing import Any, BinaryIO

import paramiko
from paramiko import sftp as protocol

from .base import ConnectionFailed, Progress

_CHUNK = 32768
"""Bytes per request: what every SFTP server takes (draft-ietf-secsh-filexfer-02, section 3)."""
_WINDOW = 64
"""Requests in flight during a transfer: 2 MiB, as much as OpenSSH's channel window."""
_VERSION = re.compile(rb"\0\0[\0-\x10][\0-\xff]\x02\0\0\0\x03")
"""How the server's first packet begins: its length, SSH_FXP_VERSION, version 3. No text that a shell prints looks so."""
_MOST_NOISE = 1024 * 1024
_FEW = 64
"""Files and directories that are removed one by one."""


class SftpLost(Exception):
    """The channel ended; whether a request was carried out is not known."""


class _Reply:
    """The response to one request, once it is there."""

    def __init__(self) -> None:
        self._arrived = threading.Event()
        self._kind: int | None = None
        self._message: Any = None

    def _async_response(self, kind: int, message: Any, number: int) -> None:  # noqa: ARG002 - paramiko's signature
        self._kind, self._message = kind, message
        self._arrived.set()

    def lose(self) -> None:
        self._arrived.set()

    def wait(self) -> tuple[int, Any]:
        self._arrived.wait()
        if self._kind is None:
            raise SftpLost
        return self._kind, self._message


class Sftp(paramiko.SFTPClient):  # type: ignore[misc]
    """An SFTP session that any number of threads may use.

    Args:
        stream: an open channel with `send`, `recv` and `close`.
    """

    def __init__(self, stream: Any) -> None:
        self._send_lock = threading.Lock()
        self._lost = False
        try:
            super().__init__(stream)
        except ConnectionFailed:
            stream.close()
            raise
        except (paramiko.SSHException, EOFError, OSError, protocol.SFTPError) as error:
            stream.close()
            raise SftpLost(str(error)) from None
        threading.Thread(target=self._dispatch, name="rayslurm-sftp", daemon=True).start()

    def _send_packet(self, kind: Any, packet: Any) -> None:
        with self._send_lock:  # A packet may leave in several pieces.
            super()._send_packet(kind, packet)

    def _send_version(self) -> int:
        """Shake hands, passing over what start-up files of the login shell print before the server's first packet."""
        message = paramiko.Message()
        message.add_int(3)
        with contextlib.suppress(OSError):  # A channel that is closed already may hold what its other end said before.
            self._send_packet(protocol.CMD_INIT, message)
        seen = b""
        while True:
            found = _VERSION.search(seen)
            if found and len(seen) >= found.start() + 4 + int.from_bytes(found.group()[:4], "big"):
                return 3
            data = self.sock.recv(_CHUNK)
            if not data or len(seen) > _MOST_NOISE:
                raise protocol.SFTPError(seen.decode("utf-8", "replace")[-300:].strip())
            seen += data

    def _dispatch(self) -> None:
        with contextlib.suppress(Exception):  # However the channel ended, whoever waits is told below.
            while True:
                self._read_response()
        self._lost = True
        for reply in list(self._expecting.values()):
            reply.lose()

    def _request(self, kind: Any, *arguments: Any) -> tuple[int, Any]:
        return self.answer(self.submit(kind, *arguments))

    def submit(self, kind: Any, *arguments: Any) -> _Reply:
        """Send a request; its response is asked for with `answer`, or by nobody."""
        reply = _Reply()
        try:
            self._async_request(reply, kind, *arguments)
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise SftpLost(str(error)) from None
        if self._lost:
            raise SftpLost
        return reply

    def answer(self, reply: _Reply) -> tuple[int, Any]:
        """The response to a request.

        Raises:
            EOFError: a read at the end of the file.
            OSError: what the server says it is.
            SftpLost: the channel ended first.
        """
        kind, message = reply.wait()
        if kind == protocol.CMD_STATUS:
            self._convert_status(message)
        return kind, message

    @property
    def lost(self) -> bool:
        """Whether the channel has ended."""
        return self._lost

    # -- what is done with files -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def opened(self, path: bytes, flags: int, mode: int | None = None) -> Iterator[bytes]:
        """A handle of a file; nobody waits for its closing."""
        attributes = paramiko.SFTPAttributes()
        if mode is not None:
            attributes.st_mode = mode
        _, message = self._request(protocol.CMD_OPEN, path, flags, attributes)
        handle = message.get_binary()
        try:
            yield handle
        finally:
            with contextlib.suppress(SftpLost):
                self.submit(protocol.CMD_CLOSE, handle)

    def _read_request(self, handle: bytes, offset: int, size: int) -> _Reply:
        return self.submit(protocol.CMD_READ, handle, protocol.int64(offset), size)

    def _data(self, reply: _Reply) -> bytes:
        try:
            return bytes(self.answer(reply)[1].get_binary())
        except EOFError:
            return b""

    def read_file(self, path: bytes, offset: int, limit: int) -> bytes:
        """At most `limit` bytes from an offset on: two round trips for a file with little news, three for one with much."""
        with self.opened(path, protocol.SFTP_FLAG_READ) as handle:
            first = self._data(self._read_request(handle, offset, min(limit, _CHUNK)))
            if len(first) < _CHUNK:
                return first
            starts = range(offset + _CHUNK, offset + limit, _CHUNK)
            replies = [self._read_request(handle, start, min(_CHUNK, offset + limit - start)) for start in starts]
            parts = [first]
            for reply in replies:
                parts.append(self._data(reply))
                if len(parts[-1]) < _CHUNK:  # What follows a short part would leave a gap.
                    break
            return b"".join(parts)

    def copy_out(self, path: bytes, target: BinaryIO, progress: Progress | None, seen: list[object]) -> None:
        """Append the file to `target`, from where that one ends; from the start, if it is not the file of before.

        Args:
            path: the file.
            target: where it goes.
            progress: told as it goes.
            seen: empty at first; what tells the file from another one, between one try and the next.
        """
        with self.opened(path, protocol.SFTP_FLAG_READ) as handle:
            _, message = self._request(protocol.CMD_FSTAT, handle)
            found = paramiko.SFTPAttributes._from_msg(message)
            size = found.st_size or 0
            if seen != [size, found.st_mtime]:
                seen[:] = [size, found.st_mtime]
                target.truncate(0)
                target.seek(0)
            done = asked = target.tell()
            replies: collections.deque[_Reply] = collections.deque()
            while True:
                while len(replies) < _WINDOW and (asked < size or not replies):
                    replies.append(self._read_request(handle, asked, _CHUNK))
                    asked += _CHUNK
                data = self._data(replies.popleft())
                target.write(data)
                done += len(data)
                if progress and data:
                    progress(done, max(size, done))
                if len(data) < _CHUNK:
                    if not data:
                        return
                    replies.clear()  # A short part: go on behind it, without a gap.
                    asked = done

    def copy_in(self, source: BinaryIO, path: bytes, start: int, progress: Progress | None, mode: int) -> Iterator[int]:
        """Write a file from `start` on, or from its beginning if the server has lost that part, and fsync it.

        Yields the number of bytes that the server has confirmed.
        """
        size = source.seek(0, os.SEEK_END)
        new = protocol.SFTP_FLAG_CREATE | protocol.SFTP_FLAG_TRUNC
        if start:
            try:  # Another edge node that goes by the same name may not have what was sent.
                start = start if (self.stat(path).st_size or 0) >= start else 0
            except FileNotFoundError:
                start = 0
        with self.opened(path, protocol.SFTP_FLAG_WRITE | (0 if start else new), mode) as handle:
            source.seek(start)
            done, replies = start, collections.deque[tuple[_Reply, int]]()
            while True:
                data = source.read(_CHUNK)
                if data:
                    request = self.submit(protocol.CMD_WRITE, handle, protocol.int64(source.tell() - len(data)), data)
                    replies.append((request, len(data)))
                if not replies:
                    break
                if not data or len(replies) >= _WINDOW:
                    reply, length = replies.popleft()
                    self.answer(reply)
                    done += length
                    if progress:
                        progress(done, size)
                    yield done
            self._finish(handle, mode)

    def _finish(self, handle: bytes, mode: int) -> None:
        """Let the mode be what was asked for whatever the umask, and the content be on the disk."""
        attributes = paramiko.SFTPAttributes()
        attributes.st_mode = mode
        replies = [
            self.submit(protocol.CMD_FSETSTAT, handle, attributes),
            self.submit(protocol.CMD_EXTENDED, "fsync@openssh.com", handle),
        ]
        self.answer(replies[0])
        kind, message = replies[1].wait()
        # Servers other than OpenSSH's may not know fsync; one that knows it and fails means a full or broken disk.
        if kind == protocol.CMD_STATUS and message.get_int() not in (protocol.SFTP_OK, protocol.SFTP_OP_UNSUPPORTED):
            raise OSError("it cannot be written to the disk (full, or over quota)")

    def entries(self, path: bytes) -> Iterator[tuple[bytes, bool]]:
        """What is in a directory, and which of it are directories; links are none."""
        _, message = self._request(protocol.CMD_OPENDIR, path)
        handle = message.get_binary()
        try:
            while True:
                try:
                    _, message = self._request(protocol.CMD_READDIR, handle)
                except EOFError:
                    return
                for _ in range(message.get_int()):
                    name, _ = message.get_binary(), message.get_binary()
                    attributes = paramiko.SFTPAttributes._from_msg(message)
                    if name not in (b".", b".."):
                        yield name, stat.S_ISDIR(attributes.st_mode or 0)
        finally:
            with contextlib.suppress(SftpLost):
                self.submit(protocol.CMD_CLOSE, handle)

    def remove_few(self, path: bytes) -> bool:
        """Remove a file, or a directory with the little that is in it; one that is not there is no error.

        Returns:
            Whether it is gone; False if there is more in it, nothing of which is touched then.

        Raises:
            OSError: some of it cannot be removed.
        """
        try:
            if not stat.S_ISDIR(self.lstat(path).st_mode or 0):
                self._request(protocol.CMD_REMOVE, path)
                return True
        except FileNotFoundError:
            return True
        files: list[bytes] = []
        directories = [path]
        for directory in directories:  # Grows as it is gone through.
            for name, is_directory in self.entries(directory):
                (directories if is_directory else files).append(directory + b"/" + name)
                if len(files) + len(directories) > _FEW:
                    return False
        for reply in [self.submit(protocol.CMD_REMOVE, each) for each in files]:
            self._gone(reply)
        for directory in reversed(directories):
            self._gone(self.submit(protocol.CMD_RMDIR, directory))
        return True

    def _gone(self, reply: _Reply) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.answer(reply)

    def replace(self, temporary: bytes, path: bytes) -> None:
        """Rename over whatever is there, in one step (posix-rename@openssh.com, OpenSSH PROTOCOL section 4.3)."""
        self._request(protocol.CMD_EXTENDED, "posix-rename@openssh.com", temporary, path)

    def make_dirs(self, path: bytes) -> None:
        """Make a directory and its parents, each for this user alone."""
        try:
            if stat.S_ISDIR(self.stat(path).st_mode or 0):
                return
            raise NotADirectoryError("what is there is not a directory")
        except FileNotFoundError:
            pass
        parent = os.path.dirname(path.rstrip(b"/"))
        if parent not in (b"", path):
            self.make_dirs(parent)
        try:
            self.mkdir(path, 0o700)
        except OSError:
            if not stat.S_ISDIR(self.stat(path).st_mode or 0):  # Another run was faster.
                raise
