"""A run from its start to its verdict, the same for every mode: start, follow, judge, bring back, tidy up."""

from .policy import Policy
from .single import execute
from .to_the_end import Followed, follow_to_the_end
from .together import execute_together
from .underway import start_errors

__all__ = ["Followed", "Policy", "execute", "execute_together", "follow_to_the_end", "start_errors"]
