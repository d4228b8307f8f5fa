"""Simulates one client of a slow network file system: it sees changes of other clients late, and its own changes at once.

It is a small FUSE file system without a library; fuse(4) and the kernel's `include/uapi/linux/fuse.h` describe the messages. The
program runs as `lagging.py SOURCE TARGET OPTIONS`, one process for each client, so that each client has its own delays. Tests use
`lagging`.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import re
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .mounts import LIBC, unmount

_IN = struct.Struct("<IIQQIIIHH")
_OUT = struct.Struct("<IiQ")
_MAX_WRITE = 128 * 1024
"""Bytes that the kernel writes in one message."""
_DIRECT_IO = 1
"""Flag of an opened file: the kernel caches no content, and asks at every read."""


@dataclass(frozen=True)
class Lag:
    """How late a client sees changes of other clients. All times are in seconds.

    Attributes:
        size: longest time for which the client sees the old length of a file that another client extends. The length after that
            may be too short once more. A file that the client sees for the first time has its real length, as NFS promises.
        least: shortest time for which the client sees the old length.
        hidden: time for which the client does not find a new name of another client, from its first look on.
        missing: time for which a name that the client did not find stays missing.
        renamed: time for which a name leads to the old file after another client has replaced it.
        failing: regular expression of file names whose first open fails with ESTALE and whose first read fails with EIO.
        seed: seed of the random choices.
    """

    size: float = 0.0
    least: float = 0.0
    hidden: float = 0.0
    missing: float = 0.0
    renamed: float = 0.0
    failing: str = "(?!)"
    seed: int = 0


class _Node:
    """A file or directory as this client knows it. Its open descriptor keeps it, even without a name."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.path = f"/proc/self/fd/{fd}"
        self.own = 0
        """Number of times that this client has the file open for writing; if any, it sees the real length."""
        self.seen: int | None = None
        self.look_again = 0.0
        self.cut = False
        """Whether the length that this client saw last was too short."""
        self.listed: tuple[float, list[str]] | None = None
        self.errors: list[int] = []


