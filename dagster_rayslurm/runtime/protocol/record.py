"""The run record: how the runtime tells Dagster what happens to a payload, by files in the run directory.

Files. The head's runtime writes, Dagster's side reads, usually over a network file system or SFTP:

* `journal.jsonl`: start, phases, Pipes messages, usage samples and exactly one `end`.
* `stdio.jsonl`: the payload's output as `{"s": "stdout" or "stderr", "t": time, "d": text}`, up to a size limit.
* `status.json`: the current state, replaced atomically.

Format of a line. A line is a JSON object whose last member is `"crc"`, the CRC-32 of all bytes of the line before `,"crc":"`, in
8 hex digits. The text contains no newline and no NUL byte, because JSON escapes both. `encode` and `decode` are the whole format.

Writing. Only one process appends to a file (`Appender`). If a write fails halfway, for instance on a full disk, the torn line is
truncated before the next one. If a writer was killed halfway, the next one first ends the torn line with a newline; its checksum
does not hold, so readers drop it. Appended lines reach other hosts when `sync` calls fsync.

Reading. A reader's whole state is a byte offset (`LineReader.offset`), so following a run, resuming after a lost connection,
reattaching and a post-mortem are the same loop. The offset only moves past complete lines.

Holes. A network file system may show the new size of a file before its new pages: the reader then sees NUL bytes. It stops before
them and reads there again later. NUL bytes that stay for a minute are damage and are skipped with their line.

Reserve for the end. `journal.reserve` occupies 64 KiB from the start. The runtime deletes it before it writes the `end`, so that
the end of a payload is recorded even on a full disk or an exceeded quota.
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
"""Start record of the runtime (`RuntimeSpec`)."""
PAYLOAD = "payload.json"
"""Start record of the payload (`PayloadSpec`)."""
SECRETS = "secrets.json"
"""Secret variables of the payload; deleted once they are read."""
CONTEXT = "pipes_context.json"
SESSION = "session.json"
"""Session announcement: how to reach a session."""
CANCEL = "cancel.json"
"""Cancel request, empty at first."""
EXIT = "exit"
"""Exit code of `srun`, written by the batch script."""
COMPONENTS = "components"
"""Directory with a run directory for each component of the separate topology."""

_CRC_KEY = b',"crc":"'
_RESERVE_BYTES = 64 * 1024
_MAX_HOLE_READS = 600
"""Reads at the same hole, which take a minute or more, after which it counts as damage."""

Record = Dict[str, Any]


def encode(record: Record) -> bytes:
    """A record as one line, with its checksum and newline."""
    body = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")[:-1]
    return body + _CRC_KEY + b'%08x"}\n' % zlib.crc32(body)


def decode(line: bytes) -> Optional[Record]:
    """The record of a line without its newline; None if the checksum does not hold."""
    body, key, tail = line.rpartition(_CRC_KEY)
    if not key or tail != b'%08x"}' % zlib.crc32(body):
        return None
    try:
        record = json.loads((body + b"}").decode("utf-8", "surrogatepass"))
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


class LineReader:
    """Turns the bytes of a growing file into records.

    Attributes:
        offset: the first byte that is not consumed; the only state that resuming needs.
        damaged: number of complete lines whose checksum does not hold.
    """

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self.damaged = 0
        self._partial: List[bytes] = []
        self._partial_bytes = 0
        self._reread_at = -1
        self._hole_reads = 0

    @property
    def next_read(self) -> int:
        """Where to read next: after the consumed lines and the partial line in memory."""
        return self.offset + self._partial_bytes

    def feed(self, data: bytes) -> List[Record]:
        """The records that `data`, read at `next_read`, completes."""
        data = self._before_hole(data)
        if not data:
            return []
        if b"\n" not in data:  # Joined only when complete, so that a line of many chunks is not copied for each chunk.
            self._partial.append(data)
            self._partial_bytes += len(data)
            return []
        in_pieces = self._partial_bytes > 0
        lines, rest = split_lines(b"".join([*self._partial, data]))
        if in_pieces and self._reread_at != self.offset and decode(lines[0]) is None:
            # Its beginning may have been truncated since (full disk) or read from a stale page: read the whole line again.
            self._partial, self._partial_bytes, self._reread_at = [], 0, self.offset
            return []
        self._partial, self._partial_bytes = ([rest] if rest else []), len(rest)
        self.offset += sum(map(len, lines)) + len(lines)
        records = [record for record in map(decode, lines) if record is not None]
        self.damaged += len(lines) - len(records)
        return records

    def _before_hole(self, data: bytes) -> bytes:
        """The data before the first NUL byte; all of the data if the hole stays."""
        hole = data.find(b"\0")
        self._hole_reads = 0 if hole else self._hole_reads + 1
        return data if hole < 0 or self._hole_reads > _MAX_HOLE_READS else data[:hole]


class Appender:
    """Appends lines to a file that no other process writes; a failed write leaves no torn line."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.size = os.fstat(self._fd).st_size
        self._dirty = False
        self._torn = False
        if self.size and os.pread(self._fd, 1, self.size - 1) != b"\n":
            self.append(b"\n")  # Ends the torn line of a killed writer.

    def append(self, data: bytes) -> None:
        """Append whole encoded lines.

        Raises:
            OSError: the disk is full or the file system failed; the lines were not appended.
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
            with contextlib.suppress(OSError):  # The file system is not available; the next append tries again.
                self._mend()
            raise

    def _mend(self) -> None:
        """Truncate the torn line of a failed write."""
        if self._torn:
            os.ftruncate(self._fd, self.size)
            self._torn = False

    def sync(self) -> None:
        """Make appended lines visible to other hosts: a network file system sends them on fsync."""
        if self._dirty:
            os.fsync(self._fd)
            self._dirty = False

    def close(self) -> None:
        os.close(self._fd)


class RunRecord:
    """The writer of one payload's run record.

    It starts with the empty files of a new run directory; after a requeue it appends to the record of the earlier attempt. Output
    that cannot be recorded (size limit, full disk) is counted, and the user is told once. A journal line that cannot be recorded
    raises, because a lost Pipes message is a lost result.

    Args:
        run_dir: the run directory; must exist.
        max_stdio_bytes: size limit of `stdio.jsonl`.
        attempt: how often Slurm has requeued the job.

    Raises:
        FileExistsError: another runtime writes, or has written, this record.
        OSError: the directory cannot be written, or lacks the space to reserve.
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
        self._end_appended = False
        with contextlib.ExitStack() as undo:  # After an error the caller may try again.
            with open(self._reserve, "xb" if attempt == 0 else "wb") as file:
                undo.callback(self._free)
                file.write(os.urandom(_RESERVE_BYTES))  # Random bytes occupy space even on a compressing file system.
                file.flush()
                os.fsync(file.fileno())
            self._journal = Appender(journal)
            undo.callback(self._journal.close)
            self._stdio = Appender(os.path.join(run_dir, STDIO))
            undo.pop_all()

    @property
    def stdio_bytes(self) -> int:
        """Size of `stdio.jsonl`."""
        return self._stdio.size

    def write(self, *records: Record) -> None:
        """Append records to the journal.

        Raises:
            OSError: they could not be written.
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
            return  # The `end` carries the number of dropped characters anyway.

    def sync(self) -> None:
        self._stdio.sync()
        self._journal.sync()

    def end(self, record: Record) -> None:
        """Append the `end`, with the reserved space if the disk is full, and close the record.

        Raises:
            OSError: it could not be written; the record stays open for another try.
        """
        if self.ended:
            return
        self._free()
        if not self._end_appended:
            with contextlib.suppress(OSError):  # The `end` matters more than the output.
                self._stdio.sync()
            full = dict(record, stdio_bytes=self.stdio_bytes, stdio_dropped=self.stdio_dropped)
            self._journal.append(encode(full))
            self._end_appended = True
        self._journal.sync()
        self.ended = True
        self._close()

    def withdraw(self) -> None:
        """Close the record and leave the directory as it was, if nothing was written."""
        self._free()
        self._close()

    def _free(self) -> None:
        with contextlib.suppress(OSError):  # If the whole directory is gone, the next write raises.
            os.unlink(self._reserve)

    def _close(self) -> None:
        for file in (self._journal, self._stdio):
            with contextlib.suppress(OSError):  # The data is synced; the descriptor is closed even then.
                file.close()


def node_log(place: int) -> str:
    """Name of a node's log, with the output of its runtime and of its Slurm task."""
    return "node-%d.log" % place


def component_dir(run_dir: str, component_id: str) -> str:
    """The run directory of one component in the separate topology."""
    return os.path.join(run_dir, COMPONENTS, component_id)


def run_of_component(directory: str) -> str:
    """The run's directory, given that of a component."""
    return os.path.dirname(os.path.dirname(directory))


def temporary_name(path: str) -> str:
    """A path in the same directory that no other thread, process or host uses; short even if the name of `path` is long."""
    return os.path.join(os.path.dirname(path), ".rs-%s.tmp" % os.urandom(8).hex())


def write_atomically(path: str, data: bytes, mode: int = 0o600) -> None:
    """Replace a file atomically: temporary file, fsync, rename."""
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
    """The last lines of a text, up to a number of characters."""
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
    """The complete lines of a buffer, and the rest."""
    *lines, rest = buffer.split(b"\n")
    return lines, rest
