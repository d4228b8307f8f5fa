"""Watches the memory of a job on this node, and kills a Ray worker before Slurm ends the whole job."""

from __future__ import annotations

import contextlib
import os
from typing import Callable, Dict, Iterable, List, Mapping, Optional, Tuple

from ..process import processes
from ..process.loop import Loop
from ..process.processes import Process
from ..process.subprocesses import query_program
from . import memory_guard, memory_use, resources
from .memory_guard import Group, Sample, State

_SCONTROL_TIMEOUT = 20.0
_ASK_AT = 0.5
"""Share of the grant from which Slurm is asked how it counts; most jobs never get there, and a cluster has many nodes."""

_SPARING = 10
"""How many times as long as a sample takes, at least, until the next: a node may have thousands of processes."""
_NO_LIMIT = 2**62

Tell = Callable[[str, bool], None]
"""Called with a sentence, and whether a Ray worker was killed."""


class MemoryWatch:
    """The memory of one node of a Slurm job.

    Args:
        loop: where the timers run.
        node: name of the node.
        ray: the processes below which Ray's workers may be killed; while there are none, nothing is watched.
        drivers: the payloads' own processes on this node.
        tell: told what is done.
        environ: the environment in which Slurm tells the grant.
    """

    def __init__(
        self,
        loop: Loop,
        node: str,
        ray: Callable[[], List[int]],
        drivers: Callable[[], Iterable[int]],
        tell: Tell,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._loop = loop
        self._node = node
        self._ray = ray
        self._drivers = drivers
        self._tell = tell
        self._cgroups = memory_use.of_job(resources.cgroup_limits())
        self._grant = resources.slurm_memory(environ)
        self._counting: Optional[memory_use.Counting] = None
        self._asked = False
        self._state = State()
        if self._cgroups or self._grant:
            loop.call_later(0.0, self._look)

    def _look(self) -> None:
        began = self._loop.now()
        pause = memory_guard.LONGEST
        if self._ray():
            with contextlib.suppress(OSError):  # Out of file descriptors, perhaps; the next sample may succeed.
                pause = self._sample()
        self._loop.call_later(max(pause, _SPARING * (self._loop.now() - began)), self._look)

    def _sample(self) -> float:
        """Act on one sample.

        Returns:
            Seconds until the next one.
        """
        used, limit = memory_use.fullest(self._cgroups) or self._added_up()
        if not self._cgroups and self._counting is None:
            if used >= _ASK_AT * limit:
                self._ask_slurm()
            return memory_guard.pause(used, limit)
        everything = processes.table() if memory_guard.needs_groups(self._state, used, limit) else {}
        sample = Sample(used, limit, groups_of(everything, self._ray(), self._drivers()) if everything else [])
        may_kill = self._counting is None or self._counting.enforced
        self._state, actions = memory_guard.decide(self._node, self._state, sample, self._loop.now(), may_kill)
        for action in actions:
            if action.kill is not None:
                processes.kill_all([action.kill, *(each.pid for each in processes.descendants(action.kill, everything))])
            self._tell(action.message, action.kill is not None)
        return memory_guard.pause(used, limit)

    def _added_up(self) -> Tuple[int, int]:
        """Bytes that this runtime's processes use, at most while the way of counting is not known, and bytes granted."""
        mine = [os.getpid(), *(process.pid for process in processes.descendants(os.getpid()))]
        memory_of = memory_use.resident_memory if self._counting is None else self._counting.memory_of
        return sum(map(memory_of, mine)), self._grant or _NO_LIMIT

    def _ask_slurm(self) -> None:
        if self._asked:
            return
        self._asked = True

        def answered(settings: Optional[str]) -> None:
            self._counting = memory_use.counting(settings)

        try:
            query_program(self._loop, memory_use.SETTINGS, _SCONTROL_TIMEOUT, answered)
        except OSError:  # No scontrol on this node.
            answered(None)


def groups_of(everything: Dict[int, Process], ray: Iterable[int], drivers: Iterable[int]) -> List[Group]:
    """All processes of this runtime: each Ray worker and each payload with those below it, each other process alone.

    Args:
        everything: the table of processes.
        ray: the processes below which Ray's workers may be killed.
        drivers: the payloads' own processes.
    """
    heads: Dict[int, str] = {pid: "driver" for pid in drivers}
    for root in ray:
        heads.update({each.pid: "worker" for each in processes.descendants(root, everything) if is_worker(each)})
    memory: Dict[int, int] = {}
    queue = [(os.getpid(), os.getpid())]
    below: Dict[int, List[int]] = {}
    for process in everything.values():
        below.setdefault(process.parent, []).append(process.pid)
    while queue:
        pid, head = queue.pop()
        memory[head] = memory.get(head, 0) + memory_use.private_memory(pid)
        for child in below.get(pid, []):
            queue.append((child, head if head in heads and child not in heads else child))
    return [Group(pid, _name(pid, heads.get(pid, "")), size, heads.get(pid, "system")) for pid, size in memory.items()]


def is_worker(process: Process) -> bool:
    """Whether a process is a Ray worker that runs tasks or an actor of the user's (Ray 2.60)."""
    entries = processes.environment(process.pid)
    # Ray's agents have a raylet and no job; what a worker starts has both, but another parent.
    by_raylet = b"RAY_RAYLET_PID=%d" % process.parent in entries
    return by_raylet and any(each.startswith(b"RAY_JOB_ID=") for each in entries) and "JobSupervisor" not in _title(process.pid)


def _title(pid: int) -> str:
    """The first word of a process's command line; a Ray worker writes there what it does."""
    return processes.command_line(pid)[:200].split(b"\0")[0].decode("utf-8", "replace")


def _name(pid: int, kind: str) -> str:
    if kind == "driver":
        return "the payload's own process"
    return os.path.basename(_title(pid)) if kind != "worker" else _title(pid)
