"""Writes the run record of one payload: phases, output, Pipes messages and the `end`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import Any, Callable, Dict, Optional

from ..process.loop import Loop
from ..protocol.record import STATUS, Record, RunRecord, split_lines, write_atomically

_CHUNK = 256 * 1024
"""Most bytes of messages that are read at a time."""
_RETRY = 1.0
"""Seconds between two tries to write the `end`."""


class MessageFile:
    """The file to which `dagster_pipes` in the payload appends messages, whose complete lines are copied into the journal."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = open(path, "xb+", buffering=0)
        self._partial = b""
        self.count = 0
        """Number of messages copied so far."""

    def remove(self) -> None:
        """Delete the file; a warm session, which runs on after the payload, would otherwise collect such files."""
        self._file.close()
        os.unlink(self._path)

    def copy(self, keep: Callable[..., None]) -> bool:
        """Copy the next chunk of messages with `keep`, which writes records.

        Returns:
            Whether there was anything to read.
        """
        data = self._file.read(_CHUNK)
        if not data:
            return False
        lines, self._partial = split_lines(self._partial + data)
        now = time.time()
        records = [{"type": "pipes", "at": now, "line": line.decode("utf-8", "replace")} for line in lines if line]
        self.count += len(records)
        if records:
            keep(*records)
        return True

    def copy_rest(self, keep: Callable[..., None]) -> None:
        """Copy the rest of the messages that are in the file now; those that leftover processes write later do not count."""
        end = os.fstat(self._file.fileno()).st_size
        while self._file.tell() < end and self.copy(keep):
            continue


class PayloadRecord:
    """Writes the run record of a payload.

    Calls `failed` with the reason if a write fails; the payload must then end, because its results would be lost.
    """

    def __init__(self, loop: Loop, files: RunRecord, nonce: str, failed: Callable[[str], None]) -> None:
        self.payload_pid: Optional[int] = None
        self._loop = loop
        self._files = files
        self._nonce = nonce
        self._failed = failed
        self._unwritten_end: Optional[Record] = None

    @property
    def ended(self) -> bool:
        """Whether the `end` record is written."""
        return self._files.ended

    def keep(self, *records: Record) -> None:
        """Write records that must not be lost into the journal."""
        self._guarded(lambda: self._files.write(*records))

    def note(self, record: Record) -> None:
        """Write a record that may get lost, such as a usage sample, into the journal; errors are ignored."""
        with contextlib.suppress(OSError):
            self._files.write(record)

    def phase(self, name: str, message: str, **detail: Any) -> None:
        """Write what happens now, such as "running", into the journal and the status file."""
        at = time.time()
        self.keep({"type": "phase", "phase": name, "message": message, "at": at, **detail})
        self.sync()
        self._guarded(lambda: self._write_status(name, message, at))

    def tail(self, name: str, text: str) -> None:
        """Write the last lines of a log that explains a failure."""
        self.keep({"type": "tail", "name": name, "text": text})

    def output(self, stream: str, text: str) -> None:
        """Write a piece of the payload's output; `stream` is "stdout" or "stderr"."""
        self._files.output(stream, text, time.time())

    def sync(self) -> None:
        """Make everything written so far visible to other hosts."""
        self._guarded(self._files.sync)

    def keep_fresh(self) -> None:
        """Update the modification time of the run directory, so that cleanup does not take it for an old one and delete it."""
        self._guarded(lambda: os.utime(self._files.run_dir))

    def end(self, end: Record) -> None:
        """Write the `end` record, and retry every second until that succeeds."""
        self._unwritten_end = end
        if not self.write_end():
            print("rayslurm: %s: the end of the run cannot be recorded yet" % self._files.run_dir, file=sys.stderr)
            self._loop.call_later(_RETRY, self._retry_end)

    def _retry_end(self) -> None:
        if not self.write_end():
            self._loop.call_later(_RETRY, self._retry_end)

    def write_end(self) -> bool:
        """Write the `end` record if it is due and not written yet.

        Returns:
            Whether no `end` remains to be written.
        """
        end = self._unwritten_end
        if end is None:
            return True
        try:
            self._write_status("ended", end["reason"], end["ended_at"])
            end.pop("status_stale", None)
        except OSError:
            end["status_stale"] = True  # The disk is full: the journal has space reserved for the `end`, the status has not.
        try:
            self._files.end(end)
        except OSError:
            return False
        self._unwritten_end = None
        return True

    def _write_status(self, state: str, message: str, at: float) -> None:
        status: Dict[str, Any] = {"state": state, "message": message, "at": at}
        status.update(nonce=self._nonce, runtime_pid=os.getpid(), payload_pid=self.payload_pid)
        write_atomically(os.path.join(self._files.run_dir, STATUS), json.dumps(status).encode("utf-8"))

    def _guarded(self, write: Callable[[], None]) -> None:
        """Write, and report an `OSError` to `failed`."""
        try:
            write()
        except OSError as error:
            self._failed("%s cannot be written: %s" % (self._files.run_dir, error.strerror))
