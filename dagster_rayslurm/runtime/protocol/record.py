"""The record of a run: append-only JSON lines, each with its own checksum, that survive torn writes and full disks.

`journal.jsonl` holds the start, phases, Pipes messages, usage and exactly one `end`; `stdio.jsonl` the payload's
output; `status.json` the current state. Writers own a file alone; readers keep a byte offset and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import zlib
from typing import Any, Dict, List, Optional, Tuple

JOURNAL = "journal.jsonl"
STDIO = "stdio.jsonl"
STATUS = "status.json"
RUNTIME_LOG = "runtime.log"

RUNTIME = "runtime.json"
PAYLOAD = "payload.json"
SECRETS = "secrets.json"
CONTEXT = "pipes_context.json"
SESSION = "session.json"
CANCEL = "cancel.json"
EXIT = "exit"
COMPONENTS = "components"
"""What is written for the runtime: its own start record, the payload's, secret variables, the Pipes context; how a
session says where it listens; the request to cancel; the exit code that the batch script saw of its `srun`; and where
components that run a payload each have run directories of their own."""

_CRC_KEY = b',"crc":"'
_RESERVE_BYTES = 64 * 1024
_HOLE_LOOKS = 600
"""Looks at a place where zeros stand, a minute or more, after which nothing is expected to fill it any more."""

Record = Dict[str, Any]


def encode(record: Record) -> bytes:
    """One record as a JSON line whose last member is the CRC-32 of everything before it."""
    body = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")[:-1]
    return body + _CRC_KEY + b'%08x"}\n' % zlib.crc32(body)


def decode(line: bytes) -> Optional[Record]:
    """The record of a line without its newline, or None if the line is torn or was altered."""
    body, key, tail = line.rpartition(_CRC_KEY)
    if not key or tail != b'%08x"}' % zlib.crc32(body):
        return None
    try:
        record = json.loads((body + b"}").decode("utf-8", "surrogatepass"))
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


class LineReader:
    """Turns bytes read from successive offsets into records.

    Attributes:
        offset: first byte that is not consumed yet; the only state that resuming needs.
        damaged: number of complete lines whose checksum did not hold.
    """

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self.damaged = 0
        self._partial: List[bytes] = []
        self._partial_bytes = 0
        self._reread = -1
        self._holes = 0

    @property
    def next_read(self) -> int:
        """The offset to read from next: after the consumed lines and the partial one kept in memory."""
        return self.offset + self._partial_bytes

    def feed(self, data: bytes) -> List[Record]:
        """The records that `data`, read at `next_read`, completes."""
        data = self._before_hole(data)
        if not data:
            return []
        if b"\n" not in data:  # Not joined yet: a line of many chunks would be copied once for each of them.
            self._partial.append(data)
            self._partial_bytes += len(data)
            return []
        in_pieces = self._partial_bytes > 0
        lines, rest = split_lines(b"".join([*self._partial, data]))
        if in_pieces and self._reread != self.offset and decode(lines[0]) is None:
            # Its beginning may have been taken back since (a full disk, a stale page): read all of it once more.
            self._partial, self._partial_bytes, self._reread = [], 0, self.offset
            return []
        self._partial, self._partial_bytes = ([rest] if rest else []), len(rest)
        self.offset += sum(map(len, lines)) + len(lines)
        records = [record for record in map(decode, lines) if record is not None]
        self.damaged += len(lines) - len(records)
        return records

    def _before_hole(self, data: bytes) -> bytes:
        """What stands before zeros, which no line has: a network file system may show a page before what is to fill it."""
        place = data.find(b"\0")
        self._holes = 0 if place else self._holes + 1
        # Those that stay are damage, and must not keep the rest from being read.
        return data if place < 0 or self._holes > _HOLE_LOOKS else data[:place]


class Appender:
    """Appends records to one file; a failed write leaves no torn line behind.

    Args:
        path: the file, which only this writer appends to.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.size = os.fstat(self._fd).st_size
        self._dirty = False
        self._torn = False
        if self.size and os.pread(self._fd, 1, self.size - 1) != b"\n":
            self.append(b"\n")  # What a killed writer left unfinished must not swallow the next line.

    def append(self, data: bytes) -> None:
        """Append whole encoded lines.

        Raises:
            OSError: the disk is full or the file system failed; the file ends where it did before.
        """
        self._mend()
        view, start = memoryview(data), self.size
        try:
            while view:
                written = os.write(self._fd, view)
                self.size += written
                view = view[written:]
            self._dirty = True
        except OSError:
            self.size, self._torn = start, True
            with contextlib.suppress(OSError):  # A file system that is away; the next append begins with it.
                self._mend()
            raise

    def _mend(self) -> None:
        """Take back what a failed write has left."""
        if self._torn:
            os.ftruncate(self._fd, self.size)
            self._torn = False

    def sync(self) -> None:
        """Make what was appended visible to other hosts (a network file system sends it on fsync)."""
        if self._dirty:
            os.fsync(self._fd)
            self._dirty = False

    def close(self) -> None:
        os.close(self._fd)


