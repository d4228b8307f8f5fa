"""The run record: files in the run directory by which the runtime tells Dagster what happens to a payload.

docs/architecture.md lists the files, the types of records and the rules that make the record reliable. A line is a JSON object
without newlines and NUL bytes, whose last member is `"crc"`: the CRC-32 of all bytes of the line before `,"crc":"`.

If a write fails halfway, the appender removes the torn line before the appender writes the next line. If a writer was killed
halfway, the next writer ends the torn line with a newline, and readers drop the torn line. Appended lines reach other hosts when
`sync` calls fsync. A reader's whole state is a byte offset, which only moves past complete lines. NUL bytes are pages that a
network file system does not show yet; NUL bytes that stay for a minute are damage.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import zlib
from typing import Any, Dict, List, Optional, Tuple

# Names of files in a run directory.
JOURNAL = "journal.jsonl"
STDIO = "stdio.jsonl"
STATUS = "status.json"
RUNTIME_LOG = "runtime.log"  # Output of the runtime itself.
RUNTIME = "runtime.json"  # Start record of the runtime (`RuntimeSpec`).
PAYLOAD = "payload.json"  # Start record of the payload (`PayloadSpec`).
SECRETS = "secrets.json"  # Secret environment variables of the payload; the runtime deletes the file once it has read them.
CONTEXT = "pipes_context.json"  # The context of Dagster Pipes for the payload.
SESSION = "session.json"  # The announcement of a warm session: the port and the key by which to reach it.
CLUSTER = "cluster.json"  # How to reach the payload's Ray cluster (`ClusterAccess`); only while the payload runs on it.
CANCEL = "cancel.json"  # The request to cancel the payload; empty as long as there is none.
LOCK = "lock"  # Locked while the Dagster process lives that follows the payload; only in a session on its machine.
EXIT = "exit"  # The exit code of `srun`, written by the batch script.
# Suffixes of files in the directory of a job array, after the number of an element: its batch script's output, and the mark of
# its end. The run directory of the element has the number as its name.
ELEMENT_LOG = ".log"
ENDED = ".ended"
COMPONENTS = "components"  # Directory with a run directory for each component of the separate topology.

_CRC_KEY = b',"crc":"'
_RESERVE_BYTES = 64 * 1024
_MAX_HOLE_READS = 600  # Reads that begin with the same NUL bytes, after which these count as damage: a minute or more.

Record = Dict[str, Any]  # The JSON object of one line.


def encode(record: Record) -> bytes:
    """Returns a record as a line of bytes: JSON with a checksum as the last member, and a newline."""
    body = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")[:-1]
    return body + _CRC_KEY + b'%08x"}\n' % zlib.crc32(body)


def decode(line: bytes) -> Optional[Record]:
    """Returns the record in `line`, a line from `encode` without the newline; None if its checksum or its JSON is wrong."""
    body, key, tail = line.rpartition(_CRC_KEY)
    if not key or tail != b'%08x"}' % zlib.crc32(body):
        return None
    try:
        record = json.loads((body + b"}").decode("utf-8", "surrogatepass"))
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


class LineReader:
    """Turns the bytes of a growing file of the run record into records.

    The caller reads bytes of the file from the position `next_read` on and passes the bytes to `feed`, again and again. `offset`
    is the position after the last complete line; a new reader may begin there. `damaged` counts the dropped lines.
    """

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset  # Position after the last line that was returned or dropped.
        self.damaged = 0  # Number of complete lines that were dropped, because their checksum does not hold.
        self._partial: List[bytes] = []
        self._reread_at, self._partial_bytes, self._hole_reads = -1, 0, 0

    @property
    def next_read(self) -> int:
        """The position in the file from which the caller must read next.

        It is `offset` plus the length of the incomplete line that this reader keeps in memory.
        """
        return self.offset + self._partial_bytes

    def feed(self, data: bytes) -> List[Record]:
        """Process `data`, the bytes that the caller read at `next_read`; returns the records of the lines that are now complete.

        The list is empty if no line is complete. A line with a wrong checksum is dropped and counted in `damaged`. But if such a
        line began in earlier data, `next_read` first moves back to its beginning once, so that the caller reads the line again.
        """
        hole = data.find(b"\0")
        self._hole_reads = 0 if hole else self._hole_reads + 1
        if hole >= 0 and self._hole_reads <= _MAX_HOLE_READS:
            data = data[:hole]
        if b"\n" not in data:  # Chunks are joined once their line is complete, so that no chunk is copied for each later one.
            self._partial += [data] if data else []
            self._partial_bytes += len(data)
            return []
        lines, rest = split_lines(b"".join([*self._partial, data]))
        if self._partial_bytes and self._reread_at != self.offset and decode(lines[0]) is None:
            # The line's beginning may have been truncated since (full disk) or read from a stale page: read the line again.
            self._partial, self._partial_bytes, self._reread_at = [], 0, self.offset
            return []
        self._partial, self._partial_bytes = [rest], len(rest)
        self.offset += sum(map(len, lines)) + len(lines)
        records = [record for record in map(decode, lines) if record is not None]
        self.damaged += len(lines) - len(records)
        return records


class Appender:
    """Appends lines to a file that no other process writes.

    If a write fails halfway, the incomplete line is removed before the next line is appended. If an earlier process was killed
    halfway, the constructor ends its incomplete line with a newline. The constructor raises OSError if the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.size = os.fstat(self._fd).st_size  # In bytes, without torn lines.
        self._dirty = False
        self._torn = False
        if self.size and os.pread(self._fd, 1, self.size - 1) != b"\n":
            self.append(b"\n")  # This ends the torn line of a killed writer.

    def append(self, data: bytes) -> None:
        """Append `data`, one or more lines from `encode`; raises OSError, and appends none of the lines, if the write fails."""
        self._mend()
        view, self._torn = memoryview(data), True
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            with contextlib.suppress(OSError):  # The file system cannot even truncate now; the next append tries again.
                self._mend()
            raise
        self.size += len(data)
        self._torn, self._dirty = False, True

    def _mend(self) -> None:
        """Remove what a failed write left at the end of the file, if anything; raises OSError if this fails."""
        if self._torn:
            os.ftruncate(self._fd, self.size)
            self._torn = False

    def sync(self) -> None:
        """Write the appended lines to the disk (fsync), which makes them visible to other hosts on a network file system.

        Does nothing if no line was appended since the last call. Raises OSError if fsync fails.
        """
        if self._dirty:
            os.fsync(self._fd)
            self._dirty = False

    def close(self) -> None:
        os.close(self._fd)


