"""A run from its start to its verdict, the same for every mode: start, follow, judge, bring back, tidy up."""

from .cleanup import Policy
from .follow_run import FollowedPayload, follow_until_end
from .run import execute, start_errors

__all__ = ["FollowedPayload", "Policy", "execute", "follow_until_end", "start_errors"]
