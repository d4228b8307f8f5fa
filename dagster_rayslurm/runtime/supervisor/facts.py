"""The state of a runtime as clients see it: its payloads, nodes and Ray cluster."""

from __future__ import annotations

import os
from typing import Any, Dict

from ..protocol.spec import PROTOCOL_VERSION
from .supervisor import Supervisor


def describe(supervisor: Supervisor) -> Dict[str, Any]:
    """Returns the answer to a client's `describe` request: the state of the runtime, its payloads, its nodes and its Ray cluster.

    The answer is a JSON object, such as `{"ready": True, "running": 1, "waiting": 0, "payloads": [...], "nodes": [...], ...}`.
    Ages and other times are durations in seconds. Facts that are not known are None.
    """
    now, queue, here = supervisor.loop.now(), supervisor.queue, supervisor.machine
    own = {"name": supervisor.name, "cpus": here.num_cpus, "gpus": here.num_gpus, "here": True, "component": here.component}
    cluster = supervisor.cluster.facts() if supervisor.cluster is not None else {}
    idle = queue.idle_for(now)
    payloads = [(each.payload, "waiting", each.since) for each in queue.waiting]
    payloads += [(each.payload, "running", each.since) for each in queue.running]
    payloads += [(each, "ended", now) for each in supervisor.unrecorded if each.ended and not each.files.ended]
    return {
        "cluster_id": supervisor.spec.cluster_id,
        "protocol": PROTOCOL_VERSION,
        "pid": os.getpid(),
        "ready": supervisor.cluster is None or supervisor.cluster.ready,
        "closing": queue.ending is not None,
        "draining": queue.closing,
        "running": len(queue.running),
        "waiting": len(queue.arrived),
        "payloads": [
            dict(run_dir=each.run_dir, run_id=each.spec.run_id, step=each.spec.step, state=state, age=round(now - since, 1))
            for each, state, since in payloads
        ],
        "served": queue.served,
        "idle": None if idle is None else round(idle, 1),
        "nodes": [own, *(member.facts() for member in supervisor.workers.members.values())],
        "ray_version": cluster.get("ray_version"),
        "address": cluster.get("ray_address"),
        "dashboard_url": cluster.get("dashboard_url"),
        "leaks": [] if supervisor.cluster is None else list(supervisor.cluster.leaks),
        "time_left": supervisor.time_left(),
    }
