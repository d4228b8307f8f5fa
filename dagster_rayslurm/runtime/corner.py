"""Directories within a scratch directory, for clusters that live beside each other there."""

from __future__ import annotations

import itertools
import os
import shutil
import string
from typing import Iterator

from .scratch import Scratch

_NAMES = [name for name in string.digits + string.ascii_lowercase if name != "r"]
"""One character each, as that of the scratch directory's own Ray: a socket's path has no room for more."""


class Corner(Scratch):
    """A part of a scratch directory that one cluster has to itself.

    Args:
        whole: the scratch directory.
        name: one character; see `Corners`.
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


class Corners:
    """Gives out the corners of a scratch directory, each name as seldom as can be: what is being removed is in use still."""

    def __init__(self, whole: Scratch) -> None:
        self._whole = whole
        self._names: Iterator[str] = itertools.cycle(_NAMES)

    def take(self) -> Corner:
        """A corner that is free.

        Raises:
            OSError: none is, or it cannot be made.
        """
        for name in itertools.islice(self._names, len(_NAMES)):
            if not os.path.lexists(self._whole.join("corner-" + name)) and not os.path.lexists(self._whole.join(name)):
                return Corner(self._whole, name)
        raise OSError("%d clusters are in %s already" % (len(_NAMES), self._whole.path))