class LaggingClient:
    """The FUSE server of one client: answers the kernel's messages with a late view of a directory.

    Args:
        source: the directory that all clients share.
        device: descriptor of /dev/fuse, from which the kernel's messages come.
        lag: how late this client sees changes.
    """

    def __init__(self, source: str, device: int, lag: Lag) -> None:
        self._device = device
        self._lag = lag
        self._random = random.Random(lag.seed)
        root = _Node(os.open(source, os.O_PATH | os.O_DIRECTORY))
        self._nodes: dict[int, _Node] = {1: root}
        self._numbers = {self._key(root): 1}
        self._names: dict[tuple[int, str], tuple[float, int | None]] = {}
        self._shown: set[tuple[int, str]] = set()
        """Names, each after the number of its directory, that are not hidden (again) from this client."""
        self._files: dict[int, bool] = {}
        """Descriptors of open files, each with whether it is open for writing."""
        self._lists: dict[int, list[str]] = {}
        self._next = 1

    def serve(self) -> None:
        """Answer the kernel's messages until the file system is unmounted."""
        while True:
            try:
                message = os.read(self._device, _MAX_WRITE + 65536)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                    continue
                return
            _, opcode, unique, number, uid, gid, *_ = _IN.unpack_from(message)
            action = self._ACTIONS.get(opcode)
            if opcode in (2, 36, 42):  # FORGET, INTERRUPT, BATCH_FORGET: not answered.
                continue
            code, data = 0, b""
            try:
                if action is None:
                    raise OSError(errno.ENOSYS, "")
                data = action(self, number, message[_IN.size :], (uid, gid))
            except OSError as error:
                code = error.errno or errno.EIO
            try:
                os.write(self._device, _OUT.pack(_OUT.size + len(data), -code, unique) + data)
            except OSError as error:
                if error.errno != errno.ENOENT:  # ENOENT: the kernel has cancelled the request.
                    return

    # ---- Delays: names and lengths of files

    def _find(self, parent: int, name: str) -> int:
        """The number of the file with a name in a directory, as this client sees it now.

        Raises:
            FileNotFoundError: the name does not exist, or is still hidden from this client.
        """
        now, key = time.monotonic(), (parent, name)
        until, number = self._names.get(key, (0.0, None))
        if now < until:
            if number is None:
                raise FileNotFoundError(errno.ENOENT, name)
            return number
        try:
            found = self._number(os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._nodes[parent].fd), name)
        except FileNotFoundError:
            self._names[key] = now + self._lag.missing, None
            raise
        if self._lag.hidden and key not in self._shown:
            self._shown.add(key)
            if time.time() - os.stat(self._nodes[found].path).st_mtime < self._lag.hidden:
                self._names[key] = now + self._lag.hidden, None
                raise FileNotFoundError(errno.ENOENT, name)
        self._names[key] = now + self._lag.renamed, found
        return found

    def _size(self, node: _Node, real: int) -> int:
        """The length of a file as this client sees it: the old length, the real one, or one between them."""
        now = time.monotonic()
        if node.own or node.seen is None or real < node.seen:
            node.seen = real
        elif now >= node.look_again:
            node.seen = real if node.cut else self._random.choice([real, self._random.randint(node.seen, real)])
            node.cut = node.seen < real
        else:
            return node.seen
        node.look_again = now + self._random.uniform(self._lag.least, self._lag.size)
        return node.seen

    # ---- Files by the numbers that the kernel knows them by

    def _key(self, node: _Node) -> tuple[int, int]:
        found = os.fstat(node.fd)
        return found.st_dev, found.st_ino

    def _number(self, fd: int, name: str = "") -> int:
        """The number of an open file, by which the kernel refers to the file; a new number for an unknown file."""
        node = _Node(fd)
        key = self._key(node)
        known = self._numbers.get(key)
        if known is not None:
            os.close(fd)
            return known
        if re.search(self._lag.failing, name):
            node.errors = [errno.EIO, errno.ESTALE]
        self._next += 1
        self._nodes[self._next] = node
        self._numbers[key] = self._next
        return self._next

    def _attributes(self, number: int) -> bytes:
        node = self._nodes[number]
        found = os.fstat(node.fd)
        size = self._size(node, found.st_size) if stat.S_ISREG(found.st_mode) else found.st_size
        seconds = [divmod(each, 10**9) for each in (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)]
        return struct.pack(
            "<6Q10I",
            *(found.st_ino, size, (size + 511) // 512, *(each[0] for each in seconds)),
            *(each[1] for each in seconds),
            *(found.st_mode, found.st_nlink, found.st_uid, found.st_gid, found.st_rdev, 4096, 0),
        )

    def _entry(self, number: int) -> bytes:
        return struct.pack("<4Q2I", number, 0, 0, 0, 0, 0) + self._attributes(number)

    @contextmanager
    def _making(self, parent: int, name: str) -> Iterator[None]:
        """Wraps the creation of a name. If the name exists already, the client sees it from then on, as on NFS."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                self._shown.add((parent, name))
                self._names.pop((parent, name), None)
            raise

    def _made(self, parent: int, name: str, who: tuple[int, int] | None) -> int:
        """Record a file that this client has made or moved, which it sees at once; returns its number."""
        directory = self._nodes[parent]
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=directory.fd)
        number = self._number(fd)
        self._shown.add((parent, name))
        if who is not None:
            os.chown(name, *who, dir_fd=directory.fd, follow_symlinks=False)
        directory.listed = None
        self._names[parent, name] = time.monotonic() + self._lag.renamed, number
        return number

    def _gone(self, parent: int, name: str) -> None:
        self._nodes[parent].listed = None
        self._names[parent, name] = time.monotonic() + self._lag.missing, None

    # ---- Answers to the kernel's messages, one method for each kind

    def _init(self, _: int, data: bytes, __: Any) -> bytes:
        major, minor, ahead, _flags = struct.unpack_from("<4I", data)
        return struct.pack("<4I2H2I2H8I", major, min(minor, 31), ahead, 0, 0, 0, _MAX_WRITE, 1, 0, 0, *[0] * 8)

    def _lookup(self, number: int, data: bytes, _: Any) -> bytes:
        return self._entry(self._find(number, _text(data)))

    def _getattr(self, number: int, _: bytes, __: Any) -> bytes:
        return struct.pack("<Q2I", 0, 0, 0) + self._attributes(number)

    def _setattr(self, number: int, data: bytes, _: Any) -> bytes:
        valid, _pad, _fh, size, _owner, atime, mtime, _ctime, atime_ns, mtime_ns, _c, mode, _u, uid, gid, _v = struct.unpack_from(
            "<2I6Q8I", data
        )
        node = self._nodes[number]
        if valid & 1:
            os.chmod(node.path, stat.S_IMODE(mode))
        if valid & 6:
            os.chown(node.path, uid if valid & 2 else -1, gid if valid & 4 else -1)
        if valid & 8:
            os.truncate(node.path, size)
            node.seen = size
        if valid & 48:
            now, found = time.time_ns(), os.stat(node.path)
            new_a = now if valid & 128 else atime * 10**9 + atime_ns if valid & 16 else found.st_atime_ns
            new_m = now if valid & 256 else mtime * 10**9 + mtime_ns if valid & 32 else found.st_mtime_ns
            os.utime(node.path, ns=(new_a, new_m))
        return self._getattr(number, b"", None)

    def _readlink(self, number: int, _: bytes, __: Any) -> bytes:
        return os.fsencode(os.readlink("", dir_fd=self._nodes[number].fd))

    def _symlink(self, number: int, data: bytes, who: Any) -> bytes:
        name, target = (os.fsdecode(each) for each in data.split(b"\0")[:2])
        with self._making(number, name):
            os.symlink(target, name, dir_fd=self._nodes[number].fd)
        return self._entry(self._made(number, name, who))

    def _mkdir(self, number: int, data: bytes, who: Any) -> bytes:
        mode, name = struct.unpack_from("<I", data)[0], _text(data[8:])
        with self._making(number, name):
            os.mkdir(name, mode, dir_fd=self._nodes[number].fd)
        return self._entry(self._made(number, name, who))

    def _mknod(self, number: int, data: bytes, who: Any) -> bytes:
        (mode, device), name = struct.unpack_from("<2I", data), _text(data[16:])
        with self._making(number, name):
            os.mknod(name, mode, device, dir_fd=self._nodes[number].fd)
        return self._entry(self._made(number, name, who))

    def _create(self, number: int, data: bytes, who: Any) -> bytes:
        flags, mode, _, _ = struct.unpack_from("<4I", data)
        name = _text(data[16:])
        there = self._exists(number, name)
        with self._making(number, name):
            fd = os.open(name, flags | os.O_CLOEXEC, mode, dir_fd=self._nodes[number].fd)
        made = self._made(number, name, None if there else who)
        handle = self._handle(made, fd, flags)
        return self._entry(made) + handle

    def _exists(self, parent: int, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self._nodes[parent].fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def _unlink(self, number: int, data: bytes, _: Any) -> bytes:
        os.unlink(_text(data), dir_fd=self._nodes[number].fd)
        self._gone(number, _text(data))
        return b""

    def _rmdir(self, number: int, data: bytes, _: Any) -> bytes:
        os.rmdir(_text(data), dir_fd=self._nodes[number].fd)
        self._gone(number, _text(data))
        return b""

    def _rename(self, number: int, data: bytes, _: Any) -> bytes:
        return self._move(number, struct.unpack_from("<Q", data)[0], data[8:])

    def _rename2(self, number: int, data: bytes, _: Any) -> bytes:
        if struct.unpack_from("<QI", data)[1]:
            raise OSError(errno.EINVAL, "")
        return self._move(number, struct.unpack_from("<Q", data)[0], data[16:])

    def _move(self, source: int, target: int, names: bytes) -> bytes:
        old, new = (os.fsdecode(name) for name in names.split(b"\0")[:2])
        with self._making(target, new):
            os.rename(old, new, src_dir_fd=self._nodes[source].fd, dst_dir_fd=self._nodes[target].fd)
        self._gone(source, old)
        self._made(target, new, None)
        return b""

    def _link(self, number: int, data: bytes, _: Any) -> bytes:
        old, name = struct.unpack_from("<Q", data)[0], _text(data[8:])
        with self._making(number, name):
            os.link(self._nodes[old].path, name, dst_dir_fd=self._nodes[number].fd, follow_symlinks=True)
        return self._entry(self._made(number, name, None))

    def _open(self, number: int, data: bytes, _: Any) -> bytes:
        node, flags = self._nodes[number], struct.unpack_from("<I", data)[0]
        if node.errors:
            raise OSError(node.errors.pop(), "")
        fd = os.open(node.path, flags & ~(os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW) | os.O_CLOEXEC)
        return self._handle(number, fd, flags)

    def _handle(self, number: int, fd: int, flags: int) -> bytes:
        self._files[fd] = flags & os.O_ACCMODE != os.O_RDONLY
        self._nodes[number].own += self._files[fd]
        return struct.pack("<Q2I", fd, _DIRECT_IO, 0)

    def _read(self, number: int, data: bytes, _: Any) -> bytes:
        fd, offset, size = struct.unpack_from("<2QI", data)
        node = self._nodes[number]
        if node.errors:
            raise OSError(node.errors.pop(), "")
        known = self._size(node, os.fstat(fd).st_size)
        return os.pread(fd, max(0, min(size, known - offset)), offset)

    def _write(self, _: int, data: bytes, __: Any) -> bytes:
        fd, offset, size = struct.unpack_from("<2QI", data)
        return struct.pack("<2I", os.pwrite(fd, data[40 : 40 + size], offset), 0)

    def _statfs(self, _: int, __: bytes, ___: Any) -> bytes:
        found = os.statvfs(self._nodes[1].path)
        counts = (found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree)
        return struct.pack("<5Q10I", *counts, found.f_bsize, 255, found.f_frsize, *[0] * 7)

    def _release(self, number: int, data: bytes, _: Any) -> bytes:
        fd, node = struct.unpack_from("<Q", data)[0], self._nodes[number]
        if self._files.pop(fd):
            node.own -= 1
            node.seen = os.fstat(fd).st_size
        os.close(fd)
        return b""

    def _fsync(self, _: int, data: bytes, __: Any) -> bytes:
        os.fsync(struct.unpack_from("<Q", data)[0])
        return b""

    def _nothing(self, _: int, __: bytes, ___: Any) -> bytes:
        return b""

    def _opendir(self, number: int, _: bytes, __: Any) -> bytes:
        node, now = self._nodes[number], time.monotonic()
        if node.listed is None or now >= node.listed[0]:
            node.listed = now + self._random.uniform(0, self._lag.renamed), sorted(os.listdir(node.path))
        self._next += 1
        self._lists[self._next] = [".", "..", *node.listed[1]]
        return struct.pack("<Q2I", self._next, 0, 0)

    def _readdir(self, _: int, data: bytes, __: Any) -> bytes:
        handle, offset, size = struct.unpack_from("<2QI", data)
        parts: list[bytes] = []
        for place, name in list(enumerate(self._lists[handle]))[offset:]:
            text = os.fsencode(name)
            entry = struct.pack("<2Q2I", 1, place + 1, len(text), 0) + text
            entry += b"\0" * (-len(entry) % 8)
            if sum(map(len, parts)) + len(entry) > size:
                break
            parts.append(entry)
        return b"".join(parts)

    def _releasedir(self, _: int, data: bytes, __: Any) -> bytes:
        del self._lists[struct.unpack_from("<Q", data)[0]]
        return b""

    _ACTIONS: dict[int, Callable[[LaggingClient, int, bytes, Any], bytes]] = {
        1: _lookup,
        3: _getattr,
        4: _setattr,
        5: _readlink,
        6: _symlink,
        8: _mknod,
        9: _mkdir,
        10: _unlink,
        11: _rmdir,
        12: _rename,
        13: _link,
        14: _open,
        15: _read,
        16: _write,
        17: _statfs,
        18: _release,
        20: _fsync,
        25: _nothing,
        26: _init,
        27: _opendir,
        28: _readdir,
        29: _releasedir,
        30: _nothing,
        35: _create,
        38: _nothing,
        45: _rename2,
    }


def _text(data: bytes) -> str:
    return os.fsdecode(data.split(b"\0", 1)[0])


@contextmanager
def lagging(source: Path, target: Path, lag: Lag) -> Iterator[Path]:
    """Mounts a client's late view of the directory `source` at `target` on this machine."""
    target.mkdir()
    words = [sys.executable, "-m", "tests.faults.lagging", str(source), str(target), json.dumps(asdict(lag))]
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(words, cwd=root, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "mounted\n"
        yield target
    finally:
        unmount(target)
        process.send_signal(signal.SIGKILL)
        process.communicate()


def main() -> None:
    source, target, options = sys.argv[1:]
    device = os.open("/dev/fuse", os.O_RDWR)
    data = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions".encode()
    if LIBC.mount(b"lagging", target.encode(), b"fuse.lagging", 6, data):  # MS_NOSUID | MS_NODEV
        sys.exit(f"{target} cannot be mounted: {os.strerror(ctypes.get_errno())}")
    os.umask(0)
    print("mounted", flush=True)
    LaggingClient(source, device, Lag(**json.loads(options))).serve()


if __name__ == "__main__":
    main()
