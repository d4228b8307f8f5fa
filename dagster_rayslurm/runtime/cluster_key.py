"""What the key of a cluster means on every node alike: its secret, the mark of its processes, and how they are cleared away.

The key of the cluster that a runtime keeps warm is ""; that of a payload's own, which lives beside others, is its nonce.
"""

from __future__ import annotations

import os
from typing import Mapping

from . import processes
from .channel import derive
from .loop import Loop
from .scratch import Scratch
from .spec import RuntimeSpec

_MARK = "RAYSLURM_CLUSTER"
"""Variable that all processes of a fresh cluster inherit: some of them may leave the tree that is below `ray start`."""

_DYING = 0.5
"""Seconds that killed processes get to be gone before their directories are."""
_SELDOM = 60.0
"""Most seconds between two attempts to remove what cannot be removed."""


def token_of(spec: RuntimeSpec, key: str) -> str:
    """The secret of a cluster: made from that of the allocation, so that its nodes need not tell each other."""
    secret = spec.token_key or spec.control_key
    if secret is None:
        return os.urandom(32).hex()
    return derive(secret, "ray-token:" + key if key else "ray-token")


def worker_env_of(spec: RuntimeSpec, key: str) -> Mapping[str, str]:
    """The variables that Ray's daemons of a cluster get."""
    return {**spec.worker_env, _MARK: key} if key else spec.worker_env


def clear_away(loop: Loop, place: Scratch, key: str) -> None:
    """Remove what a fresh cluster leaves on this node, once its processes have died; those included that got away.

    What still dies may write once more, so it is tried until nothing is left: there are few names for such places.
    """

    def clear(pause: float) -> None:
        processes.kill_all(processes.with_environment("%s=%s" % (_MARK, key)))
        place.remove()
        if os.path.lexists(place.path) or os.path.lexists(place.ray_temp_dir):
            loop.call_later(pause, lambda: clear(min(2 * pause, _SELDOM)))

    loop.call_later(_DYING, lambda: clear(_DYING))
