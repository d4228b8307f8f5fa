"""Runs payloads from start to verdict: starts them, follows them to their ends, judges them, fetches outputs, cleans up.

The steps are the same for every mode; how a mode starts a runtime is in `backends`. Begin with `run.execute`.
"""

from .cleanup import RunSettings
from .run import execute, start_errors

__all__ = ["RunSettings", "execute", "start_errors"]