class RunRecord:
    """Writes the run record of one payload: the journal and the payload's output, two files in `run_dir`.

    `attempt` tells how often Slurm has restarted the job. With 0 the record is new, and the constructor raises FileExistsError if
    there is a record already; otherwise the new lines continue the existing record. If output cannot be written (size limit, full
    disk), it is dropped and counted. If a journal line cannot be written, OSError is raised, because a lost Pipes message is a
    lost result.
    """

    def __init__(self, run_dir: str, max_stdio_bytes: int, attempt: int = 0) -> None:
        self.run_dir = run_dir
        self.ended = False  # Whether the `end` is written, after which the record is closed.
        self._max_stdio_bytes = max_stdio_bytes
        self._reserve = os.path.join(run_dir, "journal.reserve")
        self._stdio_dropped = 0  # Characters of output that were not recorded.
        self._end_appended = False
        journal = os.path.join(run_dir, JOURNAL)
        if attempt == 0 and os.path.exists(journal) and os.path.getsize(journal):
            raise FileExistsError(errno.EEXIST, "there is a record already", journal)
        with contextlib.ExitStack() as undo:  # After an error nothing is left open, so the caller may try again.
            with open(self._reserve, "xb" if attempt == 0 else "wb") as file:
                undo.callback(self._free)
                file.write(os.urandom(_RESERVE_BYTES))  # Random bytes occupy space even on a compressing file system.
                file.flush()
                os.fsync(file.fileno())
            self._journal = Appender(journal)
            undo.callback(self._journal.close)
            self._stdio = Appender(os.path.join(run_dir, STDIO))
            undo.pop_all()

    def write(self, *records: Record) -> None:
        """Append records to the journal as one write; if the write fails, raises OSError and appends none of them."""
        self._journal.append(b"".join(map(encode, records)))

    def output(self, stream: str, text: str, at: float) -> None:
        """Append output of the payload to the recorded output; never raises OSError.

        If the record would exceed its size limit, or if the write fails, the output is dropped, and a remark takes its place. All
        later output is then dropped, too; the `end` record has the number of dropped characters. `stream` is "stdout" or
        "stderr", and `at` is the time of the output in seconds since the epoch.
        """
        if not self._stdio_dropped:
            line = encode({"s": stream, "t": round(at, 3), "d": text})
            try:
                if self._stdio.size + len(line) <= self._max_stdio_bytes:
                    return self._stdio.append(line)
                why = "output limit of %d bytes reached" % self._max_stdio_bytes
            except OSError as error:
                why = os.strerror(error.errno or 0)
            marker = {"s": "stderr", "t": round(at, 3), "d": "\n[rayslurm] output not recorded from here: %s\n" % why}
            with contextlib.suppress(OSError):  # The `end` carries the number of dropped characters anyway.
                self._stdio.append(encode(marker))
        self._stdio_dropped += len(text)

    def sync(self) -> None:
        """Write the appended records and output to the disk, so that other hosts see them; raises OSError if this fails."""
        self._stdio.sync()
        self._journal.sync()

    def end(self, record: Record) -> None:
        """Append the `end` record and close the run record; reserved disk space lets this method succeed on a full disk.

        Raises OSError if the record cannot be written; the method may then be called again. After a success, further calls do
        nothing.
        """
        if self.ended:
            return
        self._free()
        if not self._end_appended:
            with contextlib.suppress(OSError):  # The `end` matters more than the output.
                self._stdio.sync()
            self.write(dict(record, stdio_bytes=self._stdio.size, stdio_dropped=self._stdio_dropped))
            self._end_appended = True
        self._journal.sync()
        self.ended = True
        self._close()

    def withdraw(self) -> None:
        """Close the run record without an `end` record, for a payload that was refused before its start.

        The files stay in the directory, empty.
        """
        self._free()
        self._close()

    def _free(self) -> None:
        with contextlib.suppress(OSError):  # If the whole directory is gone, the next write raises.
            os.unlink(self._reserve)

    def _close(self) -> None:
        for file in (self._journal, self._stdio):
            with contextlib.suppress(OSError):  # The data is synced already, and close frees the descriptor even if it fails.
                file.close()


