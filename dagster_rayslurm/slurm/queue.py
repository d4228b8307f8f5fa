"""The queue as one `squeue` shows it: one snapshot for all jobs of a user, shared through a file.

The clock of the cluster: what happens there is compared with itself, never with this machine's clock.

The queue as one `squeue` shows it to everybody: one snapshot for all jobs of a user, shared through a file.

However many steps, processes and Dagster hosts look, slurmctld is asked once per `poll_interval`: the snapshot is a
file on the cluster, and whoever finds it too old makes it anew if no other was faster. What squeue(1) prints is that of
Slurm 22.05 and 24.11.
"""

from __future__ import annotations

import math
import os
import random
import re
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from ..ssh.base import Completed, Connection
from ..ssh.local import LocalConnection
from .commands import CLEAN
from .errors import SlurmUnanswered, unanswered
from .snapshot import COLUMNS, QueueSnapshot, parse_snapshot, parse_squeue, render_snapshot


class ClusterClock:
    """The clock of the edge node, as this machine can tell it without asking each time.

    Args:
        connection: how to ask.
        local: this machine's clock, in seconds; it may stand still while the machine sleeps.
    """

    def __init__(self, connection: Connection, local: Callable[[], float] = time.monotonic) -> None:
        self._connection = connection
        self.local = local
        self._offset: float | None = None

    def now(self) -> float:
        """Seconds of the epoch there; asked for once, then reckoned.

        Raises:
            OSError: it cannot be asked.
        """
        if self._offset is None:
            asked = self.local()
            done = self._connection.run(["date", "+%s.%N"], timeout=60)
            try:
                stamp = float(done.stdout)
            except ValueError:
                said = (done.stderr or done.stdout).decode("utf-8", "replace").strip()[-500:]
                raise OSError(f"{self._connection.place}: `date +%s.%N` does not say the time: {said}") from None
            self.observe(stamp, asked, self.local())
        assert self._offset is not None
        return self.local() + self._offset

    def observe(self, stamp: float, asked: float, answered: float) -> None:
        """Learn from any answer that carries the time there.

        Args:
            stamp: the time there.
            asked: `local()` before the question.
            answered: `local()` after the answer.
        """
        low, high = stamp - answered, stamp - asked
        before = (low + high) / 2 if self._offset is None else self._offset
        self._offset = min(max(before, low), high)


SNAPSHOT = "snapshot.json"
"""Name of the file in the shared directory."""

_MOST_BYTES = 64 * 1024 * 1024
_BLOCK = 1024 * 1024
_TIMEOUT = 120.0
"""Seconds; a slurmctld that is down makes squeue itself give up earlier (MessageTimeout, 10 s, a few times)."""
_BACK_OFF = 5.0
"""A slurmctld that takes long to answer is asked no more often than every so many times that long."""
_REREAD = 2.0
"""Seconds between two reads of a snapshot that somebody else is making anew."""
_JITTER = 0.1
"""Part of the interval over which those who find the same snapshot too old are spread."""
_KEEP_CLAIMS = 600.0
"""Seconds; a claim must outlive what another host may still believe of the snapshot (NFS caches: a minute)."""

# $1 is a word that no job's name can know: it begins each row, since a name may well hold a newline. Without --all hidden
# partitions hide jobs. --states=all shows jobs that have ended as well, for MinJobAge (300 s unless the site says otherwise).
_ASK = f"""\
kept_variables=
{CLEAN}
export LC_ALL=C SLURM_TIME_FORMAT=%s
squeue --me --all --noheader --states=all --format="$1$2"
rc=$?; echo "$1 $(date +%s%3N)"; exit $rc
"""

# Before the claim: whoever cannot ask must not keep others from it.
_STAMP = 'now=$(date +%s%3N) && echo "$1 $now" && command -v squeue >/dev/null || exit 127\n'

