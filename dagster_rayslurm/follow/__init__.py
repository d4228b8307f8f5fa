"""Reads the run record while the runtime writes it: Pipes messages and output go to Dagster, evidence is kept for the verdict.

It only reads; what the evidence means is decided in `outcome`. Begin with `follower`.
"""

from .evidence import Evidence
from .follower import Cadence, Follower, ReattachState, follow_all

__all__ = ["Cadence", "Evidence", "Follower", "ReattachState", "follow_all"]
