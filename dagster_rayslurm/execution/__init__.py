"""A run from its start to its verdict, the same for every mode: start, follow, judge, bring back, tidy up."""

from .cleanup import Policy
from .follow_run import Followed, follow_to_the_end
from .run import execute, start_errors

__all__ = ["Followed", "Policy", "execute", "follow_to_the_end", "start_errors"]