# $3 is the directory, $4 the interval and $5 the age at which claims are removed, in milliseconds. Making a directory is
# atomic on NFS too, so there is one claim in each interval of the clock there, whatever callers reckon; when exactly it
# was made is the name of a directory in it, so that two in successive intervals are not too close either.
_CLAIM = """\
umask 077 && mkdir -p -- "$3" && cd -- "$3" || exit
claim="claim-$((now / $4 * $4))"
for last in "claim-$((now / $4 * $4 - $4))"/[0-9]* "$claim"/[0-9]*; do
    [ -d "$last" ] && [ $((now - ${last##*/})) -lt "$4" ] && echo "$1 taken ${last##*/}" && exit
done
mkdir "$claim" 2>/dev/null || { [ -d "$claim" ] && echo "$1 taken $now" || mkdir "$claim"; exit; }
mkdir "$claim/$now"
for old in claim-*; do [ "${old#claim-}" -lt $((now - $5)) ] && rmdir "$old"/* "$old"; done 2>/dev/null
"""


class SharedQueue:
    """The snapshot of the queue that all processes and hosts of a user share. `look` never waits for Slurm.

    Args:
        connection: the edge node, or this machine if `squeue` is here.
        directory: where the snapshot and the claims to make it anew are; on a file system that all edge nodes share.
        poll_interval: seconds for which a snapshot is good.
        start: starts the work that takes time; by default in a thread.
        clock: the cluster's clock, which learns from every answer.

    Attributes:
        clock: the cluster's clock.
        trouble: why the last attempt brought no answer, in one sentence; None since the last one that did.
    """

    def __init__(
        self,
        connection: Connection,
        directory: str,
        poll_interval: float,
        start: Callable[[Callable[[], None]], None] | None = None,
        clock: ClusterClock | None = None,
    ) -> None:
        self.clock = clock or ClusterClock(connection)
        self.error: str | None = None
        self._connection = connection
        self._directory = directory
        self._poll_interval = poll_interval
        self._start = start or _in_background
        self._lock = threading.Lock()
        self._busy = False
        self._snapshot: QueueSnapshot | None = None
        self._read_at = -math.inf
        self._claim_at = -math.inf
        self._spread = random.uniform(0, _JITTER)  # One for each process: all of them see the same snapshot grow old.

    def latest(self, now: float) -> QueueSnapshot | None:
        """The newest snapshot that is known here; None before the first. A newer one may come with a later look.

        Args:
            now: the cluster's clock, such as `clock.now()`, in seconds of the epoch.
        """
        with self._lock:
            # A `now` before the last read is a clock that was put right, and a snapshot of the future one that is wrong.
            rested = not 0 <= now - self._read_at < min(_REREAD, self._interval() / 2)
            if self._busy or not rested or abs(self._age(now)) < self._interval():
                return self._snapshot
            self._busy = True
            self._read_at = now
        try:
            self._start(lambda: self._update(now))
        except RuntimeError:  # No thread can be had while the interpreter shuts down.
            self._busy = False
        return self._snapshot

    def wait_for_latest(self, now: float) -> QueueSnapshot | None:
        """As `latest`, but waits for Slurm if the newest snapshot is too old."""
        return SharedQueue(self._connection, self._directory, self._poll_interval, lambda work: work(), self.clock).latest(now)

    def _interval(self) -> float:
        took = self._snapshot.took if self._snapshot else 0.0
        return max(self._poll_interval, _BACK_OFF * took)

    def _age(self, now: float) -> float:
        return now - self._snapshot.began if self._snapshot else math.inf

    def _update(self, now: float) -> None:
        try:
            self._take(self._read())
            interval = self._interval()
            if abs(self._age(now)) >= interval * (1 + self._spread) and not now < self._claim_at <= now + 2 * interval:
                self._refresh(now, interval)
        except OSError as error:
            self.error = str(error)
        finally:
            self._busy = False

    def _take(self, snapshot: QueueSnapshot | None) -> None:
        """Keep the newer one: a late writer, or another host's cache, may show an older one."""
        if snapshot and (self._snapshot is None or snapshot.began > self._snapshot.began):
            self._snapshot = snapshot
            self.error = None

    def _read(self) -> QueueSnapshot | None:
        path = os.path.join(self._directory, SNAPSHOT)
        data = b""
        while not data.endswith(b"\n") and (block := self._connection.read(path, len(data), _BLOCK)):
            data += block
            if len(data) > _MOST_BYTES:
                return None
        return parse_snapshot(data)

    def _refresh(self, now: float, interval: float) -> None:
        """Ask Slurm and tell all others, unless one of them does so already.

        Raises:
            OSError: Slurm did not answer, or it cannot be asked.
        """
        self._claim_at = now + interval  # Should this fail, whoever comes in the next interval tries again.
        keep = max(_KEEP_CLAIMS, 10 * interval)
        words = (self._directory, str(round(1000 * interval)), str(round(1000 * keep)))
        asked = self.clock.local()
        reply = _put(self._connection, _STAMP + _CLAIM + _ASK, *words)
        self.clock.observe(reply.began, asked, self.clock.local())
        taken = re.fullmatch(rf"{reply.mark} taken ([0-9]+)\n", reply.text)
        self._claim_at = (int(taken[1]) / 1000 if taken else reply.began) + interval * (1 + self._spread)
        if taken:
            return
        snapshot = reply.snapshot()
        shared = self._read()
        self._snapshot, self.error = snapshot, None
        # A later claim may have been answered earlier.
        if shared is None or not 0 <= shared.began - snapshot.began < interval:
            self._connection.write(os.path.join(self._directory, SNAPSHOT), render_snapshot(snapshot))


