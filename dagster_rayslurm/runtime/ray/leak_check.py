"""What payloads leave behind in a cluster that stays: asked of the GCS beside `ray start`, told in sentences elsewhere.

The GCS is asked by `GlobalStateAccessor`, Ray's private API, as `ray.util.state` needs the dashboard and `ray.init` a job of
its own (read in and tried on Ray 2.60): 2 ms for all of it.
"""

from __future__ import annotations

import importlib
import json
import os
import threading
import time
from typing import Any, Callable, Dict, List, Optional

from ..protocol.spec import JOB_MARK

Tables = Dict[str, Any]
"""`jobs`: job id to nonce; `actors`, `groups`: what is alive and has no job to end with; `submitted`: jobs of `ray job submit`
that run; `available`, `total`: resources."""

_LIVING = ("ALIVE", "RESTARTING", "PENDING_CREATION", "DEPENDENCIES_UNREADY")
_GROUP_REMOVED = 3  # PlacementGroupTableData.REMOVED in Ray's gcs.proto.
_SHARED_LIBRARIES = ("ray.data.", "ray.train.", "ray.tune.", "ray.llm.")
"""Modules of Ray whose detached actors serve every later payload that uses the library, and cost nothing (Ray 2.60)."""
_SUBMITTED = "_ray_internal_job_actor_"
"""Begin of the name of the actor that runs a submitted job (Ray 2.60); the rest is the submission id."""
_OWN_MEASURES = ("memory", "object_store_memory")
"""Resources that Ray counts by the byte: what idle workers and cached objects hold comes back when it is needed."""


def serve(fd: int, gcs: str, report: Callable[..., None]) -> None:
    """Answer each line that comes in, in a thread of its own; what goes wrong there is an answer, too.

    Args:
        fd: where questions come from: JSON objects with an `id`.
        gcs: "HOST:PORT" of the GCS.
        report: called with the answer's members.
    """
    os.set_inheritable(fd, False)

    def answer() -> None:
        accessor: Any = None
        with os.fdopen(fd, encoding="utf-8") as questions:
            for line in questions:
                question = json.loads(line)
                try:
                    accessor = _connect(gcs) if accessor is None else accessor
                    report(event="audit", id=question["id"], tables=_tables(accessor))
                except Exception as error:  # Ray's errors have no common public base, and other versions other modules.
                    accessor = None
                    report(event="audit", id=question["id"], tables=None, message="%s: %s" % (type(error).__name__, error))

    threading.Thread(target=answer, daemon=True).start()


def _connect(gcs: str) -> Any:
    from ray._raylet import GcsClientOptions, GlobalStateAccessor  # type: ignore[attr-defined]

    accessor = GlobalStateAccessor(GcsClientOptions.create(gcs, None, True, True))
    accessor.connect()
    return accessor


def _tables(accessor: Any) -> Tables:
    gcs_pb2: Any = importlib.import_module("ray.core.generated.gcs_pb2")

    # Else the GCS would ask every driver, stopped ones too, whether it is busy.
    skip = {"skip_submission_job_info_field": True, "skip_is_running_tasks_field": True}
    jobs = [gcs_pb2.JobTableData.FromString(row) for row in accessor.get_job_table(**skip)]
    # It remembers up to 100000 dead ones, which take seconds to read.
    living = [row for state in _LIVING for row in accessor.get_actor_table(None, state)]
    detached = [actor for actor in map(gcs_pb2.ActorTableData.FromString, living) if actor.is_detached]
    submitted = [actor for actor in detached if actor.name.startswith(_SUBMITTED)]
    actors = [actor for actor in detached if actor not in submitted and not _is_shared(actor)]
    groups = [gcs_pb2.PlacementGroupTableData.FromString(row) for row in accessor.get_placement_group_table()]
    available = [gcs_pb2.AvailableResources.FromString(row) for row in accessor.get_all_available_resources()]
    total = [gcs_pb2.TotalResources.FromString(row) for row in accessor.get_all_total_resources()]
    lasting = {actor.actor_id for actor in detached}
    return {
        "jobs": {job.job_id.hex(): job.config.metadata.get(JOB_MARK) for job in jobs if JOB_MARK in job.config.metadata},
        "actors": [
            {"job": actor.job_id.hex(), "name": actor.name, "namespace": actor.ray_namespace, "class": actor.class_name}
            for actor in actors
        ],
        # An actor that is still being created has not started.
        "submitted": [{"id": job.name[len(_SUBMITTED) :], "since": job.start_time / 1000 or time.time()} for job in submitted],
        # Others end with the job or the actor that made them.
        "groups": [
            {
                "job": group.creator_job_id.hex(),
                "name": group.name,
                "namespace": group.ray_namespace,
                "id": group.placement_group_id.hex(),
            }
            for group in groups
            if group.state != _GROUP_REMOVED and (group.is_detached or group.creator_actor_id in lasting)
        ],
        "available": _sum(row.resources_available for row in available),
        "total": _sum(row.resources_total for row in total),
    }


