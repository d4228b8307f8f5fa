"""Reads the run record of a running payload: passes messages and output to Dagster, and collects evidence for the verdict."""

from .follower import Cadence, Follower, Following, ReattachState, follow_all
from .forward import Evidence

__all__ = ["Cadence", "Evidence", "Follower", "Following", "ReattachState", "follow_all"]
