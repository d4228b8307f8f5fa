"""Record of one payload: log lines, output, Pipes messages and its end.

The Pipes messages of a payload, on their way into the journal.

The record of one payload while that is here: what the user is told, what it prints and reports, and its one `end`.
"""

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


class MessageFile:
    """The file that `dagster_pipes` appends messages to by default; complete lines move into the journal."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = open(path, "xb+", buffering=0)
        self._partial = b""
        self.count = 0

    def remove(self) -> None:
        """Give the file back; a warm session outlives its payloads by far."""
        self._file.close()
        os.unlink(self._path)

    def copy(self, keep: Callable[..., None]) -> bool:
        """Move one chunk of messages on; False if there was none."""
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
        """Move all on that is there by now: its payload has ended, and whoever still writes is none of it."""
        end = os.fstat(self._file.fileno()).st_size
        while self._file.tell() < end and self.copy(keep):
            continue


_AGAIN = 1.0
"""Seconds until an `end` is written again that could not be."""


class PayloadRecord:
    """Writes what becomes of a payload.

    Args:
        loop: where everything happens.
        files: the record of the run.
        nonce: the payload's.
        pid: tells its process, if there is one.
        failed: called with why something cannot be kept: results would be lost.
    """

    def __init__(
        self, loop: Loop, files: RunRecord, nonce: str, pid: Callable[[], Optional[int]], failed: Callable[[str], None]
    ) -> None:
        self._loop = loop
        self._files = files
        self._nonce = nonce
        self._pid = pid
        self._failed = failed
        self._unwritten: Optional[Record] = None
        """The `end`, while it cannot be written."""

    @property
    def ended(self) -> bool:
        """Whether the `end` stands."""
        return self._files.ended

    def keep(self, *records: Record) -> None:
        """Write records into the journal."""
        self._guarded(lambda: self._files.write(*records))

    def note(self, record: Record) -> None:
        """Write a record whose loss is no reason to end the payload."""
        with contextlib.suppress(OSError):
            self._files.write(record)

    def phase(self, name: str, message: str, **detail: Any) -> None:
        """Tell the user what happens now, and whoever asks for the payload's state."""
        at = time.time()
        self.keep({"type": "phase", "phase": name, "message": message, "at": at, **detail})
        self.sync()
        self._guarded(lambda: self._write_status(name, message, at))

    def tail(self, name: str, text: str) -> None:
        """Write the last lines of a log that explains a failure."""
        self.keep({"type": "tail", "name": name, "text": text})

    def output(self, stream: str, text: str) -> None:
        """Write what the payload has printed."""
        self._files.output(stream, text, time.time())

    def sync(self) -> None:
        """Make what was written visible to other hosts."""
        self._guarded(self._files.sync)

    def keep_fresh(self) -> None:
        """Mark the run directory as in use, for whoever sweeps old ones."""
        self._guarded(lambda: os.utime(self._files.run_dir))

    def end(self, end: Record) -> None:
        """Write the `end`; now, or else as soon as that can be done."""
        self._unwritten = end

        def again() -> None:
            if not self.write_end():
                self._loop.call_later(_AGAIN, again)

        if not self.write_end():
            # Whoever follows waits for it, and a session outlives what keeps it from being written.
            print("rayslurm: %s: the end of the run cannot be recorded yet" % self._files.run_dir, file=sys.stderr)
            self._loop.call_later(_AGAIN, again)

    def write_end(self) -> bool:
        """Write the `end`, if that could not be done so far.

        Returns:
            Whether nothing is left to be written.
        """
        end = self._unwritten
        if end is None:
            return True
        try:
            self._write_status("ended", end["reason"], end["ended_at"])
            end.pop("status_stale", None)
        except OSError:
            end["status_stale"] = True  # A full disk: the journal's `end` has space set aside, the status has not.
        try:
            self._files.end(end)
        except OSError:
            return False
        self._unwritten = None
        return True

    def _write_status(self, state: str, message: str, at: float) -> None:
        status: Dict[str, Any] = {"state": state, "message": message, "at": at}
        status.update(nonce=self._nonce, runtime_pid=os.getpid(), payload_pid=self._pid())
        write_atomically(os.path.join(self._files.run_dir, STATUS), json.dumps(status).encode("utf-8"))

    def _guarded(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self._failed("%s cannot be written: %s" % (self._files.run_dir, error.strerror))
