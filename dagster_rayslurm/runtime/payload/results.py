"""Measures a payload's use of CPU, memory and GPUs on all nodes, and finds the output files that Dagster fetches."""

from __future__ import annotations

import contextlib
import glob
import os
import stat
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Union

from ..node.usage import UsageSampler, merge_usage
from ..node.worker_nodes import WorkerNodes
from ..protocol.record import Record

# Most sentences in `left_out`; the `end` record must fit into a fixed amount of reserved disk space.
_MAX_SENTENCES = 50
# Usage is recorded again when the elapsed time or the peak memory has grown by such a factor; a long run has some hundred
# usage records.
_TIME_GROWTH, _MEMORY_GROWTH = 1.1, 1.05


@dataclass(eq=False)
class UsageMeasurement:
    """Measures the use of CPU, memory and GPUs by one payload, on this node and on the worker nodes of its Ray cluster.

    The measurement begins when the object is created, and ends with `finish` or `cancel`. `nonce` is the random name of the
    payload.
    """

    nonce: str
    sampler: UsageSampler  # Measures usage on this node.
    # Appends a record of the usage so far to the run record, so that the usage is known even if Slurm kills the job.
    note: Callable[[Record], None]
    sampled: Callable[[], None]  # Called after each sample on this node.
    workers: Optional[WorkerNodes] = None  # The worker nodes of the Ray cluster, which measure usage as well.

    def __post_init__(self) -> None:
        self._noted = (0.0, 0)
        self._total: Dict[str, Any] = {}
        self._announced: Optional[Set[str]] = None
        self.sampler.sampled = self._sampled
        self._announce_jobs()

    def finish(self, pid: int, rusage: Any, hostname: str, done: Callable[[], None]) -> bool:
        """End the measurement after the payload's process has ended; returns whether `done` will be called.

        With worker nodes, the result is True, and `done` is called later, when they have sent their usage or the time to wait is
        over. Without worker nodes, the result is False, and the usage is complete already.

        Args:
            pid: The id of the payload's process.
            rusage: The `resource.struct_rusage` of the process.
            hostname: The name of this node in the usage.
            done: A function without arguments. When it is called, `current` has the usage of all nodes.
        """
        own = self._total = self.sampler.stop(pid, rusage)
        self._announce_jobs()

        def collected(others: Dict[str, Dict[str, Any]]) -> None:
            with contextlib.suppress(Exception):  # Malformed figures of a worker node must not fail the payload.
                self._total = merge_usage({hostname: own, **others})
            done()

        return self._collect(collected)

    def cancel(self) -> None:
        """Stop measuring on all nodes, without a result."""
        self.sampler.cancel()
        self._collect(lambda _: None)

    def current(self) -> Dict[str, Any]:
        """Returns the usage so far, as a dictionary with the fields of `Usage`; empty before the first sample.

        The worker nodes send their usage after the payload's end. Until then, the result has only the usage on this node.
        """
        usage = self._total or self.sampler.meter.summary()
        return usage if usage["elapsed"] else {}

    def _sampled(self) -> None:
        self._announce_jobs()
        self.sampled()
        usage = self.sampler.meter.summary()
        points = usage.pop("points")
        elapsed, peak = self._noted
        if points and (usage["elapsed"] > _TIME_GROWTH * elapsed or usage["peak_memory"] > _MEMORY_GROWTH * peak):
            self._noted = usage["elapsed"], usage["peak_memory"]
            self.note({"type": "usage", "usage": usage, "memory": points[-1][2]})

    def _announce_jobs(self) -> None:
        """Send the worker nodes a request to measure the payload; the request names the Ray jobs that belong to the payload.

        Does nothing if the last request named the same Ray jobs. If no other payload uses the Ray cluster, the request names no
        Ray jobs, and the worker nodes measure all processes of the cluster.
        """
        jobs = None if self.sampler.jobs is None else self.sampler.jobs.job_ids
        if self.workers is not None and (jobs or set()) != self._announced:
            self._announced = set(jobs or ())
            self.workers.measure(self.nonce, None if jobs is None else sorted(jobs))

    def _collect(self, done: Callable[[Dict[str, Dict[str, Any]]], None]) -> bool:
        """End the measurement on the worker nodes, and request their usage; returns False if there are none, otherwise True.

        Later `done` is called once, with the usage on each worker node, by the name of the node. Without worker nodes, `done` is
        never called.
        """
        workers, self.workers = self.workers, None
        if workers is not None:
            workers.collect(self.nonce, done)
        return workers is not None


@dataclass(eq=False)
class OutputSearch:
    """Finds the output files of a payload: the files in its working directory that match `patterns`, but no links to input files.

    `run` searches. If the files are larger than `max_bytes` together, the smallest are selected, and the others are left out.
    """

    work_dir: str
    patterns: Sequence[str]  # As for `glob.glob`; `**` crosses directories.
    max_bytes: int
    # Name and size in bytes of each file for Dagster to fetch.
    files: List[Dict[str, Union[str, int]]] = field(default_factory=list)
    # One sentence for each pattern without a match and for each file beyond the limit.
    left_out: List[str] = field(default_factory=list)

    def run(self) -> Iterator[None]:
        """Generator that searches for the output files; when it is exhausted, `files` and `left_out` have the result.

        It yields None after each file and directory, so that the caller can do other work between two steps.
        """
        sizes: Dict[str, int] = {}
        real_work_dir = os.path.realpath(self.work_dir)
        for pattern in self.patterns:
            matched = False
            for path in _expand(self.work_dir, pattern.split("/")):
                yield
                with contextlib.suppress(OSError):  # The file was removed meanwhile.
                    status = os.stat(path)
                    name = os.path.relpath(path, self.work_dir)
                    own = os.path.realpath(path).startswith(real_work_dir + os.sep)  # Else it is an input, or below one.
                    if own and stat.S_ISREG(status.st_mode):
                        sizes[name] = status.st_size
                        matched = True
            if not matched:
                self.left_out.append("no file that the payload made matches %r" % pattern)
        total = 0
        for name, size in sorted(sizes.items(), key=lambda item: (item[1], item[0])):
            if total + size > self.max_bytes:
                sentence = "%s (%d bytes) exceeds what is left of the limit of %d bytes" % (name, size, self.max_bytes)
                self.left_out.append(sentence)
            else:
                total += size
                self.files.append({"name": name, "size": size})
        more = len(self.left_out) - _MAX_SENTENCES
        if more > 0:
            self.left_out[_MAX_SENTENCES:] = ["and %d more" % more]


def _expand(directory: str, parts: Sequence[str]) -> Iterator[str]:
    """Generator that yields the paths below `directory` that match a pattern, and also each directory that a `**` walks through.

    `parts` are the parts of the pattern between slashes. The additional directories let the caller pause: `glob.iglob` would walk
    a whole tree before the first match, which may take minutes on a network file system.
    """
    if "**" not in parts:
        yield from glob.iglob(os.path.join(glob.escape(directory), *parts))
        return
    position = list(parts).index("**")
    starts = _expand(directory, parts[:position]) if position else [directory]
    for start in starts:
        for path, names, _ in os.walk(start):  # `os.walk` follows no links, and what links lead to is no output.
            names[:] = [name for name in names if not name.startswith(".")]
            yield path
            yield from _expand(path, parts[position + 1 :] or ["*"])
