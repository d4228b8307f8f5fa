"""The command that `ray symmetric-run` runs: it says that the cluster is up, and keeps it up.

The payload is not run by `ray symmetric-run` itself: its exit code 0 also means that Ray did not start (Ray 2.60).
"""

from __future__ import annotations

import signal


def main(path: str) -> int:
    """Make a file, which the runtime waits for, and stay until the runtime ends everything."""
    with open(path, "x"):
        pass
    while True:
        signal.pause()
