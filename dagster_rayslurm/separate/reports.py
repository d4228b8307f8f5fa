"""Merge what payloads of several components report to Dagster: one result for each asset and asset check."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Reports = Sequence[tuple[str, Mapping[str, Any]]]
"""Reports of one asset or check: the reporting components, and the parameters of the messages."""

_MATERIALIZATION = "report_asset_materialization"
_CHECK = "report_asset_check"
_SEVERITIES = ("WARN", "ERROR")
"""The worst one last."""


class ReportedTwice(ValueError):
    """One component reports twice what another component reports, too."""

    def __init__(self, component: str, what: str) -> None:
        super().__init__(f"component {component!r} reports {what} twice, and another component reports it, too; report it once")
        self.component = component


class ReportMerger:
    """Forwards the Pipes messages of several payloads to Dagster's one handler.

    Results wait until all payloads have ended, because only then it is known what all of them report. So does `closed`,
    after which Dagster expects no message.

    Args:
        components: in the order in which their reports are merged.
        check: raises what Dagster's handler would raise for a result, so that a bad one is refused at once.
    """

    def __init__(self, handler: Any, components: Iterable[str], check: Callable[[Any], object]) -> None:
        self._handler = handler
        self._order = {component: index for index, component in enumerate(components)}
        self._check = check
        self._results: list[tuple[str, Message]] = []
        self._closed: list[tuple[str, Message]] = []

    def of(self, component: str) -> ComponentHandler:
        """The handler for the payload of one component."""
        return ComponentHandler(self, component)

    def add(self, component: str, message: Message) -> None:
        """Take one message; raises what Dagster raises for it."""
        if message["method"] in _MERGE:
            self._check(message)
            self._results.append((component, message))
        elif message["method"] == "closed":
            self._closed.append((component, message))
        else:
            self._handler.handle_message(message)

    def hand_over(self) -> list[tuple[str, Exception]]:
        """Merge the results and hand all messages to Dagster; returns what was refused, by component."""
        refused: list[tuple[str, Exception]] = []
        reports: dict[tuple[str, str, str | None], list[tuple[str, Mapping[str, Any]]]] = {}
        for component, message in sorted(self._results, key=lambda each: self._order[each[0]]):
            params = message["params"]
            key = (message["method"], params["asset_key"], params.get("check_name"))
            reports.setdefault(key, []).append((component, params))
        for (method, *_), same in reports.items():
            try:
                for params in _MERGE[method](same):
                    self._handler.handle_message({"method": method, "params": params})
            except Exception as error:  # noqa: BLE001 - Dagster's handler raises anything on a malformed message
                refused.append((error.component if isinstance(error, ReportedTwice) else same[-1][0], error))
        for component, message in self._closed:
            try:
                self._handler.handle_message(message)
            except Exception as error:  # noqa: BLE001 - the exception inside comes from the user
                refused.append((component, error))
        self._results.clear()
        self._closed.clear()
        return refused


@dataclass(frozen=True)
class ComponentHandler:
    """Stands in for Dagster's handler in the follower of one payload."""

    merger: ReportMerger
    component: str

    def handle_message(self, message: Message) -> None:
        self.merger.add(self.component, message)


def merge(reports: Reports) -> list[Message]:
    """One materialization of an asset that several components report; reports of one component alone stay as they are.

    Raises:
        ValueError: the data versions differ, or one component reports twice.
    """
    asset_key = reports[0][1]["asset_key"]
    by_component = _by_component(reports, f"asset {asset_key!r}")
    if by_component is None:
        return [dict(params) for _, params in reports]
    versions: dict[str, str] = {}
    for component, params in by_component.items():
        if params["data_version"] is not None:
            versions.setdefault(params["data_version"], component)
    if len(versions) > 1:
        each = " and ".join(f"{version!r} in component {component!r}" for version, component in versions.items())
        raise ValueError(f"asset {asset_key!r} has data_version {each}; report it in one of them")
    return [{"asset_key": asset_key, "metadata": _merged_metadata(by_component), "data_version": next(iter(versions), None)}]


def merge_checks(reports: Reports) -> list[Message]:
    """One result of an asset check that several components report; reports of one component alone stay as they are.

    The check passed if it passed in all components. The severity is the worst of those in which it did not.

    Raises:
        ValueError: one component reports twice.
    """
    asset_key, check_name = reports[0][1]["asset_key"], reports[0][1]["check_name"]
    by_component = _by_component(reports, f"asset check {check_name!r} of {asset_key!r}")
    if by_component is None:
        return [dict(params) for _, params in reports]
    failed = [params for params in by_component.values() if not params["passed"]]
    severity = max((params["severity"] for params in failed or by_component.values()), key=_SEVERITIES.index)
    return [
        {
            "asset_key": asset_key,
            "check_name": check_name,
            "passed": not failed,
            "severity": severity,
            "metadata": _merged_metadata(by_component),
        }
    ]


_MERGE = {_MATERIALIZATION: merge, _CHECK: merge_checks}


def _by_component(reports: Reports, what: str) -> dict[str, Mapping[str, Any]] | None:
    """The report of each component; None if all are of one component.

    Raises:
        ReportedTwice: one of several components reports twice.
    """
    by_component = dict(reports)
    if len(by_component) == 1:
        return None
    names = [component for component, _ in reports]
    for component in by_component:
        if names.count(component) > 1:
            raise ReportedTwice(component, what)
    return by_component


def _merged_metadata(by_component: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The metadata of all components; keys with different values get the component's name."""
    own = {component: params["metadata"] or {} for component, params in by_component.items()}
    taken = {key for metadata in own.values() for key in metadata}
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for metadata in own.values() for key in metadata):
        values = {component: metadata[key] for component, metadata in own.items() if key in metadata}
        # Compared as JSON, in which they came: to Python, 1, 1.0 and True are the same.
        if len({json.dumps(value, sort_keys=True) for value in values.values()}) == 1:
            merged[key] = next(iter(values.values()))
            continue
        for component, value in values.items():
            name = _free(f"{key} ({component})", taken)
            taken.add(name)
            merged[name] = value
    return merged


def _free(name: str, taken: Iterable[str]) -> str:
    """The name, with a number if it is taken."""
    return next(each for each in itertools.chain([name], (f"{name} {n}" for n in itertools.count(2))) if each not in taken)
