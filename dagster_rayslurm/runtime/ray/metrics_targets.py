"""Writes the addresses of a Ray cluster's metrics into a file for Prometheus, in a directory that outlives the Ray cluster.

Ray's dashboard lists the addresses in a file of Ray's temporary directory, in the format of `file_sd_configs` (Prometheus
documentation, "Configuration"; Ray 2.60). The temporary directory is on one node, private, and has another name each time.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import time
from dataclasses import dataclass
from typing import Any, Dict, Optional

from ..process.loop import Loop, Timer
from ..protocol.record import write_atomically

_SOURCE = "prom_metrics_service_discovery.json"  # Ray's file in its temporary directory (Ray 2.60).
_PREFIX = "rayslurm-"  # Of the names of our files; other files in the directory are left alone.
_INTERVAL = 5.0  # Seconds between two reads of Ray's file; Ray writes it as often.
# Seconds after which an unchanged file is written again, and after which another cluster's file is removed as left behind.
_REFRESH, _LEFT_BEHIND = 60.0, 900.0


@dataclass(eq=False)
class MetricsTargets:
    """Keeps a file for Prometheus with the addresses of one Ray cluster's metrics up to date, until `stop`.

    The file is in `directory`. If `directory` cannot be used, `problem` says why. The constructor also removes from `directory`
    the files of killed runtimes.
    """

    loop: Loop
    directory: str  # Created if the directory is missing.
    cluster: str  # The name of the cluster, for the file and for a label.
    labels: Dict[str, str]  # Further labels of all metrics.
    temp_dir: str  # Ray's temporary directory on this node, the head.

    def __post_init__(self) -> None:
        self.path = os.path.join(self.directory, "%s%s.json" % (_PREFIX, self.cluster))
        self._written, self._written_at = "", 0.0
        self._timer = Timer()
        self.problem: Optional[str] = None  # Why there can be no file, as a sentence for the Dagster log.
        try:
            os.makedirs(self.directory, exist_ok=True)
            if not os.access(self.directory, os.W_OK):
                raise PermissionError(errno.EACCES, "Permission denied")
        except OSError as error:
            self.problem = "metrics_dir=%r cannot be used: %s; Prometheus will not find this cluster" % (
                self.directory,
                error.strerror,
            )
        self._remove_left_behind()
        self._copy()

    def stop(self) -> None:
        """Stop updating the file for Prometheus, and remove it. Prometheus then forgets the Ray cluster."""
        self._timer.cancel()
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def _copy(self) -> None:
        self._timer = self.loop.call_later(_INTERVAL if self._written else 1.0, self._copy)
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # Ray's file may not be there yet.
            with open(os.path.join(self.temp_dir, _SOURCE), encoding="utf-8") as file:
                text = targets(json.load(file), {"ray_cluster": self.cluster, **self.labels})
            if text != self._written or self.loop.now() - self._written_at > _REFRESH:
                write_atomically(self.path, text.encode("utf-8"), 0o644)  # Prometheus may run as another user.
                self._written, self._written_at = text, self.loop.now()

    def _remove_left_behind(self) -> None:
        """Remove files of other Ray clusters in the directory that have not been written for `_LEFT_BEHIND` seconds.

        Their runtimes were killed, because a running one writes its file more often.
        """
        for path in glob.glob(os.path.join(glob.escape(self.directory), _PREFIX + "*.json")):
            with contextlib.suppress(OSError):
                if time.time() - os.stat(path).st_mtime > _LEFT_BEHIND:
                    os.unlink(path)


def targets(groups: Any, labels: Dict[str, str]) -> str:
    """Returns the JSON text of a file for Prometheus that has the targets in `groups`, with `labels` added to each group.

    `groups` is the parsed content of Ray's own file of targets. Raises TypeError, KeyError or ValueError if it is malformed.
    """
    return json.dumps([{"targets": list(each["targets"]), "labels": {**each["labels"], **labels}} for each in groups], indent=1)
