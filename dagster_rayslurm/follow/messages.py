"""Forward a payload's Pipes messages to Dagster, and write the phases of its runtime to the Dagster log."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

from ..errors import without_colours
from .evidence import Evidence


class MessageForwarder:
    """Forwards the messages of one payload to Dagster, each message once.

    Args:
        hold_results: whether results wait for `forward_held`, because Slurm may requeue the job.
        logged: level and text of the lines that an earlier Dagster process logged for this payload, oldest first. Each
            new line is searched behind the line found before. The first line that is not found ends the search; this
            line and all later lines are logged.
    """

    def __init__(self, handler: Any, log: Any, prefix: str, hold_results: bool, logged: Iterator[tuple[int, str]]) -> None:
        self._handler = handler
        self._log = log
        self._prefix = prefix
        self._hold_results = hold_results
        self._logged = logged
        self._held: list[dict[str, Any]] = []

    def forward(self, line: str, evidence: Evidence) -> None:
        """Forward one message, given as a line of JSON; the refusal of a message becomes evidence."""
        try:
            message = json.loads(line)
            method, params = message["method"], message.get("params") or {}
            if not isinstance(method, str):
                raise TypeError(f"its method is {method!r}")
            if method == "closed" and params.get("exception"):
                params["exception"] = _without_colours(params["exception"])
            evidence.add_message(method, params)
        except Exception as error:  # noqa: BLE001 - users' messages may be malformed in any way
            return self.refuse(error, evidence, line)
        if self._hold_results and method.startswith("report_"):
            self._held.append(message)
        else:
            self._hand_over(message, evidence)

    def forward_held(self, evidence: Evidence) -> None:
        """Forward the results that were held back, now that the job cannot be requeued."""
        for message in self._held:
            self._hand_over(message, evidence)
        self._held.clear()

    def drop_held(self) -> int:
        """Drop the results that were held back, because Slurm requeued the job; returns their number."""
        dropped = len(self._held)
        self._held.clear()
        return dropped

    def refuse(self, error: Exception, evidence: Evidence, line: str = "") -> None:
        """Log that a message cannot be used; the first such message becomes evidence."""
        why = f"{type(error).__name__}: {error}"
        shown = f"; the message was: {line[:500]}" if line else ""
        evidence.message_error = evidence.message_error or why + shown
        self.log(logging.ERROR, f"a Pipes message cannot be used: {why}")

    def log(self, level: int, text: str) -> None:
        """Write a line to the Dagster log, unless an earlier Dagster process already wrote it."""
        text = self._prefix + text
        if not self._is_logged(level, text):
            self._log.log(level, text)

    def _hand_over(self, message: dict[str, Any], evidence: Evidence) -> None:
        try:
            if not self._is_logged_message(message):
                self._handler.handle_message(message)
        except Exception as error:  # noqa: BLE001 - Dagster's handler raises anything on a malformed message
            self.refuse(error, evidence, json.dumps(message))

    def _is_logged_message(self, message: dict[str, Any]) -> bool:
        """Whether the message is a log line that an earlier Dagster process already wrote."""
        if message["method"] != "log":
            return False
        params = message.get("params") or {}
        level = logging.getLevelName(str(params.get("level", "INFO")).upper())
        return isinstance(level, int) and self._is_logged(level, params.get("message"))

    def _is_logged(self, level: int, text: Any) -> bool:
        """Whether an earlier Dagster process already wrote this line; advances `logged` behind the line."""
        # A line below Dagster's log level is never in the event log, so a search for it would exhaust the iterator.
        return self._log.isEnabledFor(level) and (level, text) in self._logged


def _without_colours(value: Any) -> Any:
    """Returns an exception as Pipes reports it, without colour codes, which messages of Ray's exceptions have."""
    if isinstance(value, str):
        return without_colours(value)
    if isinstance(value, dict):
        return {key: _without_colours(each) for key, each in value.items()}
    return [_without_colours(each) for each in value] if isinstance(value, list) else value
