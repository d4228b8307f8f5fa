"""From the record of a run to Dagster, while it grows; what is left in the end is the evidence for a verdict."""

from .bookmark import Bookmark, ReattachState
from .evidence import Evidence
from .follower import Cadence, Follower, follow_all

__all__ = ["Bookmark", "Cadence", "Evidence", "Follower", "ReattachState", "follow_all"]
