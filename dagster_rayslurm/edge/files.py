"""Operations on files. Paths are absolute."""

import contextlib
import errno
import os
import shutil
import stat


def home() -> str:
    """Return the home directory of the user."""
    return os.path.expanduser("~")


def modified(path: str) -> "float | None":
    """Return the time of the last change of a file or directory, in seconds since the epoch; None if the path does not exist."""
    try:
        return os.stat(path).st_mtime
    except FileNotFoundError:
        return None


def read(path: str, offset: int, limit: int) -> bytes:
    """Read at most `limit` bytes of a file, starting at `offset`; returns b"" if the file does not exist."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(limit)
    except FileNotFoundError:
        return b""


def read_many(paths: str, offsets: "list[int]", limit: int) -> "tuple[list[int], bytes]":
    """Read up to `limit` bytes of each of several files.

    `paths` are the paths of the files, separated by NUL characters. `offsets` has the position of the first byte to read, for
    each file. Returns two values: a list with the number of bytes read from each file, or -1 for a file that cannot be read; and
    the bytes of all files, one after the other. The number for a missing file is 0.
    """
    sizes, parts = [], []
    for path, offset in zip(paths.split("\0"), offsets):
        try:
            data = read(path, offset, limit)
        except OSError:
            sizes.append(-1)
        else:
            sizes.append(len(data))
            parts.append(data)
    return sizes, b"".join(parts)


def write(path: str, data: bytes, mode: int) -> None:
    """Create a file with the content `data` and the mode `mode`; an existing file is replaced atomically."""
    temporary = temporary_name(path)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            write_at(fd, 0, data)
        except BaseException:
            os.close(fd)
            raise
        finish(fd, temporary, path, mode)
    except BaseException:
        remove(temporary)
        raise


def temporary_name(path: str) -> str:
    """Return a new path in the directory of `path`, with a short name that no other thread, process or host uses."""
    return os.path.join(os.path.dirname(path), ".rs-" + os.urandom(8).hex() + ".tmp")


def names(path: str) -> "list[str]":
    """Return the names of the entries of a directory."""
    return os.listdir(path)


def make_dir(path: str) -> None:
    """Make a directory and missing parents, for this user only. An existing directory is no error."""
    if path and not os.path.isdir(path):
        make_dir(os.path.dirname(path))  # os.makedirs applies its mode to the last directory only.
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            if not os.path.isdir(path):  # Another process may have made it.
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None


def rename(old: str, new: str) -> None:
    """Rename the file `old` to `new`; an existing file `new` is replaced."""
    os.rename(old, new)


def close_to_others(directory: str) -> None:
    """Let only this user enter a directory.

    The setgid bit stays: with it, new files belong to the group of the directory, whose disk quota a site may intend for them.
    """
    os.chmod(directory, 0o700 | os.stat(directory).st_mode & stat.S_ISGID)


def remove(path: str) -> None:
    """Remove a file, or a directory with all content, even if parts of it are read-only. A missing path is no error."""
    try:
        if not os.path.isdir(path) or os.path.islink(path):
            return os.unlink(path)
        shutil.rmtree(path, ignore_errors=True)  # Another process may remove parts of it as well.
        if os.path.lexists(path):
            for parent, _, _ in os.walk(path):
                with contextlib.suppress(OSError):
                    os.chmod(parent, 0o700)
            shutil.rmtree(path)  # Raises the reason.
    except FileNotFoundError:
        pass


# -- transfers: the client keeps the descriptor ----------------------------------------------------------------------------


def open_read(path: str, version: "list[int]", offset: int, limit: int) -> "tuple[int, list[int], int, bytes]":
    """Open a file and read up to `limit` bytes from `offset` on, or from 0 if the file's version is not `version`.

    Returns the descriptor, the file's version (size, time of the last change, and inode), the offset that was used, and the
    bytes. `version` is the version that an earlier call returned; [] at the first call.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        found = [status.st_size, status.st_mtime_ns, status.st_ino]
        if found != version:
            offset = 0
        return fd, found, offset, os.pread(fd, limit, offset)
    except BaseException:
        os.close(fd)
        raise


def read_at(fd: int, offset: int, limit: int) -> bytes:
    """Read at most `limit` bytes of the open file `fd`, starting at `offset`; returns b"" at the end of the file."""
    return os.pread(fd, limit, offset)


def open_write(path: str, offset: int) -> "tuple[int, int]":
    """Open a file for writing, and create a missing file; returns the descriptor and the offset at which to write.

    `offset` is the number of bytes that were written before. The returned offset is the same number; or 0 if the file has fewer
    bytes, so that all bytes must be written again.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if os.fstat(fd).st_size < offset:  # The host name may lead to another edge node now.
        offset = 0
    return fd, offset


def write_at(fd: int, offset: int, data: bytes) -> int:
    """Write all bytes of `data` at `offset` into the open file `fd`; returns the number of bytes."""
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count
    return len(data)


def finish(fd: int, temporary: str, path: str, mode: int) -> None:
    """Set the mode of the open file `fd`, flush and close the file, and rename the file from `temporary` to `path`.

    After a lost connection, the client has the upload finished a second time. If the first agent has renamed the file meanwhile,
    that is no error.
    """
    try:
        os.fchmod(fd, mode)
        os.fsync(fd)
        status = os.fstat(fd)
    finally:
        os.close(fd)
    try:
        os.rename(temporary, path)
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(path), status):
                return
        raise


def close(fd: int) -> None:
    """Close an open file."""
    os.close(fd)
