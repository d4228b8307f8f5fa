"""Reads the run record while the runtime writes it: messages and output go to Dagster, evidence is kept for the verdict."""

from .follower import Cadence, Follower, Following, ReattachState, follow_all
from .forward import Evidence

__all__ = ["Cadence", "Evidence", "Follower", "Following", "ReattachState", "follow_all"]
