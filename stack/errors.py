"""The one error of the stack's tool."""

from __future__ import annotations

import click


class StackError(click.ClickException):
    """What went wrong and what to do about it, in one sentence; evidence may follow on further lines."""
