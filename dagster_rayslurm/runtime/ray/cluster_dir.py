"""Private directory, token and process mark of one Ray cluster on a node.

The key of a cluster tells it from others on the same nodes: "" for the one that a runtime keeps warm, the payload's nonce
for a payload's own.
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
"""One character each, like the "r" of the scratch directory's own Ray: a socket's path has no room for more."""
_MARK = "RAYSLURM_CLUSTER"
"""Variable that all processes of a fresh cluster inherit: some of them may leave the process tree below `ray start`."""
_DYING = 0.5
"""Seconds that killed processes get before their directories are removed."""
_LONGEST_PAUSE = 60.0
"""Most seconds between two attempts to remove directories."""


class ClusterDir(Scratch):
    """A part of a scratch directory for one cluster; `name` is one character."""

    def __init__(self, parent: Scratch, name: str) -> None:
        self.path = parent.join("cluster-" + name)
        self._ray_temp_dir = parent.join(name)
        os.mkdir(self.path, 0o700)

    @property
    def ray_temp_dir(self) -> str:
        return self._ray_temp_dir

    def remove(self) -> None:
        shutil.rmtree(self._ray_temp_dir, ignore_errors=True)
        shutil.rmtree(self.path, ignore_errors=True)


class ClusterDirs:
    """Makes the directories of clusters. Names are reused as late as possible, because removal takes time."""

    def __init__(self, parent: Scratch) -> None:
        self._parent = parent
        self._names: Iterator[str] = itertools.cycle(_NAMES)

    def take(self) -> ClusterDir:
        """Make a directory.

        Raises:
            OSError: all names are in use, or the directory cannot be made.
        """
        for name in itertools.islice(self._names, len(_NAMES)):
            if not os.path.lexists(self._parent.join("cluster-" + name)) and not os.path.lexists(self._parent.join(name)):
                return ClusterDir(self._parent, name)
        raise OSError("%d clusters are in %s already" % (len(_NAMES), self._parent.path))


def token_of(spec: RuntimeSpec, key: str) -> str:
    """The token of a cluster. It is derived from the allocation's secret, so that nodes need not exchange it."""
    secret = spec.token_key or spec.control_key
    if secret is None:
        return os.urandom(32).hex()
    return derive_key(secret, "ray-token:" + key if key else "ray-token")


def worker_env_of(spec: RuntimeSpec, key: str) -> Mapping[str, str]:
    """The variables of a cluster's daemons, which all its workers inherit."""
    return {**spec.worker_env, _MARK: key} if key else spec.worker_env


def clean_up_cluster(loop: Loop, place: Scratch, key: str) -> None:
    """Remove what a fresh cluster leaves on this node: its directories, and processes that left the process tree.

    Dying processes may write once more, so removal is repeated until nothing is left: names are few.
    """

    def clear(pause: float) -> None:
        processes.kill_all(processes.with_environment("%s=%s" % (_MARK, key)))
        place.remove()
        if os.path.lexists(place.path) or os.path.lexists(place.ray_temp_dir):
            loop.call_later(pause, lambda: clear(min(2 * pause, _LONGEST_PAUSE)))

    loop.call_later(_DYING, lambda: clear(_DYING))
