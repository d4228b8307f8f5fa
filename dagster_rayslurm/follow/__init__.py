"""From the record of a run to Dagster, while it grows; what is left in the end is the evidence for a verdict."""

from .evidence import Evidence
from .follower import Cadence, Follower, follow_all
from .handed_on import Bookmark, HandedOn

__all__ = ["Bookmark", "Cadence", "Evidence", "Follower", "HandedOn", "follow_all"]