def _is_shared(actor: Any) -> bool:
    """Whether an actor belongs to one of Ray's libraries and holds no resources: to kill it would break later payloads."""
    module = actor.function_descriptor.python_function_descriptor.module_name
    return module.startswith(_SHARED_LIBRARIES) and not actor.required_resources


def _sum(rows: Any) -> Dict[str, float]:
    total: Dict[str, float] = {}
    for row in rows:
        for name, amount in row.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def leaks(tables: Tables, nonce: Optional[str] = None, since: float = 0.0) -> List[str]:
    """What stays alive although its job has ended, as sentences.

    Args:
        tables: what the GCS knows.
        nonce: of whose jobs; None for all that there is.
        since: the time from which submitted jobs count; they carry no mark of the payload that submitted them.
    """

    def mine(thing: Dict[str, str]) -> bool:
        return nonce is None or tables["jobs"].get(thing["job"]) == nonce

    actors = [
        "detached actor %r (%s, namespace %r) is still alive; end it with "
        "ray.kill(ray.get_actor(%r, namespace=%r)) before the payload ends"
        % (actor["name"], actor["class"], actor["namespace"], actor["name"], actor["namespace"])
        for actor in tables["actors"]
        if mine(actor)
    ]
    groups = [
        "placement group %s still holds its resources; give it back with "
        "ray.util.remove_placement_group(group) before the payload ends"
        % ("%(name)r (namespace %(namespace)r)" % group if group["name"] else group["id"])
        for group in tables["groups"]
        if mine(group)
    ]
    return actors + groups + submitted_jobs(tables, since)


def submitted_jobs(tables: Tables, since: float = 0.0) -> List[str]:
    """The jobs that still run and were submitted after a time, as sentences."""
    return [
        "job %(id)s of `ray job submit` still runs; end it with `ray job stop %(id)s` before the payload ends, "
        "or submit it without --no-wait" % job
        for job in tables["submitted"]
        if job["since"] >= since
    ]


def still_left(before: Tables, now: Tables) -> Tables:
    """What was left before and is left still; what has come meanwhile may be at work.

    Args:
        before: what the GCS knew when nothing ran.
        now: what it knows by now.
    """
    available = {
        name: max(tables.get(name, 0.0) for tables in (before["available"], now["available"])) for name in before["total"]
    }
    things = {kind: [thing for thing in before[kind] if thing in now[kind]] for kind in ("actors", "groups", "submitted")}
    return {**before, **things, "available": available}


def not_back(tables: Tables) -> List[str]:
    """What is at work although no payload runs, as sentences: resources that are taken, and submitted jobs."""
    found = []
    for name, total in sorted(tables["total"].items()):
        if name in _OWN_MEASURES or name.startswith("node:") or "_group_" in name:
            continue
        available = tables["available"].get(name, 0.0)
        if available < total - 1e-3:
            found.append("%s: %g of %g are not free although no payload runs" % (name, total - available, total))
    return found + leaks(tables) if found else submitted_jobs(tables)


class LeakQuery:
    """Asks the process beside the GCS, and does not wait for long.

    Args:
        ask: called with a question's id; False if there is nobody to ask.
        call_later: the loop's.
    """

    def __init__(self, ask: Callable[[int], bool], call_later: Callable[[float, Callable[[], None]], Any]) -> None:
        self._ask = ask
        self._call_later = call_later
        self._asked = 0
        self._waiting: Dict[int, Callable[[Optional[Tables]], None]] = {}

    def ask(self, patience: float, done: Callable[[Optional[Tables]], None]) -> None:
        """Ask for the tables; `done` gets None after `patience` seconds without them."""
        self._asked += 1
        question = self._asked
        self._waiting[question] = done
        known = self._ask(question)
        self._call_later(patience if known else 0.0, lambda: self.take(question, None))

    def take(self, question: int, tables: Optional[Tables]) -> None:
        """Take an answer, unless it comes too late."""
        done = self._waiting.pop(question, None)
        if done is not None:
            done(tables)