def node_log(place: int) -> str:
    """Returns the file name of the log of the node with the index `place`, such as "node-3.log"; 0 is the first node.

    The log contains the output of the node's runtime and Slurm task.
    """
    return "node-%d.log" % place


def component_dir(run_dir: str, component_id: str) -> str:
    """Returns the path of the run directory of one component; `run_dir` is the directory of the whole run.

    Components have run directories only in the separate topology, where each component of the job runs a payload of its own.
    """
    return os.path.join(run_dir, COMPONENTS, component_id)


def run_of_component(directory: str) -> str:
    """Returns the path of the directory of the whole run; `directory` is the result of `component_dir` for a component."""
    return os.path.dirname(os.path.dirname(directory))


def temporary_name(path: str) -> str:
    """Returns the path of a new temporary file, with a short random name in the directory of `path`; does not create the file.

    No other thread, process or host gets the same path.
    """
    return os.path.join(os.path.dirname(path), ".rs-%s.tmp" % os.urandom(8).hex())


def write_atomically(path: str, data: bytes, mode: int = 0o600) -> None:
    """Write `data` to the file `path`, so that readers see either the whole old or the whole new content.

    `mode` has the permissions of the file. If writing fails, raises OSError, and the old content stays.
    """
    temporary = temporary_name(path)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def tail_lines(text: str, lines: int = 40) -> str:
    """Returns the end of a text: at most the last `lines` lines, and at most 8,000 characters."""
    return "\n".join(text[-8000:].splitlines()[-lines:])


def tail_file(path: str, lines: int = 40) -> str:
    """Returns at most the last `lines` lines of the log file `path`, from the last 16 KiB; "" if the file cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 16384))
            return tail_lines(file.read().decode("utf-8", "replace"), lines)
    except OSError:
        return ""


def split_lines(buffer: bytes) -> Tuple[List[bytes], bytes]:
    """Returns the complete lines of a buffer, without the newlines, and the bytes after the last newline."""
    *lines, rest = buffer.split(b"\n")
    return lines, rest