class RunRecord:
    """The record of one payload, as the runtime writes it: once, from the empty files of a fresh run directory.

    A job that Slurm has requeued goes on with the record of the attempt before.

    Output that cannot be kept (size cap, full disk) is counted and announced once; a journal line that cannot be
    kept raises, because a lost Pipes message is a lost result. Space for the `end` is set aside at the start.

    Args:
        run_dir: the run directory; must exist.
        max_stdio_bytes: size at which `stdio.jsonl` stops to grow.
        attempt: how often the job was requeued.

    Raises:
        FileExistsError: another runtime wrote, or writes, the record of this directory.
        OSError: the directory cannot be written, or there is no space to set aside.
    """

    def __init__(self, run_dir: str, max_stdio_bytes: int, attempt: int = 0) -> None:
        self.run_dir = run_dir
        self._max_stdio_bytes = max_stdio_bytes
        self._reserve = os.path.join(run_dir, "journal.reserve")
        self.stdio_dropped = 0
        self.ended = False
        journal = os.path.join(run_dir, JOURNAL)
        if attempt == 0 and os.path.exists(journal) and os.path.getsize(journal):
            raise FileExistsError(errno.EEXIST, "there is a record already", journal)
        self._end_stands = False
        with contextlib.ExitStack() as undo:  # Who is refused may come again.
            with open(self._reserve, "xb" if attempt == 0 else "wb") as file:
                undo.callback(self._free)
                file.write(os.urandom(_RESERVE_BYTES))  # Random: a file system that compresses must set it aside too.
                file.flush()
                os.fsync(file.fileno())
            self._journal = Appender(journal)
            undo.callback(self._journal.close)
            self._stdio = Appender(os.path.join(run_dir, STDIO))
            undo.pop_all()

    @property
    def stdio_bytes(self) -> int:
        return self._stdio.size

    def write(self, *records: Record) -> None:
        """Append records to the journal.

        Raises:
            OSError: they could not be kept.
        """
        self._journal.append(b"".join(map(encode, records)))

    def output(self, stream: str, text: str, at: float) -> None:
        """Append payload output; `stream` is "stdout" or "stderr"."""
        if self.stdio_dropped:
            self.stdio_dropped += len(text)
            return
        line = encode({"s": stream, "t": round(at, 3), "d": text})
        try:
            if self._stdio.size + len(line) <= self._max_stdio_bytes:
                return self._stdio.append(line)
            why = "output limit of %d bytes reached" % self._max_stdio_bytes
        except OSError as error:
            why = os.strerror(error.errno or 0)
        self.stdio_dropped += len(text)
        marker = encode({"s": "stderr", "t": round(at, 3), "d": "\n[rayslurm] output not recorded from here: %s\n" % why})
        try:
            self._stdio.append(marker)
        except OSError:
            return  # The `end` carries the number of dropped characters all the same.

    def sync(self) -> None:
        self._stdio.sync()
        self._journal.sync()

    def end(self, record: Record) -> None:
        """Append the one `end`, using the space set aside if the disk is full, and close the record.

        Raises:
            OSError: it could not be kept; the record stays open, and this may be tried again.
        """
        if self.ended:
            return
        self._free()
        if not self._end_stands:
            with contextlib.suppress(OSError):  # Output is worth less than the `end`.
                self._stdio.sync()
            full = dict(record, stdio_bytes=self.stdio_bytes, stdio_dropped=self.stdio_dropped)
            self._journal.append(encode(full))
            self._end_stands = True
        self._journal.sync()
        self.ended = True
        self._close()

    def withdraw(self) -> None:
        """Give the directory back as it was, before anything was written."""
        self._free()
        self._close()

    def _free(self) -> None:
        with contextlib.suppress(OSError):  # Gone with its directory, perhaps; then writing will say so.
            os.unlink(self._reserve)

    def _close(self) -> None:
        for file in (self._journal, self._stdio):
            with contextlib.suppress(OSError):  # What matters has been synced; the descriptor is closed all the same.
                file.close()


def node_log(place: int) -> str:
    """The name of a node's own log: what its runtime prints, and what Slurm says of its task."""
    return "node-%d.log" % place


def component_dir(run_dir: str, component_id: str) -> str:
    """The run directory of one component within that of a run whose components run a payload each."""
    return os.path.join(run_dir, COMPONENTS, component_id)


def run_of_component(directory: str) -> str:
    """The run's directory of a component's."""
    return os.path.dirname(os.path.dirname(directory))


def temporary_name(path: str) -> str:
    """A name beside `path` that no other thread, process or host takes; short, however long the name itself is."""
    return os.path.join(os.path.dirname(path), ".rs-%s.tmp" % os.urandom(8).hex())


def write_atomically(path: str, data: bytes, mode: int = 0o600) -> None:
    """Replace a file in one step: temporary name, fsync, rename."""
    temporary = temporary_name(path)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def tail_lines(text: str, lines: int = 40, chars: int = 8000) -> str:
    """The last lines of a text, bounded in characters too."""
    return "\n".join(text[-chars:].splitlines()[-lines:])


def tail_file(path: str, lines: int = 40, limit: int = 16384) -> str:
    """The last lines of a log file, or "" if it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - limit))
            return tail_lines(file.read().decode("utf-8", "replace"), lines)
    except OSError:
        return ""


def split_lines(buffer: bytes) -> Tuple[List[bytes], bytes]:
    """Complete lines of a buffer, and the rest."""
    *lines, rest = buffer.split(b"\n")
    return lines, rest
