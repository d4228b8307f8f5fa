"""Follow the record of a payload while it grows: pass output and messages to Dagster, and collect evidence for the verdict."""

from .evidence import Evidence
from .follower import Cadence, Follower, ReattachState, follow_all

__all__ = ["Cadence", "Evidence", "Follower", "ReattachState", "follow_all"]