def fetch_queue(connection: Connection) -> QueueSnapshot:
    """What is in the queue right now: for the few questions that a shared snapshot is too old for.

    Raises:
        SlurmUnanswered: Slurm did not answer.
        OSError: it cannot be asked.
    """
    return _put(connection, _STAMP + _ASK).snapshot()


@dataclass(frozen=True)
class _Reply:
    """What came back: the time there at which the question was put, and what followed."""

    place: str
    done: Completed
    mark: str
    began: float
    text: str

    def snapshot(self) -> QueueSnapshot:
        """The queue that it tells of.

        Raises:
            SlurmUnanswered: it tells of none.
        """
        rows, _, ended = ("\n" + self.text).rpartition(f"\n{self.mark} ")
        # A squeue that fails may have printed half of the jobs all the same.
        if self.done.returncode or not ended.strip().isdigit():
            raise unanswered(self.place, "squeue", self.done)
        try:
            return QueueSnapshot(self.began, parse_squeue(rows, self.mark), int(ended) / 1000 - self.began)
        except ValueError as error:
            raise SlurmUnanswered(f"{self.place}: {error}") from None


def _put(connection: Connection, script: str, *words: str) -> _Reply:
    mark = secrets.token_hex(8)
    done = connection.run(["sh", "-c", script, "sh", mark, COLUMNS, *words], timeout=_TIMEOUT)
    stamp, _, text = done.stdout.decode("utf-8", "replace").partition("\n")
    match = re.fullmatch(rf"{mark} ([0-9]+)", stamp)
    if not match:
        raise unanswered(connection.place, "squeue", done)
    return _Reply(connection.place, done, mark, int(match[1]) / 1000, text)


def _in_background(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="rayslurm-queue", daemon=True).start()


_lock = threading.Lock()
_queues: weakref.WeakValueDictionary[tuple[int, str, float], SharedQueue] = weakref.WeakValueDictionary()


def shared_queue(connection: Connection, directory: str, poll_interval: float) -> SharedQueue:
    """The queue of a cluster, one for all steps and threads of this process that need it at the same time.

    Nothing is sent before its first use.

    Args:
        connection: the edge node; the same object for the same queue.
        directory: where the snapshot is.
        poll_interval: seconds for which a snapshot is good.
    """
    # A queue keeps its connection, so that the id is not another's while the queue is here.
    key = (0 if isinstance(connection, LocalConnection) else id(connection), directory, poll_interval)
    with _lock:
        queue = _queues.get(key)
        if queue is None:
            queue = _queues[key] = SharedQueue(connection, directory, poll_interval)
        return queue


def _start_anew() -> None:
    """In a forked child, which has none of its parent's threads."""
    global _lock
    _lock = threading.Lock()
    _queues.clear()


os.register_at_fork(after_in_child=_start_anew)
