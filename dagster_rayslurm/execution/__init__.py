"""Run payloads in any mode: start them, follow them to their ends, judge them, fetch outputs, clean up."""

from .cleanup import RunSettings
from .follow_run import FollowedPayload, follow_until_end
from .run import execute, start_errors

__all__ = ["FollowedPayload", "RunSettings", "execute", "follow_until_end", "start_errors"]
