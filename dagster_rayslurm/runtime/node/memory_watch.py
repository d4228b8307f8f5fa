"""Watches the memory of a job on this node, and kills a Ray worker before Slurm ends the whole job."""

from __future__ import annotations

import contextlib
import os
from typing import Callable, Dict, Iterable, List, Mapping, Optional, Tuple

from ..process import processes
from ..process.loop import Loop
from ..process.processes import Process, query_program
from . import memory_guard, memory_use, resources
from .memory_guard import Group, GroupKind, Sample, State
from .usage import PROCESS_TABLE

_SCONTROL_TIMEOUT = 20.0
"""Seconds in which `scontrol` must answer."""
_QUERY_SHARE = 0.5
"""Share of the memory limit from which Slurm is asked how it counts memory. Most jobs never use so much, which spares Slurm a
query from each node."""
_PAUSE_FACTOR = 10
"""The pause after a sample is at least this many times as long as the sample took; a node may have thousands of processes."""
_TABLE_AGE = 0.1
"""Greatest age in seconds of a process table from /proc that a sample may use."""
_NO_LIMIT = 2**62
"""The limit in bytes where there is none."""

Report = Callable[[str, bool], None]
"""Called with a sentence for the Dagster log, and whether a Ray worker was killed."""


class MemoryWatch:
    """Samples the memory that a Slurm job uses on this node, warns of a full node, and kills a Ray worker if need be.

    Args:
        node: name of this node for messages.
        ray_pids: returns the ids of the processes below which Ray's workers run; nothing is watched while there are none.
        payload_pids: returns the process ids of the payloads on this node.
        report: called for each warning and each kill.
        environ: environment variables with Slurm's memory limit.
    """

    def __init__(
        self,
        loop: Loop,
        node: str,
        ray_pids: Callable[[], List[int]],
        payload_pids: Callable[[], Iterable[int]],
        report: Report,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._loop = loop
        self._node = node
        self._ray_pids = ray_pids
        self._payload_pids = payload_pids
        self._report = report
        self._cgroups = memory_use.job_cgroups(resources.cgroup_limits())
        self._limit = resources.slurm_memory(environ)
        self._accounting: Optional[memory_use.MemoryAccounting] = None
        self._queried = False
        self._state = State()
        if self._cgroups or self._limit:
            loop.call_later(0.0, self._sample_and_repeat)

    def _sample_and_repeat(self) -> None:
        began = self._loop.now()
        pause = memory_guard.LONGEST
        if self._ray_pids():
            with contextlib.suppress(OSError):  # Out of file descriptors, perhaps; the next sample may succeed.
                pause = self._sample()
        self._loop.call_later(max(pause, _PAUSE_FACTOR * (self._loop.now() - began)), self._sample_and_repeat)

    def _sample(self) -> float:
        """Take one sample, warn or kill if it calls for that, and return the seconds until the next sample."""
        used, limit = memory_use.fullest(self._cgroups) or self._memory_of_processes()
        if not self._cgroups and self._accounting is None:
            if used >= _QUERY_SHARE * limit:
                self._query_slurm()
            return memory_guard.pause(used, limit)
        groups: List[Group] = []
        table: Dict[int, Process] = {}
        if memory_guard.needs_groups(self._state, used, limit):
            _, table = PROCESS_TABLE.read()
            groups = process_groups(table, self._ray_pids(), self._payload_pids())
        may_kill = self._accounting is None or self._accounting.enforced
        sample = Sample(used, limit, groups)
        self._state, actions = memory_guard.decide(self._node, self._state, sample, self._loop.now(), may_kill)
        for action in actions:
            if action.kill is not None:
                processes.kill_all([action.kill, *(each.pid for each in processes.descendants(action.kill, table))])
            self._report(action.message, action.kill is not None)
        return memory_guard.pause(used, limit)

    def _memory_of_processes(self) -> Tuple[int, int]:
        """Bytes that this runtime's processes use, and the limit; until Slurm has told how it counts, shared memory counts."""
        _, table = PROCESS_TABLE.read(_TABLE_AGE)
        pids = [os.getpid(), *(process.pid for process in processes.descendants(os.getpid(), table))]
        memory_of = memory_use.resident_memory if self._accounting is None else self._accounting.memory_of
        return sum(map(memory_of, pids)), self._limit or _NO_LIMIT

    def _query_slurm(self) -> None:
        """Ask Slurm, once only, how it counts memory."""
        if self._queried:
            return
        self._queried = True

        def answered(config: Optional[str]) -> None:
            self._accounting = memory_use.memory_accounting(config)

        try:
            query_program(self._loop, memory_use.SHOW_CONFIG, _SCONTROL_TIMEOUT, answered)
        except OSError:  # This node has no scontrol.
            answered(None)


def process_groups(table: Dict[int, Process], ray_pids: Iterable[int], payload_pids: Iterable[int]) -> List[Group]:
    """The processes below this runtime in groups: each Ray worker and each payload's process leads a group of all processes below
    it, and each other process is a group of its own.

    Args:
        table: all processes of this machine by id.
        ray_pids: the processes below which Ray's workers run.
        payload_pids: the payloads' own processes.
    """
    leaders = {pid: GroupKind.DRIVER for pid in payload_pids}
    for root in ray_pids:
        leaders.update({each.pid: GroupKind.WORKER for each in processes.descendants(root, table) if is_worker(each)})
    children: Dict[int, List[int]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process.pid)
    memory: Dict[int, int] = {}
    queue = [(os.getpid(), os.getpid())]
    while queue:
        pid, leader = queue.pop()
        memory[leader] = memory.get(leader, 0) + memory_use.private_memory(pid)
        for child in children.get(pid, []):
            queue.append((child, leader if leader in leaders and child not in leaders else child))
    kinds = {pid: leaders.get(pid, GroupKind.SYSTEM) for pid in memory}
    return [Group(pid, _name(pid, kinds[pid]), size, kinds[pid]) for pid, size in memory.items()]


def is_worker(process: Process) -> bool:
    """Whether a process is a Ray worker that runs a payload's tasks or actor, not one of Ray's own processes (Ray 2.60)."""
    entries = processes.environment(process.pid)
    # Ray's agents have a raylet and no job; processes that a worker starts have both, but another parent.
    by_raylet = b"RAY_RAYLET_PID=%d" % process.parent in entries
    return by_raylet and any(each.startswith(b"RAY_JOB_ID=") for each in entries) and "JobSupervisor" not in _title(process.pid)


def _title(pid: int) -> str:
    """The first word of a process's command line, where a Ray worker writes what it does."""
    return processes.command_line(pid)[:200].split(b"\0")[0].decode("utf-8", "replace")


def _name(pid: int, kind: GroupKind) -> str:
    """What messages call a group of processes."""
    if kind == GroupKind.DRIVER:
        return "the payload's own process"
    return _title(pid) if kind == GroupKind.WORKER else os.path.basename(_title(pid))
