"""Follow the record of a run while it grows: hand it to Dagster, and collect the evidence for the verdict."""

from .evidence import Evidence
from .follower import Cadence, Follower, ReattachState, follow_all

__all__ = ["Cadence", "Evidence", "Follower", "ReattachState", "follow_all"]
