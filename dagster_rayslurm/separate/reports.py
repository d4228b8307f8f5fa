"""What payloads that run together report to Dagster: what several of them say of one asset, or of one check, becomes one result.

Pure but for the handler that it goes to in the end.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Message = dict[str, Any]
Said = Sequence[tuple[str, Mapping[str, Any]]]
"""Components and what they say, all of the same thing."""

_MATERIALIZATION = "report_asset_materialization"
_CHECK = "report_asset_check"
_SEVERITIES = ("WARN", "ERROR")
"""The worst one last."""


class ReportedTwice(ValueError):
    """A component says two things of what another component reports, too.

    Attributes:
        component: its name.
    """

    def __init__(self, component: str, what: str) -> None:
        super().__init__(f"component {component!r} reports {what} twice, and another component reports it, too; report it once")
        self.component = component


class ReportMerger:
    """The Pipes messages of several payloads on their way to Dagster's one handler.

    Results count when all have ended, as only then it is known what all of them say; so do the ends of the writers, after
    which Dagster expects no message any more.

    Args:
        handler: Dagster's.
        components: in the order in which they are told of.
        try_out: given a result, raises what Dagster's handler would: what is held back is known to be good, or whose it is.
    """

    def __init__(self, handler: Any, components: Iterable[str], try_out: Callable[[Any], object]) -> None:
        self._handler = handler
        self._order = {component: place for place, component in enumerate(components)}
        self._try_out = try_out
        self._results: list[tuple[str, Message]] = []
        self._closed: list[tuple[str, Message]] = []

    def of(self, component: str) -> ComponentReports:
        """The handler for the payload of one component."""
        return ComponentReports(self, component)

    def take(self, component: str, message: Message) -> None:
        """Take one message.

        Raises:
            Exception: Dagster refuses it.
        """
        if message["method"] in _MERGED:
            self._try_out(message)
            self._results.append((component, message))
        elif message["method"] == "closed":
            self._closed.append((component, message))
        else:
            self._handler.handle_message(message)

    def hand_over(self) -> list[tuple[str, Exception]]:
        """Give Dagster what was held back.

        Returns:
            What cannot be used, with the component that said it.
        """
        refused: list[tuple[str, Exception]] = []
        same: dict[tuple[str, str, str | None], list[tuple[str, Mapping[str, Any]]]] = {}
        for component, message in sorted(self._results, key=lambda each: self._order[each[0]]):
            params = message["params"]
            key = (message["method"], params["asset_key"], params.get("check_name"))
            same.setdefault(key, []).append((component, params))
        for (method, *_), said in same.items():
            try:
                for params in _MERGED[method](said):
                    self._handler.handle_message({"method": method, "params": params})
            except Exception as error:  # noqa: BLE001 - whatever Dagster's handler raises on a user's message
                refused.append((error.component if isinstance(error, ReportedTwice) else said[-1][0], error))
        for component, message in self._closed:
            try:
                self._handler.handle_message(message)
            except Exception as error:  # noqa: BLE001 - the exception in it is the user's
                refused.append((component, error))
        self._results.clear()
        self._closed.clear()
        return refused


class ComponentReports:
    """What the follower of one payload takes for Dagster's handler."""

    def __init__(self, reports: ReportMerger, component: str) -> None:
        self._reports = reports
        self._component = component

    def handle_message(self, message: Message) -> None:
        self._reports.take(self._component, message)


def merge(said: Said) -> list[Message]:
    """One materialization of what several components say of one asset; what one component alone says stays as it is.

    Raises:
        ValueError: they give different data versions, or one of them says two things.
    """
    asset_key = said[0][1]["asset_key"]
    by_component = _by_component(said, f"asset {asset_key!r}")
    if by_component is None:
        return [dict(params) for _, params in said]
    versions: dict[str, str] = {}
    for component, params in by_component.items():
        if params["data_version"] is not None:
            versions.setdefault(params["data_version"], component)
    if len(versions) > 1:
        each = " and ".join(f"{version!r} in component {component!r}" for version, component in versions.items())
        raise ValueError(f"asset {asset_key!r} has data_version {each}; report it in one of them")
    return [{"asset_key": asset_key, "metadata": _united(by_component), "data_version": next(iter(versions), None)}]


def merge_checks(said: Said) -> list[Message]:
    """One result of what several components say of one asset check; what one component alone says stays as it is.

    It passed if it did in all of them. How severe it is, those say in which it did not.

    Raises:
        ValueError: one of them says two things.
    """
    asset_key, check_name = said[0][1]["asset_key"], said[0][1]["check_name"]
    by_component = _by_component(said, f"asset check {check_name!r} of {asset_key!r}")
    if by_component is None:
        return [dict(params) for _, params in said]
    failed = [params for params in by_component.values() if not params["passed"]]
    severity = max((params["severity"] for params in failed or by_component.values()), key=_SEVERITIES.index)
    return [
        {
            "asset_key": asset_key,
            "check_name": check_name,
            "passed": not failed,
            "severity": severity,
            "metadata": _united(by_component),
        }
    ]


_MERGED = {_MATERIALIZATION: merge, _CHECK: merge_checks}
"""Results, which are held back, and what makes one of several."""


def _by_component(said: Said, what: str) -> dict[str, Mapping[str, Any]] | None:
    """What each component says; None if there is but one, whatever it says.

    Raises:
        ReportedTwice: one of several says two things.
    """
    by_component = dict(said)
    if len(by_component) == 1:
        return None
    names = [component for component, _ in said]
    for component in by_component:
        if names.count(component) > 1:
            raise ReportedTwice(component, what)
    return by_component


def _united(by_component: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The metadata of all; a key of different values is told apart by the component's name."""
    said = {component: params["metadata"] or {} for component, params in by_component.items()}
    taken = {key for metadata in said.values() for key in metadata}
    united: dict[str, Any] = {}
    for key in dict.fromkeys(key for metadata in said.values() for key in metadata):
        values = {component: metadata[key] for component, metadata in said.items() if key in metadata}
        # As JSON, in which they came: to Python, 1, 1.0 and True are the same.
        if len({json.dumps(value, sort_keys=True) for value in values.values()}) == 1:
            united[key] = next(iter(values.values()))
            continue
        for component, value in values.items():
            name = _free(f"{key} ({component})", taken)
            taken.add(name)
            united[name] = value
    return united


def _free(name: str, taken: Iterable[str]) -> str:
    """The name, or the first one like it that nobody has."""
    return next(each for each in itertools.chain([name], (f"{name} {n}" for n in itertools.count(2))) if each not in taken)
