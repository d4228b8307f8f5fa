"""What belongs to one Ray cluster alone on a node: its directories, its token, and a variable that marks its processes.

Functions identify a Ray cluster by its key: "" for the cluster that a runtime keeps warm, the payload's nonce for a cluster
that is one payload's own.
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
"""Names of Ray's directories of clusters; one character each, because the path of a Unix socket must be short.

"r" belongs to the scratch directory itself.
"""
_MARK = "RAYSLURM_CLUSTER"
"""Variable by which processes of a payload's own cluster are found even if they left the process tree below `ray start`."""
_DYING = 0.5
"""Seconds between the kill of a cluster's processes and the first attempt to remove its directories."""
_LONGEST_PAUSE = 60.0
"""Most seconds between two attempts to remove a cluster's directories; the pauses begin with `_DYING` and double."""


class ClusterDir(Scratch):
    """The directories of one Ray cluster inside a scratch directory.

    Args:
        parent: the scratch directory.
        name: one character.
    """

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
    """Makes the directories of Ray clusters. It reuses a name as late as possible, because removal takes time."""

    def __init__(self, parent: Scratch) -> None:
        self._parent = parent
        self._names: Iterator[str] = itertools.cycle(_NAMES)

    def take(self) -> ClusterDir:
        """Make the directories of a new Ray cluster, and return them.

        Raises:
            OSError: all names are in use, or the directory cannot be made.
        """
        for name in itertools.islice(self._names, len(_NAMES)):
            if not os.path.lexists(self._parent.join("cluster-" + name)) and not os.path.lexists(self._parent.join(name)):
                return ClusterDir(self._parent, name)
        raise OSError("%d clusters are in %s already" % (len(_NAMES), self._parent.path))


def token_of(spec: RuntimeSpec, key: str) -> str:
    """The token with which Ray's processes of one cluster authenticate each other.

    Every node derives the same token from the allocation's secret. Without such a secret the token is random.
    """
    secret = spec.token_key or spec.control_key
    if secret is None:
        return os.urandom(32).hex()
    return derive_key(secret, "ray-token:" + key if key else "ray-token")


def worker_env_of(spec: RuntimeSpec, key: str) -> Mapping[str, str]:
    """Environment variables for the daemons of a Ray cluster, which its workers inherit."""
    return {**spec.worker_env, _MARK: key} if key else spec.worker_env


def clean_up_cluster(loop: Loop, place: Scratch, key: str) -> None:
    """Remove what a payload's own Ray cluster leaves on this node: its directories, and processes outside the process tree.

    Dying processes may write to the directories again, so the removal is repeated until nothing is left.
    """

    def clear(pause: float) -> None:
        processes.kill_all(processes.with_environment("%s=%s" % (_MARK, key)))
        place.remove()
        if os.path.lexists(place.path) or os.path.lexists(place.ray_temp_dir):
            loop.call_later(pause, lambda: clear(min(2 * pause, _LONGEST_PAUSE)))

    loop.call_later(_DYING, lambda: clear(_DYING))
