"""Private directory, token and process mark of one Ray cluster on a node.

Directories within a scratch directory, for clusters that live beside each other there.

What the key of a cluster means on every node alike: its secret, the mark of its processes, and how they are cleared away.

The key of the cluster that a runtime keeps warm is ""; that of a payload's own, which lives beside others, is its nonce.
"""

from __future__ import annotations

import itertools
import os
import shutil
import string
from typing import Iterator, Mapping

from ..process import processes
from ..process.loop import Loop
from ..process.scratch import Scratch
from ..protocol.rpc import derive_key
from ..protocol.spec import RuntimeSpec

_NAMES = [name for name in string.digits + string.ascii_lowercase if name != "r"]
"""One character each, as that of the scratch directory's own Ray: a socket's path has no room for more."""


class ClusterDir(Scratch):
    """A part of a scratch directory that one cluster has to itself.

    Args:
        whole: the scratch directory.
        name: one character; see `ClusterDirs`.
    """

    def __init__(self, whole: Scratch, name: str) -> None:
        self.path = whole.join("corner-" + name)
        self._ray_temp_dir = whole.join(name)
        os.mkdir(self.path, 0o700)

    @property
    def ray_temp_dir(self) -> str:
        return self._ray_temp_dir

    def remove(self) -> None:
        shutil.rmtree(self._ray_temp_dir, ignore_errors=True)
        shutil.rmtree(self.path, ignore_errors=True)


class ClusterDirs:
    """Gives out the corners of a scratch directory, each name as seldom as can be: what is being removed is in use still."""

    def __init__(self, whole: Scratch) -> None:
        self._whole = whole
        self._names: Iterator[str] = itertools.cycle(_NAMES)

    def take(self) -> ClusterDir:
        """A corner that is free.

        Raises:
            OSError: none is, or it cannot be made.
        """
        for name in itertools.islice(self._names, len(_NAMES)):
            if not os.path.lexists(self._whole.join("corner-" + name)) and not os.path.lexists(self._whole.join(name)):
                return ClusterDir(self._whole, name)
        raise OSError("%d clusters are in %s already" % (len(_NAMES), self._whole.path))


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
    return derive_key(secret, "ray-token:" + key if key else "ray-token")


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
