"""Forward Pipes messages and runtime phases of a payload to Dagster."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

from ..errors import without_colours
from .evidence import Evidence


class MessageForwarder:
    """Forwards the messages of one payload to Dagster, each of them once.

    Args:
        hold_results: whether results wait for `forward_held`, because Slurm may run the job again.
        logged: level and text of what an earlier Dagster process logged of this payload, in the record's order. Each
            line is searched behind the one before; the first that is missing ends the search, and is logged with all
            that follow.
    """

    def __init__(self, handler: Any, log: Any, prefix: str, hold_results: bool, logged: Iterator[tuple[int, str]]) -> None:
        self._handler = handler
        self._log = log
        self._prefix = prefix
        self._hold_results = hold_results
        self._logged = logged
        self._held: list[dict[str, Any]] = []

    def forward(self, line: str, evidence: Evidence) -> None:
        """Forward one message; a message that Dagster refuses becomes evidence."""
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
        """Forward the results that were held back."""
        for message in self._held:
            self._hand_over(message, evidence)
        self._held.clear()

    def drop_held(self) -> int:
        """Forget the results that were held back; returns their number."""
        dropped = len(self._held)
        self._held.clear()
        return dropped

    def refuse(self, error: Exception, evidence: Evidence, line: str = "") -> None:
        """Record that a message cannot be used."""
        why = f"{type(error).__name__}: {error}"
        shown = f"; the message was: {line[:500]}" if line else ""
        evidence.message_error = evidence.message_error or why + shown
        self.log(logging.ERROR, f"a Pipes message cannot be used: {why}")

    def log(self, level: int, text: str) -> None:
        """Write a line to the step's log, unless an earlier process did."""
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
        if message["method"] != "log":
            return False
        params = message.get("params") or {}
        level = logging.getLevelName(str(params.get("level", "INFO")).upper())
        return isinstance(level, int) and self._is_logged(level, params.get("message"))

    def _is_logged(self, level: int, text: Any) -> bool:
        # A line below Dagster's log level is in no event log: searching for it would exhaust the iterator.
        return self._log.isEnabledFor(level) and (level, text) in self._logged


def _without_colours(value: Any) -> Any:
    """An exception as Pipes reports it, without escape codes: messages of Ray's exceptions have some."""
    if isinstance(value, str):
        return without_colours(value)
    if isinstance(value, dict):
        return {key: _without_colours(each) for key, each in value.items()}
    return [_without_colours(each) for each in value] if isinstance(value, list) else value
